"""The eviction rule against a walk that holds blocks step by step and has no formula."""

import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.unit.rules.peak import peak_blocks
from vllm_kvevict.config.budget import budget_share
from vllm_kvevict.rules.layers import by_layer
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule, blocks_for

PROFILE = settings(deadline=None, derandomize=True)


@st.composite
def rules(draw, share: bool = True, recent: bool = False) -> EvictionRule:
    window = draw(st.integers(1, 40))
    tokens: int | None = window + draw(st.integers(1, 150))
    portion = None
    if share and draw(st.booleans()):
        tokens, portion = None, draw(st.floats(0.01, 1.0))
    least = draw(st.sampled_from([0, 0, 90, 300])) if portion else 0
    block_size = draw(st.sampled_from([1, 3, 8, 16, 32]))
    return EvictionRule(
        block_size=block_size,
        page_tokens=block_size * draw(st.sampled_from([1, 1, 2, 4])),
        window=window,
        interval=draw(st.sampled_from([0, 1, 7, 16, 50, 128])),
        budget_tokens=tokens,
        budget_share=portion,
        min_tokens=least,
        recent=draw(st.none() | st.integers(1, window)) if recent else None,
    )


@PROFILE
@given(rules(), st.integers(0, 900))
def test_the_shortest_prompt_that_is_evicted(rule: EvictionRule, longest: int) -> None:
    """Every length is tried, and asked for what a request would do with it."""
    lengths = range(1, longest + 1)
    evicts = (n for n in lengths if EvictionProgress(rule, n, n).next_prefill_eviction is not None)
    assert rule.shortest_evicted(longest) == next(evicts, None)


@dataclass
class Walk:
    """One request, block by block: what it holds, what a step in flight keeps from being free."""

    rule: EvictionRule
    prompt_len: int
    prefill_end: int
    in_flight: int
    at: int | None = None
    n: int = 0
    positional: set[int] = field(default_factory=set)
    stores: int = 0
    freeing: deque[tuple[set[int], int]] = field(default_factory=deque)
    evicted_at: list[int] = field(default_factory=list)
    store_at: list[int] = field(default_factory=list)
    held: int = 0

    def __post_init__(self) -> None:
        self.request = EvictionProgress(self.rule, self.prompt_len, self.prefill_end, self.at)

    def step(self, tokens: int) -> None:
        bs = self.rule.block_size
        self.positional |= {p // bs for p in range(self.n, self.n + tokens)}
        self.n += tokens
        frees: tuple[set[int], int] = (set(), 0)
        if self.request.is_due(self.n):
            before = self.request.store_blocks
            old, new = self.request.evict(self.n)
            self.stores += self.request.store_blocks
            gone = {block for block in self.positional if old <= block * bs < new}
            assert min(gone) * bs == old
            frees = (gone, before)
            self.evicted_at.append(self.n)
            self.store_at.append(self.request.store_blocks)
        self.held = max(self.held, len(self.positional) + self.stores)
        self.freeing.append(frees)
        if len(self.freeing) > self.in_flight:
            blocks, stores = self.freeing.popleft()
            self.positional -= blocks
            self.stores -= stores

    def prefill(self, chunk: int) -> None:
        """In chunks; one ends at the eviction point, and the next waits for its blocks."""
        while self.n < self.prefill_end:
            point = self.request.next_prefill_eviction or 0
            stop = point if self.n < point < self.prefill_end else self.prefill_end
            self.step(min(chunk, stop - self.n))
            if self.n == self.at:
                self.settle()

    def settle(self) -> None:
        while self.freeing:
            blocks, stores = self.freeing.popleft()
            self.positional -= blocks
            self.stores -= stores


@PROFILE
@given(rules(), st.integers(1, 2000))
def test_tail_start_is_whole_blocks_and_monotone_and_spares_the_window(rule, n):
    start, later = rule.tail_start(n), rule.tail_start(n + 1)
    assert start % rule.block_size == 0
    assert start <= later
    assert 0 <= start <= max(0, n - rule.window)
    assert start == 0 or n - rule.window - start < rule.block_size


@PROFILE
@given(rules(), st.integers(1, 5000))
def test_store_is_what_the_budget_leaves_beside_the_window(rule, prompt_len):
    store = rule.store_blocks(prompt_len)
    assert store >= 1
    if store > 1:
        kept = store * rule.page_tokens + rule.window
        assert kept <= rule.budget(prompt_len)
        full = rule.may_keep_all and kept + rule.page_tokens > prompt_len - rule.block_size
        assert full or rule.budget(prompt_len) < kept + rule.page_tokens


@PROFILE
@given(rules(), st.integers(1, 5000))
def test_a_share_is_one_of_the_memory(rule, prompt_len):
    """Blocks are counted, and not tokens."""
    if rule.budget_share is None or rule.min_tokens:
        return
    memory, store = rule.budget_share * prompt_len, rule.store_blocks(prompt_len)
    if store > 1:
        assert store * rule.block_size + rule.window <= memory + 1e-6
        room = memory - store * rule.block_size - rule.window
        assert (
            room < rule.block_size + 1 or store == rule.tail_start(prompt_len) // rule.page_tokens
        )


@PROFILE
@given(rules(share=False), st.integers(1, 700), st.integers(0, 60), st.integers(1, 200))
def test_evicts_at_the_end_of_prefill_and_then_every_stride(rule, prompt_len, replayed, chunk):
    end = prompt_len + replayed
    walk = Walk(rule, prompt_len, end, in_flight=0)
    walk.prefill(chunk)
    for _ in range(3 * rule.stride + 5):
        walk.step(1)
    bs, kept = rule.block_size, rule.store_blocks(prompt_len) * rule.page_tokens
    apart = max(rule.interval, rule.page_tokens) if rule.interval else 0
    assert rule.stride % bs == 0 and apart <= rule.stride < apart + bs
    whole_blocks_before_window = max(0, end - rule.window) // bs
    if whole_blocks_before_window * bs > kept:
        expected = list(range(end, walk.n + 1, rule.stride)) if rule.stride else [end]
    elif rule.stride:
        first = kept + rule.window + rule.stride
        assert first > end, "a prompt this long should have been evicted"
        expected = list(range(first, walk.n + 1, rule.stride))
    else:
        expected = []
    assert walk.evicted_at == expected
    assert walk.request.evicted == bool(expected)
    assert walk.request.computed_valid == (expected[0] if expected else None)


@PROFILE
@given(
    rules(share=False),
    st.integers(1, 700),
    st.integers(0, 60),
    st.integers(1, 200),
    st.floats(0.01, 1),
)
def test_evicts_at_a_point_of_its_own_whatever_the_chunks(rule, prompt_len, replayed, chunk, share):
    at = max(1, round(share * prompt_len))
    end = prompt_len + replayed
    walk = Walk(rule, prompt_len, end, in_flight=0, at=at)
    cap = walk.request.hit_cap
    walk.prefill(chunk)
    for _ in range(3 * rule.stride + 5):
        walk.step(1)
    kept = rule.store_blocks(at) * rule.page_tokens
    if max(0, at - rule.window) // rule.block_size * rule.block_size > kept:
        second = max(at + rule.stride, end)
        later = range(second, walk.n + 1, rule.stride) if rule.stride else []
        expected = [at, *later]
        assert (walk.request.next_prefill_eviction, cap) == (at, rule.tail_start(at))
    else:
        first = max(kept + rule.window + rule.stride, end + 1)
        expected = list(range(first, walk.n + 1, rule.stride)) if rule.stride else []
        assert walk.request.next_prefill_eviction is None
        assert cap == (min(end, rule.tail_start(first)) if rule.stride else end)
    assert walk.evicted_at == expected


@pytest.mark.slow
@settings(PROFILE, max_examples=200)
@given(
    rules(),
    st.integers(1, 500),
    st.integers(0, 60),
    st.integers(1, 200),
    st.integers(0, 1),
    st.floats(0.01, 1),
)
def test_never_holds_more_than_peak_blocks_with_a_point(
    rule, prompt_len, replayed, chunk, in_flight, share
):
    at = max(1, round(share * prompt_len))
    in_flight = in_flight if rule.stride != 1 else 0
    walk = Walk(rule, prompt_len, prompt_len + replayed, in_flight, at)
    request = EvictionProgress(rule, prompt_len, walk.prefill_end, at)
    walk.prefill(chunk)
    assert walk.held <= peak_blocks(request, walk.n)
    for _ in range(3 * rule.stride + 2 * rule.block_size):
        walk.step(1)
        assert walk.held <= peak_blocks(request, walk.n)
    assert peak_blocks(request, walk.n) - walk.held <= 1


@pytest.mark.slow
@settings(PROFILE, max_examples=200)
@given(rules(), st.integers(1, 500), st.integers(0, 60), st.integers(1, 200), st.integers(0, 1))
def test_never_holds_more_than_peak_blocks(rule, prompt_len, replayed, chunk, in_flight):
    # At a stride of 1 a second eviction is planned before the first was processed.
    walk = Walk(rule, prompt_len, prompt_len + replayed, in_flight if rule.stride != 1 else 0)
    request = EvictionProgress(rule, prompt_len, walk.prefill_end)
    walk.prefill(chunk)
    assert walk.held <= peak_blocks(request, walk.n)
    for _ in range(3 * rule.stride + 2 * rule.block_size):
        walk.step(1)
        assert walk.held <= peak_blocks(request, walk.n)
    slack = peak_blocks(request, walk.n) - walk.held
    assert slack <= 1


@PROFILE
@given(rules(recent=True), st.integers(1, 600), st.integers(0, 60))
@example(EvictionRule(3, 2, 1, budget_share=0.96875, recent=1), 1, 16)
def test_prefill_cap_leaves_the_window_to_compute(rule, prompt_len, replayed):
    end = prompt_len + replayed
    request = EvictionProgress(rule, prompt_len, end)
    cap, due = request.hit_cap, request.next_eviction
    assert 0 <= cap <= end
    if due is not None and due - rule.window < end:
        assert cap <= due - rule.window
        assert due - rule.window - cap < rule.block_size, "a whole block more could be reused"
    else:
        assert end - cap < rule.block_size, "every whole block can be reused"


@PROFILE
@given(rules(recent=True), st.integers(1, 600))
def test_every_query_of_the_window_is_observed(rule, prompt_len):
    request = EvictionProgress(rule, prompt_len, prompt_len)
    # A share close to 100% evicts after more tokens than can be enumerated.
    assume(request.next_eviction is not None and request.next_eviction < 100_000)
    unseen = [n for n in range(1, request.next_eviction + 1) if not request.observes(n)]
    assert unseen == list(range(1, request.next_eviction - rule.window + 1))


def shares() -> st.SearchStrategy[EvictionRule]:
    return rules().filter(lambda rule: rule.budget_share is not None)


def blocks_of_share(rule: EvictionRule, n: int, old: int = 0, store: int = 0) -> int:
    """Blocks that an eviction at ``n`` fills, after one that kept ``store`` blocks and the tail
    from block ``old`` on."""
    bs, size = rule.block_size, rule.page_tokens
    memory = n * rule.budget_share
    tokens = int(round(memory, 6))
    tail = (n - rule.window) // bs
    if size > bs and memory > rule.window:
        tokens = min(n, int(round(rule.window + (memory - rule.window) * size / bs, 6)))
    blocks = max(1, (max(rule.min_tokens, tokens) - rule.window) // size)
    if size > bs:
        blocks = max(1, store, min(blocks, tail * bs // size, store + (tail - old) * bs // size))
    return blocks


@PROFILE
@given(shares(), st.integers(1, 700), st.integers(0, 60), st.integers(1, 200), st.integers(1, 200))
def test_a_share_is_one_of_the_tokens_at_each_eviction(rule, prompt_len, replayed, chunk, other):
    end = prompt_len + replayed
    walk, same = Walk(rule, prompt_len, end, 0), Walk(rule, prompt_len, end, 0)
    walk.prefill(chunk)
    same.prefill(other)
    for _ in range(6 * rule.stride + 5):
        walk.step(1)
        same.step(1)
    assert (walk.evicted_at, walk.store_at) == (same.evicted_at, same.store_at), "chunks matter"
    assert all(n == end or n - end >= 1 for n in walk.evicted_at)

    def gains(n: int, old: int, store: int, kept: int) -> bool:
        tail = (n - rule.window) // rule.block_size - old
        before = store * rule.page_tokens + tail * rule.block_size
        if rule.page_tokens > rule.block_size:
            room = store and kept == store and blocks_of_share(rule, n) > kept
            fits = kept * rule.page_tokens <= before and kept < store + tail
            return fits and not room
        return kept * rule.page_tokens < before

    old = store = 0
    for n, kept in zip(walk.evicted_at, walk.store_at, strict=True):
        assert kept == blocks_of_share(rule, n, old, store)
        assert gains(n, old, store, kept), "nothing was evicted or given back"
        old, store = (n - rule.window) // rule.block_size, kept
        # Whenever something can go an interval later, it goes.
        soon = n + rule.stride
        if rule.stride and soon <= walk.n:
            wanted = blocks_of_share(rule, soon, old, store)
            assert (soon in walk.evicted_at) == gains(soon, old, store, wanted)


@pytest.mark.parametrize("share", [0.125, 0.25])
@pytest.mark.parametrize(
    ("block_size", "page_tokens", "prompt"),
    [(32, 32, 20), (32, 120, 20), (128, 480, 20), (128, 480, 2000), (16, 60, 2000)],
)
def test_a_share_grows_with_the_answer(share, block_size, page_tokens, prompt):
    """Also if a page of the store holds more tokens than come between two evictions."""
    rule = EvictionRule(block_size, 32, 128, budget_share=share, page_tokens=page_tokens)
    walk = Walk(rule, prompt, prompt, in_flight=0)
    walk.prefill(prompt)
    for _ in range(8000 - prompt):
        walk.step(1)
    blocks = share * 8000 / block_size
    # A page of the store, and the tokens between two evictions.
    late = (page_tokens + 2 * rule.stride) / block_size
    assert blocks - 2 - late * share < walk.store_at[-1] <= blocks
    assert len(walk.positional) + walk.stores < blocks + late + 3


@PROFILE
@given(
    shares().filter(lambda rule: rule.may_keep_all),
    st.integers(1, 700),
    st.lists(st.integers(1, 5), min_size=1, max_size=60),
)
def test_an_eviction_that_is_due_stays_due(rule, prompt_len, steps):
    """Until it runs, which may be some tokens late."""
    request, n = EvictionProgress(rule, prompt_len, prompt_len), prompt_len
    if request.is_due(n):
        request.evict(n)
    for tokens in steps * 9:
        n += tokens
        late = request.next_eviction is not None and n >= request.next_eviction
        assert request.is_due(n) == late
        if late and tokens % 2:
            request.evict(n)


def test_a_share_has_a_least_and_a_most():
    rule = EvictionRule(32, 32, 128, budget_share=0.25, min_tokens=256, max_tokens=512)
    assert [rule.budget(n) for n in (100, 1024, 1600, 9000)] == [256, 256, 400, 512]
    request = EvictionProgress(rule, prompt_len=200, prefill_end=200)
    assert (request.next_prefill_eviction, request.next_eviction) == (None, 256 + 128), (
        "until then all of it is kept"
    )
    assert EvictionProgress(rule, 256 + 32, 256 + 32).next_prefill_eviction == 256 + 32


def test_everything_is_never_evicted():
    rule = EvictionRule(32, 32, 128, budget_share=1.0)
    assert EvictionProgress(rule, 20, 20).next_eviction is None
    assert EvictionProgress(rule, 20, 20, max_length=4000).next_eviction is None


def test_a_share_counts_what_is_replayed():
    """A preempted request keeps what it would have kept at that length."""
    rule = EvictionRule(block_size=16, window=32, interval=0, budget_share=0.25)
    request = EvictionProgress(rule, prompt_len=1000, prefill_end=1400)
    assert request.evict(1400) == (0, 1360)
    assert request.store_blocks == (350 - 32) // 16


def test_a_store_of_layers_never_shrinks():
    """Protected tokens that the prompt's store holds are in every later store, too."""
    share = by_layer((1.2, 1.2, 0.8, 0.8), 2)
    for group in (share[0], share[2]):
        rule = EvictionRule(16, 32, 16, budget_share=0.3, share=group)
        request = EvictionProgress(rule, 300, 300)
        stores = [rule.store_blocks(300)]
        for n in range(300, 1500):
            if request.is_due(n):
                request.evict(n)
                stores.append(request.store_blocks)
        assert len(stores) > 30 and stores == sorted(stores)


@given(st.integers(1, 100), st.integers(1, 10**6))
def test_a_share_in_per_cent_is_exact(percent, length):
    rule = EvictionRule(16, 32, 0, budget_share=budget_share(f"{percent}%"))
    assert rule.budget(length) == length * percent // 100


def test_eviction_that_is_not_due_is_refused():
    request = EvictionProgress(EvictionRule(16, 32, 64, budget_tokens=64), 200, 200)
    with pytest.raises(AssertionError, match="no eviction is due at 199"):
        request.evict(199)
    assert request.evict(200) == (0, 160)
    assert not request.is_due(263) and request.is_due(264)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"window": 0},
        {"interval": -1},
        {"budget_tokens": None},
        {"budget_share": 0.5},
    ],
)
def test_rejects(wrong):
    good = dict(block_size=16, window=32, interval=64, budget_tokens=64, budget_share=None)
    EvictionRule(**good)
    with pytest.raises(ValueError):
        EvictionRule(**(good | wrong))


@PROFILE
@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_is_the_least_that_holds_the_tokens(tokens, block_size):
    blocks = blocks_for(tokens, block_size)
    assert blocks * block_size >= tokens > (blocks - 1) * block_size


def test_imports_neither_torch_nor_vllm():
    code = (
        "import sys, vllm_kvevict.rules.rule, vllm_kvevict.rules.step_plan\n"
        "heavy = {name.split('.')[0] for name in sys.modules} & {'torch', 'vllm', 'numpy'}\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_fewer_recent_tokens_than_the_window_observes():
    rule = EvictionRule(16, 32, 64, budget_tokens=200, recent=8)
    assert (rule.store_blocks(500), rule.tail_start(500)) == (12, 480)
    request = EvictionProgress(rule, 500, 500)
    assert request.next_eviction == 500 and request.gain(500) == 18
    assert [request.observes(n) for n in (468, 469)] == [False, True], "32 queries, not 8"
    assert request.evict(500) == (0, 480)
    assert request.next_eviction == 564 and request.gain(564) == 4
    with pytest.raises(ValueError, match="recent must be at least 1"):
        EvictionRule(16, 32, 0, budget_tokens=200, recent=0)
