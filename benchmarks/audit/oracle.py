"""Part 2: the audits of an engine beside what transformers finds for the same evictions.

The engine runs as served, in bfloat16. The offline value is float32, with the positions that each
head kept as a mask. Both take the same positions as kept: the engine's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.audit.engine import engine, evicted
from benchmarks.audit.figures import Row, divergence
from benchmarks.audit.prompts import Document, Mixture
from benchmarks.quality.local_chat import LocalChat

WINDOW = 32
AFTER = 8
"""Tokens behind the eviction, in which the audit comes."""


def pairs(documents: Sequence[Document], count: int) -> list[tuple[str, Document, int]]:
    """The first prompts of the mixture: kind, document, point."""
    found = [
        (kind, document, point) for document in documents for kind, point in document.points.items()
    ]
    return found[:count]


class Offline:
    """KL of the last tokens before evictions, computed over what these kept.

    Args:
        oracle: A ``MaskedModel``.

    """

    def __init__(self, oracle: Any) -> None:
        self._oracle = oracle
        self._before: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
        """Logits over the full cache, by tokens and the first that is computed again."""

    @torch.inference_mode()
    def divergence(self, tokens: tuple[int, ...], kept: Any) -> float:
        """In nats, of a request's first eviction.

        Args:
            tokens: All before the eviction.
            kept: Its ``Kept``.

        """
        from benchmarks.oracles.masked import Kept, Life

        start = max(kept.n - WINDOW, kept.tail_start)
        again = Kept(start, kept.tail_start, kept.positions)
        if (tokens, start) not in self._before:
            self._before[tokens, start] = self._oracle.predictions(
                list(tokens), Life(start + 1, [])
            )
        before = self._before[tokens, start]
        after = self._oracle.predictions(list(tokens), Life(start + 1, [again]))
        # A prediction behind each of the tokens.
        assert len(before) == len(after) == kept.n - start
        return divergence(before, after)


def measure(
    model: Path,
    policies: Sequence[str],
    budgets: Sequence[str],
    kinds: Sequence[str],
    prompts: int,
    tokens: int,
    found: Callable[[dict[str, Any]], object],
) -> None:
    """Each prompt under each policy at each budget; arguments as in part 1."""
    from benchmarks.oracles.engine import Engine
    from benchmarks.oracles.masked import MaskedModel

    mixture, oracle = Mixture(LocalChat(model), tokens, kinds), Offline(MaskedModel(model))
    seeds = -(-prompts // len(kinds))
    asked = pairs([one for seed in range(seeds) for one in mixture.documents(seed)], prompts)
    rows: list[Row] = []
    for policy in policies:
        with engine(model, policy) as run:
            recorded = Engine(run.llm)
            for kind, document, point in tqdm(asked, desc=f"{policy}, oracle", unit="prompt"):
                ids = document.ids[:point]
                for budget in budgets:
                    run.listener.clear()
                    behind = [ids[-1]] * AFTER
                    recorded.generate([[*ids, *behind]], 1, [evicted(point, budget)])
                    audits = [one for mine in run.listener.audits.values() for one in mine]
                    (life,) = recorded.lives()[0]
                    if len(audits) != 1 or len(life.evictions) != 1:
                        continue
                    value = oracle.divergence(ids, life.evictions[0])
                    rows.append(
                        dict(
                            policy=policy, kind=kind, budget=budget, tokens=point,
                            kept=audits[0][2], audit=audits[0][3], answer=value,
                        )
                    )  # fmt: skip
                found({"prompts": len(asked), "rows": rows})
