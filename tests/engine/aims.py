"""What requests with a target may come to, from what was measured of their trials."""

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.engine.expected import Expected
    from tests.engine.harness import Setup

TRIES = "-target-"
"""In the id of a request that tries a budget for another one, behind that one's."""

RUNGS = ("6.25%", "12.5%", "25%", "50%")

WORST = 10
"""Times its target that a request may lose for want of blocks."""


class Told:
    """Takes trials at their word: what is made of them has tests of its own."""

    @staticmethod
    def loss(policy: str, share: str, nats: float, salt: str | None) -> float:
        return nats


def tries(request_id: str) -> bool:
    """Whether a request of the engine's own tries a budget, or replays one that does."""
    return TRIES in request_id


def share_of(request_id: str) -> str:
    """The budget that a trial tries."""
    return request_id.partition(TRIES)[2].partition("-")[0]


def drawn(request_id: str, tokens: list[int]) -> float:
    """Nats of an eviction: as good as random, the same for the same tokens and budget."""
    seen = repr((tokens, share_of(request_id))).encode()
    return int.from_bytes(hashlib.sha256(seen).digest()[:2], "big") / 2**16


class Aims:
    """Follows the requests that have a target.

    Args:
        setup: The server's settings.
        scheduler: vLLM's, with ours.
        worker: Measures what is lost.
        expected: What each budget comes to.

    """

    def __init__(self, setup: "Setup", scheduler: Any, worker: Any, expected: "Expected") -> None:
        self._setup = setup
        self._scheduler = scheduler
        self._worker = worker
        self._expected = expected
        self._targets = getattr(scheduler, "_targets", None)
        self.kept: dict[str, str] = {}
        """What each request came to, by id; nothing while it waits."""
        self.tally: Counter[str] = Counter()
        self.waiting: dict[str, int] = {}
        """Tokens before which requests wait, by id."""
        self.stands: dict[str, str] = {}
        """The smaller budget that requests went down to for want of blocks, by id."""
        self.changed: set[str] = set()
        """Those that have gone down since they evicted."""
        self._before: dict[str, str] = {}
        self._lives: dict[str, int] = {}
        self._short = False
        self.in_the_way: list[str] = []
        self._said: set[tuple[Any, ...]] = set()
        if self._targets is not None:
            self._targets.trials._estimate = Told()
            preempt = scheduler._preempt_request

            def preempted(request: Any, *args: Any, **kwargs: Any) -> None:
                mine = [one.request.request_id for one in self._targets.trials.under_way.values()]
                if self.scheduling and not tries(request.request_id) and mine:
                    self.in_the_way.append(f"{mine} hold blocks that {request.request_id} lacks")
                preempt(request, *args, **kwargs)

            scheduler._preempt_request = preempted
        self.scheduling = True
        """Whether vLLM preempts for want of blocks, and not because it is told to."""

    def target(self, request: Any) -> float | None:
        """The target of a client's request that has trials; None for all others."""
        given = request.sampling_params.extra_args or {}
        setup = self._setup
        own = "kv_eviction_budget" in given
        inside = int(given.get("kv_eviction_prefill_interval", 0))
        policy = given.get("kv_eviction", setup.policy)
        pressure = given.get("kv_eviction_when", setup.when) == "pressure"
        if setup.targets is None or own or inside or policy in ("none", "h2o") or pressure:
            return None
        end, longest = self.end(request), request.num_prompt_tokens + request.max_tokens
        whole = (end - setup.window) // setup.block_size
        if whole < 1 or end + 1 >= min(longest, setup.max_model_len) or not self.rungs(request):
            return None
        return float(given.get("kv_eviction_target", setup.targets))

    def end(self, request: Any) -> int:
        """Where a request evicts."""
        at = int((request.sampling_params.extra_args or {}).get("kv_eviction_at", 0))
        return at + request.num_prompt_tokens if at <= 0 else at

    def rungs(self, request: Any) -> list[str]:
        """Budgets of a request that keep more than the window, and not all."""
        given = request.sampling_params.extra_args or {}
        end, policy = self.end(request), given.get("kv_eviction", self._setup.policy)
        protect = int(given.get("kv_eviction_protect_first", 0))
        evicting = [m.kv_cache_group_id for m in self._scheduler._evicting.values()]
        tail, found = (end - self._setup.window) // self._setup.block_size, []
        for share in RUNGS:
            stores = [self._expected.kept_blocks(share, end, g, policy) for g in evicting]
            room = min(stores) * self._setup.block_size
            beside = int(end * float(share[:-1]) / 100) > self._setup.window
            if beside and tail > min(stores) and room >= protect:
                found.append(share)
        return found

    def follow(self) -> None:
        """Note who waits, and what those came to that do not any more."""
        if self._targets is None:
            return
        for request_id, request in self._scheduler.requests.items():
            if tries(request_id) or "-audit-" in request_id or request_id in self.kept:
                continue
            if (target := self.target(request)) is None:
                assert request_id not in self._targets.pending, "a target where there is none"
                self.kept[request_id] = ""
            elif request_id in self._targets.pending:
                size = self._setup.block_size
                hold = (self.end(request) - self._setup.window) // size * size
                self.waiting[request_id] = hold
            else:
                self.waiting.pop(request_id, None)
                self.kept[request_id] = self._come_to(request, target)
        for request_id, request in self._scheduler.requests.items():
            if self.kept.get(request_id) not in (None, "", "short"):
                self._stand(request)

    def begin(self) -> None:
        """Note whether blocks are short for those that run, before a step is scheduled."""
        setup, scheduler = self._setup, self._scheduler
        lead = 3 + (setup.window if setup.ring_count else 0)
        taken = setup.groups * -(-lead * len(scheduler.running) // setup.block_size)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self._short = free < min(taken, setup.blocks // 4)

    def _stand(self, request: Any) -> None:
        """A request goes down to the next budget that was tried, and up with its next life."""
        request_id, kept = request.request_id, self.kept[request.request_id]
        former = self.stands.get(request_id, kept)
        now = self._says(request_id)
        if request.num_preemptions > self._lives.get(request_id, 0):
            assert now == kept, f"{request_id} has lost its blocks, and stays at {now}"
            self._lives[request_id] = request.num_preemptions
            self.stands.pop(request_id, None)
            self.changed.discard(request_id)
        elif now != former:
            if now == self._before.get(request_id) and request_id in self.changed:
                self.tally["up"] += 1
            else:
                self._down(request, former, now)
            self._before[request_id] = former
            self.stands[request_id] = now
            self.changed.add(request_id)

    def _down(self, request: Any, former: str, now: str) -> None:
        prompt = tuple(request.prompt_token_ids)[: self.end(request)]
        smaller = [share for share in self.rungs(request) if (prompt, share) in self._said]
        smaller = smaller[: smaller.index(former)] if former in smaller else smaller
        assert now in smaller[-1:], f"{request.request_id} goes from {former} to {now}"
        loses = self._worker.loses(f"r{TRIES}{now}-1", list(prompt))
        target = self.target(request)
        assert target is not None and loses <= WORST * target, "a step down that loses too much"
        assert self._short, f"{request.request_id} goes down, and blocks are not short"
        self.tally["down"] += 1

    def _says(self, request_id: str) -> str:
        """What a request is, as the scheduler has it."""
        options = self._scheduler._table.states[request_id].options
        return options.budget or ("100%" if options.policy == "none" else "short")

    def answered(self, request_id: str, told: Any) -> None:
        """A request has ended, and is told what it came to, or stood on at last."""
        if kept := self.kept.get(request_id):
            assert told["kv_eviction"]["kept"] == self.stands.get(request_id, kept)

    def _come_to(self, request: Any, target: float) -> str:
        kept = self._says(request.request_id)
        rungs = self.rungs(request)
        prompt = list(request.prompt_token_ids)[: self.end(request)]
        loses = {share: self._worker.loses(f"r{TRIES}{share}-1", prompt) for share in rungs}
        if kept in rungs:
            assert loses[kept] <= target, "a budget that loses too much"
            smaller = rungs[: rungs.index(kept)]
            passed = [share for share in smaller if loses[share] <= target]
            # Only where no trial of it has said anything.
            assert not [s for s in passed if (tuple(prompt), s) in self._said], "a smaller passed"
        elif kept == "100%":
            assert all(nats > target for nats in loses.values()), "a budget would have done"
        else:
            assert kept == "short"
        self.tally[kept] += 1
        return kept

    def heard(self) -> None:
        """Note what the worker has measured in a step."""
        for request_id, *_ in self._worker.audits:
            if tries(request_id) and request_id in self._targets.trials.under_way:
                trial = self._targets.trials.under_way[request_id]
                self._said.add((tuple(trial.request.prompt_token_ids), share_of(request_id)))

    def check(self) -> None:
        assert not self.in_the_way, self.in_the_way[0]

    def check_idle(self) -> None:
        if self._targets is not None:
            settled = self._targets.stairs.settled
            left = self._targets.pending, self._targets.trials.under_way, settled
            assert not any(left), "something is left of a target"
