"""What recorded answers lose: means with intervals, by length and by kind of request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_kvevict.tools.measure.score import Score

RESAMPLES = 10_000
FEWEST = 5
"""Requests below which no interval is given."""

ALL = "all"
LENGTHS = (1024, 4096, 16384, 65536)
"""Tokens of a prompt at which a class of lengths ends."""


@dataclass(frozen=True)
class Loss:
    """The loss of a group of requests, in nats per token of the answer.

    Args:
        group: Name of the group.
        requests: Number of requests.
        tokens: Tokens of their answers.
        mean: Mean over the requests of the nats that each loses per token.
        low: Lower end of the 95% interval of the mean; NaN with fewer than :data:`FEWEST` requests.
        high: Upper end.
        kept_first: Share of the tokens that were the likeliest with the full cache and still are;
            NaN if none was.
        changed: Requests of which any token has another probability.

    """

    group: str
    requests: int
    tokens: int
    mean: float
    low: float
    high: float
    kept_first: float
    changed: int


def loss_of(group: str, scores: Sequence[Score]) -> Loss:
    """Return the loss of requests, at least one.

    The interval is a bootstrap over the requests, with a fixed seed: both settings score the same
    tokens, so the losses are differences of pairs.
    """
    losses = np.array([one.loss for one in scores])
    low = high = float("nan")
    if len(losses) >= FEWEST:
        generator = np.random.default_rng(0)
        # Bounded memory for many requests.
        means = [
            losses[generator.integers(len(losses), size=len(losses))].mean()
            for _ in range(RESAMPLES)
        ]
        low, high = np.quantile(means, (0.025, 0.975))
    first = sum(one.first for one in scores)
    return Loss(
        group=group,
        requests=len(scores),
        tokens=sum(one.tokens for one in scores),
        mean=float(losses.mean()),
        low=float(low),
        high=float(high),
        kept_first=sum(one.still_first for one in scores) / first if first else float("nan"),
        changed=sum(one.full != one.evicted for one in scores),
    )


def length_class(tokens: int) -> str:
    """Return the class of a prompt's length."""
    below = next((end for end in LENGTHS if tokens < end), None)
    if below is None:
        return f"prompt of {LENGTHS[-1]:,} tokens or more"
    return f"prompt below {below:,} tokens"


def by_group(scores: Sequence[Score]) -> list[Loss]:
    """Return the loss of all requests, of each class of lengths, and of each kind.

    A division into one class is left out.
    """
    found = [loss_of(ALL, scores)]
    ordered = sorted(scores, key=lambda one: one.prompt)
    lengths = list(dict.fromkeys(length_class(one.prompt) for one in ordered))
    kinds = sorted({one.kind for one in scores})
    if len(lengths) > 1:
        for name in lengths:
            found.append(loss_of(name, [one for one in scores if length_class(one.prompt) == name]))
    if len(kinds) > 1:
        found += [loss_of(kind, [one for one in scores if one.kind == kind]) for kind in kinds]
    return found


def lines(losses: Sequence[tuple[str, Sequence[Loss]]]) -> Iterator[str]:
    """Return a table of the losses at each budget."""
    head = "kept", "requests", "number", "nats per token", "95%", "same first choice"
    cells = [head]
    for budget, groups in losses:
        for one in groups:
            known = one.low == one.low
            cells.append(
                (
                    budget,
                    one.group,
                    str(one.requests),
                    f"{one.mean:.4f}",
                    f"[{one.low:.4f}, {one.high:.4f}]" if known else "-",
                    f"{one.kept_first:.1%}" if one.kept_first == one.kept_first else "-",
                )
            )
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def sentence(budget: str, loss: Loss) -> str:
    """Return what the loss of all requests means, in one sentence."""
    if not loss.changed:
        return (
            f"{budget}: no answer changed, so nothing was evicted; the prompts are shorter than "
            "the budget, or the requests ask for the full cache."
        )
    if loss.low != loss.low:
        return f"{budget}: fewer than {FEWEST} requests are too few for an interval."
    if loss.low <= 0:
        return (
            f"{budget}: no loss was found; answers lose less than {max(loss.high, 0):.3f} nats per "
            "token on average, with 97.5% confidence."
        )
    return (
        f"{budget}: answers lose {loss.mean:.3f} nats per token on average, between {loss.low:.3f} "
        f"and {loss.high:.3f} with 95% confidence."
    )
