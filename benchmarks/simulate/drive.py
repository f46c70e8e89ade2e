"""The engine core's loop without a model: schedule, let the clock run, hand back tokens."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.simulate.card import Card, Work, step_seconds
from benchmarks.simulate.job import TOKEN, Job
from benchmarks.simulate.server import Server
from benchmarks.simulate.tally import Tally


class Simulation:
    """One server under one load.

    Args:
        server: The scheduler.
        card: For the clock.
        jobs: The load, by arrival.
        clients: Requests that a closed loop keeps unfinished at once.
        block_size: Of the pool.
        asynchronous: Whether one step is in flight while the next is scheduled.

    """

    def __init__(
        self,
        server: Server,
        card: Card,
        jobs: Iterator[Job],
        clients: int,
        block_size: int,
        asynchronous: bool,
    ) -> None:
        self.server, self.card, self.clients = server, card, clients
        self.scheduler = server.scheduler
        self.block_size, self.depth = block_size, int(asynchronous)
        self.tally = Tally()
        self._jobs = jobs
        self._next: Job | None = next(jobs, None)
        self._alive: dict[str, Job] = {}
        self._last: dict[str, float] = {}
        self._sampled: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        """Cached tokens that evictions took, by request."""
        self._touched: set[str] = set()
        """Requests that were evicted, in this life or before a preemption."""
        self._pending: deque[tuple[Any, list[str], list[list[int]]]] = deque()
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._counters = getattr(self.scheduler, "eviction_counters", None)
        self._evicting = getattr(self.scheduler, "_evicting", {})

    def run(self, steps: int, progress: Callable[[int], Any] = lambda _: None) -> Tally:
        """Run at most so many steps, or until the load has ended and was served."""
        while self.tally.steps < steps:
            self._admit()
            if self._step():
                progress(1)
            elif self._pending:
                self._process()
            elif self._next is not None and self._next.arrival is not None and not self._alive:
                self.tally.seconds = max(self.tally.seconds, self._next.arrival)
            else:
                break
        while self._pending:
            self._process()
        return self.tally

    def _admit(self) -> None:
        while self._next is not None:
            job = self._next
            if job.arrival is None and len(self._alive) >= self.clients:
                return
            if job.arrival is not None and job.arrival > self.tally.seconds:
                return
            self._alive[job.request_id] = job
            self._last[job.request_id] = job.arrival or self.tally.seconds
            self._sampled[job.request_id] = 0
            self.scheduler.add_request(job.request(self.block_size))
            self._next = next(self._jobs, None)

    def _step(self) -> bool:
        """Schedule one step and process what is no longer in flight; False for an empty step."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        self.tally.scheduler_seconds += time.perf_counter() - start
        self.tally.preemptions += len(output.preempted_req_ids or ())
        for request_id in output.preempted_req_ids or ():
            self._gone.pop(request_id, None)
        if not output.total_num_scheduled_tokens:
            return False
        self.tally.steps += 1
        ids, sampled, work = self._execute(output)
        self.tally.seconds += step_seconds(self.card, self.server.sizes, work)
        self.tally.computed += work.tokens
        self._pending.append((output, ids, sampled))
        while len(self._pending) > self.depth:
            self._process()
        self._note()
        return True

    def _execute(self, output: Any) -> tuple[list[str], list[list[int]], Work]:
        """Who samples, and what the step costs."""
        requests, gone = self.scheduler.requests, self._gone
        plan = getattr(output, "kv_eviction_plan", None)
        for request_id, groups in (plan.reused if plan is not None else {}).items():
            saved = sum(one.tail_start - len(one.store) * self.block_size for one in groups)
            gone[request_id] = saved // len(self._evicting)
        ids, sampled = list(output.num_scheduled_tokens), []
        cached = pairs = 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = requests[request_id]
            sampled.append([] if request.is_prefill_chunk else [TOKEN])
            before = request.num_computed_tokens - tokens - gone.get(request_id, 0)
            cached += before
            pairs += tokens * before + tokens * tokens // 2
        work = Work(output.total_num_scheduled_tokens, cached, pairs)
        evictions = plan.evictions if plan is not None else ()
        self.tally.most_evictions = max(self.tally.most_evictions, len(evictions))
        for eviction in evictions:
            self._evict(eviction, work)
        return ids, sampled, work

    def _evict(self, eviction: Any, work: Work) -> None:
        """Count an eviction's bytes; groups of layers count by their mean."""
        self._touched.add(eviction.request_id)
        groups = len(self._evicting)
        kept = sum(len(group.store) for group in eviction.groups) * self.block_size // groups
        tail = sum(group.tail_start for group in eviction.groups) // groups
        work.evicted += tail - self._gone.get(eviction.request_id, 0)
        work.kept += kept
        self._gone[eviction.request_id] = tail - kept

    def _process(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output, ids, sampled = self._pending.popleft()
        rows = {request_id: index for index, request_id in enumerate(ids)}
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index=rows, sampled_token_ids=sampled)
        start = time.perf_counter()
        outputs = self.scheduler.update_from_output(output, result)
        self.tally.scheduler_seconds += time.perf_counter() - start
        for client in outputs.values():
            for one in client.outputs:
                self._receive(one)

    def _receive(self, one: Any) -> None:
        """What a client sees of one request."""
        from vllm.v1.request import RequestStatus

        request_id, tally = one.request_id, self.tally
        job = self._alive.get(request_id)
        if job is None:
            return
        if one.new_token_ids:
            count = self._sampled[request_id]
            (tally.between if count else tally.first).append(tally.seconds - self._last[request_id])
            self._last[request_id] = tally.seconds
            self._sampled[request_id] = count = count + len(one.new_token_ids)
            tally.sampled += len(one.new_token_ids)
            if one.finish_reason is None and job.abort_after == count:
                self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                tally.aborted += 1
                self._forget(request_id)
                return
        if one.finish_reason is not None:
            tally.end(job.phase, request_id not in self._touched)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        for known in (self._alive, self._last, self._sampled, self._gone):
            known.pop(request_id, None)
        self._touched.discard(request_id)

    def _note(self) -> None:
        saved = sum(manager.blocks_saved for manager in self._evicting.values())
        self.tally.peak_saved = max(self.tally.peak_saved, saved)
        used = self.server.blocks - 1 - self._pool.get_num_free_blocks()
        self.tally.peak_used = max(self.tally.peak_used, used)
        self.tally.point(
            self._pool.get_num_free_blocks() / self.server.blocks,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self._counters.evictions if self._counters is not None else 0,
        )
