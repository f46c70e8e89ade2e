"""Layers with individual budgets: shares, groups of similar shares, and blocks. Pure arithmetic.

A layer's share is the number of tokens that it keeps in addition to the window, relative to the
mean over all layers. Shares are measured (:mod:`vllm_kvevict.calibrate`) or decrease with depth:
PyramidKV (arXiv:2406.02069), section 4.2, called "Pyramid" in Ada-KV section 3.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import fsum, log
from operator import mul

MAX_DIVIDED = 1024
"""Number of divisions of a budget between groups that are remembered."""


@dataclass(frozen=True)
class Share:
    """Budget of one group of layers relative to the mean over all layers.

    Args:
        group: Number of the group.
        sizes: Layers of every group.
        shares: Share of every group, the mean of the shares of its layers. Over all layers they
            average 1.
        steepest: The largest share of a layer, if shares decrease with depth. If that layer would
            get more tokens than there are, all shares move towards 1, as in PyramidKV's code. None
            for measured shares: tokens that a group cannot use go to the other groups.
        measured_at: The part of the tokens that a layer kept on average where the shares were
            measured, in (0, 1); None if it is not known. If a constant share keeps more, shares
            move towards 1: a group kept ``share * measured_at`` of its tokens there, and keeps a
            power of that.

    Raises:
        ValueError: The group is not one of the groups, a share is not above 0, or ``measured_at``
            is out of range.

    """

    group: int
    sizes: tuple[int, ...]
    shares: tuple[float, ...]
    steepest: float | None = None
    measured_at: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.group < len(self.sizes) == len(self.shares) or min(self.shares) <= 0:
            raise ValueError("a group must be one of the groups, and every share above 0")
        if self.measured_at is not None and not 0 < self.measured_at < 1:
            raise ValueError("measured_at must be between 0 and 1")

    @property
    def value(self) -> float:
        """The group's share."""
        return self.shares[self.group]

    def blocks(self, budget: float, length: float, page_tokens: int, constant: bool = False) -> int:
        """Return the blocks that the group keeps in addition to the window, at least 1.

        On average, all layers together keep at most ``budget``, and come as close to it as whole
        blocks allow, unless the budget is less than one block per layer. The difference, when a
        group is raised to 1 block or has too few tokens, is taken from or given to the other
        groups.

        Args:
            budget: Mean over all layers in tokens per KV head, window not included.
            length: Tokens before the window.
            page_tokens: Tokens in a block of the store, per KV head.
            constant: True if the budget is the same share of every length. Only then measured
                shares move towards 1 if more is kept than where they were measured.

        """
        limit = int(length // page_tokens)
        if budget >= length or limit <= 1:
            return max(1, int(budget // page_tokens))
        if budget <= page_tokens:
            return 1
        at = self.measured_at if constant else None
        divided = _divide(self.sizes, self.shares, self.steepest, at, budget, length, page_tokens)
        return divided[self.group]


@lru_cache(maxsize=MAX_DIVIDED)
def _divide(
    sizes: tuple[int, ...],
    shares: tuple[float, ...],
    steepest: float | None,
    measured_at: float | None,
    budget: float,
    length: float,
    page_tokens: int,
) -> tuple[int, ...]:
    """Return what :meth:`Share.blocks` returns for every group, which groups ask for in turn.

    ``measured_at`` is None unless shares move towards 1 if more is kept than there.
    """
    limit = int(length // page_tokens)
    total = budget / page_tokens * sum(sizes)
    room = length / budget
    if steepest is not None and steepest > room:
        bend = (room - 1) / (steepest - 1)
        shares = tuple(1 + (share - 1) * bend for share in shares)
    if measured_at is not None and room * measured_at < 1:
        power = -log(room) / log(measured_at)
        shares = tuple(min(1.0, share * measured_at) ** power for share in shares)
    held = [round(blocks, 6) for blocks in _fill(sizes, shares, total, limit)]
    full = [int(blocks) for blocks in held]
    left = round(total - sum(map(mul, sizes, full)), 6)
    # The largest remainder is rounded up first. A smaller one is never rounded up instead, so
    # that of two groups the one with the larger share never keeps less.
    for group in sorted(range(len(held)), key=lambda group: full[group] - held[group]):
        if sizes[group] > left or full[group] == limit:
            break
        full[group] += 1
        left -= sizes[group]
    return tuple(full)


def _fill(
    sizes: tuple[int, ...], shares: tuple[float, ...], total: float, limit: int
) -> list[float]:
    """Return the blocks of every group in [1, ``limit``], by share, with the sum ``total`` over
    layers."""
    filled: dict[int, float] = {}
    while len(filled) < len(shares):
        free = [group for group in range(len(shares)) if group not in filled]
        left = total - fsum(sizes[group] * blocks for group, blocks in filled.items())
        each = left / fsum(sizes[group] * shares[group] for group in free)
        wanted = {group: each * shares[group] for group in free}
        given = {group: min(max(blocks, 1.0), limit) for group, blocks in wanted.items()}
        excess = fsum(sizes[group] * (given[group] - wanted[group]) for group in free)
        # Only the bound with the greater effect is final: the other may not apply after it.
        final = {
            group: blocks
            for group, blocks in given.items()
            if abs(excess) < 1e-9 or (blocks - wanted[group]) * excess > 0
        }
        filled |= final
    return [filled[group] for group in range(len(shares))]


def pyramid(layers: int, beta: float) -> tuple[float, ...]:
    """Return shares that decrease with depth: the deepest layer has ``1 / beta``, the mean is 1.

    Raises:
        ValueError: ``beta`` is below 1.

    """
    if beta < 1:
        raise ValueError("beta must be at least 1")
    if layers == 1:
        return (1.0,)
    return tuple(1 + (1 - 1 / beta) * (1 - 2 * layer / (layers - 1)) for layer in range(layers))


@lru_cache
def by_layer(
    shares: tuple[float, ...],
    max_groups: int | None,
    steepest: float | None = None,
    stages: tuple[int, ...] = (),
    measured_at: float | None = None,
) -> tuple[Share, ...]:
    """Return the share of each layer's group, by depth. Results are cached, because every checked
    request needs them.

    Args:
        shares: Of each layer, by depth.
        max_groups: Maximum number of groups; fewer if that wastes less memory. None for the
            smallest number that is close enough to the layers' shares
            (:data:`MAX_RESIDUAL_VARIANCE`).
        steepest, measured_at: As in :class:`Share`.
        stages: Layers of each pipeline stage. The memory of a stage serves its own layers only, so
            shares are relative to the mean of the stage.

    """
    if len(stages) > 1:
        parts = [shares[part.start : part.stop] for part in _parts(stages)]
        shares = tuple(share * len(part) / fsum(part) for part in parts for share in part)
        steepest = None if steepest is None else max(shares)
    groups = (
        _fewest_groups(shares, stages)
        if max_groups is None
        else group_layers(shares, max_groups, stages)
    )
    sizes = tuple(map(len, groups))
    means = tuple(fsum(shares[layer] for layer in group) / len(group) for group in groups)
    place = {layer: number for number, group in enumerate(groups) for layer in group}
    return tuple(
        Share(place[layer], sizes, means, steepest, measured_at) for layer in range(len(shares))
    )


MAX_GROUPS, MAX_RESIDUAL_VARIANCE = 8, 1 / 25
"""Maximum number of groups if none is given, and the share of the variance of the layers' shares
that may remain inside groups. For SmolLM2-135M-Instruct, 4 groups leave 1/9, 5 leave 1/14 and 6
leave 1/27."""

MIN_VARIANCE = 1e-12
"""Sum of the squared differences of shares that are equal but for rounding."""

MAX_PADDING_SHARE = 0.1
"""Share of the KV cache that uneven groups may leave unused before fewer groups are used."""


def group_layers(
    shares: Sequence[float], max_groups: int, stages: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """Group layers of similar share in at most ``max_groups`` groups of nearly equal size.

    Among such groupings, this one minimizes the sum of the squared differences between the layers
    and the mean of their group. Fewer groups are used if the maximum number wastes more memory than
    they do and more than :data:`MAX_PADDING_SHARE`. Every group has layers of every stage, since a
    block is taken in all of them.

    Args:
        shares: Of each layer, by depth.
        max_groups: Maximum number of groups, at least 2.
        stages: Layers of each pipeline stage; empty for one stage.

    Returns:
        The layers of each group, by depth; the group with the largest share is first.

    """
    stages = stages or (len(shares),)

    def waste(count: int) -> int:
        sizes = [[n // count + (rest < n % count) for rest in range(count)] for n in stages]
        missing = padding(*sizes)
        return missing if missing > MAX_PADDING_SHARE * len(shares) else 0

    fewest = min(stages)
    count = min(range(min(max_groups, fewest), min(fewest, 2) - 1, -1), key=waste)
    groups: list[list[int]] = [[] for _ in range(count)]
    for part in _parts(stages):
        order = sorted(part, key=lambda layer: -shares[layer])
        start = 0
        sizes = _sizes([shares[layer] for layer in order], count)
        for group, size in zip(groups, sizes, strict=True):
            group += order[start : start + size]
            start += size
    groups.sort(key=lambda group: -fsum(shares[layer] for layer in group) / len(group))
    return [tuple(sorted(group)) for group in groups]


def _parts(stages: Sequence[int]) -> list[range]:
    """Return the layers of each pipeline stage."""
    ends = list(accumulate(stages))
    return [range(end - size, end) for size, end in zip(stages, ends, strict=True)]


def _fewest_groups(shares: Sequence[float], stages: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Return the fewest groups with little enough variance inside, else those that lose least.

    The memory that a padded group leaves unused counts like a share of the variance.
    """
    variance = max(_spread(shares), MIN_VARIANCE)

    def left(groups: list[tuple[int, ...]]) -> float:
        inside = fsum(_spread([shares[layer] for layer in group]) for group in groups)
        return inside / variance

    def loss(groups: list[tuple[int, ...]]) -> float:
        missing = padding(*sizes_by_stage(groups, stages or (len(shares),)))
        return left(groups) + missing / (len(shares) + missing)

    tried = [group_layers(shares, count, stages) for count in range(2, MAX_GROUPS + 1)]
    return next(
        (groups for groups in tried if left(groups) <= MAX_RESIDUAL_VARIANCE), min(tried, key=loss)
    )


def sizes_by_stage(groups: Sequence[Sequence[int]], stages: Sequence[int]) -> list[list[int]]:
    """Return the number of layers of every group on each pipeline stage."""
    return [[sum(layer in part for layer in group) for group in groups] for part in _parts(stages)]


def _sizes(ordered: Sequence[float], count: int) -> list[int]:
    """Return sizes of ``count`` groups that differ by at most one, with the least loss."""
    small, larger = divmod(len(ordered), count)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for group in range(count):
        longer: dict[int, tuple[float, list[int]]] = {}
        for extra, (loss, sizes) in best.items():
            for size in (small + 1, small):
                start, now = group * small + extra, extra + size - small
                if now > larger:
                    continue
                total = round(loss + _spread(ordered[start : start + size]), 9)
                if now not in longer or total < longer[now][0]:
                    longer[now] = total, [*sizes, size]
        best = longer
    return best[larger][1]


def _spread(shares: Sequence[float]) -> float:
    mean = fsum(shares) / len(shares)
    return fsum((share - mean) ** 2 for share in shares)


def padding(*stages: Sequence[int]) -> int:
    """Return the number of layers that vLLM adds to groups as unused padding.

    A block id refers to one block in every layer of a group. vLLM therefore makes all groups as
    large as the smallest by splitting larger ones, or as large as the largest if that is less than
    1.5 times as large (``_get_kv_cache_groups_uniform_page_size``). Each of several pipeline stages
    has memory for its own largest group.

    Args:
        stages: Sizes of the groups on each stage.

    """
    if len(stages) > 1:
        return sum(len(sizes) * max(sizes) - sum(sizes) for sizes in stages)
    (sizes,) = stages
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    return sum(-count % size for count in sizes)
