"""What a store that several requests may hold depends on."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from vllm_kvevict.timeline.progress import EvictionProgress

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, eq=False)
class ShareKey:
    """Requests with equal keys evict at one point to equal stores.

    What is the same for a whole server (model, window, block size, groups of layers) is no part.
    Keys are compared by a digest, since a thousand waiting requests may have the same one.

    Args:
        prefix: vLLM's hash of the whole blocks before the point. It covers their tokens, the LoRA
            adapter, the cache salt, images and embeddings.
        rest: Tokens between those blocks and the point.
        extra: What vLLM hashes beside these tokens.
        point: The eviction point, in tokens.
        policy: The policy that chooses.
        protect_first: Tokens that stay whatever the policy chooses.
        stores: S of every KV-cache group, or 0 where a group has nothing to evict at the point.
        inside: Whether the prompt goes on after the point, so that the window does not hold the
            question.
        share: Part of the tokens that the budget keeps; 0 for policies that do not read it.

    """

    prefix: bytes
    rest: tuple[int, ...]
    extra: tuple[Any, ...] | None
    point: int
    policy: str
    protect_first: int
    stores: tuple[tuple[int, int], ...]
    inside: bool = False
    share: float = 0.0

    @cached_property
    def digest(self) -> bytes:
        return sha256(repr(self).encode()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShareKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def share_key(
    request: "Request",
    timelines: Mapping[int, EvictionProgress],
    hash_block_size: int,
    policy: str,
    protect_first: int,
    reads_share: bool,
) -> ShareKey | None:
    """The key of a request that evicts at a point of its own; None for all others.

    Args:
        request: vLLM's request, whose blocks are hashed as far as they are full.
        timelines: Its timelines before anything was evicted, by KV-cache group.
        hash_block_size: Tokens that one of these hashes covers.
        policy: The policy that chooses.
        protect_first: Tokens that stay whatever the policy chooses.
        reads_share: Whether the policy's scores depend on the share of tokens that is kept.

    """
    stops = [stop for t in timelines.values() if (stop := t.next_chunk_end(0)) is not None]
    point = min(stops, default=request.num_tokens)
    if point >= request.num_tokens:
        return None
    blocks = point // hash_block_size
    if not 0 < blocks <= len(request.block_hashes):
        return None
    if any(timeline.looks_before(point) for timeline in timelines.values()):
        return None
    hashed = blocks * hash_block_size
    extra = None
    if hashed < point:
        extra = generate_block_hash_extra_keys(request, hashed, point, 0)[0]
    stores = tuple(
        (group, timeline.wanted(point) if timeline.is_due(point) else 0)
        for group, timeline in sorted(timelines.items())
    )
    return ShareKey(
        prefix=request.block_hashes[blocks - 1],
        rest=tuple(request.all_token_ids[hashed:point]),
        extra=extra,
        point=point,
        policy=policy,
        protect_first=protect_first,
        stores=stores,
        inside=goes_on(request, point),
        share=kept_share(timelines, point) if reads_share else 0.0,
    )


def goes_on(request: "Request", point: int) -> bool:
    """Whether a prompt goes on after a point by more than the token that asks."""
    return point + 1 < request.num_prompt_tokens


def kept_share(timelines: Mapping[int, EvictionProgress], point: int) -> float:
    """Largest part of the tokens before a point that a group's budget keeps."""
    return max(timeline.share(point) for timeline in timelines.values())
