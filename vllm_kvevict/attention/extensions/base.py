"""Attention that a policy runs in addition to or instead of vLLM's kernel."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats

if TYPE_CHECKING:
    from vllm_kvevict.ops.triton.every_query import Sequences


class AttentionExtension(ABC):
    """Reads or writes the floats of cached tokens in every step.

    :attr:`Requirements.attention` of a policy names its class. A worker makes one extension of each
    class that its policies name.

    Args:
        caches: The caches of evictable layers by name.
        token_stats: Floats of the cached tokens.

    """

    replaces: ClassVar[bool] = False
    """True if the extension computes the attention of evicted requests instead of vLLM's kernel,
    under a policy that weighs its tokens. False if it runs in addition to vLLM's kernel, for
    requests under a policy that requires every query."""

    serves_gpus: ClassVar[bool] = False
    """True if :meth:`forward_on_gpu` exists."""

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
        """Lay out the extension's requests of a step, once for all layers of a group.

        Args:
            common: vLLM's metadata of the whole batch.
            state: The group's state.
            rows: [K] int64 state rows of the requests.
            requests: [K] int64 batch indices of the requests.

        Returns:
            The argument ``batch`` of :meth:`forward`.

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
            batch: The result of :meth:`build`.
            output: [T, query heads, D]; an extension that replaces vLLM's kernel writes it at the
                tokens of its requests.

        """

    def forward_on_gpu(
        self,
        state: GroupState,
        layer_name: str,
        batch: "Sequences",
        slots: torch.Tensor,
        output: torch.Tensor,
    ) -> bool:
        """Run one layer on a GPU, after the keys and values of the step's tokens were cached.

        Args:
            state: The group's state.
            layer_name: A layer of the group, or one that shares the cache of such a layer.
            batch: The extension's requests, or some of them.
            slots: [T'] int64 slot mapping of the tokens of these requests in this step.
            output: [Q, G, D], ordered as the queries of ``batch``.

        Returns:
            True if ``output`` was written, which is then the attention of these queries.

        Raises:
            NotImplementedError: The extension runs on CPUs only.

        """
        raise NotImplementedError(f"{type(self).__name__} runs on CPUs only")


def make_extensions(
    names: Iterable[str], caches: Mapping[str, LayerCache], token_stats: TokenStats | None
) -> list[AttentionExtension]:
    """Return extensions of the classes that policies name as ``module:Class``; "" names none."""
    extensions = []
    for name in dict.fromkeys(filter(None, names)):
        assert token_stats is not None
        extensions.append(resolve_name(name)(caches, token_stats))
    return extensions
