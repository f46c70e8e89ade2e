"""A connector that saves what requests compute by their tokens, as LMCache does, without memory.

It loads in the step that admits a request, and a load may fail from some block on. That is known
when the output of the step is processed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from vllm_kvevict.worker.failed_loads import BlocksNotLoaded

LOST = -1
"""Content of a slot that was not loaded, or that was computed over one. No hash has this value."""


def extend_chain(chain: list[int], tokens: list[int], *over: int) -> None:
    """Continue ``chain`` with the content of further tokens, computed ``over`` what was kept."""
    for token in tokens:
        chain.append(hash((chain[-1] if chain else 0, token, *over)))


@dataclass
class Span:
    """Tokens [start, end) of a request and its blocks in each group, from its first token on."""

    request_id: str
    blocks: list[list[int]]
    start: int
    end: int


@dataclass
class Spans(KVConnectorMetadata):
    loads: list[Span] = field(default_factory=list)
    saves: list[Span] = field(default_factory=list)


class Saving(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half. ``saved`` has the content of the last token of each saved block."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.size = vllm_config.cache_config.block_size
        self.saved: set[int] = set()
        self._found: dict[str, tuple[int, int]] = {}
        self._loads: list[Span] = []
        self._tables: dict[str, list[list[int]]] = {}
        self._ends: dict[str, int] = {}
        """Tokens of each request that were saved or need not be."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        chain: list[int] = []
        extend_chain(chain, list(request.all_token_ids))
        end = 0
        while end + self.size <= len(chain) and chain[end + self.size - 1] in self.saved:
            end += self.size
        self._found[request.request_id] = computed, end
        return max(0, end - computed - (end == len(chain))), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        start, end = self._found.pop(request.request_id, (0, 0))
        if num_tokens:
            assert num_tokens == end - start - (end == request.num_tokens)
            ids = [list(group) for group in blocks.get_block_ids()]
            self._loads.append(Span(request.request_id, ids, start, end))
            self._ends[request.request_id] = end

    def build_connector_meta(self, output: Any) -> Spans:
        spans, self._loads = Spans(loads=self._loads), []
        assert {load.request_id for load in spans.loads} <= output.num_scheduled_tokens.keys()
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._tables.pop(request_id, None)
        rows = [(new.req_id, new.block_ids, new.num_computed_tokens, True)
                for new in output.scheduled_new_reqs]  # fmt: skip
        cached = output.scheduled_cached_reqs
        rows += [
            (request_id, blocks, computed, request_id in cached.resumed_req_ids)
            for request_id, blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        for request_id, blocks, computed, begins in rows:
            if begins:
                self._tables[request_id] = [list(ids) for ids in blocks]
            elif request_id not in self._tables:
                continue
            else:
                for table, more in zip(self._tables[request_id], blocks or (), strict=bool(blocks)):
                    table.extend(more)
            end = computed + output.num_scheduled_tokens[request_id]
            start, end = (n // self.size * self.size for n in (computed, end))
            if start < end:
                ids = [list(table) for table in self._tables[request_id]]
                spans.saves.append(Span(request_id, ids, start, end))
        return spans

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    request_finished_all_groups = request_finished

    # The worker's half is ShadowSaving.

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, *args: Any) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class ShadowSaving:
    """The worker's half, on the shadow's memory.

    Args:
        memory: What every block of the KV cache holds.
        block_size: Tokens in a block.
        seed: Draws which loads fail, and where.

    """

    def __init__(self, memory: list[list[int | None]], block_size: int, seed: int) -> None:
        self.memory = memory
        self.block_size = block_size
        self.content: Callable[[str], list[int]] = lambda request_id: []
        """What full attention computes for the tokens of a request, one number for each."""
        self.saved: set[int] = set()
        self.loads = self.failures = self.filled = self.saves = 0
        self.released: set[str] = set()
        self.rng = Random(seed)
        self.first_lost = self._draw
        """Returns the first token that a load of tokens [start, end) loses; ``end`` for none."""
        self.lost: set[int] = set()
        """Blocks that the last step reported."""
        self.loading = False
        self.not_loaded = BlocksNotLoaded()
        self.unsaved = self.unsaved_ahead = 0
        """Saves that were left out in the step of a load that failed, and after it."""

    def _draw(self, start: int, end: int) -> int:
        return self.rng.randrange(start, end) if self.rng.random() < 0.2 else end

    def learn(self, prompt: list[int], count: int | None = None) -> None:
        """Another server has saved the first ``count`` tokens of a prompt, or some of them."""
        chain: list[int] = []
        count = self.rng.randrange(len(prompt) + 1) if count is None else count
        extend_chain(chain, prompt[:count])
        self.saved.update(chain[self.block_size - 1 :: self.block_size])

    def begin(self, spans: Spans) -> None:
        self.lost = set()
        for load in spans.loads:
            self.loads += 1
            lost = self.first_lost(load.start, load.end)
            self.failures += lost < load.end
            content = self.content(load.request_id)
            for blocks in load.blocks:
                self._load(blocks, content, load.start, load.end, lost)
        self.not_loaded.add(self.lost)

    def _load(self, blocks: list[int], content: list[int], start: int, end: int, lost: int) -> None:
        size = self.block_size
        for first in range(start, end, size):
            block, slots = blocks[first // size], content[first : first + size]
            assert block, f"loads token {first} into the null block"
            if first + size > lost:
                slots = [LOST] * size
                self.lost.add(block)
            self.memory[block] = list(slots)

    def save(self, spans: Spans) -> None:
        """Save what the step computed, right or wrong, but for what the worker leaves out."""
        for save in spans.saves:
            content, size = self.content(save.request_id), self.block_size
            if self.not_loaded.any_in(
                b for table in save.blocks for b in table[: save.end // size]
            ):
                self.unsaved += 1
                self.unsaved_ahead += not self.lost
                continue
            for first in range(save.start, save.end, size):
                found = [self.memory[blocks[first // size]] for blocks in save.blocks]
                assert not any(LOST in slots for slots in found), (
                    f"{save.request_id} saves token {first}, which was computed over a lost block"
                )
                expected = content[first : first + size]
                assert all(slots == expected for slots in found), (
                    f"{save.request_id} saves token {first}, which depends on an eviction"
                )
                self.saved.add(expected[-1])
                self.saves += 1

    def tally(self) -> dict[str, int]:
        return dict(saved=self.saves, unsaved=self.unsaved, unsaved_ahead=self.unsaved_ahead)

    def after(self) -> KVConnectorOutput:
        """What a step reports."""
        return KVConnectorOutput(invalid_block_ids=set(self.lost))
