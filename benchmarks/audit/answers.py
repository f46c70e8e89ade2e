"""Part 1: the audit of a prompt's eviction beside the divergence of the answer behind it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.audit.engine import ANSWER, WHOLE, Audited, engine, evicted
from benchmarks.audit.figures import Row, divergence
from benchmarks.audit.prompts import Document, Mixture
from benchmarks.quality.local_chat import LocalChat


def answer_rows(prompt: int, answer: int, point: int) -> range:
    """Positions whose next token is one of the answer's and was computed behind the eviction.

    Args:
        prompt: Tokens of the prompt.
        answer: Tokens of the answer.
        point: Tokens before the eviction. One at the prompt's end leaves the answer's first
            token as it was.

    """
    return range(max(prompt - 1, point), prompt + answer - 1)


def under_all(
    run: Audited, document: Document, policy: str, budgets: Sequence[str], seed: int
) -> list[Row]:
    """One document at all budgets, beside its answer by the full cache.

    The answer is given to the evicted requests behind the prompt. So each of its tokens is
    predicted from the tokens of the full cache's, over what the eviction left.

    Returns:
        A row for each kind and budget. Left out are evictions that were not audited, and answers
        of which no token was computed behind the eviction. ``again`` of a row is the divergence
        of the same tokens, computed in the same way and without any eviction: what rounding alone
        comes to. It is None where the prefix cache held some of them.

    """
    ids, listener = document.ids, run.listener
    listener.clear()
    listener.first = len(ids) - 1
    ((whole, answer),) = run.generate([ids], [WHOLE], ANSWER)
    full = listener.logits[whole]
    asked = [(kind, point, b) for kind, point in document.points.items() for b in budgets]
    asked = [one for one in asked if answer_rows(len(ids), len(answer), one[1])]
    (again, _), *found = run.generate(
        [[*ids, *answer[:-1]]] * (1 + len(asked)),
        [WHOLE, *(evicted(point, budget) for _, point, budget in asked)],
    )
    rows = []
    for (kind, point, budget), (request, _) in zip(asked, found, strict=True):
        audits = listener.audits.get(request, [])
        if len(audits) != 1:
            continue
        _, _, kept, nats, agreed = audits[0]
        places = answer_rows(len(ids), len(answer), point)
        before = rows_of(full, places)
        after, rounded = (rows_of(listener.logits.get(one, {}), places) for one in (request, again))
        assert before is not None and after is not None
        rows.append(
            {
                "policy": policy, "kind": kind, "budget": budget, "seed": seed,
                "tokens": len(ids), "point": point, "answer_tokens": len(places), "kept": kept,
                "audit": nats, "agreement": agreed, "answer": divergence(before, after),
                "again": None if rounded is None else divergence(before, rounded),
            }
        )  # fmt: skip
    return rows


def rows_of(logits: dict[int, torch.Tensor], places: range) -> torch.Tensor | None:
    """[N, V] logits of positions; None where one of them was not computed."""
    if not all(place in logits for place in places):
        return None
    return torch.stack([logits[place] for place in places])


def measure(
    model: Path,
    policies: Sequence[str],
    budgets: Sequence[str],
    kinds: Sequence[str],
    seeds: Sequence[int],
    tokens: int,
    minutes: float,
    found: Callable[[dict[str, Any]], object],
) -> None:
    """All cells, a policy after the other in engines of their own.

    Args:
        model: Folder of the model.
        policies: That evict.
        budgets: Shares of the prompt.
        kinds: Of the mixture.
        seeds: Of the prompts of a cell.
        tokens: Of a prompt, about.
        minutes: A policy begins no further document after so many; 0 for no limit.
        found: Told of the result so far, now and then.

    """
    mixture = Mixture(LocalChat(model), tokens, kinds)
    rows: list[Row] = []
    counted: dict[str, dict[str, int]] = {}
    for policy in policies:
        with engine(model, policy) as run:
            began, counters = time.monotonic(), run.listener.counters
            for seed in tqdm(seeds, desc=policy, unit="sample"):
                if minutes and time.monotonic() - began > 60 * minutes:
                    break
                for document in mixture.documents(seed):
                    rows += under_all(run, document, policy, budgets, seed)
                counted[policy] = {
                    name: getattr(counters, name)
                    for name in ("evictions", "tokens_audited", "audits_dropped")
                }
                found({"rows": rows, "counted": counted})
