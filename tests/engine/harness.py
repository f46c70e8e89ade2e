"""vLLM's real schedulers with eviction, driven without a model.

:class:`Engine` plays the engine core: it schedules, lets the shadow worker execute, and hands
back sampled tokens, one step in flight with the async scheduler. Every invariant is asserted
after every move.
"""

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.bare_scheduler import (
    STOP_TOKEN,
    VOCABULARY,
    Setup,
    eviction_config,
    kv_cache_config,
    layer_shares,
    make_request,
    make_scheduler,
    vllm_config,
)
from tests.engine.faulty_disk import SECONDS_A_STEP, FaultyDisk
from tests.engine.invariants import Invariants
from tests.engine.losses import Losses
from tests.engine.saving import Saving, ShadowSaving, extend_chain
from tests.engine.shadow import ShadowWorker
from vllm_kvevict.config.connectors import DUMMY, EXAMPLE
from vllm_kvevict.engine.store_reads import READ_TIMEOUT_S
from vllm_kvevict.metrics.report import MEASURED
from vllm_kvevict.stores.host import StoreNews

__all__ = [
    "STOP_TOKEN",
    "VOCABULARY",
    "Engine",
    "Setup",
    "eviction_config",
    "kv_cache_config",
    "layer_shares",
    "make_scheduler",
    "vllm_config",
]


class Engine:
    """Engine core and worker of one setup.

    Args:
        setup: The configuration.
        sample: The token a request samples, by request id and tokens so far.
        log_stats: Whether the scheduler makes vLLM's statistics.

    """

    def __init__(
        self,
        setup: Setup,
        sample: Callable[[str, list[int]], int] | None = None,
        seed: int = 0,
        log_stats: bool = False,
    ) -> None:
        self.setup = setup
        self.rng = random.Random(seed)
        with patch.dict(KVConnectorFactory._registry, {EXAMPLE: lambda: Saving}):
            self.scheduler = make_scheduler(setup, log_stats)
        self.worker = ShadowWorker(setup, sample or self._sample)
        self.invariants = Invariants(setup, self.scheduler, self.worker)
        self.pending: deque[Any] = deque()
        self.losses: Losses | None = None
        """What must hold of loads that failed, where the connector saves prompts by tokens."""
        if isinstance(self.worker.remote, ShadowSaving):
            # Both halves share what is saved.
            self.scheduler.connector.saved = self.worker.remote.saved
            self.losses = Losses(self.scheduler, self.worker, self.pending)
        self.requests: list[Request] = []
        self.prefilled: set[str] = set()
        """Requests whose prompts another server has computed for this one."""
        if self.worker.remote is not None:
            self.worker.remote.content = self._content
        self.handed_over: set[str] = set()
        """Requests reported as having a store that another server can find."""
        self._chains: dict[str, list[int]] = {}
        self.steps = 0
        self.seen: Callable[[Any], None] = lambda output: None
        """Is shown each step as it was scheduled."""
        self.disk: FaultyDisk | None = None
        if setup.disk is not None and setup.keeps:
            self.disk = FaultyDisk(self, setup.disk, random.Random(seed))

    def clock(self) -> AbstractContextManager[None]:
        """Within this context the file tier's time is that of the engine's steps."""
        return self.disk.clock() if self.disk is not None else nullcontext()

    def _sample(self, request_id: str, tokens: list[int]) -> int:
        return STOP_TOKEN if self.rng.random() < 0.01 else self.rng.randrange(2, VOCABULARY)

    def _content(self, request_id: str) -> list[int]:
        chain = self._chains.setdefault(request_id, [])
        request = self.requests[int(request_id[1:])]
        extend_chain(chain, request.all_token_ids[len(chain) :])
        return chain

    def add(self, prompt: list[int], max_tokens: int, **options: Any) -> Request:
        """Add a request; ``prefilled`` is whether another server has computed its prompt."""
        request_id = f"r{len(self.requests)}"
        prefilled = options.pop("prefilled", self.setup.connector != DUMMY)
        if isinstance(self.worker.remote, ShadowSaving):
            if prefilled:
                self.worker.remote.learn(prompt)
        elif prefilled and self.setup.connector:
            asked = dict(options.get("asked") or {})
            blocks = -(-len(prompt) // self.setup.block_size)
            asked["kv_transfer_params"] = dict(
                do_remote_prefill=True,
                do_remote_decode=False,
                remote_block_ids=tuple([*range(1, blocks + 1)] for _ in range(self.setup.groups)),
                remote_engine_id="prefill",
                remote_request_id=request_id,
                remote_host="host",
                remote_port=1,
                tp_size=1,
                remote_num_tokens=len(prompt),
            )
            options["asked"] = asked
            self.prefilled.add(request_id)
        request = make_request(self.setup, request_id, list(prompt), max_tokens, **options)
        self.requests.append(request)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        if self.disk is not None:
            self.disk.step()
        output = self.scheduler.schedule()
        self.steps += output.total_num_scheduled_tokens > 0
        self.pending.append(output)
        self.seen(output)
        self.invariants.scheduled(output)
        self.invariants.check()
        return output

    def process(self) -> None:
        """Execute the oldest scheduled step and process its output."""
        output = self.pending.popleft()
        sampled = self.worker.execute(output)
        self.invariants.executed(output)
        ids = list(output.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=self.worker.transferred,
        )
        if self.worker.files is not None:
            written, weighed = self.worker.files.results(), self.worker.weighed
            news = StoreNews(written, weighed, self.worker.generation, self.worker.lost)
            setattr(done, MEASURED, dict(seconds=[], head_spread=[], stores=[news]))
        if self.losses is not None:
            self.losses.executed(output)
        outputs = self.scheduler.update_from_output(output, done)
        for one in (one for each in outputs.values() for one in each.outputs):
            if one.kv_transfer_params is not None:
                self.handed_over.add(one.request_id)
            if self.losses is not None:
                self.losses.answered(one)
        if self.losses is not None:
            self.losses.check()
        self.invariants.check()

    def step(self, between: Callable[[], None] | None = None) -> Any:
        """Schedule once, then process what vLLM's engine core would by then.

        ``between`` runs after scheduling and before any processing.
        """
        output = self.schedule()
        if between is not None:
            between()
        while len(self.pending) > (1 if self.setup.asynchronous else 0):
            self.process()
        return output

    def settle(self) -> None:
        """Process all that is in flight."""
        while self.pending:
            self.process()

    def hold(self, free: int) -> None:
        """Take blocks from the pool so that ``free`` are left."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self.invariants.held += pool.get_new_blocks(pool.get_num_free_blocks() - free)

    def release(self, blocks: int | None = None) -> None:
        """Give back what :meth:`hold` took, or so many of its blocks."""
        held = self.invariants.held
        self.scheduler.kv_cache_manager.block_pool.free_blocks(held[:blocks])
        del held[:blocks]

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.invariants.check()

    def reset(self) -> None:
        """What sleep mode and weight updates do: preempt all, forget the prefix cache."""
        # vLLM resets none of what a load has written to, or will.
        offload = self.worker.offload
        transfers = [one for one in (offload, self.worker.remote) if one is not None]
        while transfers and (
            self.scheduler.kv_holding_waiting or any(one.loading for one in transfers)
        ):
            self.step()
        if transfers:
            self.settle()
        connector = offload is not None and self.rng.random() < 0.5
        if self.disk is not None and self.rng.random() < 0.5:
            self.disk.change_weights()
        assert self.scheduler.reset_prefix_cache(
            reset_running_requests=True, reset_connector=connector
        )
        if connector:
            # vLLM ends at a second one in the same step.
            self.step()
        self.invariants.check()

    def _loads(self) -> int:
        """Loads by a connector that have ended."""
        return self.worker.remote.loads if self.worker.remote is not None else 0

    def finish(self, patience: int = 1500) -> None:
        """Run until every request has finished, and assert that nothing is left behind.

        A request that waits for ever, or is preempted for ever, is a failure: for ``patience``
        steps nobody gets a token, or four steps have nothing to do.
        """
        idle = stuck = 0
        # A request waits for its file for a limited time, and for a second one that was queued.
        patience_idle = 16 if self.setup.offloads or self.setup.connector else 4
        # A conversation first waits until it is known which of its states have files.
        patience_idle += 5 * int(READ_TIMEOUT_S / SECONDS_A_STEP) if self.disk else 0
        known, loads = self._tokens(), self._loads()
        remote = self.worker.remote
        # A transfer goes on after its request was aborted, even if it was the last one.
        while (
            self.scheduler.has_unfinished_requests()
            or self._comes_to_more()
            or (remote is not None and remote.loading)
        ):
            output = self.step()
            busy = [output, *self.pending]
            # Loads that fail one after the other take up to seven steps each.
            works = any(one.total_num_scheduled_tokens for one in busy) or self._loads() > loads
            idle, loads = 0 if works else idle + 1, self._loads()
            stuck, known = (stuck + 1 if self._tokens() == known else 0), self._tokens()
            counts = f"{self.scheduler.get_request_counts()} (running, waiting)"
            assert idle < patience_idle, f"livelock: {counts}"
            assert stuck < patience, f"no token in {patience} steps: {counts}"
        self.settle()
        self.step()
        self.settle()
        stores = self.scheduler._stores
        if hasattr(stores, "_kept"):
            assert self.worker.host.keys() - set(stores._next.forgotten) == stores._kept.keys()
        if remote is not None:
            assert not remote.loading
            assert self.prefilled <= remote.released, "the other server was never told"
        assert not self.worker.left, "workers keep hidden states for ever"
        self.invariants.check_idle()
        if self.disk is not None:
            self.disk.check_idle()

    def _comes_to_more(self) -> bool:
        """Whether what is in flight leaves requests of the engine's own."""
        self.settle()
        return self.scheduler.has_unfinished_requests()

    def _tokens(self) -> tuple[int, int]:
        """Grows with every token that is sampled and every request that ends."""
        alive = self.scheduler.requests
        return sum(request.num_tokens for request in self.requests), -len(alive)
