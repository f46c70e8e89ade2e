"""vLLM without eviction in a fresh process, and, if asked, an engine with eviction after it.

Prints MARK behind what ran without eviction, and the result as JSON behind RESULT.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

PROMPT = random_prompt(400, seed=400)
EVICTION = dict(policy="ada-snapkv", budget=96, interval=32)
MARK, RESULT = "---- so far without eviction", "---- result: "


def prompt_logprobs(llm: Any, prompt: list[int]) -> list[list[list[float]]]:
    """Per prompt token but the first, [token, log-probability] by rank."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
    output = llm.generate([dict(prompt_token_ids=prompt)], params, use_tqdm=False)[0]
    return [
        [[token, p.logprob] for token, p in sorted(entry.items(), key=lambda item: item[1].rank)]
        for entry in output.prompt_logprobs[1:]
    ]


def metrics() -> dict[str, float]:
    """What /metrics would say, summed over labels."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
        found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def main(model: Path, then_evict: bool) -> None:
    from vllm import SamplingParams

    result: dict[str, Any] = {}
    # A line that comes by the clock would differ from run to run.
    os.environ["VLLM_LOG_STATS_INTERVAL"] = "3600"
    with engine(model, None, disable_log_stats=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        outputs = llm.generate([dict(prompt_token_ids=PROMPT)], params, use_tqdm=False)
        result["tokens"] = list(outputs[0].outputs[0].token_ids)
        result["prompt_logprobs"] = prompt_logprobs(llm, PROMPT)
        result["metrics"] = metrics()
    print(MARK, flush=True)
    if then_evict:
        with engine(model, EVICTION, disable_log_stats=False) as run:
            output = run.generate([PROMPT], 100)[0]
            result["agreed"] = check_tokens(MaskedModel(model), PROMPT, output, run.lives()[0])
            result["evictions"] = run.counters.evictions
            result["metrics_then"] = metrics()
    print(RESULT + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "then-evict" in sys.argv)
