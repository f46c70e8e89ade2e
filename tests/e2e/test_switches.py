"""Switches of vLLM that schedule or cache otherwise: tokens equal those of the oracle."""

import pytest
import torch

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

SETTINGS = dict(policy="ada-snapkv", budget=128, interval=32)
LENGTHS = (500, 333, 150, 64)
NEW_TOKENS = 70
OPTIONS = dict(max_num_batched_tokens=256, max_model_len=1024)

SWITCHES = dict(
    max_num_seqs=4,
    max_num_active_seqs=2,
    max_num_scheduled_tokens=192,
    long_prefill_token_threshold=40,
    long_prefill_token_threshold_adaptive=True,
    watermark=0.1,
    enable_prefix_caching=True,
    prefix_caching_hash_algo="sha256_cbor",
    prefix_cache_retention_interval=None,
    stream_interval=3,
    scheduling_policy="priority",
    logprobs_mode="processed_logits",
    disable_cascade_attn=True,
    kv_events_config=dict(enable_kv_cache_events=True, publisher="null"),
)


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def agree(run, oracle, prompts, outputs):
    """All tokens are the oracle's, and most are not those of full attention."""
    whole = 0
    for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
        assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
        whole += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
    assert run.counters.evictions >= 6 and whole < len(prompts) * NEW_TOKENS


def test_all_of_them_together(tiny_model, oracle):
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    with engine(tiny_model, SETTINGS, **OPTIONS | SWITCHES) as run:
        assert run.scheduler.max_num_active_reqs == 2
        assert run.scheduler.max_num_scheduled_tokens == 192
        agree(run, oracle, prompts, run.generate(prompts, NEW_TOKENS))


def test_a_length_that_vllm_fits_to_the_memory(tiny_model, oracle):
    """``--max-model-len auto``: it is shorter than what rings and tables were made for."""
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    memory = dict(max_model_len=-1, kv_cache_memory_bytes=2 << 20)
    with engine(tiny_model, SETTINGS, max_num_batched_tokens=256, **memory) as run:
        length = run.core.vllm_config.model_config.max_model_len
        assert LENGTHS[0] + NEW_TOKENS < length < 4096
        agree(run, oracle, prompts, run.generate(prompts, NEW_TOKENS))


def test_prompts_that_are_embeddings(tiny_model, oracle):
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    with engine(tiny_model, SETTINGS, **OPTIONS, enable_prompt_embeds=True) as run:
        embed = run.worker.model_runner.get_model().model.embed_tokens
        with torch.inference_mode():
            given = [embed(torch.tensor(prompt)) for prompt in prompts]
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        done = run.llm.generate([dict(prompt_embeds=one) for one in given], params, use_tqdm=False)
        outputs = [list(one.outputs[0].token_ids) for one in done]
        agree(run, oracle, prompts, outputs)


def test_batches_without_requests_inside_answers(tiny_model, oracle):
    """As a rank of a mixture of experts runs them while others compute."""
    from vllm import SamplingParams

    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        llm, outputs = run.llm.llm_engine, {}
        for number, prompt in enumerate(prompts):
            llm.add_request(str(number), dict(prompt_token_ids=prompt), params)
        while llm.has_unfinished_requests():
            run.core.execute_dummy_batch()
            for output in llm.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        answers = [outputs[str(number)] for number in range(len(prompts))]
        agree(run, oracle, prompts, answers)
