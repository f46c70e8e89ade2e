"""Each prompt with a target: what it came to, and what its answer lost."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.audit.answers import answer_rows, rows_of
from benchmarks.audit.engine import ANSWER, WHOLE, Audited, engine
from benchmarks.audit.figures import Row, divergence
from benchmarks.audit.prompts import FOUR, FOUR_KNOWN, Document, Mixture
from benchmarks.quality.local_chat import LocalChat
from vllm_kvevict.settings.own_target import TARGET
from vllm_kvevict.settings.requests import AT, INTERVAL
from vllm_kvevict.target.scheduler import ANSWER as TOLD

FOUR_TIMES = 4 * ANSWER
"""Most tokens of an answer of four numbers."""


def share(kept: str) -> float:
    """Of its tokens that a request came to keep; ``short`` took the engine's 50%."""
    return float(kept[:-1]) / 100 if kept.endswith("%") else 0.5


def with_target(
    run: Audited, document: Document, kinds: Sequence[str], policy: str, target: float, seed: int
) -> list[Row]:
    """One document, a row for each kind; teacher-forced on the full cache's greedy answer."""
    from vllm import SamplingParams

    ids, listener = document.ids, run.listener
    listener.clear()
    listener.first = len(ids) - 1
    longest = FOUR_TIMES if {FOUR, FOUR_KNOWN} & document.points.keys() else ANSWER
    ((whole, answer),) = run.generate([ids], [WHOLE], longest)
    full = listener.logits[whole]
    asked = [
        (kind, point)
        for kind, point in document.points.items()
        if kind in kinds and answer_rows(len(ids), len(answer), point)
    ]
    outputs = run.llm.generate(
        [{"prompt_token_ids": [*ids, *answer[:-1]]} for _ in asked],
        [
            SamplingParams(
                temperature=0, max_tokens=1, extra_args={AT: point, TARGET: target, INTERVAL: 0}
            )
            for _, point in asked
        ],
        use_tqdm=False,
    )
    rows = []
    for (kind, point), output in zip(asked, outputs, strict=True):
        told = (output.kv_transfer_params or {}).get(TOLD, {})
        places = answer_rows(len(ids), len(answer), point)
        before = rows_of(full, places)
        after = rows_of(listener.logits.get(int(output.request_id), {}), places)
        assert before is not None and after is not None
        rows.append(
            {
                "policy": policy, "kind": kind, "seed": seed, "tokens": len(ids), "point": point,
                "answer_tokens": len(places), "rung": told.get("kept"),
                "kept": share(told.get("kept", "short")), "nats": told.get("kl_nats"),
                "answer": divergence(before, after),
            }
        )  # fmt: skip
    return rows


def measure(
    model: Path,
    policies: Sequence[str],
    kinds: Sequence[str],
    target: float,
    seeds: Sequence[int],
    tokens: int,
    found: Callable[[dict[str, Any]], object],
) -> None:
    """All kinds, a policy after the other in engines of their own.

    Args:
        model: Folder of the model.
        policies: That evict.
        kinds: Of :data:`~benchmarks.audit.prompts.KINDS`.
        target: Nats.
        seeds: Of the prompts of each kind.
        tokens: Of a prompt, about.
        found: Told of the result so far after each document.

    """
    mixture = Mixture(LocalChat(model), tokens, kinds)
    rows: list[Row] = []
    counted: dict[str, dict[str, int]] = {}
    for policy in policies:
        with engine(model, policy, audit=0, target=target) as run:
            for seed in tqdm(seeds, desc=policy, unit="prompt"):
                for document in mixture.documents(seed):
                    rows += with_target(run, document, kinds, policy, target, seed)
                    counters = run.listener.counters
                    names = "trials", "tokens_tried", "target_short"
                    counted[policy] = {name: getattr(counters, name) for name in names}
                    found({"target": target, "rows": rows, "counted": counted})
