"""Proof 3: where nothing needs evicting, the output is that of vLLM without the plugin."""

from tests.models import random_prompt
from tests.oracles.engine import engine


def test_generous_budget_changes_nothing(tiny_model):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": random_prompt(n, seed=n)} for n in (700, 333, 1, 60)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=5)

    def run(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            [
                (output.outputs[0].token_ids[i], sorted((t, lp.logprob) for t, lp in step.items()))
                for i, step in enumerate(output.outputs[0].logprobs)
            ]
            for output in outputs
        ]

    with engine(tiny_model, None, max_num_batched_tokens=512) as llm:
        stock = run(llm)
    eviction = dict(policy="ada-snapkv", budget=4096)
    with engine(tiny_model, eviction, max_num_batched_tokens=512) as evicting:
        assert run(evicting.llm) == stock
        assert evicting.counters.evictions == 0
