"""Attention that a policy adds to the CPU backend, or runs instead of vLLM's kernel."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats


class AttentionExtension(ABC):
    """Reads or writes the floats of cached tokens in every step.

    :attr:`Requirements.attention` of a policy names its class. A worker makes one extension of each
    class that its policies name.

    Args:
        caches: The caches of evictable layers by name.
        token_stats: Floats of the cached tokens.

    """

    replaces: ClassVar[bool] = False
    """True: it computes the attention of evicted requests under a policy that weighs its tokens,
    and vLLM's kernel does not. False: it runs in addition, for requests under a policy that
    requires every query."""

    def __init__(self, caches: Mapping[str, LayerCache], token_stats: TokenStats) -> None:
        self.caches = caches
        self.token_stats = token_stats

    @abstractmethod
    def build(
        self,
        common: CommonAttentionMetadata,
        state: GroupState,
        rows: torch.Tensor,
        requests: torch.Tensor,
    ) -> Any:
        """Lay out its requests of a step, once for all layers of a group.

        Args:
            common: vLLM's metadata of the whole batch.
            state: The group's state.
            rows: [K] int64 state rows of its requests.
            requests: [K] int64 their places in the batch.

        Returns:
            What :meth:`forward` takes.

        """

    @abstractmethod
    def forward(
        self,
        state: GroupState,
        layer_name: str,
        query: torch.Tensor,
        batch: Any,
        output: torch.Tensor,
    ) -> None:
        """Run one layer, after the keys and values of the step's tokens were cached.

        Args:
            state: The group's state.
            layer_name: A layer of the group, or one that shares the cache of such a layer.
            query: [T, query heads, D] of the whole batch.
            batch: Of :meth:`build`.
            output: [T, query heads, D]; an extension that replaces vLLM's kernel writes it at the
                tokens of its requests.

        """


def make_extensions(
    names: Iterable[str], caches: Mapping[str, LayerCache], token_stats: TokenStats | None
) -> list[AttentionExtension]:
    """The extensions of the classes that policies name, as ``module:Class``; "" names none."""
    found = []
    for name in dict.fromkeys(filter(None, names)):
        assert token_stats is not None
        found.append(resolve_name(name)(caches, token_stats))
    return found
