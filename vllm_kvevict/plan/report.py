"""The plan of a server, as text and as JSON."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvevict.plan.life import Life, groups_of, life
from vllm_kvevict.plan.memory import Memory, plan_memory
from vllm_kvevict.plan.model import rank_specs
from vllm_kvevict.plan.options import Options
from vllm_kvevict.settings.config import NONE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.settings.config import EvictionConfig


@dataclass(frozen=True)
class Plan:
    """What a server would have: memory of one rank, and a request's life without and with."""

    options: Options
    vllm_config: "VllmConfig"
    config: "EvictionConfig"
    memory: Memory
    without: Life
    evicting: Life

    @classmethod
    def of(cls, options: Options, vllm_config: "VllmConfig", config: "EvictionConfig") -> "Plan":
        """Plan a server.

        Raises:
            PlanError: The memory does not suffice, or the model's layers are unknown.

        """
        memory = plan_memory(options, vllm_config, config, rank_specs(vllm_config, config))
        load = options.prompt, options.output
        without, evicting = (
            life(groups_of(vllm_config, memory.specs, options.prompt, policy), *load)
            for policy in (NONE, config.policy)
        )
        return cls(options, vllm_config, config, memory, without, evicting)

    @property
    def usable_blocks(self) -> int:
        """Blocks for requests; one is vLLM's null block."""
        return self.memory.blocks - 1

    def sequences(self, one: Life) -> int:
        """Requests at once of which none is preempted."""
        return min(one.sequences(self.usable_blocks), self._most)

    def mean_sequences(self, one: Life) -> int:
        """Requests at once that are spread over their lives."""
        return min(one.mean_sequences(self.usable_blocks), self._most)

    @property
    def _most(self) -> int:
        return self.vllm_config.scheduler_config.max_num_seqs


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything in bytes, blocks and tokens."""
    memory, cache = plan.memory, plan.vllm_config.cache_config
    model, parallel = plan.vllm_config.model_config, plan.vllm_config.parallel_config

    def request(one: Life) -> dict[str, Any]:
        return asdict(one) | dict(
            sequences=plan.sequences(one), mean_sequences=plan.mean_sequences(one)
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
        eviction=plan.config.model_dump(mode="json"),
        block_size=cache.block_size,
        max_num_seqs=plan.vllm_config.scheduler_config.max_num_seqs,
        memory=dict(
            gpu_memory=plan.options.gpu_memory,
            gpu_memory_utilization=cache.gpu_memory_utilization,
            weights=memory.weights,
            weights_from=memory.weights_from,
            activations=memory.activations,
            activations_given=plan.options.activations is not None,
            kv_cache=memory.kv_cache,
            blocks=memory.blocks,
            block_bytes=memory.block_bytes,
            capacity_tokens=memory.capacity_tokens,
            concurrency=memory.concurrency,
            **{f"eviction_{name}": value for name, value in asdict(memory.buffers).items()},
        ),
        prompt=plan.options.prompt,
        output=plan.options.output,
        without=request(plan.without),
        with_eviction=request(plan.evicting),
    )


def as_text(plan: Plan) -> str:
    """One screen."""
    memory, config = plan.memory, plan.config
    block_size = plan.vllm_config.cache_config.block_size
    stride = config.timeline(block_size).stride
    model = as_json(plan)["model"]
    lines = [
        f"model      {model['architecture']}: {model['layers']} layers, per rank "
        f"{model['kv_heads']} KV heads of {model['head_size']}, {model['dtype']}",
        f"eviction   {config.policy}, budget {config.budget}, window {config.window}, "
        + (f"after prefill and every {stride} decode steps" if stride else "after prefill only"),
        "",
        f"{'memory of one rank':32}{'bytes':>16}{'':>12}",
        *(_row(*row) for row in _memory_rows(plan)),
        "",
        f"KV cache: {memory.blocks} blocks of {block_size} tokens "
        f"({memory.block_bytes} bytes each), one of them vLLM's own",
        f"vLLM's start-up says: {memory.capacity_tokens:,} tokens, "
        f"{memory.concurrency:.2f}x for {model['max_model_len']:,} tokens per request",
        "",
        f"{f'request of {plan.options.prompt} + {plan.options.output} tokens':44}"
        f"{'stock':>10}{'eviction':>10}",
    ]
    for name, pick in (
        ("evictions", lambda one: one.evictions),
        ("blocks when its prompt is computed", lambda one: one.prompt),
        ("blocks while it decodes, most", lambda one: one.decode),
        ("blocks that an eviction takes for a moment", lambda one: one.replace),
        ("blocks while it decodes, mean", lambda one: f"{one.mean:.1f}"),
        ("sequences at once, none ever preempted", plan.sequences),
        ("sequences at once, spread over their lives", plan.mean_sequences),
    ):
        lines.append(f"{name:44}{pick(plan.without):>10}{pick(plan.evicting):>10}")
    most = plan.vllm_config.scheduler_config.max_num_seqs
    if plan.mean_sequences(plan.evicting) == most:
        lines.append(f"(no more than {most}: --max-num-seqs)")
    return "\n".join(lines)


def _memory_rows(plan: Plan) -> list[tuple[str, int, str]]:
    memory, options = plan.memory, plan.options
    rows = []
    if options.gpu_memory is not None:
        assert memory.weights is not None and memory.activations is not None
        share = plan.vllm_config.cache_config.gpu_memory_utilization
        assumed = "given" if options.activations is not None else "assumed; vLLM measures it"
        rows += [
            (f"device x {share:g}", int(options.gpu_memory * share), ""),
            ("weights", memory.weights, memory.weights_from),
            ("activations", memory.activations, assumed),
        ]
    buffers = memory.buffers
    slots = f"{buffers.ring_slots} slots" if buffers.ring_slots else "this policy needs none"
    rows += [
        ("observation rings", buffers.rings, slots),
        *([("per-head attention", buffers.attention, "")] if buffers.attention else []),
        *([("eviction's workspace", buffers.workspace, "")] if buffers.workspace else []),
        ("KV cache", memory.kv_cache, ""),
        ("numbers beside the KV cache", buffers.page_values, ""),
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
