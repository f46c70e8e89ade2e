"""What must hold of vLLM's pool and our bookkeeping, whatever happened before."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.engine.announced import Announced
from tests.engine.asked import Asked
from tests.engine.expected import Expected, of_client, replays
from tests.engine.published import Published
from tests.engine.put_off import PutOff
from tests.engine.shadow import ShadowWorker, of_store
from tests.engine.tally import Life, Tally
from tests.engine.views import admitted, holdings, owned, replays_of
from vllm_kvevict.engine.blocks import EvictableAttentionManager
from vllm_kvevict.rules.step_plan import PLAN, StepPlan

if TYPE_CHECKING:
    from tests.engine.harness import Setup


class Invariants:
    """Asserts over scheduler, pool, ledger and the shadow worker's memory."""

    def __init__(self, setup: "Setup", scheduler: Any, worker: ShadowWorker) -> None:
        self.setup = setup
        self.scheduler = scheduler
        self.worker = worker
        self.pool = scheduler.kv_cache_manager.block_pool
        self.managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self.evicting = [m for m in self.managers if isinstance(m, EvictableAttentionManager)]
        self.tally = Tally()
        self.held: list[Any] = []
        """Blocks that the test itself took from the pool."""
        self._lives: dict[str, Life] = {}
        self._steps: dict[int, dict[str, int]] = {}
        self._clients: dict[str, Any] = {}
        self.expected = Expected(setup, self._clients)
        self.published = Published(setup, scheduler, worker, self.tally)
        self._stored: dict[tuple[int, int], tuple[Any, int]] = {}
        """Who made a store, and at which length, by group and first block. The last token may not
        be known until later."""
        self._saved: dict[str, dict[int, tuple[Any, int]]] = {}
        self.announced = Announced(self.pool)
        self.put_off = PutOff(setup, scheduler)

    def scheduled(self, output: Any) -> None:
        """Note the lives of a step that was just scheduled, and look at its plan."""
        self.published.scheduled += 1
        self._clients |= {r: q for r, q in self.scheduler.requests.items() if of_client(r)}
        self.tally.preemptions += len(output.preempted_req_ids or ())
        admitted = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                admitted[request_id] = computed
        plan: StepPlan = getattr(output, PLAN, None) or StepPlan()
        # Before loads and evictions write to their blocks.
        self._note(plan.saves_first)
        for copy in plan.loads:
            assert copy.name in self._saved, "a store that nobody saved"
            for group, made_of in self._saved[copy.name].items():
                (one,) = [one for one in copy.groups if one.group_id == group]
                self._stored[group, one.store[0]] = made_of
        for request_id, hit in admitted.items():
            former = self._lives.get(request_id)
            self._lives[request_id] = Life(former.number + 1 if former else 1)
            self.expected.prefill_ends[request_id] = self.scheduler.requests[request_id].num_tokens
            self.tally.hits += hit > 0
            self.tally.hit_tokens += hit
            taken = plan.reused.get(request_id)
            if replays(request_id):
                self._lives[request_id].postponed = True  # It holds what the other does.
            elif taken is None:
                self._expect_window_uncovered(request_id, hit)
            else:
                self._lives[request_id].took = True
                self._expect_taken(request_id, hit, taken)
        self._steps[id(output)] = {
            request_id: self._lives[request_id].number for request_id in output.num_scheduled_tokens
        }
        self._expect_plan(output, plan)
        self._note(plan.saves)
        self.published.forget_what_no_step_computes(output)

    def _note(self, saves: Any) -> None:
        """Record which requests made the stores that are copied out of the KV cache."""
        for copy in saves:
            self._saved[copy.name] = {
                one.group_id: self._stored[one.group_id, one.store[0]]
                for one in copy.groups
                if one.store
            }

    def _expect_window_uncovered(self, request_id: str, hit: int) -> None:
        state = admitted(self.scheduler).get(request_id)
        if state is None or not state.evicts:
            return
        request = self.scheduler.requests[request_id]
        asked = self.expected.asked(request)
        if asked.every:
            for manager in self.evicting:
                first = self.expected.chain(manager.kv_cache_group_id, request)[:1]
                covers = any(point - self.setup.window < hit for point, _, _ in first)
                over = hit and any(point <= request.num_tokens for point, _, _ in first)
                assert not (covers and over), f"{request_id}: a hit covers the window before it"
            return
        needs_window = self.setup.needs_window and asked.policy != "streaming-llm"
        stops = asked.at or asked.prefill_interval
        if asked.policy == "none" or asked.pressure or not (needs_window or stops):
            return
        longest = min(request.num_prompt_tokens + request.max_tokens, self.setup.max_model_len)
        for manager in self.evicting:
            points = self.expected.points(manager.kv_cache_group_id, request)
            if needs_window and not asked.at:
                points.append(request.num_tokens)
            for end in points:
                can = self.expected.gives(manager.kv_cache_group_id, request, end, 0)
                covers = can and end + 1 < longest and hit > end - self.setup.window
                assert not covers, f"{request_id}: a hit covers the window before {end}"

    def _expect_taken(self, request_id: str, hit: int, taken: Any) -> None:
        """A store is taken by requests that would have made it, and by no others."""
        request = self.scheduler.requests[request_id]
        asked = self.expected.asked(request)
        assert asked.policy in ("snapkv", "pyramidkv", "streaming-llm")
        assert hit < request.num_tokens
        if asked.every:
            self._expect_link(request, hit, taken)
            return
        groups = [manager.kv_cache_group_id for manager in self.evicting]
        ends = [(group, end) for group in groups for end in self.expected.points(group, request)]
        point = min(end for group, end in ends if self.expected.gives(group, request, end, 0))
        assert hit == point or (hit > point and hit % self.setup.block_size == 0)
        tail_start = (point - self.setup.window) // self.setup.block_size * self.setup.block_size
        can = {
            group: blocks
            for group in groups
            if point in self.expected.points(group, request)
            and (blocks := self.expected.store_blocks(group, request, point))
            and self.expected.gain(group, request, point) > 0
        }
        assert can == {one.group_id: len(one.store) for one in taken}
        assert {one.tail_start for one in taken} == {tail_start}
        for one in taken:
            made_of = self.expected.made_of(request, point)
            stored = self.expected.made_of(*self._stored[one.group_id, one.store[0]])
            assert stored == made_of, "a store of other tokens"
            life = self._lives[request_id]
            life.tails[one.group_id], life.stores[one.group_id] = one.tail_start, len(one.store)
        self.tally.taken += 1
        self.tally.taken_behind += hit > point
        self.tally.taken_in_use += any(
            self.pool.blocks[block].ref_cnt > 1 for one in taken for block in one.store
        )
        self.tally.taken_again += self._lives[request_id].number > 1

    def _expect_link(self, request: Any, hit: int, taken: Any) -> None:
        """A request starts with what it would have kept at one of its own positions."""
        life = self._lives[request.request_id]
        stored = {one.group_id: self._stored[one.group_id, one.store[0]] for one in taken}
        point = max(end for _, end in stored.values())
        assert hit == point or (hit > point and hit % self.setup.block_size == 0)
        for manager in self.evicting:
            group = manager.kv_cache_group_id
            chain = self.expected.chain(group, request)
            so_far = [link for link in chain if link[0] <= point]
            one = next((one for one in taken if one.group_id == group), None)
            if one is None:
                assert not so_far, "a group without a store"
                continue
            last, tail_start, blocks = so_far[-1]
            assert (one.tail_start, len(one.store)) == (tail_start, blocks)
            made_of = self.expected.made_of(*stored[group])
            assert made_of == self.expected.made_of(request, last), "a store of other tokens"
            life.tails[group], life.stores[group] = tail_start, blocks
            later = [p for p, _, _ in chain if p > point]
            covers = later[0] - self.setup.window < hit if later else False
            assert not covers or later[0] > request.num_tokens, "a hit covers the window"
            self.tally.taken_later += last > chain[0][0]
        self.tally.taken += 1
        self.tally.taken_behind += hit > point
        self.tally.taken_in_use += any(
            self.pool.blocks[block].ref_cnt > 1 for one in taken for block in one.store
        )
        self.tally.taken_again += life.number > 1

    def _expect_plan(self, output: Any, plan: StepPlan) -> None:
        evicted = {eviction.request_id: eviction for eviction in plan.evictions}
        assert len(evicted) == len(plan.evictions)
        for request_id in output.num_scheduled_tokens:
            entry = admitted(self.scheduler).get(request_id)
            request = self.scheduler.requests[request_id]
            if entry is None or request.resumable or replays(request_id):
                assert request_id not in evicted and request_id not in plan.rings
                continue
            end = request.num_computed_tokens
            still_due = entry.due_groups(end)
            asked = self.expected.asked(request)
            self._expect_chunk(request, asked, end - output.num_scheduled_tokens[request_id], end)
            if asked.policy == "none":
                assert request_id not in evicted and request_id not in plan.rings
                self.tally.switched_off += 1
            if asked.policy in ("streaming-llm", "h2o"):
                assert request_id not in plan.rings, "a ring for a policy without a window"
            self._expect_gains(request_id, entry, evicted.get(request_id), end)
            if request_id in evicted:
                assert not still_due
                assert evicted[request_id].num_tokens == end
                assert evicted[request_id].policy == asked.policy
                assert evicted[request_id].protect_first == asked.protect_first
                self.tally.at_point += end == asked.at and end < request.num_prompt_tokens
                self.tally.inside += asked.prefill_interval > 0 and end < entry.prefill_end
                for part in evicted[request_id].groups:
                    if part.published:
                        self._stored[part.group_id, part.store[0]] = request, end
                    progress = entry.progress[part.group_id]
                    stores, tails = self._lives[request_id].stores, self._lives[request_id].tails
                    former = tails.get(part.group_id, 0), stores.get(part.group_id, 0)
                    wanted = self.expected.store_blocks(part.group_id, request, end, *former)
                    if asked.every and not self._lives[request_id].postponed:
                        link = end, part.tail_start, len(part.store)
                        chain = self.expected.chain(part.group_id, request)
                        assert link in chain, f"{request_id} evicts at another position"
                        self.tally.inside += end < entry.prefill_end
                    assert len(part.store) == wanted, "a store of another budget"
                    stores[part.group_id] = wanted
                    self._lives[request_id].tails[part.group_id] = part.tail_start
                    assert progress.store_blocks == len(part.store)
            elif still_due and not entry.last_step(end):
                self._lives[request_id].postponed = True
                prefill = end <= next(iter(entry.progress.values())).prefill_end
                # What was put off as a loss has recorded no window; the next one is incomplete.
                put_off = set().union(*self._lives[request_id].put_off.values())
                prefill &= put_off.isdisjoint(range(end - self.setup.window + 1, end + 1))
                if prefill and self.setup.ring_count in (0, self.setup.max_num_seqs):
                    stores = sum(entry.progress[group].wanted(end) for group in still_due)
                    short = self.pool.get_num_free_blocks() < stores
                    must = self._must(request_id)
                    assert short and must, (
                        f"{request_id}: postponed at the end of prefill with room for the store"
                    )

    def _expect_gains(self, request_id: str, entry: Any, eviction: Any, end: int) -> None:
        """Evictions that take more than they give back do not run by default, others do."""
        life, bs = self._lives[request_id], self.setup.block_size
        parts = {part.group_id: part for part in eviction.groups} if eviction else {}
        for manager in self.evicting:
            group = manager.kv_cache_group_id
            if (progress := entry.progress.get(group)) is None:
                continue
            first = progress.next_eviction if life.took else progress.next_prefill_eviction
            request = self.scheduler.requests[request_id]
            if self.expected.asked(request).every:
                due = life.due.get(group)
                life.due[group] = progress.next_eviction
                put_off = due is not None and progress.next_eviction != due
                assert group in parts or not put_off, f"{request_id} was put off"
                continue
            if life.took and group not in life.due and group not in parts:
                first = self._missed(request, group, progress, entry.prefill_end, end) or first
            if self.expected.asked(request).prefill_interval:
                before = life.tails.get(group, 0) if life.took else 0
                points = self.expected.points(group, request)
                gives = [p for p in points if self.expected.gives(group, request, p, before)]
                gives = [p for p in gives if p + 1 < request.num_prompt_tokens + request.max_tokens]
                first = min(gives, default=first)
            if first is None and not progress.evicted:
                first = self.expected.joins(group, request)
            due = life.due.get(group, first)
            life.due[group] = progress.next_eviction
            if (part := parts.get(group)) is not None:
                replaced = (part.tail_start - part.old_tail_start) // bs
                mine = {*part.old_store, *part.positional[:replaced]}
                reused = set(part.store[: part.reused])
                assert mine >= reused and mine.isdisjoint(part.store[part.reused :])
                gains = len(self.put_off.held_once(mine) | reused) > len(part.store)
                must = self._must(request_id)
                assert gains or must, f"{request_id} evicts at a loss"
                self.tally.at_a_loss += not gains
                self.tally.mixed += 0 < part.reused < len(part.store)
            elif due is not None and (
                progress.next_eviction is None
                or progress.next_eviction > due
                or self._goes_without_window(entry, group, end, due)
            ):
                assert self.setup.shared == "keep", f"{request_id} was put off"
                wrongly = self.put_off.wrongly(entry, group, max(end, due))
                assert not wrongly, f"{request_id} was put off, and gives blocks back"
                life.postponed = True
                life.put_off.setdefault(group, set()).add(due)
                self.tally.put_off += 1

    def _goes_without_window(self, entry: Any, group: int, end: int, due: int) -> bool:
        """Whether an eviction at the end of a prompt was put off in a chunk before it.

        It is the next one all the same, and comes without the queries of that chunk.
        """
        before = self.setup.shared == "keep" and end < due <= entry.prefill_end
        return before and self.put_off.asked(entry, group)

    def _missed(
        self, request: Any, group: int, progress: Any, prefill_end: int, end: int
    ) -> int | None:
        """The eviction after that of a store which a step takes, if the step reaches it at once."""
        asked, bs = self.expected.asked(request), self.setup.block_size
        stride = asked.decode_stride(self.setup.interval, bs, self.setup.page)
        if self.setup.shared != "keep" or asked.pressure or asked.prefill_interval or not stride:
            return None
        if progress.computed_valid is None:
            return None  # The budget covers the store's tokens in this group.
        due = max(progress.computed_valid + stride, prefill_end)
        after = (due - self.setup.window) // bs - -(-(asked.at or 0) // bs)
        if asked.at and after <= self.expected.store_blocks(group, request, due):
            return None  # What it may share with others does not count.
        gives = due <= end and self.expected.gives(group, request, due, progress.tail_start)
        return due if gives and due + 1 < progress.max_length else None

    def _must(self, request_id: str) -> bool:
        """Whether evictions of a request run at a loss, too."""
        request = self.scheduler.requests[request_id]
        again = self.expected.asked(request).prefill_interval and request.num_preemptions
        every = self.expected.asked(request).every
        return self.setup.shared == "evict" or bool(again or every)

    def _expect_chunk(self, request: Any, asked: Asked, start: int, end: int) -> None:
        """No step runs across an eviction point at which something can be evicted."""
        if asked.policy == "none" or asked.pressure:
            return
        life = self._lives[request.request_id]
        for group in (manager.kv_cache_group_id for manager in self.evicting):
            for point in self.expected.points(group, request):
                if point in life.put_off.get(group, ()) and asked.prefill_interval:
                    continue  # Its window was not recorded: it waits for the point behind it.
                if asked.every:
                    crosses = start < point < end and not life.postponed
                    assert not crosses, f"{request.request_id}: [{start}, {end}) crosses {point}"
                    continue
                can = self.expected.gives(group, request, point, life.tails.get(group, 0))
                crosses = can and start < point < end
                assert not crosses, f"{request.request_id}: [{start}, {end}) crosses {point}"

    def executed(self, output: Any) -> None:
        """Every block a step touched still belongs to its request when the step is processed."""
        self.published.executed += 1
        owners = owned(self.managers)
        running = {request.request_id for request in self.scheduler.running}
        for request_id, number in self._steps.pop(id(output)).items():
            if request_id not in running or self._lives[request_id].number != number:
                continue
            for group, blocks in enumerate(self.worker.used[request_id]):
                lost = blocks - owners[group].get(request_id, set())
                if self.setup.sliding_window is not None and group == self.setup.groups - 1:
                    lost = {b for b in lost if self._in_window(request_id, group, b)}
                assert not lost, f"{request_id} uses blocks {lost} of group {group}, freed before"

    def _in_window(self, request_id: str, group: int, block: int) -> bool:
        row = self.worker.rows[request_id]
        first = self.setup.first_read(max(0, row.computed - 1))
        return block in row.tables[group][first // self.setup.block_size :]

    def check(self) -> None:
        """All that must hold between any two moves."""
        references = Counter(block.block_id for block in self.held)
        for _, blocks in self.scheduler.deferred_frees:
            references.update(block.block_id for block in blocks)
        for state in self.scheduler._table.states.values():
            assert state.holds_blocks or not state.kept_window
            references.update(block.block_id for block in state.kept_window)
        for waiting in self._replays():
            references.update(block.block_id for block in waiting.held)
        positional: set[int] = set()
        stores: dict[int, tuple[int, ...]] = {}
        for manager in self.managers:
            group = manager.kv_cache_group_id
            for blocks in manager.req_to_blocks.values():
                references.update(b.block_id for b in blocks if not b.is_null)
                positional.update(b.block_id for b in blocks if not b.is_null)
            for holding in holdings(manager).values():
                mine = tuple(b.block_id for b in holding.store)
                for block_id in mine:
                    same = stores.setdefault(block_id, mine) == mine
                    assert same, f"store block {block_id} has another owner"
                    once = not references[block_id] or (group, mine[0]) in self._stored
                    assert once, f"store block {block_id} has another owner"
                references.update(mine)
                references.update(b.block_id for b in holding.reserved)
                reserved = {b.block_id: (b.block_id,) for b in holding.reserved}
                assert stores.keys().isdisjoint(reserved), "a reserved block has another owner"
                stores |= reserved
                references.update(b.block_id for _, old in holding.replaced_in_flight for b in old)
        for block_id in stores:
            assert block_id not in positional, f"store block {block_id} has another owner"
            marked = self.pool.blocks[block_id].block_hash
            assert marked is None or of_store(marked), f"store {block_id} is published"
        free = 0
        for block in self.pool.blocks:
            if block.is_null:
                continue
            assert block.ref_cnt == references[block.block_id], (
                f"block {block.block_id}: {block.ref_cnt} references, "
                f"{references[block.block_id]} owners"
            )
            free += block.ref_cnt == 0
        queued = self.pool.free_block_queue.get_all_free_blocks()
        assert len(queued) == free == len({b.block_id for b in queued})
        assert free == self.pool.get_num_free_blocks()
        self.published.check()
        self._check_entries()
        self.announced.check()

    def _replays(self) -> list[Any]:
        audits = replays_of(self.scheduler)
        return [] if audits is None else list(audits._waiting.values())

    def _check_entries(self) -> None:
        entries, turns = admitted(self.scheduler), self.scheduler._turns
        running = {request.request_id for request in self.scheduler.running}
        running |= {request.request_id for request in self.scheduler.kv_holding_waiting}
        # An aborted request keeps its blocks until its transfer ends.
        running |= {r for r, one in self.scheduler.requests.items() if one.is_finished()}
        # A session of streaming input keeps its blocks while it waits.
        assert {r for r, state in entries.items() if state.evicts} <= running
        slots = [e.ring for e in self.scheduler._table.states.values() if e.ring is not None]
        assert len(set(slots)) == len(slots), "a ring slot has two owners"
        if turns.slots is not None:
            assert turns.slots.num_free + len(slots) == self.setup.ring_count
        for manager in self.evicting:
            group = manager.kv_cache_group_id
            assert set(holdings(manager)) <= set(entries)
            for request_id, entry in entries.items():
                progress, request = entry.progress.get(group), self.scheduler.requests[request_id]
                holding = holdings(manager).get(request_id)
                if progress is None:
                    assert holding is None, "a store for a request that switched eviction off"
                    continue
                if progress.evicted:
                    kept = len(holding.store) if holding else 0
                    assert kept == progress.store_blocks, "a store is not held"
                life = self._lives.get(request_id)
                if life is None or life.postponed:
                    continue
                held = sum(not b.is_null for b in manager.req_to_blocks[request_id])
                held += len(holding.blocks) if holding else 0
                reach = request.num_computed_tokens + 1 + self.scheduler.num_lookahead_tokens
                bound = self.expected.max_blocks(group, request, reach)
                if self.setup.connector:
                    # A prompt is loaded as a whole before its first eviction.
                    size = self.setup.block_size
                    bound += max(0, -(-request.num_tokens // size) - -(-reach // size))
                assert held <= bound, f"{request_id} holds {held} blocks, bound {bound}"

    def check_idle(self) -> None:
        """Nothing is left of anyone."""
        self.check()
        assert self.pool.get_num_free_blocks() == self.setup.blocks - 1
        assert not self.scheduler._table.states and not self._replays()
        if self.scheduler._turns.slots is not None:
            assert self.scheduler._turns.slots.num_free == self.setup.ring_count
        for manager in self.managers:
            assert not manager.req_to_blocks and not manager.num_cached_block
            assert not holdings(manager) and not getattr(manager, "_starts", None)
        assert not self.worker.rows
