"""The front door for requests: vLLM's own methods, with our check in front."""

import inspect
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving.admission import check_name, check_request, install, refuse_session


def engine(eviction: Any = "snapkv") -> SimpleNamespace:
    """What the check reads of a ``VllmConfig``."""
    additional = {"kv_eviction": eviction} if eviction else {}
    return SimpleNamespace(
        additional_config=additional,
        speculative_config=None,
        kv_transfer_config=None,
        # As vLLM has it before an engine is ready.
        cache_config=SimpleNamespace(
            block_size=32,
            effective_attention_block_size=None,
            kv_cache_max_concurrency=None,
            num_gpu_blocks=None,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            get_total_num_hidden_layers=lambda: 8,
            max_model_len=1000,
        ),
    )


def asking(**extra_args: Any) -> SamplingParams:
    return SamplingParams(extra_args=extra_args)


def test_bad_settings_are_refused_with_tokens_and_with_embeddings():
    with pytest.raises(ValueError, match="the prompt's 5 tokens"):
        check_request(engine(), asking(kv_eviction_at=6), [1] * 5, None)
    with pytest.raises(ValueError, match="the prompt's 7 tokens"):
        check_request(engine(), asking(kv_eviction_at=8), None, np.zeros((7, 4)))
    check_request(engine(), asking(kv_eviction_at=5), [1] * 5, None)


def test_a_point_in_a_seeded_prompt_is_refused_where_it_would_end_the_worker(monkeypatch):
    def seeded(temperature: float = 1.0, **asked: Any) -> SamplingParams:
        return SamplingParams(seed=3, temperature=temperature, extra_args=asked)

    with pytest.raises(ValueError, match="kv_eviction_at and seed cannot be combined"):
        check_request(engine(), seeded(kv_eviction_at=4), [1] * 5, None)
    stores = engine({"policy": "snapkv", "store_path": "/stores"})
    taken = {"kv_transfer_params": {"do_remote_prefill": True}}
    with pytest.raises(ValueError, match="kv_eviction_at and seed cannot be combined"):
        check_request(stores, seeded(**taken), [1] * 5, None)
    check_request(engine(), seeded(**taken), [1] * 5, None)
    for harmless in (
        seeded(kv_eviction_at=5),
        seeded(kv_eviction_at=4, temperature=0),
        seeded(kv_eviction_interval=4),
        asking(kv_eviction_at=4),
    ):
        check_request(engine(), harmless, [1] * 5, None)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    check_request(engine(), seeded(kv_eviction_at=4), [1] * 5, None)


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector", "MultiConnector"])
def test_a_prompt_that_another_server_reads_is_answered_with_one_token(connector):
    handed = {"kv_transfer_params": {"do_remote_decode": True}}
    server = engine()
    contained = [{"kv_connector": name} for name in ("NixlConnector", "OffloadingConnector")]
    server.kv_transfer_config = KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": contained},
    )
    for tokens in (2, None):
        params = SamplingParams(max_tokens=tokens, extra_args=handed)
        with pytest.raises(ValueError, match=f"set max_tokens to 1, not {tokens}"):
            check_request(server, params, [1] * 5, None)
        assert check_request(engine(), params, [1] * 5, None) is not None, "no connector"
    options = check_request(server, SamplingParams(max_tokens=1, extra_args=handed), [1] * 5, None)
    assert options is not None and not options.evicts
    taken = {"kv_transfer_params": {"do_remote_prefill": True}}
    options = check_request(server, SamplingParams(max_tokens=9, extra_args=taken), [1] * 5, None)
    assert options is not None and options.evicts


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


def test_names_of_replays_are_the_engines_where_vllm_keeps_names_as_they_are(monkeypatch):
    """Else a client of that name would be taken for the replay, and get its tokens."""
    for name in ("a-audit-1", "-audit-0", "chatcmpl-a-audit-7-audit-12"):
        check_name(name)
        with monkeypatch.context() as patch:
            patch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
            with pytest.raises(ValueError, match="KV eviction: request ids that end with -audit-"):
                check_name(name)
            for other in ("a", "a-audit-", "a-audit-1b", "a-audit-1-0", "audit-1"):
                check_name(other)


def test_a_configuration_is_read_once_for_all_its_requests(monkeypatch):
    """A profile of 80 layers takes milliseconds, and every request of ours asks for it."""
    read = []
    parse = EvictionConfig.parse
    monkeypatch.setattr(EvictionConfig, "parse", lambda value: read.append(value) or parse(value))
    config = engine({"policy": "snapkv", "budget": 64})
    for budget in range(40, 60):
        check_request(config, asking(kv_eviction_budget=budget), [1] * 50, None)
    assert len(read) == 1
    with pytest.raises(ValueError, match="give at least 33"):
        check_request(config, asking(kv_eviction_budget=32), [1] * 50, None)
    # Another configuration, other settings, and another size of blocks are read anew.
    check_request(engine({"policy": "snapkv", "budget": 64}), asking(kv_eviction_at=1), [1], None)
    config.additional_config["kv_eviction"]["window"] = 16
    check_request(config, asking(kv_eviction_budget=32), [1] * 50, None)
    config.cache_config.block_size = 16
    check_request(config, asking(kv_eviction_budget=32), [1] * 50, None)
    assert len(read) == 4
    off = engine("none")
    for _ in range(3):
        check_request(off, asking(kv_eviction_budget=32), [1] * 50, None)
    assert len(read) == 5


async def chunks() -> AsyncGenerator[None, None]:
    yield None


def test_a_session_of_streaming_input_takes_no_settings():
    from vllm.v1.engine.async_llm import AsyncLLM

    install()
    llm = SimpleNamespace(vllm_config=engine())
    with pytest.raises(ValueError, match="streaming input is never evicted"):
        AsyncLLM.generate(llm, chunks(), asking(kv_eviction_at=-1), "r")
    assert hasattr(AsyncLLM.generate(llm, chunks(), asking(), "r"), "__anext__")
    llm = SimpleNamespace(vllm_config=engine(None))
    assert hasattr(AsyncLLM.generate(llm, chunks(), asking(kv_eviction_at=-1), "r"), "__anext__")
    refuse_session(engine(), asking())


def test_responses_refuse_before_their_stream_begins(monkeypatch):
    """The Responses API calls ``AsyncLLM.generate`` only once the status is sent."""
    import vllm.entrypoints.launchers.api_server.entry  # noqa: F401  (marks an API server)
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses as Responses

    plain = inspect.unwrap(Responses._generate_with_builtin_tools)
    assert "engine_input" in inspect.signature(plain).parameters
    assert "sampling_params" in inspect.signature(plain).parameters
    monkeypatch.setattr(Responses, "_generate_with_builtin_tools", plain)
    install()
    install()
    assert Responses._generate_with_builtin_tools.__wrapped__ is plain
    serving = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=engine()))
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    asked = dict(request_id="r", engine_input=prompt, context=None)
    generate = Responses._generate_with_builtin_tools
    with pytest.raises(ValueError, match="the prompt's 3 tokens"):
        generate(serving, sampling_params=asking(kv_eviction_at=4), **asked)
    assert hasattr(generate(serving, sampling_params=asking(), **asked), "__anext__")
