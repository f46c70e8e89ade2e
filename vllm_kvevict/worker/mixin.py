"""vLLM's workers with eviction around ``execute_model``."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.gpu_sync_debug import with_gpu_sync_check
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.spec import EvictableAttentionSpec, is_evictable
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.connectors import LMCACHE, NIXL, connector_names, connectors_of
from vllm_kvevict.config.memory_budget import evictable_stages, kv_cache_bytes
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.probe_weights import read
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.engine.blocks import register_spec
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.requirements import floats_per_token, policy_requirements, ring_slots
from vllm_kvevict.stores.content import StoreContent, WindowGroup
from vllm_kvevict.stores.fingerprint import store_files
from vllm_kvevict.stores.host import HostStores
from vllm_kvevict.worker.checks import check_layer, check_specs
from vllm_kvevict.worker.comparison import Comparison
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.failed_loads import FailedLoads
from vllm_kvevict.worker.fused import FusedEvictions
from vllm_kvevict.worker.head_shares import by_group
from vllm_kvevict.worker.load_fence import LoadFence
from vllm_kvevict.worker.meter import attach
from vllm_kvevict.worker.probes import LayerProbe, Probes
from vllm_kvevict.worker.ranks import first_head, on_all_ranks
from vllm_kvevict.worker.rotary import Rotary, find
from vllm_kvevict.worker.runners import RowsV1, RowsV2, RunnerRows
from vllm_kvevict.worker.weights import WeightsMixin
from vllm_kvevict.worker.workspace import Workspace

logger = init_logger("vllm.kv_eviction.worker")


class EvictionWorkerMixin(WeightsMixin, ABC):
    """Makes full-attention layers evictable, binds the backend and runs the evictions.

    A subclass registers its platform's attention backend and returns the layout of its cache.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = EvictionConfig.parse(self.vllm_config.additional_config.get(CONFIG_KEY))
        assert config is not None
        self.eviction_config = config
        self.kv_eviction: WorkerEviction | None = None
        self._rings: ObservationRings | None = None
        self._workspace: Workspace | None = None
        self._cache_is_lost = False
        self._failed_loads: FailedLoads | None = None
        register_spec()
        self._register_backend()

    @abstractmethod
    def _register_backend(self) -> None:
        """Register the evicting attention backend instead of the platform's."""

    @abstractmethod
    def _layer_cache(self, layer: Any, spec: AttentionSpec) -> LayerCache:
        """Return the cache of an attention layer as head pages."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return vLLM's specs, with those of full-attention layers replaced by evictable ones.

        Raises:
            ValueError: No layer can evict, or a layer is of an unsupported kind.

        """
        specs = super().get_kv_cache_spec()
        check_specs(specs)
        evictable = [name for name, spec in specs.items() if is_evictable(spec)]
        if not evictable:
            raise ValueError(
                "KV eviction needs layers with full attention, and this model has none on this "
                "rank: serve it without --kv-eviction."
            )
        for name in evictable:
            check_layer(name, self._layer(name))
        self._give_rules(specs, evictable)
        self._evictable_layers = evictable
        self._evictable_specs = [specs[name] for name in evictable]
        return specs

    def _give_rules(self, specs: dict[str, Any], evictable: list[str]) -> None:
        """Make the specs of the named layers evictable, in place, and store each layer's depth.

        Raises:
            ValueError: Budgets differ by layer, and the model's configuration counts other layers.

        """
        stages: tuple[int, ...] = (len(evictable),)
        by_depth, stage = evictable, 0
        if self.eviction_config.has_groups:
            by_depth = sorted(evictable, key=extract_layer_index)
            stages, stage = evictable_stages(self.vllm_config), get_pp_group().rank_in_group
            if len(evictable) != stages[stage]:
                raise ValueError(
                    "KV eviction cannot set a budget for each layer of this model, because "
                    f"{len(evictable)} of its layers evict and its configuration counts "
                    f"{stages[stage]}; serve it without --kv-eviction-profile and without the "
                    "policies pyramidkv and ada-pyramid."
                )
        first = sum(stages[:stage])
        self._depths = {name: first + index for index, name in enumerate(by_depth)}
        block_size = specs[by_depth[0]].block_size
        rules = self.eviction_config.layer_rules(block_size, *stages)
        for name, depth in self._depths.items():
            specs[name] = EvictableAttentionSpec.from_spec(specs[name], rules[depth])

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache, without those of the rings and of the token stats.

        The bytes of the token stats are taken from ``--kv-cache-memory-bytes`` as well.
        """
        self._allocate_rings()
        available = super().determine_available_memory()
        channels = floats_per_token(self.eviction_config)
        stored = self.eviction_config.token_format
        return kv_cache_bytes(available, self._evictable_specs, channels, stored)

    def _allocate_rings(self) -> None:
        slots = ring_slots(self.vllm_config, self.eviction_config)
        if not slots or self._rings is not None:
            return
        impls = [self._layer(name).impl for name in self._evictable_layers]
        shapes = {(impl.num_heads, impl.head_size) for impl in impls}
        if len(shapes) > 1:
            raise ValueError(
                "KV eviction needs the same number of query heads and head size in every "
                f"full-attention layer, and this model has {sorted(shapes)}: serve it without "
                "--kv-eviction."
            )
        with self._like_the_cache():
            self._rings = ObservationRings(
                self._evictable_layers,
                slots,
                self.eviction_config.window,
                *shapes.pop(),
                dtype=self.model_config.dtype,
                device=self.device,
            )

    def _like_the_cache(self) -> AbstractContextManager[None]:
        """Return a context in which memory is allocated as the KV cache is.

        Sleep mode and :meth:`discard` free this memory, and its content is undefined after
        :meth:`wake_up`, which calls :meth:`_reset`.
        """
        return self._maybe_get_memory_pool_context("kv_cache")

    def _like_the_runtime(self) -> AbstractContextManager[None]:
        """Return a context in which memory is allocated whose content vLLM preserves.

        Sleep mode copies it to the host, every :meth:`wake_up` copies it back, and
        :meth:`discard` leaves it alone.
        """
        return self._maybe_get_memory_pool_context("runtime")

    def sleep(self, level: int = 1) -> None:
        """Sleep; the workspace of evictions and stores in host memory are freed as well."""
        self._lose_cache()
        super().sleep(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free memory without preserving it; with the KV cache also the workspace of evictions and
        stores in host memory."""
        if "kv_cache" in tags:
            self._lose_cache()
        super().discard(tags)

    def _lose_cache(self) -> None:
        self._cache_is_lost = True
        if self._workspace is not None:
            self._workspace.release()
        if self.kv_eviction is not None:
            self.kv_eviction.stores.clear()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up; no request and no published store outlives the KV cache."""
        super().wake_up(tags)
        if self._cache_is_lost and (tags is None or "kv_cache" in tags):
            self._cache_is_lost = False
            if self._workspace is not None:
                self._workspace.renew()
            self._reset()

    def _reset(self) -> None:
        """Write what evictions expect to memory that was allocated as the KV cache is."""
        assert self.kv_eviction is not None
        for state in self.kv_eviction.states.values():
            state.reset()
        if self._rings is not None:
            self._rings.reset()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        self._allocate_rings()
        states: dict[int, GroupState] = {}
        caches: dict[str, LayerCache] = {}
        heads: dict[str, int] = {}
        layers = self.compilation_config.static_forward_context.items()
        targets = {n: getattr(layer, "kv_sharing_target_layer_name", None) for n, layer in layers}
        sharing = {name: target for name, target in targets.items() if target is not None}
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            # A pipeline stage may have no layer of a group.
            if not isinstance(spec, EvictableAttentionSpec) or not group.layer_names:
                continue
            assert spec.rule is not None
            with self._like_the_cache():
                states[group_id] = GroupState(
                    group_id,
                    group.layer_names,
                    spec.rule,
                    spec.num_kv_heads,
                    self.scheduler_config.max_num_seqs,
                    self.model_config.max_model_len,
                    self.device,
                    # A published store is identified by its first block.
                    kv_cache_config.num_blocks if self.cache_config.enable_prefix_caching else 0,
                    sharing,
                )
            for name in group.layer_names:
                caches[name] = self._layer_cache(self._layer(name), spec)
                heads[name] = spec.num_kv_heads
        channels = floats_per_token(self.eviction_config)
        with self._like_the_cache():
            token_stats = TokenStats(caches, heads, channels) if channels else None
        with self._like_the_runtime():
            probes = self._probes(states, caches, token_stats)
        rows = self._rows(states)
        # It may extend the workspace, which has a pool of its own.
        fused = self._fused(states, caches, token_stats, probes)
        self.kv_eviction = WorkerEviction(
            build_policies(self.eviction_config),
            states,
            caches,
            self._rings,
            token_stats,
            rows,
            fused,
            self._head_shares(states),
            probes,
            self._workspace,
        )
        self.kv_eviction.stores.tiers = self._tiers(states, caches, token_stats, kv_cache_config)
        # Only the last pipeline stage has the hidden states from which logits are computed.
        if self.eviction_config.audits and get_pp_group().is_last_rank:
            self.kv_eviction.comparison = Comparison(
                rows,
                self.eviction_config.window,
                self.model_runner.get_model().compute_logits,
                self.kv_eviction.meter.compared,
            )
        self._bind(self.kv_eviction)
        names = connector_names(self.vllm_config.kv_transfer_config)
        connectors = connectors_of(get_kv_transfer_group()) if names else []
        for name, connector in zip(names, connectors, strict=True):
            if name in NIXL and self.device.type == "cuda":
                self.kv_eviction.fence = LoadFence(connector)
            if name == LMCACHE:
                self._failed_loads = FailedLoads(connector, self.cache_config.block_size)
        logger.info(
            "KV eviction memory on this rank: %d bytes of observation rings, %d bytes of tables, "
            "%d bytes of floats of cached tokens",
            self._rings.num_bytes if self._rings is not None else 0,
            sum(state.num_bytes for state in states.values()),
            token_stats.num_bytes if token_stats is not None else 0,
        )

    def _tiers(
        self,
        states: dict[int, GroupState],
        caches: dict[str, LayerCache],
        token_stats: TokenStats | None,
        kv_cache_config: KVCacheConfig,
    ) -> HostStores | None:
        """Return the stores outside the KV cache; None if no flag asks for them."""
        config = self.eviction_config
        if not config.has_tiers:
            return None
        floats = floats_per_token(config)
        files = store_files(self.vllm_config, kv_cache_config, config, floats)
        assert self.kv_eviction is not None
        windows, others = self._windows(kv_cache_config)
        content = StoreContent(states, {**caches, **others}, token_stats, windows)
        meter = self.kv_eviction.meter
        if files is not None:
            self._watch_weights()
        return HostStores(content, files, self.rank, meter.restore, self._weights, on_all_ranks)

    def _windows(
        self, kv_cache_config: KVCacheConfig
    ) -> tuple[dict[int, WindowGroup], dict[str, LayerCache]]:
        """Return the groups whose layers attend within a window, and the caches of these layers.

        The scheduler shares stores only if all groups that do not evict are of this kind.
        """
        windows, caches = {}, {}
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            if isinstance(spec, AttentionSpec) and not isinstance(spec, EvictableAttentionSpec):
                windows[group_id] = WindowGroup(group.layer_names, spec.num_kv_heads)
                for name in group.layer_names:
                    caches[name] = self._layer_cache(self._layer(name), spec)
        return windows, caches

    def shutdown(self) -> None:
        """Write the pending stores to files, and shut down."""
        if self.kv_eviction is not None and self.kv_eviction.stores.tiers is not None:
            self.kv_eviction.stores.tiers.flush()
        super().shutdown()

    def _fused(
        self,
        states: dict[int, GroupState],
        caches: dict[str, LayerCache],
        token_stats: TokenStats | None,
        probes: Probes | None,
    ) -> FusedEvictions | None:
        """Return the CUDA evictions that replace the PyTorch operations; None without them."""
        return None

    def _head_shares(self, states: dict[int, GroupState]) -> dict[int, torch.Tensor] | None:
        """Return the measured shares of this rank's heads; None if the profile has none."""
        profile = self.eviction_config.profile
        if not isinstance(profile, Profile) or profile.heads is None:
            return None
        first = first_head(next(iter(states.values())).num_heads)
        ranks = self.parallel_config.tensor_parallel_size
        return by_group(profile.heads, self._depths, states, first, ranks)

    def _probes(
        self,
        states: dict[int, GroupState],
        caches: dict[str, LayerCache],
        token_stats: TokenStats | None,
    ) -> Probes | None:
        """Return the probes of the model's profile; None if no policy reads them.

        Raises:
            ValueError: This rank cannot use the probes. The message gives the reason.

        """
        requirements = policy_requirements(self.eviction_config).values()
        channels = [needs.floats_per_token for needs in requirements if needs.key_scores]
        if not channels:
            return None
        if self.use_v2_model_runner and self.model_config.uses_mrope:
            raise ValueError(
                "KV eviction: the policy probe does not know the positions of images (M-RoPE) "
                "under vLLM's model runner V2: serve this model under the policy ada-defensive."
            )
        profile = self.eviction_config.profile
        assert (
            isinstance(profile, Profile) and profile.probe is not None and token_stats is not None
        )
        weights = read(profile.probe, profile.model)
        heads = next(iter(states.values())).num_heads
        copies = self.parallel_config.tensor_parallel_size * heads // profile.model.kv_heads
        first = first_head(heads)
        own_heads = [(first + head) // copies for head in range(heads)]
        probes = {}
        for name, depth in self._depths.items():
            size = self._layer(name).head_size
            if weights.head_size != size:
                raise ValueError(
                    f"KV eviction: the probes of --kv-eviction-profile are for keys of "
                    f"{weights.head_size} dimensions, and those of layer {name} have {size}."
                )
            rotated = weights.rotated is None or weights.rotated[depth]
            rotary = self._rotary(name) if rotated else None
            probes[name] = LayerProbe.of(
                weights, depth, own_heads, max(channels), rotary, self.device
            )
        return Probes(probes, caches, token_stats)

    def _rotary(self, name: str) -> Rotary | None:
        """Return the rotation of a layer's keys; None if keys are not rotated."""
        try:
            rotary = find(self.model_runner.get_model(), self._layer(name))
            if rotary is None or rotary.is_exact(self.model_config.max_model_len, self.device):
                return rotary
            problem = f"{type(rotary.module).__name__} does not rotate pairs of dimensions"
        except ValueError as error:
            problem = str(error)
        raise ValueError(
            f"KV eviction: the policy probe cannot invert the rotation of the keys of layer "
            f"{name}, because {problem}: serve this model under the policy ada-defensive."
        )

    def _rows(self, states: dict[int, GroupState]) -> RunnerRows:
        if self.use_v2_model_runner:
            return RowsV2(self.model_runner)

        def evicted(row: int) -> bool:
            return any(bool(state.evicted[row]) for state in states.values())

        return RowsV1(self.model_runner, self.scheduler_config.max_num_seqs, evicted)

    def _bind(self, worker: WorkerEviction) -> None:
        drafter = getattr(self.model_runner, "drafter", None)
        # A draft model computes the sampled token together with the tokens of the step.
        new_slots = getattr(drafter, "net_num_new_slots_per_request", 0)
        drafting = getattr(drafter, "draft_attn_groups", ())
        for group_id, state in worker.states.items():
            attn_groups = [(group, 0) for group in self.model_runner.attn_groups[group_id]]
            attn_groups += [
                (group, new_slots) for group in drafting if group.kv_cache_group_id == group_id
            ]
            for attn_group, beyond in attn_groups:
                for builder in attn_group.metadata_builders:
                    if not hasattr(builder, "binding"):
                        raise ValueError(
                            "KV eviction needs its own attention backend in layers "
                            f"{attn_group.layer_names}, but vLLM chose {attn_group.backend}."
                        )
                    if builder.kv_cache_spec.block_size != state.rule.block_size:
                        raise ValueError(
                            "KV eviction needs attention blocks as large as the KV cache's "
                            f"({state.rule.block_size} tokens): set --block-size to "
                            f"{builder.kv_cache_spec.block_size}."
                        )
                    builder.binding = GroupBinding(worker, state, beyond)

    def _layer(self, name: str) -> Any:
        return self.compilation_config.static_forward_context[name]

    @torch.inference_mode()
    @with_gpu_sync_check
    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Run vLLM's step and then its evictions, which follow sampling if the step samples.

        Only the tokens of the next step wait for evictions in this order, and a drafter reads the
        blocks that the step was planned with.
        """
        assert self.kv_eviction is not None
        if self._failed_loads is not None:
            self._failed_loads.begin_step(scheduler_output)
        self.kv_eviction.begin_step(scheduler_output)
        done = False
        try:
            output = super().execute_model(scheduler_output)
            done = True
        finally:
            self.kv_eviction.end_step(scheduler_output, run=done)
        if output is not None:
            self.kv_eviction.evict()
        return self._measured(output)

    @torch.inference_mode()
    @with_gpu_sync_check
    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        assert self.kv_eviction is not None
        output = super().sample_tokens(grammar_output)
        self.kv_eviction.evict()
        return self._measured(output)

    def _measured(self, output: Any) -> Any:
        """Return the step's output with the measurements of evictions attached."""
        assert self.kv_eviction is not None
        if output is None:
            return output
        measured, tiers = self.kv_eviction.meter.take(), self.kv_eviction.stores.tiers
        if tiers is not None and (news := tiers.news()) is not None:
            measured = {"seconds": [], "head_spread": []} | (measured or {}) | {"stores": [news]}
        return attach(measured, output)


def sinks_of(impl: Any) -> torch.Tensor | None:
    """Return the attention sinks [H, G] of a layer, a view of its weights; None without sinks."""
    sinks: torch.Tensor | None = getattr(impl, "sinks", None)
    return None if sinks is None else sinks.detach().view(impl.num_kv_heads, -1)
