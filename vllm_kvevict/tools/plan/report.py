"""The sizes of a server, as text and as JSON."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvevict.config.names import NONE
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.requirements import sustained
from vllm_kvevict.tools.plan.footprint import (
    RequestFootprint,
    groups_of,
    request_footprint,
    sharing_groups,
)
from vllm_kvevict.tools.plan.memory import RankMemory, share_out
from vllm_kvevict.tools.plan.model import rank_specs
from vllm_kvevict.tools.plan.options import Options, SizingError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class Sizing:
    """Sizes of a server: the memory of one rank, and a request's life without and with eviction."""

    options: Options
    vllm_config: "VllmConfig"
    config: "EvictionConfig"
    memory: RankMemory
    without: RequestFootprint
    evicting: RequestFootprint
    sharing: RequestFootprint | None = None
    """A request's own blocks where all take one context's store."""
    shared: int = 0
    """Blocks of that store, and the full blocks after it."""

    @classmethod
    def of(cls, options: Options, vllm_config: "VllmConfig", config: "EvictionConfig") -> "Sizing":
        """Size a server.

        Raises:
            SizingError: The memory does not suffice, the model's layers are unknown, or a context
                is given and could not be shared.

        """
        memory = share_out(options, vllm_config, config, rank_specs(vllm_config, config))
        load = options.prompt, options.output
        without, evicting = (
            request_footprint(groups_of(vllm_config, memory.specs, options.prompt, policy), *load)
            for policy in (NONE, config.policy)
        )
        if options.context is None:
            return cls(options, vllm_config, config, memory, without, evicting)
        groups = sharing_groups(
            memory.specs,
            options.prompt,
            options.context,
            config.policy,
            config.shared_blocks == "evict",
        )
        if groups is None or not build_policies(config)[config.policy].requirements.shares_stores:
            raise SizingError(
                f"--context: {config.policy} on this model shares no stores "
                "(docs/configuration.md, Many questions about one context)"
            )
        shared = sum(group.shared for group in groups)
        return cls(
            options,
            vllm_config,
            config,
            memory,
            without,
            evicting,
            request_footprint(groups, *load),
            shared,
        )

    @property
    def usable_blocks(self) -> int:
        """Blocks for requests; one is vLLM's null block."""
        return self.memory.blocks - 1

    def sequences(self, one: RequestFootprint) -> int:
        """Requests at once of which none is preempted."""
        return min(one.sequences(self._blocks(one)), self._most)

    def mean_sequences(self, one: RequestFootprint) -> int:
        """Requests at once that are spread over their lives."""
        return min(one.mean_sequences(self._blocks(one)), self._most)

    @property
    def keeping_everything(self) -> int:
        """Requests at once that are spread over their lives, while nothing is evicted."""
        return min(self.without.mean_sequences(self.usable_blocks), self._most)

    def _blocks(self, one: RequestFootprint) -> int:
        if one is self.without:
            # Stock vLLM gives its KV cache what eviction's buffers take here.
            return self.memory.stock_blocks - 1
        return self.usable_blocks - (self.shared if one is self.sharing else 0)

    @property
    def _most(self) -> int:
        return self.vllm_config.scheduler_config.max_num_seqs


def as_json(sizing: Sizing) -> dict[str, Any]:
    """Everything in bytes, blocks and tokens."""
    memory, cache = sizing.memory, sizing.vllm_config.cache_config
    model, parallel = sizing.vllm_config.model_config, sizing.vllm_config.parallel_config

    def request(one: RequestFootprint) -> dict[str, Any]:
        return asdict(one) | dict(
            sequences=sizing.sequences(one), mean_sequences=sizing.mean_sequences(one)
        )

    return dict(
        model=dict(
            architecture=model.architecture,
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=model.max_model_len,
        ),
        eviction=sizing.config.model_dump(mode="json"),
        notes=list(sizing.options.notes),
        block_size=cache.block_size,
        max_num_seqs=sizing.vllm_config.scheduler_config.max_num_seqs,
        memory=dict(
            gpu_memory=sizing.options.gpu_memory,
            gpu_memory_utilization=cache.gpu_memory_utilization,
            weights=memory.weights,
            weights_from=memory.weights_from,
            activations=memory.activations,
            activations_given=sizing.options.activations is not None,
            kv_cache=memory.kv_cache,
            blocks=memory.blocks,
            block_bytes=memory.block_bytes,
            stock_blocks=memory.stock_blocks,
            capacity_tokens=memory.capacity_tokens,
            concurrency=memory.concurrency,
            **{f"eviction_{name}": value for name, value in asdict(memory.buffers).items()},
        ),
        prompt=sizing.options.prompt,
        output=sizing.options.output,
        without=request(sizing.without),
        with_eviction=request(sizing.evicting),
        context=sizing.options.context,
        shared_blocks=sizing.shared,
        sharing=request(sizing.sharing) if sizing.sharing is not None else None,
    )


def as_text(sizing: Sizing) -> str:
    """One screen."""
    memory, config = sizing.memory, sizing.config
    block_size = sizing.vllm_config.cache_config.block_size
    rule = config.rule(block_size)
    inside = f"every {rule.prefill_stride} tokens of a prompt, " if rule.prefill_stride else ""
    model = as_json(sizing)["model"]
    lines = [
        f"model      {model['architecture']}: {model['layers']} layers, per rank "
        f"{model['kv_heads']} KV heads of {model['head_size']}, {model['dtype']}",
        f"eviction   {config.policy}, budget {config.budget}, window {config.window}, "
        + ("" if config.token_format.as_cached else f"stores in {config.store_dtype}, ")
        + inside
        + (
            f"and every {rule.stride} tokens of the answer"
            if rule.every
            else f"after prefill and every {rule.stride} decode steps"
            if rule.stride
            else "after prefill only"
        ),
        "",
        f"{'memory of one rank':32}{'bytes':>16}{'':>12}",
        *(_row(*row) for row in _memory_rows(sizing)),
        "",
        f"KV cache: {memory.blocks} blocks of {block_size} tokens "
        f"({memory.block_bytes} bytes each), one of them vLLM's own; stock vLLM has "
        f"{memory.stock_blocks}",
        f"vLLM's start-up says: {memory.capacity_tokens:,} tokens, "
        f"{memory.concurrency:.2f}x for {model['max_model_len']:,} tokens per request",
        "",
        f"{f'request of {sizing.options.prompt} + {sizing.options.output} tokens':44}"
        f"{'stock':>10}{'eviction':>10}",
    ]
    for name, pick in (
        ("evictions", lambda one: one.evictions),
        ("blocks while its prompt is computed, most", lambda one: one.prompt),
        ("blocks while it decodes, most", lambda one: one.decode),
        ("blocks that an eviction takes for a moment", lambda one: one.replace),
        ("blocks while it decodes, mean", lambda one: f"{one.mean:.1f}"),
        ("sequences at once, none ever preempted", sizing.sequences),
        ("sequences at once, spread over their lives", sizing.mean_sequences),
    ):
        lines.append(f"{name:44}{pick(sizing.without):>10}{pick(sizing.evicting):>10}")
    if (one := sizing.sharing) is not None:
        lines += [
            "",
            f"{f'one context of {sizing.options.context} of these tokens, taken by all':54}"
            f"{'eviction':>10}",
            f"{'blocks of the context, held once':54}{sizing.shared:>10}",
            f"{'blocks of a request while it decodes, most':54}{one.decode:>10}",
            f"{'sequences at once, none ever preempted':54}{sizing.sequences(one):>10}",
            f"{'sequences at once, spread over their lives':54}{sizing.mean_sequences(one):>10}",
        ]
    if config.when == "pressure":
        lines.append(
            f"under pressure only: up to {sizing.keeping_everything} such requests, "
            "spread over their lives, keep everything"
        )
    most = sizing.vllm_config.scheduler_config.max_num_seqs
    if sizing.mean_sequences(sizing.evicting) == most:
        lines.append(f"(no more than {most}: --max-num-seqs)")
    if sizing.options.notes:
        lines += ["", *(f"note: {note}" for note in sizing.options.notes)]
    return "\n".join(lines)


def _memory_rows(sizing: Sizing) -> list[tuple[str, int, str]]:
    memory, options = sizing.memory, sizing.options
    rows = []
    if options.gpu_memory is not None:
        assert memory.weights is not None and memory.activations is not None
        share = sizing.vllm_config.cache_config.gpu_memory_utilization
        assumed = "given" if options.activations is not None else "assumed; vLLM measures it"
        rows += [
            (f"device x {share:g}", int(options.gpu_memory * share), ""),
            ("weights", memory.weights, memory.weights_from),
            ("activations", memory.activations, assumed),
        ]
    buffers = memory.buffers
    slots = f"{buffers.ring_slots} slots" if buffers.ring_slots else "this policy needs none"
    rule = sizing.config.rule(sizing.vllm_config.cache_config.block_size)
    if (most := sustained(buffers.ring_slots, rule)) is not None:
        slots += f": {most} sequences evict at the interval"
    rows += [
        ("observation rings", buffers.rings, slots),
        *([("per-head attention", buffers.attention, "")] if buffers.attention else []),
        *([("eviction's workspace", buffers.workspace, "")] if buffers.workspace else []),
        ("KV cache", memory.kv_cache, ""),
        ("floats of tokens outside the KV cache", buffers.token_stats, ""),
        ("tables of the requests", buffers.tables, ""),
    ]
    return rows


def _row(name: str, size: int, note: str) -> str:
    return f"  {name:30}{size:>16}{_human(size):>12}  {note}".rstrip()


def _human(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size} B"
