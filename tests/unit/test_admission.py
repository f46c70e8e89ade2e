"""The front door for requests: vLLM's own methods, with our check in front."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.pooling_params import PoolingParams

from vllm_kvevict.admission import check_request, install


def engine(eviction: Any = "snapkv") -> SimpleNamespace:
    """What the check reads of a ``VllmConfig``."""
    additional = {"kv_eviction": eviction} if eviction else {}
    return SimpleNamespace(
        additional_config=additional, cache_config=SimpleNamespace(block_size=32)
    )


def asking(**extra_args: Any) -> SamplingParams:
    return SamplingParams(extra_args=extra_args)


def test_bad_settings_are_refused_with_tokens_and_with_embeddings():
    with pytest.raises(ValueError, match="the prompt's 5 tokens"):
        check_request(engine(), asking(kv_eviction_at=6), [1] * 5, None)
    with pytest.raises(ValueError, match="the prompt's 7 tokens"):
        check_request(engine(), asking(kv_eviction_at=8), None, np.zeros((7, 4)))
    check_request(engine(), asking(kv_eviction_at=5), [1] * 5, None)


@pytest.mark.parametrize("off", [None, "none", {"policy": None}])
def test_a_server_without_eviction_ignores_the_keys(off):
    check_request(engine(off), asking(kv_eviction="nope", kv_eviction_x=1), [1], None)


def test_other_requests_pass():
    check_request(engine(), asking(other="kv_eviction"), [1], None)
    check_request(engine(), SamplingParams(), [1], None)
    check_request(engine(), PoolingParams(), [1], None)


def test_install_wraps_once_and_refuses_before_the_answer_begins():
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    install()
    wrapped = InputProcessor.process_inputs, AsyncLLM.generate
    install()
    assert wrapped == (InputProcessor.process_inputs, AsyncLLM.generate)
    for method in wrapped:
        assert not hasattr(method.__wrapped__, "__wrapped__")
    llm = SimpleNamespace(vllm_config=engine())
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    with pytest.raises(ValueError, match="kv_eviction_budget"):
        AsyncLLM.generate(llm, prompt, asking(kv_eviction_budget=1), "r")
    # A generator that nobody has started: a client sees no error before it iterates.
    assert hasattr(AsyncLLM.generate(llm, prompt, asking(), "r"), "__anext__")
