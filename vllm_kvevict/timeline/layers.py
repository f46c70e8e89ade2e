"""Layers with budgets of their own: shares, groups of like share, and blocks. Pure arithmetic.

A layer's share is what it keeps beside the window relative to the mean over all layers. Shares
are measured (:mod:`vllm_kvevict.calibrate`) or fall with depth: PyramidKV (arXiv:2406.02069),
section 4.2, which Ada-KV section 3.4 takes over as "Pyramid".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import fsum
from operator import mul


@dataclass(frozen=True)
class Share:
    """What one group of layers keeps, relative to the mean over all layers.

    Args:
        group: Number of the group.
        sizes: Layers of every group.
        shares: Share of every group, the mean of its layers'. Over all layers they average 1.
        steepest: The largest share of a layer, where shares fall with depth. Where that layer
            would be given more than there is, all shares come nearer to 1, as PyramidKV's code
            has it. None for measured shares: what a group cannot use goes to the others.

    Raises:
        ValueError: The group is none of the groups, or a share is not above 0.

    """

    group: int
    sizes: tuple[int, ...]
    shares: tuple[float, ...]
    steepest: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.group < len(self.sizes) == len(self.shares) or min(self.shares) <= 0:
            raise ValueError("a group must be one of the groups, and every share above 0")

    @property
    def value(self) -> float:
        """The group's share."""
        return self.shares[self.group]

    def blocks(self, budget: float, length: float, block_size: int) -> int:
        """Blocks that the group keeps beside the window, at least 1.

        All layers together keep no more than ``budget`` on average, and as near to it as whole
        blocks come, save where it is less than a block a layer. What a group is lifted to 1
        block, or has no tokens for, is taken from or goes to the others.

        Args:
            budget: Mean over all layers in tokens per KV head, window not included.
            length: Tokens before the window.
            block_size: Tokens in a block.

        """
        most = int(length // block_size)
        if budget >= length or most <= 1:
            return max(1, int(budget // block_size))
        if budget <= block_size:
            return 1
        total = budget / block_size * sum(self.sizes)
        held = [round(blocks, 6) for blocks in self._fill(total, most, length / budget)]
        whole = [int(blocks) for blocks in held]
        left = round(total - sum(map(mul, self.sizes, whole)), 6)
        # The largest remainder is rounded up first, and none instead of it: of two groups the one
        # with the larger share never keeps less.
        for group in sorted(range(len(held)), key=lambda group: whole[group] - held[group]):
            if self.sizes[group] > left or whole[group] == most:
                break
            whole[group] += 1
            left -= self.sizes[group]
        return whole[self.group]

    def _fill(self, total: float, most: int, room: float) -> list[float]:
        """Blocks of every group in [1, ``most``] that sum to ``total`` over layers, by share."""
        shares = self.shares
        if self.steepest is not None and self.steepest > room:
            bend = (room - 1) / (self.steepest - 1)
            shares = tuple(1 + (share - 1) * bend for share in shares)
        found: dict[int, float] = {}
        while len(found) < len(shares):
            free = [group for group in range(len(shares)) if group not in found]
            left = total - fsum(self.sizes[group] * blocks for group, blocks in found.items())
            each = left / fsum(self.sizes[group] * shares[group] for group in free)
            wanted = {group: each * shares[group] for group in free}
            given = {group: min(max(blocks, 1.0), most) for group, blocks in wanted.items()}
            excess = fsum(self.sizes[group] * (given[group] - wanted[group]) for group in free)
            # Only the bound that weighs more is final: the other may not hold after that.
            final = {
                group: blocks
                for group, blocks in given.items()
                if abs(excess) < 1e-9 or (blocks - wanted[group]) * excess > 0
            }
            found |= final
        return [found[group] for group in range(len(shares))]


def pyramid(layers: int, beta: float) -> tuple[float, ...]:
    """Shares that fall with depth: the deepest layer has ``1 / beta``, the mean is 1.

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
    most: int | None,
    steepest: float | None = None,
    stages: tuple[int, ...] = (),
) -> tuple[Share, ...]:
    """The share of each layer's group, by depth; kept, as every checked request asks for it.

    Args:
        shares: Of each layer, by depth.
        most: Groups; fewer where that wastes less memory. None for as few as come near enough to
            the layers' own shares (:data:`NEAR`).
        steepest: As :class:`Share` has it.
        stages: Layers of each pipeline stage. A stage's memory serves its own layers only, so
            that shares count relative to its mean.

    """
    if len(stages) > 1:
        parts = [shares[part.start : part.stop] for part in _parts(stages)]
        shares = tuple(share * len(part) / fsum(part) for part in parts for share in part)
        steepest = None if steepest is None else max(shares)
    groups = _few_alike(shares, stages) if most is None else alike(shares, most, stages)
    sizes = tuple(map(len, groups))
    means = tuple(fsum(shares[layer] for layer in group) / len(group) for group in groups)
    place = {layer: number for number, group in enumerate(groups) for layer in group}
    return tuple(Share(place[layer], sizes, means, steepest) for layer in range(len(shares)))


MOST_GROUPS, NEAR = 8, 1 / 30
"""Groups that are tried where no number is given, and what is near enough to the layers' own
shares: the part of their variance that is left inside groups. Of SmolLM2-135M-Instruct's shares 4
groups leave 1/13, 5 leave 1/16 and 6 leave 1/35, and 6 answered best (docs/layers.md)."""

MOST_PADDING = 0.1
"""Share of the KV cache that uneven groups may leave unused before there are fewer groups."""


def alike(shares: Sequence[float], most: int, stages: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Group layers of like share, in at most ``most`` groups as even in size as can be.

    Of all such groups these lose least: the squares of what layers differ from the mean of
    their group sum up to the least. Fewer groups where they waste less than the most would,
    beyond :data:`MOST_PADDING`. Every group has layers of every stage, as a block that it takes
    is taken in all of them.

    Args:
        shares: Of each layer, by depth.
        most: Groups, at least 2.
        stages: Layers of each pipeline stage; empty for one stage.

    Returns:
        The layers of each group, by depth; the group with the largest share comes first.

    """
    stages = stages or (len(shares),)

    def waste(count: int) -> int:
        sizes = [[n // count + (rest < n % count) for rest in range(count)] for n in stages]
        missing = padding(*sizes)
        return missing if missing > MOST_PADDING * len(shares) else 0

    fewest = min(stages)
    count = min(range(min(most, fewest), min(fewest, 2) - 1, -1), key=waste)
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
    """The layers of each pipeline stage."""
    ends = list(accumulate(stages))
    return [range(end - size, end) for size, end in zip(stages, ends, strict=True)]


def _few_alike(shares: Sequence[float], stages: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """The fewest groups that are :data:`NEAR` enough, or those of up to 8 that lose least.

    A group that is padded leaves memory unused: its part of all counts like a part of the variance.
    """
    whole = _spread(shares)

    def left(groups: list[tuple[int, ...]]) -> float:
        inside = fsum(_spread([shares[layer] for layer in group]) for group in groups)
        return inside / whole if whole else 0.0

    def loss(groups: list[tuple[int, ...]]) -> float:
        missing = padding(*sizes_by_stage(groups, stages or (len(shares),)))
        return left(groups) + missing / (len(shares) + missing)

    tried = [alike(shares, count, stages) for count in range(2, MOST_GROUPS + 1)]
    return next((groups for groups in tried if left(groups) <= NEAR), min(tried, key=loss))


def sizes_by_stage(groups: Sequence[Sequence[int]], stages: Sequence[int]) -> list[list[int]]:
    """Layers of every group on each pipeline stage."""
    return [[sum(layer in part for layer in group) for group in groups] for part in _parts(stages)]


def _sizes(ordered: Sequence[float], count: int) -> list[int]:
    """Sizes of ``count`` groups that differ by one at most, and lose least."""
    small, larger = divmod(len(ordered), count)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for group in range(count):
        longer: dict[int, tuple[float, list[int]]] = {}
        for extra, (loss, sizes) in best.items():
            for size in (small + 1, small):
                start, now = group * small + extra, extra + size - small
                if now > larger:
                    continue
                found = round(loss + _spread(ordered[start : start + size]), 9)
                if now not in longer or found < longer[now][0]:
                    longer[now] = found, [*sizes, size]
        best = longer
    return best[larger][1]


def _spread(shares: Sequence[float]) -> float:
    mean = fsum(shares) / len(shares)
    return fsum((share - mean) ** 2 for share in shares)


def padding(*stages: Sequence[int]) -> int:
    """Layers that vLLM adds to groups, and whose memory nobody uses.

    A block id stands for one block in every layer of a group, so vLLM makes all groups as large
    as the smallest, cutting larger ones up, or as the largest where that is less than 1.5 times
    as large (``_get_kv_cache_groups_uniform_page_size``). Each of several pipeline stages has
    memory for its own largest group.

    Args:
        stages: Sizes of the groups on each stage.

    """
    if len(stages) > 1:
        return sum(len(sizes) * max(sizes) - sum(sizes) for sizes in stages)
    (sizes,) = stages
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    return sum(-count % size for count in sizes)
