"""The key of a store that several requests may hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from vllm_kvevict.rules.positions import Position
from vllm_kvevict.rules.progress import EvictionProgress

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, eq=False)
class ShareKey:
    """Key of a store. Requests with equal keys evict at the same point to equal stores.

    Values that are equal for a whole server (model, window, block size, groups of layers) are not
    part of the key. Keys are compared by a digest, since a thousand waiting requests may have the
    same key.

    Args:
        prefix: vLLM's hash of the whole blocks before the point. It covers their tokens, the LoRA
            adapter, the cache salt, images and embeddings.
        rest: Tokens between those blocks and the point.
        extra: Values that vLLM hashes in addition to these tokens.
        point: The eviction point, in tokens.
        policy: The policy that chooses.
        protect_first: First tokens that are always kept.
        stores: S of every KV-cache group, or 0 if the group has nothing to evict at the point.
        share: Share of the tokens that the budget keeps; 0 for policies that do not read it.
        in_context: True if the policy reads no window at the point because it is inside a context
            that the request names.
        parent: Digest of the key of the store that the eviction replaces; empty for a request's
            first eviction.
        tails: Tail start of every KV-cache group, if earlier evictions may have set it. ``stores``
            then also counts what groups keep that do not evict at the point.

    """

    prefix: bytes
    rest: tuple[int, ...]
    extra: tuple[Any, ...] | None
    point: int
    policy: str
    protect_first: int
    stores: tuple[tuple[int, int], ...]
    share: float = 0.0
    in_context: bool = False
    parent: bytes = b""
    tails: tuple[tuple[int, int], ...] = ()

    @cached_property
    def digest(self) -> bytes:
        return sha256(repr(self).encode()).digest()

    @cached_property
    def name(self) -> str:
        """The name of the store outside the KV cache.

        It does not contain the prompt, but who knows the settings can compute it for a guessed
        prompt, because vLLM's hashes have a public seed unless ``PYTHONHASHSEED`` is set.
        """
        return self.digest.hex()[:40]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShareKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def share_key(
    request: "Request",
    progress: Mapping[int, EvictionProgress],
    hash_block_size: int,
    policy: str,
    protect_first: int,
    reads_share: bool,
    context_end: int = 0,
) -> ShareKey | None:
    """Return the key of a request that evicts at a point inside its prompt; None for other
    requests.

    Args:
        request: vLLM's request. Its full blocks are hashed.
        progress: Its progress by KV-cache group, before the first eviction.
        hash_block_size: Number of tokens that one hash covers.
        policy: The policy that chooses.
        protect_first: First tokens that are always kept.
        reads_share: True if the policy's scores depend on the share of tokens that is kept.
        context_end: Tokens of the context that the request names, if the policy reads no window
            inside it; 0 for none.

    """
    ends = [end for t in progress.values() if (end := t.next_chunk_end(0)) is not None]
    point = min(ends, default=request.num_tokens)
    if point >= request.num_tokens:
        return None
    if any(group_progress.looks_before(point) for group_progress in progress.values()):
        return None
    tokens = _tokens_before(request, point, hash_block_size)
    if tokens is None:
        return None
    stores = tuple(
        (group, group_progress.wanted(point) if group_progress.is_due(point) else 0)
        for group, group_progress in sorted(progress.items())
    )
    return ShareKey(
        *tokens,
        point=point,
        policy=policy,
        protect_first=protect_first,
        stores=stores,
        share=largest_share(progress, point) if reads_share else 0.0,
        in_context=point <= context_end,
    )


def link_key(
    request: "Request",
    position: Position,
    hash_block_size: int,
    policy: str,
    protect_first: int,
    reads_share: bool,
    parent: bytes,
) -> ShareKey | None:
    """Return the key of the store at one of the positions at which every request evicts; None if
    its tokens are not known.

    Args:
        request: vLLM's request. Its full blocks are hashed.
        position: The position.
        hash_block_size: Number of tokens that one hash covers.
        policy: The policy that chooses.
        protect_first: First tokens that are always kept.
        reads_share: True if the policy's scores depend on the share of tokens that is kept.
        parent: Digest of the key of the store before; empty for the first one.

    """
    point, stores, tails = position.point, position.stores, position.tails
    tokens = _tokens_before(request, point, hash_block_size)
    if tokens is None:
        return None
    share = position.share if reads_share else 0.0
    return ShareKey(*tokens, point, policy, protect_first, stores, share, True, parent, tails)


def _tokens_before(
    request: "Request", point: int, hash_block_size: int
) -> tuple[bytes, tuple[int, ...], tuple[Any, ...] | None] | None:
    """Return what identifies the tokens before a point: vLLM's hash of the whole blocks, the tokens
    after them, and what vLLM hashes in addition to these; None if a hash is missing."""
    blocks = point // hash_block_size
    if not 0 < blocks <= len(request.block_hashes):
        return None
    hashed = blocks * hash_block_size
    extra = None
    if hashed < point:
        extra = generate_block_hash_extra_keys(request, hashed, point, 0)[0]
    return request.block_hashes[blocks - 1], tuple(request.all_token_ids[hashed:point]), extra


def largest_share(progress: Mapping[int, EvictionProgress], point: int) -> float:
    """Return the largest share of the tokens before a point that the budget of a group keeps."""
    return max(group_progress.share(point) for group_progress in progress.values())
