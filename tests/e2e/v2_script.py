"""Runs under Triton's interpreter: evictions through Model Runner V2, checked by the oracle."""

import json
import sys
from pathlib import Path

from tests.e2e.test_audit import expected, listen
from tests.e2e.test_offload import loaded, watch
from tests.e2e.test_stored_tokens import NEAR
from tests.e2e.test_stores import lose
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens
from tests.oracles.packed import BITS, packed

NEW_TOKENS = 70


def force_async_scheduling() -> None:
    """``platforms/cpu.py`` turns async scheduling off; turn it on again behind it."""
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config.__func__

    def configured(cls, vllm_config):
        configure(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(configured)


def main(model: Path, scheduler: str, store_dtype: str) -> None:
    if scheduler == "async":
        force_async_scheduling()
    prompts = [random_prompt(n, seed=n) for n in (300, 133, 1, 280)]
    asked = [{}, {}, {}, {"kv_eviction_at": 200, "kv_eviction": "streaming-llm"}]
    options = dict(
        max_num_batched_tokens=128, max_model_len=1024, max_num_seqs=8, enable_prefix_caching=True,
        disable_log_stats=False, kv_offloading_size=0.25,
    )  # fmt: skip
    settings = dict(policy="ada-snapkv", budget=96, interval=32, allow="streaming-llm")
    settings["audit"] = "100%"
    stored, near = None, 0.0
    if store_dtype == "int4":
        settings |= dict(budget=200, store_dtype=store_dtype)
        stored, near = packed(*BITS["int4"]), NEAR
    with engine(model, settings, **options) as run:
        free, told = run.free_blocks(), listen(watch(run))
        oracle = MaskedModel(model, stored=stored)
        agreed = total = full = points = audited = 0
        furthest = 0.0
        for round_ in range(3):  # the second time with prefix hits, the third with loads
            number = 4 * round_
            if round_ == 2:
                lose(run)
            outputs = run.generate(prompts, NEW_TOKENS, asked)
            for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
                same, count = check_tokens(oracle, prompt, output, lives, near)
                agreed, total = agreed + same, total + count
                points += any(eviction.n == 200 < len(prompt) for eviction in lives[0].evictions)
                wanted = expected(oracle, [*prompt, *output], lives)
                for audit in told:
                    if audit[0].startswith(f"{number}-"):
                        furthest = max(furthest, min(abs(audit[3] - nats) for nats, _ in wanted))
                        audited += 1
                number += 1
                full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
        result = dict(
            runner=type(run.worker.model_runner).__module__,
            async_scheduling=run.core.async_scheduling,
            batch_queue_size=run.core.batch_queue_size,
            agreed=agreed,
            total=total,
            full_attention_agreed=full,
            evictions_at_point=points,
            evictions=run.counters.evictions,
            audited=audited,
            audits_dropped=run.counters.audits_dropped,
            audit_off_by=furthest,
            stores_reused=run.counters.stores_reused,
            loaded=loaded(run),
            evictions_on_worker=run.worker.kv_eviction.evictions,
            blocks_leaked=free - run.free_blocks(),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
