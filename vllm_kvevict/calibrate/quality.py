"""Measures what answers lose by budget, on contexts from which nothing was learned."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from vllm_kvevict.calibrate.lessons import Later, Lesson
from vllm_kvevict.calibrate.options import CalibrateError
from vllm_kvevict.calibrate.pace import Pace
from vllm_kvevict.config.probe_weights import prose_weights
from vllm_kvevict.ops.torch.allocate import shared_pages
from vllm_kvevict.rules.layers import Share

BUDGETS = (0.5, 0.25, 0.125, 0.0625)
"""Shares of the cache at which quality is measured."""

KNOWN = 2
"""Questions of a context that are also asked with the question known at the eviction."""

RESAMPLES = 2000

NORMAL = 1.96
"""Standard deviations that 95% of a normal distribution lie within."""


def check(model: Any, lessons: Sequence[Lesson], least: float) -> Pace:
    """Refuse a model whose full cache does not answer what is asked about the contexts.

    Args:
        model: The model.
        lessons: Contexts and questions; those without questions check nothing.
        least: Share of the questions that must be answered.

    Returns:
        The time that this took.

    Raises:
        CalibrateError: In one sentence, how many were answered.

    """
    answered, pace = [], Pace()
    for index, lesson in enumerate(lessons):
        questions = [later for later in lesson.later if later.asked]
        # Of what has no questions, one is run for its time.
        if questions or not index:
            pace.hold(model, lesson.context)
            for later in questions or lesson.later:
                _, right = pace.lost(model, later.ids, later.answer)
                answered += [bool(right[0])] if questions else []
    if answered and sum(answered) < least * len(answered):
        raise CalibrateError(
            f"the full cache answers {sum(answered)} of {len(answered)} questions about the texts "
            f"that a profile is learned from, and {least:.0%} is needed: check the tokenizer (does "
            "it begin prompts as the model expects?), give --documents or --prompts of your own, "
            "or lower --least-answered"
        )
    return pace


def measured(
    model: Any,
    shares: torch.Tensor,
    measured_at: float | None,
    lessons: Sequence[Lesson],
    progress: Any,
) -> dict[str, Any]:
    """Losses of answers by budget.

    Args:
        model: The model, with probes.
        shares: [L, H] of the budget.
        measured_at: Part of the tokens that was kept where they were measured.
        lessons: Contexts held out.
        progress: Shows a bar.

    Returns:
        ``keys`` and ``joined``: the question is not known at the eviction, and scores are those of
        the keys alone or joined with the window's; ``known``: it is, and they are joined (not
        there if nothing is asked). Each has ``answers``, their number, and by budget: ``kl``, the
        mean KL divergence in nats per token of the answer and its 95% interval; and ``right``, the
        share of questions that are answered right and its interval. ``full``: that share without
        eviction.

    """
    rows: dict[str, dict[float, list[Answer]]] = {}
    full: list[Answer] = []
    for index, lesson in enumerate(progress(lessons, "quality")):
        for names, context, texts in _asked(lesson):
            model.hold(context)
            length = len(context)
            for _, alike in groupby(BUDGETS, partial(prose_weights, tokens=length)):
                budgets = list(alike)
                model.use(budgets[0], length)
                trials = [
                    served_counts(shares, measured_at, share, length, model.recent)
                    for share in budgets
                ]
                for name in names:
                    model.scores(name != "keys")
                    for later in texts:
                        lost, right = model.lost(later.ids, later.answer, trials)
                        whole, *each = (bool(ok) if later.asked else None for ok in right)
                        if name == "joined" and budgets[0] == BUDGETS[0]:
                            full.append(Answer(index, 0.0, whole))
                        for share, kl, ok in zip(budgets, lost.tolist(), each, strict=True):
                            answer = Answer(index, kl, ok)
                            rows.setdefault(name, {}).setdefault(share, []).append(answer)
    quality: dict[str, Any] = {"full": wilson(full)}
    for name, by_share in rows.items():
        quality[name] = {
            f"{share:.2%}": {"kl": interval(mine), "right": wilson(mine)}
            for share, mine in by_share.items()
        } | {"answers": len(by_share[BUDGETS[0]])}
    return quality


@dataclass(frozen=True)
class Answer:
    """One answer: of which context, its KL divergence, and whether it is right.

    ``right`` is None if nothing is asked.
    """

    context: int
    kl: float
    right: bool | None


def interval(answers: Sequence[Answer]) -> list[float]:
    """Mean KL divergence, and its 95% interval: the bootstrap over contexts."""
    contexts = sorted({one.context for one in answers})
    sums = np.array([[
        sum(one.kl for one in answers if one.context == context),
        sum(one.context == context for one in answers),
    ] for context in contexts])  # fmt: skip
    rng = np.random.default_rng(0)
    drawn = sums[rng.integers(0, len(sums), (RESAMPLES, len(sums)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    total = sums.sum(0)
    return [round(float(value), 4) for value in (total[0] / total[1], low, high)]


def wilson(answers: Sequence[Answer]) -> list[float] | None:
    """Share of the answers that are right, and its 95% interval; None if nothing is asked."""
    asked = [one.right for one in answers if one.right is not None]
    if not asked:
        return None
    count, share = len(asked), sum(asked) / len(asked)
    middle = (share + NORMAL**2 / (2 * count)) / (1 + NORMAL**2 / count)
    half = math.sqrt(share * (1 - share) / count + NORMAL**2 / (4 * count**2))
    half *= NORMAL / (1 + NORMAL**2 / count)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return [round(value, 4) for value in (share, low, high)]


def _asked(lesson: Lesson) -> Iterator[tuple[tuple[str, ...], list[int], list[Later]]]:
    """Return contexts that are evicted, and texts after them: questions not known, and known."""
    yield ("keys", "joined"), lesson.context, lesson.later
    for later in [one for one in lesson.later if one.asked][:KNOWN]:
        following = Later(later.ids[later.asked :], later.answer, later.asked)
        yield ("known",), [*lesson.context, *later.ids[: later.asked]], [following]


def kept_tokens(share: float, length: int, recent: int) -> float:
    """Return the tokens that a head keeps on average, without the last ones."""
    return max(1.0, share * length - recent)


def counts_of(shares: torch.Tensor, share: float, length: int, recent: int) -> list[list[int]]:
    """Return the number of tokens, not pages, that each head keeps without the last ones."""
    wanted = shares * kept_tokens(share, length, recent)
    return wanted.clamp(1, length - recent).round().long().tolist()


def served_counts(
    shares: torch.Tensor, measured_at: float | None, share: float, length: int, recent: int
) -> list[list[int]]:
    """Return the number of tokens that each head keeps in a server, without the last ones.

    What a layer or a head cannot use goes to the others, and layers' shares move towards 1 if more
    is kept than where they were measured (``rules/layers.py``). A server rounds to pages, and
    groups layers, in addition.

    Args:
        shares: [L, H] of mean 1.
        measured_at: Part of the tokens that was kept where they were measured; None if not known.
        share: Share of the tokens to keep.
        length: Tokens of the context.
        recent: Last tokens of the context, which are always kept.

    """
    layers, count = tuple(shares.mean(1).tolist()), length - recent
    ones, kept = (1,) * len(layers), kept_tokens(share, length, recent)
    stores = [
        Share(layer, ones, layers, measured_at=measured_at).blocks(kept, count, 1, constant=True)
        for layer in range(len(layers))
    ]
    caps = torch.full((1, shares.shape[1]), count)
    heads = [
        shared_pages(row[None] / row.mean(), caps, min(store, count))[0]
        for row, store in zip(shares, stores, strict=True)
    ]
    return [row.tolist() for row in heads]
