"""vLLM in this process, with every eviction recorded as kept positions."""

import gc
import itertools
import os
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.oracles.masked import Kept, Life
from vllm_kvevict.rules.step_plan import PLAN, StepPlan


class Recorder:
    """Kept positions of every request, by life and eviction.

    Args:
        layers: Layers of every evictable group, numbered by depth among those that evict.

    """

    def __init__(self, layers: dict[int, list[int]]) -> None:
        self.lives: dict[str, list[Life]] = defaultdict(list)
        self.layers = layers
        self._last: Any = None
        self._published: dict[tuple[int, int], list[Kept]] = {}
        """Evictions up to the one that made a store, by group and first block."""
        self._saves: list[Any] = []
        self._saved: dict[str, list[Kept]] = {}

    @property
    def saved(self) -> dict[str, list[Kept]]:
        """The evictions that made the stores that were copied out of the KV cache, by name."""
        for copy in self._saves:
            self._saved[copy.name] = self._history(copy.groups)
        self._saves.clear()
        return self._saved

    def taken(self, plan: Any) -> None:
        """Requests of a step that begin with what another one's eviction kept."""
        self._saves += plan.saves_first
        saved = self.saved
        for copy in plan.loads:
            for group in copy.groups:
                if group.store:
                    self._published[group.group_id, group.store[0]] = saved[copy.name]
        self._saves += plan.saves
        for request_id, groups in plan.reused.items():
            self.lives[request_id][-1].evictions += self._history(groups)

    def _history(self, groups: Any) -> list[Kept]:
        """Evictions that made a store. Not every group of layers takes part in every one."""
        histories = [self._published[g.group_id, g.store[0]] for g in groups if g.store]
        longest = max(histories, key=len)
        for history in histories:
            assert all(one is other for one, other in zip(history, longest, strict=False))
        return longest

    def admitted(self, request_id: str, num_tokens: int) -> None:
        self.lives[request_id].append(Life(num_tokens))

    def __call__(self, record: Any) -> None:
        life = self.lives[record.eviction.request_id][-1]
        group = record.group
        if record.eviction is not self._last:
            count = sum(map(len, self.layers.values()))
            kept = Kept(record.eviction.num_tokens, group.tail_start, [None] * count)
            life.evictions.append(kept)
            self._last = record.eviction
        kept = life.evictions[-1]
        if group.published:
            self._published[group.group_id, group.store[0]] = list(life.evictions)
        assert kept.tail_start == group.tail_start
        bs = record.columns.shape[1] // int(record.pages[0].sum())
        for row, layer in enumerate(self.layers[group.group_id]):
            earlier = [e.positions[layer] for e in life.evictions[:-1] if e.positions[layer]]
            assert bool(earlier) == bool(group.old_store)
            columns = record.columns[row].tolist()
            heads, mine_of_heads, start = [], [], 0
            for head, count in enumerate(record.pages[row].tolist()):
                former = earlier[-1][head] if earlier else []
                candidates = [*former, *range(group.old_tail_start, group.tail_start)]
                padding = int(record.padding[row, head])
                mine = columns[start : start + count * bs]
                heads.append([candidates[column - padding] for column in mine])
                if record.log_weights is not None:
                    log_weights = record.log_weights[row, start : start + count * bs]
                    mine_of_heads.append(log_weights.tolist())
                start += count * bs
            kept.positions[layer] = heads
            if record.log_weights is not None:
                kept.weights = kept.weights or [None] * len(kept.positions)
                kept.weights[layer] = mine_of_heads


def layers_by_depth(states: dict[int, Any]) -> dict[int, list[int]]:
    """Each group's layers, numbered by depth among the layers that evict, a draft model's last."""
    from vllm.model_executor.models.utils import extract_layer_index

    def place(name: str) -> tuple[bool, int]:
        return name.startswith("draft_model."), extract_layer_index(name)

    depth = {g: [place(n) for n in s.layer_names] for g, s in states.items()}
    order = sorted(index for indices in depth.values() for index in indices)
    return {group: [order.index(i) for i in indices] for group, indices in depth.items()}


class Engine:
    """An ``LLM`` in this process: its scheduler, its worker, and a recorder."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.worker = self.core.model_executor.driver_worker.worker
        self.prompts: list[list[int]] = []
        self.recorder = Recorder(layers_by_depth(self.worker.kv_eviction.states))
        self.worker.kv_eviction.listeners.append(self.recorder)
        begin = self.worker.kv_eviction.begin_step

        def begun(output: Any) -> None:
            self.recorder.taken(getattr(output, PLAN, None) or StepPlan())
            begin(output)

        self.worker.kv_eviction.begin_step = begun
        table = self.scheduler._table
        admit = table.admit

        def recorded(state: Any) -> None:
            admit(state)
            self.recorder.admitted(state.request_id, state.request.num_tokens)

        table.admit = recorded

    @property
    def counters(self) -> Any:
        return self.scheduler.eviction_counters

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int | list[int],
        asked: list[dict[str, Any]] | None = None,
        media: list[dict[str, list[Any]]] | None = None,
        **params: Any,
    ) -> list[list[int]]:
        """Greedy tokens of every prompt; the recorder keeps the lives in prompt order.

        ``asked`` are the requests' own settings, as ``vllm_xargs`` would bring them, ``media`` the
        images or sounds of their prompts; ``self.prompts`` are then the tokens that the model saw.
        """
        from vllm import SamplingParams

        lengths = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        extra = asked or [{} for _ in prompts]
        self.recorder.lives.clear()
        outputs = self.llm.generate(
            [
                dict(prompt_token_ids=prompt, **(dict(multi_modal_data=more) if more else {}))
                for prompt, more in zip(prompts, media or [{}] * len(prompts), strict=True)
            ],
            [
                SamplingParams(
                    temperature=0, max_tokens=n, ignore_eos=True, extra_args=dict(mine), **params
                )
                for n, mine in zip(lengths, extra, strict=True)
            ],
            use_tqdm=False,
        )
        self.prompts = [list(output.prompt_token_ids) for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def lives(self) -> list[list[Life]]:
        """Lives of the requests of the last :meth:`generate`, in prompt order."""

        def number(request_id: str) -> int:
            return int(request_id.split("-")[0])

        mine = (key for key in self.recorder.lives if "-audit-" not in key)
        return [self.recorder.lives[key] for key in sorted(mine, key=number)]

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


UNFROZEN = 8
"""Every so many engines everything is looked through, for objects that were frozen in use."""

_started = itertools.count()
_running: list[int] = []


def set_aside() -> None:
    """Free what former engines left, and leave all else out of vLLM's garbage collections.

    There are five at a start and three at an end, 0.7 s each over all that imports made.
    """
    if next(_started) % UNFROZEN == 0:
        gc.unfreeze()
    gc.collect()
    if not _running:
        gc.freeze()


@contextmanager
def engine(model: Path, eviction: dict[str, Any] | None, **options: Any):
    """A float32 engine in this process, shut down at the end."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    settings: dict[str, Any] = dict(
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=128 << 20,
        block_size=32,
        max_model_len=4096,
        disable_log_stats=True,
        enable_prefix_caching=False,
        seed=0,
    )
    settings.update(options)
    set_aside()
    # What is frozen is not freed with its engine.
    with mock.patch("gc.freeze"):
        llm = LLM(
            str(model),
            additional_config={"kv_eviction": eviction} if eviction else {},
            **settings,
        )
    _running.append(id(llm))
    try:
        yield Engine(llm) if eviction else llm
    finally:
        _running.remove(id(llm))
        with mock.patch("gc.unfreeze"):
            llm.llm_engine.engine_core.shutdown()
        del llm
