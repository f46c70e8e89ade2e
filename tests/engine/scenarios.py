"""Random servers and random days on them, for hypothesis to draw and to shrink."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from vllm.v1.request import Request

from tests.engine.harness import (
    VOCABULARY,
    Engine,
    Setup,
    eviction_config,
    kv_cache_config,
    vllm_config,
)
from tests.engine.saving import ShadowSaving
from tests.engine.wishes import WISHES, Wish
from vllm_kvevict.config.connectors import DUMMY, EXAMPLE
from vllm_kvevict.config.requests import parse_options
from vllm_kvevict.serving.capacity import check_capacity
from vllm_kvevict.serving.context import common_prefix


@st.composite
def setups(draw: Any) -> Setup:
    window = draw(st.sampled_from([1, 4, 8, 16]))
    block_size = draw(st.sampled_from([4, 8, 16]))
    budgets = st.sampled_from([window + 1, 24, 40, 64, 96, "10%", "50%"])
    budget = draw(budgets.filter(lambda b: isinstance(b, str) or b > window))
    kind = draw(st.sampled_from(["one", "one", "two", "sliding", "pyramid", "shares", "both"]))
    seqs = draw(st.integers(1, 8))
    # No two parts of a block of one server are equal, which floats would round either way.
    shares = draw(st.sampled_from([(1.8937, 0.1063), (2.0731, 0.6083, 0.3186), (1.0, 1.0)]))
    shares = shares if kind == "shares" else ()
    # vLLM finds wrong hits where a chunk ends inside a block.
    chunked = draw(st.sampled_from([False, False, True]))
    windows = st.just(16) if chunked else st.sampled_from([5, 16, 40])
    return Setup(
        budget=budget,
        window=window,
        interval=draw(st.sampled_from([0, 4, 16, 64])),
        needs_window=draw(st.sampled_from([True, True, False])),
        second_budget=window + draw(st.integers(1, 100)) if kind == "two" else None,
        sliding_window=draw(windows) if kind in ("sliding", "both") else None,
        chunked=chunked,
        pyramid=draw(st.integers(2, 4)) if kind in ("pyramid", "both") else len(shares),
        shares=shares,
        beta=draw(st.sampled_from([20.0, 2.0])) if kind in ("pyramid", "both") else 20.0,
        blocks=draw(st.integers(16, 90)),
        block_size=block_size,
        max_num_seqs=seqs,
        max_batched=draw(st.sampled_from([8, 24, 64, 512])),
        long_prefill=draw(st.sampled_from([0, 0, 5])),
        caching=draw(st.sampled_from([True, True, False])),
        asynchronous=draw(st.booleans()),
        priority=draw(st.booleans()),
        rings=draw(st.sampled_from([None, None, 1, 2])),
        reserve_full=draw(st.booleans()),
        shared=draw(st.sampled_from(["keep", "evict"])),
        memory=draw(st.sampled_from([0, 100_000, 10**9])),
        audit=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        offload=draw(st.sampled_from([0, 6, 60, 600])),
        chunk=draw(st.sampled_from([1, 1, 2])),
        answers=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.05])),
    )


LENGTHS = st.one_of(st.integers(1, 40), st.integers(20, 200), st.integers(150, 500))
MAX_TOKENS = st.one_of(st.integers(1, 4), st.integers(5, 60), st.integers(60, 200))

EVENTS = st.one_of(
    st.tuples(st.just("add"), LENGTHS, st.integers(0, 4), MAX_TOKENS, st.integers(0, 2), WISHES),
    st.tuples(st.just("add"), LENGTHS, st.integers(0, 4), MAX_TOKENS, st.integers(0, 2), WISHES),
    st.tuples(st.just("burst"), LENGTHS, st.integers(2, 6), st.integers(0, 4), MAX_TOKENS),
    st.tuples(st.just("repeat"), st.integers(0, 20), MAX_TOKENS, WISHES),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 5), st.integers(1, 60), MAX_TOKENS),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 5), st.integers(1, 60), MAX_TOKENS),
    st.tuples(st.just("many"), LENGTHS, st.integers(2, 6), MAX_TOKENS, WISHES),
    st.tuples(st.just("squeeze"), st.integers(0, 60), st.integers(1, 12)),
    st.tuples(st.just("follow"), st.integers(0, 20), st.integers(1, 60), MAX_TOKENS),
    st.tuples(st.just("lose"), st.integers(0, 20), MAX_TOKENS),
    st.tuples(st.just("steps"), st.integers(1, 30)),
    st.tuples(st.just("steps"), st.integers(1, 80)),
    st.tuples(st.just("steps"), st.integers(40, 120)),
    st.tuples(st.sampled_from(["abort", "abort", "reset"]), st.integers(0, 7), st.booleans()),
)


@dataclass(frozen=True)
class Scenario:
    setup: Setup
    seed: int
    events: list[tuple[Any, ...]]


SCENARIOS = st.builds(
    Scenario, setups(), st.integers(0, 2**16), st.lists(EVENTS, min_size=12, max_size=60)
)

HANDOVERS = (
    {"do_remote_decode": True, "do_remote_prefill": False},
    {"do_remote_prefill": True, "do_remote_decode": False},
)
"""What a proxy adds to a request whose prompt another server shall compute, or has computed."""

MARKS = ((0.05, 0.1), (0.0, 0.0), (0.3, 0.6), (0.9, 0.95))
"""The default, marks that are hardly reached, and marks that always are."""


def under_pressure(scenario: Scenario) -> Scenario:
    """The same day on a server that evicts under pressure, some of it on the smallest pools.

    Storms of aborts come in between, and some requests ask to be evicted at once.
    """
    seed = scenario.seed
    events: list[tuple[Any, ...]] = []
    for number, event in enumerate(scenario.events, seed):
        if isinstance(event[-1], Wish) and number % 3 == 0:
            event = (*event[:-1], replace(event[-1], when="always"))
        events.append(event)
        if number % 17 == 0:
            events.append(("storm", 1 + number % 3))
    blocks = 8 if seed % 5 == 0 else scenario.setup.blocks
    setup = replace(scenario.setup, when="pressure", marks=MARKS[seed % 4], blocks=blocks)
    return replace(scenario, setup=setup, events=events)


def streaming_in(scenario: Scenario) -> Scenario:
    """The same day on a server that evicts inside prompts, most of which are longer than the pool.

    Some requests ask for another interval, or for none.
    """
    seed, setup = scenario.seed, scenario.setup
    budget = 40 if isinstance(setup.budget, str) else setup.budget
    interval, shared = (1, 20, 64, 200)[seed % 4], ("keep", "evict")[seed // 4 % 2]
    setup = replace(setup, budget=budget, prefill_interval=interval, shared=shared)
    least = eviction_config(setup).min_prefill_interval
    config = kv_cache_config(setup)
    wanted = vllm_config(replace(setup, longest=700))
    needed = sum(
        group.kv_cache_spec.max_memory_usage_bytes(wanted) // group.kv_cache_spec.page_size_bytes
        for group in config.kv_cache_groups
    )
    setup = replace(setup, longest=700 if needed < setup.blocks else None)
    events: list[tuple[Any, ...]] = []
    for number, event in enumerate(scenario.events, seed):
        if isinstance(event[-1], Wish):
            share = isinstance(event[-1].budget, str)
            other = 0 if share else (None, max(16, least), max(50, least))[number % 3]
            event = (*event[:-1], replace(event[-1], prefill=other))
        events.append(event)
    return replace(scenario, setup=setup, events=events)


def conversing(scenario: Scenario) -> Scenario:
    """The same day on a server on which conversations grow, and evict every so many tokens.

    Some requests ask for another number of tokens, or for the evictions of other servers, and some
    prompts come again with twice the number. Turns follow one another, several continue the same
    one, and the KV cache loses some in between, of which host memory or files, on disks that may
    fail, have the last states.
    """
    seed = scenario.seed
    every, shared = (20, 64, 33, 128)[seed % 4], ("keep", "evict")[seed // 4 % 2]
    setup = replace(
        scenario.setup, every=max(every, scenario.setup.window), shared=shared, caching=True,
        audit=0.0, blocks=max(30, scenario.setup.blocks),
        disk=(None, None, 0.0, 0.1, 0.4)[seed % 5],
    )  # fmt: skip
    if setup.second_budget is not None:
        # Layers of a server share one mean budget, so all groups evict at the same positions.
        setup = replace(setup, second_budget=None, pyramid=2, shares=(1.8937, 0.1063))
    twice = 2 * -(-setup.every // setup.block_size) * setup.block_size
    every_second = Wish(None, None, None, 0, None, False, every=twice)
    events: list[tuple[Any, ...]] = []
    for number, event in enumerate(scenario.events, seed):
        if isinstance(event[-1], Wish) and number % 3:
            plain = dict(interval=None, at=None, prefill=None, when=None)
            least = eviction_config(setup).min_every
            other = (None, max(16, least), max(50, least))[number // 3 % 3]
            event = (*event[:-1], replace(event[-1], **plain, every=other))
        events.append(event)
        if number % 2:
            events += [("follow", number % 23, 1 + 7 * number % 90, 4 + 5 * number % 50)]
        if number % 5 == 0:
            events += [("follow", number % 7, 1 + k, 8) for k in range(3)]
        if number % 4 == 0:
            # Stores of the same tokens at the same point, with another history.
            events += [("repeat", number % 13, 8, every_second)]
        if number % 7 == 0:
            events += [("steps", 30), ("forget",)]
    return replace(scenario, setup=setup, events=events)


def loading(scenario: Scenario) -> Scenario:
    """The same day on a server whose prompts another one has computed, most of them."""
    seed, setup = scenario.seed, scenario.setup
    connector = EXAMPLE if seed % 8 in (2, 3, 5) else "NixlConnector" if seed % 8 else DUMMY
    setup = replace(
        setup,
        connector=connector,
        asynchronous=setup.asynchronous or seed % 8 in (3, 5),
        load_failure="fail" if connector == EXAMPLE or seed % 8 == 7 else "recompute",
        sliding_window=None,
        memory=0,
        audit=0.0,
        offload=0,
    )
    if seed % 8 in (1, 6):
        # Both connectors are served together with one group and whole prompts only.
        one_group = dict(second_budget=None, pyramid=0, shares=())
        setup = replace(setup, **one_group, reserve_full=True, offload=scenario.setup.offload)
    if connector == EXAMPLE:
        return replace(scenario, setup=setup, events=loading_again(scenario))
    return replace(scenario, setup=setup)


def loading_again(scenario: Scenario) -> list[tuple[Any, ...]]:
    """The same events; the cache loses a document between those that load it."""
    events: list[tuple[Any, ...]] = []
    for number, event in enumerate(scenario.events, scenario.seed):
        events.append(event)
        if number % 3 == 0:
            events += [("forget",), ("burst", 100 + 7 * number % 200, 3, 4, 8)]
            events += [("ask", 0, 2, 1 + number % 40, 8), ("steps", 1 + number % 6)]
    return events


def settings(request: Request) -> dict[str, Any] | None:
    """Return the settings of a request, without the parameters of a proxy."""
    asked = request.sampling_params.extra_args
    return asked and {key: value for key, value in asked.items() if key != "kv_transfer_params"}


def in_few_bits(scenario: Scenario) -> Scenario:
    """The same day on a server whose stores have more tokens in a page than other blocks."""
    setup = replace(scenario.setup, store_dtype=("int4", "int8")[scenario.seed % 2])
    return replace(scenario, setup=setup)


def in_files(scenario: Scenario) -> Scenario:
    """The same day on a server that writes stores to files, most of them on a disk that fails.

    Clients ask about the same documents again and again, and the KV cache loses them in between.
    """
    seed = scenario.seed
    events: list[tuple[Any, ...]] = []
    for number, event in enumerate(scenario.events, seed):
        events.append(event)
        if number % 3 == 0:
            events += [("forget",), ("ask", number // 3 % 4, 2, 1 + number % 40, 8)]
            events.append(("steps", 4 + number % 20))
        elif number % 19 == 0:
            # While a store is being read.
            events += [("forget",), ("ask", number % 4, 2, 1 + number % 40, 8)]
            events += [("steps", 1 + number % 2), ("reset", 0, False)]
    setup = replace(
        scenario.setup, caching=True, disk=(0.0, 0.05, 0.1, 0.4)[seed % 4],
        memory=(0, 0, 20_000)[seed % 3], blocks=max(40, scenario.setup.blocks),
    )  # fmt: skip
    return replace(scenario, setup=setup, events=events)


def run(scenario: Scenario, totals: Counter[str] | None = None) -> Engine:
    """Play a scenario to its end; adds what happened to ``totals``."""
    day = Day(scenario)
    live(day, scenario)
    if totals is not None:
        totals.update(day.totals())
    return day.engine


def live(day: "Day", scenario: Scenario) -> None:
    """Let everything happen that a scenario says."""
    with day.engine.clock():
        for event in scenario.events:
            getattr(day, event[0])(*event[1:])
        day.engine.finish()


class Day:
    """The events of a scenario, as methods."""

    def __init__(self, scenario: Scenario) -> None:
        self.setup = scenario.setup
        self.engine = Engine(scenario.setup, seed=scenario.seed)
        self.rng = random.Random(scenario.seed)
        self.shared = [self._tokens(300) for _ in range(2)]
        self.asked = [
            (f"{self.rng.choice([10, 25, 40])}%", self.rng.randrange(40, 300), salt)
            for salt in (None, None, "a", "b")
        ]
        self.aborts = self.resets = self.wishes = self.refused = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2, VOCABULARY) for _ in range(count)]

    def _submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        wish: Wish | None = None,
        asked: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> None:
        longest = self.setup.max_model_len - 1
        if longest < 1:
            return
        prompt = prompt[:longest]
        max_tokens = min(max_tokens, self.setup.max_model_len - len(prompt))
        if wish is not None:
            asked = wish.asked(self.setup, len(prompt))
        if self.setup.prefill_interval and not self._fits(asked, len(prompt), max_tokens):
            self.refused += 1
            return
        more: dict[str, Any] = {}
        if self.setup.connector:
            more["prefilled"] = self.setup.connector != DUMMY and self.rng.random() < 0.8
        request = self.engine.add(
            prompt, max_tokens, priority=priority, asked=asked, cache_salt=salt, **more
        )
        if self.engine.disk is not None and asked and "kv_eviction_at" in asked:
            request.kv_transfer_params = self.rng.choice([None, None, *HANDOVERS])
        # A refused wish would silently become the server's settings.
        config = self.engine.scheduler._table.config
        rules = list(self.engine.scheduler._table.rules.values())
        parse_options(config, asked, request.num_prompt_tokens, rules)
        self.wishes += asked is not None

    def _fits(self, asked: dict[str, Any] | None, length: int, max_tokens: int) -> bool:
        """Whether the front door lets a request in."""
        config = self.engine.scheduler._table.config
        rules = list(self.engine.scheduler._table.rules.values())
        options = parse_options(config, asked, length, rules)
        try:
            check_capacity(vllm_config(self.setup), rules, options, length, max_tokens)
        except ValueError:
            return False
        return True

    def add(
        self, length: int, shared: int, max_tokens: int, priority: int, wish: Wish | None
    ) -> None:
        """A prompt that shares 0 to 100% of its tokens with others."""
        common = self.shared[shared % 2][: length * shared // 4]
        self._submit(common + self._tokens(length - len(common)), max_tokens, priority, wish)

    def burst(self, length: int, count: int, shared: int, max_tokens: int) -> None:
        """Prompts of one length at once, which come to evict together."""
        for _ in range(count):
            self.add(length, shared, max_tokens, 0, None)

    def repeat(self, index: int, max_tokens: int, wish: Wish | None) -> None:
        """The very same prompt again, as ``n > 1`` sends it."""
        if self.engine.requests:
            former = self.engine.requests[index % len(self.engine.requests)]
            self._submit(list(former.prompt_token_ids or ()), max_tokens, wish=wish)

    def ask(self, index: int, count: int, length: int, max_tokens: int) -> None:
        """Questions about one document, each with the eviction point at its end."""
        budget, size, salt = self.asked[index]
        document = self.shared[index % 2][: min(size, self.setup.max_model_len - 2)]
        if not document:
            return
        point: dict[str, Any] = {"kv_eviction_budget": budget}
        if self.setup.prefill_interval:
            point["kv_eviction_budget"] = self.setup.window + 8 * int(budget[:-1])
        for _ in range(count):
            prompt = document + self._tokens(length)
            # As the front end finds the end of a text or a message, whose closing token differs.
            at = common_prefix(prompt, [*document, VOCABULARY])
            asked = point | {"kv_eviction_at": at}
            self._submit(prompt, max_tokens, asked=asked, salt=salt)

    def many(self, length: int, count: int, max_tokens: int, wish: Wish | None) -> None:
        """``n`` answers to one prompt: vLLM makes that many requests of it."""
        prompt = self._tokens(length)
        for _ in range(count):
            self._submit(prompt, max_tokens, wish=wish)

    def squeeze(self, free: int, steps: int) -> None:
        """The pool has so many free blocks at most, for some steps: whoever grows is preempted."""
        have = self.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.engine.hold(min(free, have))
        self.steps(steps)
        self.engine.release()

    def follow(self, index: int, more: int, max_tokens: int) -> None:
        """The next turn of a conversation; at times another tenant has said the same so far."""
        if self.engine.requests:
            former = self.engine.requests[index % len(self.engine.requests)]
            asked = settings(former) or {}
            about = asked if int(asked.get("kv_eviction_at", 0)) > 0 or self.setup.every else None
            prompt = list(former.all_token_ids) + self._tokens(more)
            salt = former.cache_salt if self.rng.random() < 0.75 else "another"
            self._submit(prompt, max_tokens, asked=about, salt=salt)

    def lose(self, index: int, max_tokens: int) -> None:
        """The pool loses what nobody holds, and a client says the same again."""
        self.forget()
        if self.engine.requests:
            former = self.engine.requests[index % len(self.engine.requests)]
            asked = settings(former)
            prompt = list(former.prompt_token_ids or ())
            self._submit(prompt, max_tokens, asked=asked, salt=former.cache_salt)

    def forget(self) -> None:
        """The pool loses what nobody holds."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        idle = [b for b in pool.blocks if b.block_hash is not None and not b.ref_cnt]
        pool.evict_blocks({block.block_id for block in idle})

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.scheduler.has_unfinished_requests():
                self.engine.step()

    def abort(self, index: int, while_in_flight: bool) -> None:
        if while_in_flight:
            self.engine.step(between=lambda: self._abort(index))
        else:
            self._abort(index)

    def storm(self, between: int) -> None:
        """Every client goes away, one after the other, with a step between some of them."""
        while self.engine.scheduler.requests:
            self._abort(0)
            if self.aborts % between == 0:
                self.engine.step()

    def _abort(self, index: int) -> None:
        alive: list[Request] = list(self.engine.scheduler.requests.values())
        if alive:
            self.engine.abort(alive[index % len(alive)])
            self.aborts += 1

    def reset(self, *_: Any) -> None:
        self.engine.reset()
        self.resets += 1

    def totals(self) -> dict[str, int]:
        tally, counters = self.engine.invariants.tally, self.engine.scheduler.eviction_counters
        offload, remote = self.engine.worker.offload, self.engine.worker.remote
        disk = self.engine.disk
        return {
            "scenarios": 1,
            "steps": self.engine.steps,
            "requests": len(self.engine.requests),
            "aborts": self.aborts,
            "resets": self.resets,
            "preemptions": tally.preemptions,
            "prefix_hits": tally.hits,
            "prefix_hit_tokens": tally.hit_tokens,
            "published_blocks": tally.published,
            "own_settings": self.wishes,
            "evictions_at_point": tally.at_point,
            "evictions_inside": tally.inside,
            "evictions_at_once": counters.evictions - counters.evictions_pressure,
            "refused": self.refused,
            "steps_switched_off": tally.switched_off,
            "put_off": tally.put_off,
            "at_a_loss": tally.at_a_loss,
            "mixed": tally.mixed,
            "taken": tally.taken,
            "taken_behind": tally.taken_behind,
            "taken_in_use": tally.taken_in_use,
            "taken_again": tally.taken_again,
            "taken_later": tally.taken_later,
            "offload_loads": offload.loads if offload else 0,
            "offload_waits": offload.waited if offload else 0,
            "remote_loads": remote.loads if remote else 0,
            "remote_failures": remote.failures if remote else 0,
            "filled": remote.filled if remote else 0,
            **(remote.tally() if isinstance(remote, ShadowSaving) else {}),
            "files_hung": disk.hung if disk else 0,
            "files_failed": disk.failed if disk else 0,
            "files_damaged": disk.damaged if disk else 0,
            "weights_changed": disk.generations if disk else 0,
            "handed_over": len(self.engine.handed_over),
            **(self.engine.losses.tally if self.engine.losses else {}),
            **counters.as_dict(),
        }
