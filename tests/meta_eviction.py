"""Evictions of real size on the meta device, which has shapes and no data.

Whatever reads a number fails there, as the host would wait for it on a GPU.
"""

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat
from vllm_kvevict.ops.torch.probe import Network
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.requirements import floats_per_token
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.gpu import interleaved
from vllm_kvevict.worker.probes import LayerProbe, Probes

META = torch.device("meta")
WINDOW, BLOCK = 32, 16


def worker(
    policy: str,
    num_tokens: int,
    layers: int = 32,
    heads: int = 8,
    group: int = 4,
    size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    stored: TokenFormat = AS_CACHED,
) -> tuple[WorkerEviction, Eviction]:
    """A worker, and the eviction of a prompt to an eighth of its tokens."""
    names = [f"layer.{index}" for index in range(layers)]
    config = EvictionConfig(policy=policy, window=WINDOW, budget="12.5%")
    tokens = stored.page_tokens(BLOCK)
    rule = EvictionRule(BLOCK, WINDOW, 128, budget_share=0.125, page_tokens=tokens)
    state = GroupState(0, names, rule, heads, 4, num_tokens, META)
    layout = interleaved(BLOCK, size)
    assert layout._views and layout.slot_size == 2 * size  # read on the host, once

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=META)

    pool = num_tokens // BLOCK * heads
    caches = {
        name: LayerCache(
            empty(pool, 2 * BLOCK * size).to(dtype),
            layout,
            size**-0.5,
            0.0,
            token_format=stored,
            centres=None if stored.as_cached else empty(heads, size),
        )
        for name in names
    }
    rings = ObservationRings(names, 2, WINDOW, heads * group, size, dtype, META)
    policies = build_policies(config)
    stats = SimpleNamespace()
    if channels := floats_per_token(config):
        stats = TokenStats(caches, dict.fromkeys(names, heads), channels)
        # Tensors of the meta device have no addresses by which layers could be told apart.
        stats._layers = {name: empty(pool, tokens, channels) for name in names}
    probes = None
    if "probe" in policy:
        network = Network(
            empty(heads, 24, size), empty(heads, 24, 3), empty(heads, 1, 24), empty(heads, 1)
        )
        weights = empty(heads, channels, size + 2)
        layer = LayerProbe(weights, None, empty(heads), None, network=network)
        probes = Probes(dict.fromkeys(names, layer), caches, stats)
    rows = SimpleNamespace(
        rows=lambda ids: np.array([1]),
        positions=lambda request, start, stop: torch.arange(start, stop, device="cpu"),
    )
    tail = rule.tail_start(num_tokens)
    due = GroupEviction(
        group_id=0,
        old_tail_start=0,
        tail_start=tail,
        old_store=[],
        store=list(range(rule.store_blocks(num_tokens))),
        positional=list(range(num_tokens // BLOCK)),
    )
    eviction = Eviction("a", num_tokens, 1, [due], policy, 0, share=0.125)
    made = WorkerEviction(policies, {0: state}, caches, rings, stats, rows, probes=probes)
    if made._prompts is not None:
        new = [SimpleNamespace(req_id="a", prompt_token_ids=[1])]
        made._prompts.begin_step(SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=new))
    return made, eviction


class Operations(TorchDispatchMode):
    """Counts the device's operations that are not views, and the bytes of their live results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    @property
    def launches(self) -> int:
        return sum(count for name, count in self.names.items() if "empty" not in name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        leaves = tree_leaves((args, kwargs, result))
        on_device = any(isinstance(leaf, torch.Tensor) and not leaf.is_cpu for leaf in leaves)
        if on_device and (alias is None or alias.is_write):
            self.names[func.name().split(".")[0]] += 1
        known = {
            id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.is_cpu:
                continue
            storage, number = leaf.untyped_storage(), id_of(leaf)
            if number not in known and number not in self._sizes:
                self._sizes[number] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, number)
        return result

    def _free(self, number: int) -> None:
        self.live -= self._sizes.pop(number)


def id_of(tensor: torch.Tensor) -> int:
    """Identify the memory of a tensor."""
    return tensor.untyped_storage()._cdata
