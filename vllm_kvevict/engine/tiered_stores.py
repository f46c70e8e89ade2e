"""Published stores that are restored from host memory or files after the KV cache lost them.

The files of all ranks of a store are read into shared memory and checked
(:mod:`vllm_kvevict.engine.store_reads`). Only then may a request take blocks for the store, so a
load cannot fail once blocks are assigned, even if the files change later. The plan of a step refers
to the memory, each rank maps its own part, and the memory is released when the step was executed. A
request whose store cannot be read in time computes its prompt. A faulty file costs a prefill but
never a wrong token.
"""

from collections import deque
from collections.abc import Sequence
from time import monotonic

from vllm.logger import init_logger

from vllm_kvevict.config.handover import hands_over, takes_over
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.chain import Chain
from vllm_kvevict.engine.chain_searches import ChainSearches
from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.store_reads import HANDOVER_TIMEOUT_S, StoreReads
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.step_plan import GroupEviction, StepPlan, StoreBlocks, StoreCopy
from vllm_kvevict.stores.files import StoreFiles
from vllm_kvevict.stores.host import StoreNews
from vllm_kvevict.stores.key import ShareKey
from vllm_kvevict.stores.region import Handle
from vllm_kvevict.stores.retention import KeptStates
from vllm_kvevict.stores.shape import GroupShape, StoreSizes

logger = init_logger("vllm.kv_eviction.tiers")


class TieredStores(PublishedStores):
    """Copies every store out of the KV cache when it is published, and restores it when it is
    needed.

    Of the stores that a request makes at fixed positions, the last one is copied, when the request
    ends, because it continues all before it, and the last one of its prompt, because the next
    prompt may not repeat the answer. Those before leave host memory first.

    The scheduler decides which stores the workers' host memory holds, least recently used first
    out, so the workers report nothing about it. A request waits while its store is read from files;
    all other requests continue. Stores that cannot be restored are computed. Stores of requests
    with a LoRA adapter stay in the KV cache, because an adapter may be replaced under the same name
    and path, and only vLLM's prefix cache may then use the old one.

    Args:
        core: The engine core.
        sizes: Sizes of one rank's part of a store.
        ranks: Number of ranks of the server.
        memory: Bytes of host memory of all ranks together; 0 for none.
        files: Files of stores, or None.

    """

    def __init__(
        self,
        core: EvictionCore,
        sizes: StoreSizes,
        ranks: int,
        memory: int,
        files: StoreFiles | None,
    ) -> None:
        super().__init__(core, enabled=True)
        self._core = core
        self._pool = core.cache.block_pool
        self._counters = core.counters
        self._sizes = sizes
        self._ranks = ranks
        self._memory = memory
        self.reads = StoreReads(sizes, ranks, files, core.counters)
        """Reads of stores from files."""
        self._searches = ChainSearches(self.reads, ranks)
        self._kept = KeptStates()
        self._next = StepPlan()
        self._restoring: deque[PublishedStore] = deque()
        """The stores of the loads in plans that were not executed yet, in the same order."""
        self._writing: dict[str, tuple[PublishedStore, float]] = {}
        """Stores that are being written, and the start of the write."""
        self._writes_fail = False
        self._made_over: dict[PublishedStore, PublishedStore] = {}
        """Stores that were made over one of a load that was not executed yet, with that one."""
        self._filed: set[str] = set()
        """Those of the stores in host memory that are in files too."""
        self._resets = 0

    def has(self, key: ShareKey) -> bool:
        outside = key.name in self._kept or self.reads.payload(key.name) is not None
        return outside or super().has(key)

    def ready(self) -> list[ShareKey]:
        return [*super().ready(), *self.reads.ready(), *self._searches.ready()]

    def find(self, state: RequestState) -> PublishedStore | None:
        store = super().find(state)
        if self._may_take(state):
            for key in reversed(state.reusable):
                if store is not None and key.point <= store.key.point:
                    break
                if (restored := self._restore(state, key)) is not None:
                    return restored
        if store is not None:
            name = store.key.name
            self.reads.drop(name)
            if name in self._kept:
                self._kept.use(name)
        return store

    def waits(self, state: RequestState) -> bool:
        if state.chain is not None:
            return super().waits(state) or (self._may_take(state) and self._waits_for_turn(state))
        if state.store_key is not None and self._may_take(state) and self._waits_for_files(state):
            return True
        return super().waits(state)

    def _waits_for_files(self, state: RequestState) -> bool:
        """Return whether a request's store is being looked for in files; start to look for it."""
        key = state.store_key
        assert key is not None
        if key.name in self._kept or self._in_pool(key):
            return False
        claims = takes_over(state.request.kv_transfer_params)
        return self.reads.wait(key, state.rules, state.request_id, claims)

    def _waits_for_turn(self, state: RequestState) -> bool:
        """Return whether a request waits for files of a store of its chain, the last one that there
        is; start to look for them."""
        keys = []
        for key in reversed(state.reusable):
            if self.has(key):
                break
            keys.append(key)
        if not keys:
            return False
        found = self._searches.found(state.request_id, keys)
        if found is None:
            state.store_key = self._searches.first_key(state.request_id)
            return True
        for key in found:
            if self.reads.wait(key, state.rules, state.request_id, claims=False):
                state.store_key = key
                return True
            if self.reads.payload(key.name) is not None:
                return False
        return False

    def publish(
        self, state: RequestState, end: int, evictions: Sequence[GroupEviction]
    ) -> PublishedStore | None:
        store = super().publish(state, end, evictions)
        if store is not None and state.request.lora_request is None and state.chain is None:
            self._save(state, store, self._next.saves, self.reads.files is not None)
        return store

    def blocks_for(self, state: RequestState, key: ShareKey) -> int:
        """Return the blocks for a request that starts with a store, if no request holds the
        store.

        If the rest of the prompt evicts, these are at most what the request holds at once, as for a
        prompt that is computed.
        """
        length, total = state.request.num_tokens + 1, 0
        sizes = self._manager.coordinator.group_block_sizes
        for group, shape in self._sizes.shapes(key, state.rules).items():
            blocks = shape.blocks + blocks_for(length - key.point, sizes[group])
            if state.positions is not None and group in state.progress:
                at_once = state.positions.sufficient_blocks(group, length)
                blocks = min(blocks, max(shape.blocks, at_once))
            total += blocks
        return total

    def started(self, state: RequestState) -> None:
        super().started(state)
        self._searches.drop(state.request_id)

    def request_finished(self, state: RequestState) -> bool:
        """Record that a request ends, and discard a file that no other waiting request needs.

        A store that is being written counts as available, unless the last write failed or this one
        takes too long.
        """
        super().request_finished(state)
        self._searches.drop(state.request_id)
        self.reads.request_finished(
            state.request_id, state.store_key.name if state.store_key else ""
        )
        if state.chain is not None:
            # It may have waited for another store before.
            for key in state.chain.keys:
                self.reads.request_finished(state.request_id, key.name)
            if state.last_store is not None:
                self._save_link(state, state.chain, state.last_store)
            return False
        store = state.base_store
        if store is None or not store.written or not hands_over(state.request.kv_transfer_params):
            return False
        _, since = self._writing.get(store.key.name, (None, None))
        return since is None or not (self._writes_fail or monotonic() > since + HANDOVER_TIMEOUT_S)

    def copy(self, plan: StepPlan) -> None:
        plan.loads, plan.saves = self._next.loads, self._next.saves
        plan.saves_first = self._next.saves_first
        plan.forgotten, plan.weigh = self._next.forgotten, self._next.weigh
        self._counters.stores_saved += len(plan.saves) + len(plan.saves_first)
        self._next = StepPlan()

    def executed(self, plan: StepPlan | None, news: Sequence[StoreNews]) -> list[PublishedStore]:
        """Release the memory that the plan of a step refers to, and process the reports of the
        workers."""
        lost = {name for report in news for name in report.lost}
        stores: list[PublishedStore] = []
        for copy in plan.loads if plan is not None else ():
            if copy.payload is not None:
                self.reads.loaded(copy.name)
            store = self._restoring.popleft()
            if copy.name in lost:
                self._lose(store)
                stores.append(store)
            stores += self._confirm(store, copy.name in lost)
        for report in news:
            self._process(report)
        return stores

    def _lose(self, store: PublishedStore) -> None:
        """Drop a store that a rank could not load, or that a policy did not choose."""
        name = store.key.name
        store.written = False
        self._writing.pop(name, None)
        for saves in (self._next.saves, self._next.saves_first):
            saves[:] = [copy for copy in saves if copy.name != name]
        if name in self._kept:
            self.kept_bytes -= self._kept.pop(name)
            self._drop_from_memory(name)
        self.reads.failed(name)
        self._drop(store)

    def _continues(self, base: PublishedStore | None, store: PublishedStore) -> None:
        if base is not None and (root := self._unconfirmed(base)) is not None:
            self._made_over[store] = root

    def _unconfirmed(self, store: PublishedStore) -> PublishedStore | None:
        """Return the store of a load that was not executed yet and that a store depends on."""
        return store if store in self._restoring else self._made_over.get(store)

    def _confirm(self, root: PublishedStore, lost: bool) -> list[PublishedStore]:
        """Record that a load was executed, and drop what was made over a store that was lost.

        Returns:
            The stores that were lost with it.

        """
        derived = [store for store, of in self._made_over.items() if of is root]
        for store in derived:
            del self._made_over[store]
            if lost:
                self._drop(store)
        return derived if lost else []

    def extends(self, state: RequestState, end: int) -> None:
        store, prompt_end = state.last_store, state.request.num_prompt_tokens
        if state.chain is not None and store is not None and store.key.point <= prompt_end < end:
            self._save_link(state, state.chain, store)

    def _save_link(self, state: RequestState, chain: Chain, store: PublishedStore) -> None:
        """Copy the last store of a prompt or of a request before the blocks change.

        It continues the ones before it, which leave host memory first, except for the last one of
        the prompt: the next prompt may not repeat the answer.
        """
        if state.request.lora_request is not None or not store.intact:
            return
        if any(s is not None and self._unconfirmed(s) for s in (store, state.reused_store)):
            # It is not known whether all ranks can load what it depends on.
            return
        name = store.key.name
        of_prompt = max(0, chain.before(state.request.num_prompt_tokens + 1) - 1)
        for key in reversed(chain.keys[: min(chain.before(store.key.point), of_prompt)]):
            if key.name in self._kept:
                self._kept.supersede(key.name)
        write = self.reads.files is not None and not store.written
        if write or (self._memory and name not in self._kept):
            self._save(state, store, self._next.saves_first, write)
        elif name in self._kept:
            self._kept.use(name)

    def _process(self, news: StoreNews) -> None:
        """Process a worker's report about files."""
        for name, written in news.written.items():
            store, _ = self._writing.pop(name, (None, 0.0))
            if store is not None:
                store.written = written
            if written and name in self._kept:
                self._filed.add(name)
            self._writes_fail = not written
        if news.full:
            # The workers keep what they have, and nothing more.
            self._memory = 0
        files = self.reads.files
        if files is not None and news.weighed == self._resets and self.reads.paused:
            files.use(news.generation)
            self.reads.paused = False
            logger.info(
                "KV eviction: after the reset of the prefix cache, the weights are %s; files hold "
                "stores of these weights.",
                "different from those at start-up" if news.generation else "those of start-up",
            )

    def reset(self) -> None:
        """Forget all stores, since the model's weights may have changed.

        Workers check their weights in the next step. Files are read again after their answer.
        """
        super().reset()
        self._next.forgotten += self._kept
        for copy in self._next.saves_first:
            store, _ = self._writing.pop(copy.name, (None, 0.0))
            if store is not None:
                store.written = False
        self._next.saves_first.clear()
        self._kept.clear()
        self._filed.clear()
        self.kept_bytes = 0
        self.reads.clear()
        self._searches.clear()
        if self.reads.files is not None:
            self.reads.paused = True
            self._resets += 1
            self._next.weigh = self._resets

    def _may_take(self, state: RequestState) -> bool:
        """Return whether a request may start with a store from outside the KV cache."""
        return state.request.lora_request is None and self._may_reuse(state)

    def _save(
        self, state: RequestState, store: PublishedStore, saves: list[StoreCopy], write: bool
    ) -> None:
        name, shapes = store.key.name, self._sizes.shapes(store.key, state.rules)
        if write:
            store.written = True
            self._writing[name] = store, monotonic()
        self.reads.written(name)
        self.reads.drop(name)
        keep = self._keep(name, self._sizes.host_bytes(shapes) * self._ranks)
        if keep or write:
            saves.append(_copy(name, store, keep, write))

    def _keep(self, name: str, num_bytes: int) -> bool:
        """Make room in host memory; return False if a store is too large for it."""
        if num_bytes > self._memory:
            return False
        self.kept_bytes += num_bytes - self._kept.get(name, 0)
        self._kept[name] = num_bytes
        self._kept.use(name)
        # Workers load stores before they remove others.
        self._next.forgotten = [other for other in self._next.forgotten if other != name]
        while self.kept_bytes > self._memory:
            oldest, size = self._kept.popitem(last=False)
            self._drop_from_memory(oldest)
            self.kept_bytes -= size
        return True

    def _drop_from_memory(self, name: str) -> None:
        """Let the workers remove a store from host memory, even one that the same step would
        save."""
        self._next.forgotten.append(name)
        self._filed.discard(name)
        for saves in (self._next.saves, self._next.saves_first):
            for copy in saves:
                if copy.name == name:
                    copy.keep = False
            saves[:] = [copy for copy in saves if copy.keep or copy.write]

    def _restore(self, state: RequestState, key: ShareKey) -> PublishedStore | None:
        """Take blocks for a store that the next step's plan restores, if there are enough."""
        name = key.name
        payload = None if name in self._kept else self.reads.payload(name)
        if name not in self._kept and payload is None:
            return None
        # vLLM does not admit the request if fewer blocks than its watermark remain for running
        # requests.
        reserved = self._core.cache.watermark_blocks if self._core.scheduler.running else 0
        if self.blocks_for(state, key) + reserved > self._pool.get_num_free_blocks():
            return None
        shapes = self._sizes.shapes(key, state.rules)
        store = self._enter(key, {group: self._take(shape) for group, shape in shapes.items()})
        self._pool.free_blocks([block for block, _ in store.hashes])
        store.written = payload is not None or (state.chain is not None and name in self._filed)
        handles = None
        if payload is not None:
            handles = [region.handle for region in payload]
            self._counters.restoring(self.reads.load(name).seconds, from_file=True)
        self.reads.drop(name)
        keep = self._keep(name, self._sizes.host_bytes(shapes) * self._ranks)
        self._next.loads.append(_copy(name, store, keep, False, handles))
        self._restoring.append(store)
        num_bytes = self._sizes.num_bytes(shapes) * self._ranks
        self._counters.restored(key.point, num_bytes, from_file=payload is not None)
        return store

    def _take(self, shape: GroupShape) -> PublishedGroup:
        blocks = self._pool.get_new_blocks(shape.blocks)
        store, tail = tuple(blocks[: shape.store]), tuple(blocks[shape.store :])
        return PublishedGroup(shape.tail_start, store, tail)


def _copy(
    name: str,
    store: PublishedStore,
    keep: bool,
    write: bool,
    payload: list[Handle] | None = None,
) -> StoreCopy:
    groups = [
        StoreBlocks(group, [b.block_id for b in part.store], [b.block_id for b in part.tail])
        for group, part in store.groups.items()
    ]
    return StoreCopy(name, groups, keep, write, payload)
