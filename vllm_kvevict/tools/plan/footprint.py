"""Blocks that one request holds from its prompt to its last token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule, blocks_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class RequestFootprint:
    """Blocks of a request, over all KV-cache groups.

    Args:
        prompt: Most that it holds while its prompt is computed, up to the step that ends it, which
            may evict.
        decode: Most that it holds while it decodes, without what an eviction takes.
        replace: Most that an eviction takes in addition: the new store, and the block that a
            step in flight adds before the old ones are free.
        mean: Over its decode steps.
        evictions: In its whole life; groups that evict in the same step count once.

    """

    prompt: int
    decode: int
    replace: int
    mean: float
    evictions: int

    def sequences(self, blocks: int) -> int:
        """Requests that ``blocks`` hold at once: one with its whole prompt, others in decode.

        Holds for the largest moment of each, so none is preempted for want of a block.
        """
        most = max(self.decode, 1)
        first = max(self.prompt, self.decode + self.replace)
        return 0 if blocks < first else 1 + (blocks - first) // most

    def mean_sequences(self, blocks: int) -> int:
        """Decoding requests that ``blocks`` hold at once where they are spread over their lives."""
        return int(blocks / self.mean)


def request_footprint(groups: Sequence["Group"], prompt: int, output: int) -> RequestFootprint:
    """Follow one request.

    Args:
        groups: Its share of every KV-cache group.
        prompt: Tokens of the prompt.
        output: Tokens generated; the last of them is never cached.

    """
    last = prompt + output - 1
    inside = sorted({point for group in groups for point in group.points})
    steps = [
        (sum(group.step(n, last) for group in groups), sum(group.replacing for group in groups))
        for n in (*inside, *range(prompt, last + 1))
    ]
    # An answer of one token ends with the prompt's own step.
    decode = steps[len(inside) + 1 :] or [(sum(group.held for group in groups), 0)]
    return RequestFootprint(
        prompt=max(map(sum, steps[: len(inside) + 1])),
        decode=max(blocks for blocks, _ in decode),
        replace=max(more for _, more in decode),
        mean=sum(blocks for blocks, _ in decode) / len(decode),
        evictions=sum(more > 0 for _, more in steps),
    )


class Group:
    """One request's blocks in a group that never evicts.

    Args:
        block_size: Tokens in a block.
        cap: Most blocks of one request, for sliding windows; None for no bound.

    """

    def __init__(self, block_size: int, cap: int | None = None) -> None:
        self.block_size = block_size
        self.cap = cap
        self.held = self.replacing = 0
        self.points: tuple[int, ...] = ()
        """Where it evicts inside the prompt."""

    def step(self, n: int, last: int) -> int:
        """Blocks held in the step after which ``n`` tokens are cached.

        ``last`` is the length at which the request ends.
        """
        self.held = blocks_for(n, self.block_size)
        if self.cap is not None:
            self.held = min(self.held, self.cap)
        return self.held


class EvictingGroup(Group):
    """One request's blocks in a group that evicts; ``held`` is what stays after the step.

    Args:
        rule: The group's rule.
        prompt: Tokens of the prompt.

    """

    def __init__(self, rule: EvictionRule, prompt: int) -> None:
        super().__init__(rule.block_size)
        self._request = EvictionProgress(rule, prompt, prompt)
        self.points = self._request.points

    def step(self, n: int, last: int) -> int:
        request = self._request
        during = self._blocks(n)
        self.replacing = 0
        # A request that ends with this step is not evicted.
        if request.is_due(n) and n < last:
            request.evict(n)
            # A prompt that streams in may find no more room than in blocks of its own.
            self.replacing = 1 if request.has_eviction_points else request.store_blocks + 1
        self.held = self._blocks(n)
        return during

    def _blocks(self, n: int) -> int:
        request = self._request
        positional = blocks_for(n, self.block_size) - request.tail_start // self.block_size
        return positional + request.store_blocks


class SharingGroup(EvictingGroup):
    """One request's own blocks in a group where all requests take one context's store.

    Args:
        rule: The group's rule.
        prompt: Tokens of the prompt.
        context: Its first tokens, the same for all requests, which are evicted at their end.
        evicts_shared: Whether it evicts again at every interval, and not only where that gives
            blocks back while others hold the store.

    """

    def __init__(self, rule: EvictionRule, prompt: int, context: int, evicts_shared: bool) -> None:
        super().__init__(rule, prompt)
        request = self._request = EvictionProgress(
            rule, prompt, prompt, requested_point=context, shares_context=not evicts_shared
        )
        if request.is_due(context):
            request.evict(context)
        self.points = request.points
        self._first = request.tail_start
        whole = context // self.block_size - self._first // self.block_size
        self.shared = request.store_blocks + whole
        """Blocks that all requests hold together."""

    def step(self, n: int, last: int) -> int:
        during = super().step(n, last)
        if self.replacing:
            self.replacing = self._request.store_blocks + 1
        return during

    @property
    def _shares(self) -> bool:
        return self._request.tail_start == self._first

    def _blocks(self, n: int) -> int:
        return super()._blocks(n) - (self.shared if self._shares else 0)


def groups_of(
    vllm_config: "VllmConfig", specs: Sequence["KVCacheSpec"], prompt: int, policy: str
) -> list[Group]:
    """The groups of a request, with or without eviction.

    Args:
        vllm_config: Bounds what a sliding window holds.
        specs: One of each KV-cache group.
        prompt: Tokens of the prompt.
        policy: What the request evicts by, or "none".

    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from vllm_kvevict.cache.spec import EvictableAttentionSpec

    groups: list[Group] = []
    options = RequestOptions(policy)
    for spec in specs:
        evictable = isinstance(spec, EvictableAttentionSpec) and options.evicts
        if evictable and spec.rule is not None:
            groups.append(EvictingGroup(options.own_rule(spec.rule), prompt))
        elif isinstance(spec, SlidingWindowSpec):
            cap = spec.max_admission_blocks_per_request(
                vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len
            )
            groups.append(Group(spec.block_size, cap))
        else:
            groups.append(Group(spec.block_size))
    return groups


def sharing_groups(
    specs: Sequence["KVCacheSpec"], prompt: int, context: int, policy: str, evicts_shared: bool
) -> list[SharingGroup] | None:
    """The groups of a request that takes the store of a context; None where none is shared.

    Args:
        specs: One of each KV-cache group.
        prompt: Tokens of the prompt.
        context: Tokens of the context, which it begins with.
        policy: What the request evicts by.
        evicts_shared: As in :class:`SharingGroup`.

    """
    from vllm_kvevict.cache.spec import EvictableAttentionSpec

    options = RequestOptions(policy, at=context)
    groups = [
        SharingGroup(options.own_rule(spec.rule), prompt, context, evicts_shared)
        for spec in specs
        if isinstance(spec, EvictableAttentionSpec) and spec.rule is not None
    ]
    return groups if len(groups) == len(specs) else None
