"""What a store is outside the KV cache does not depend on where and how it lay inside."""

import errno
import gc
import mmap
import weakref

import pytest
import torch

from tests.token_formats import FORMATS
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import GroupEviction, StepPlan, StoreBlocks, StoreCopy
from vllm_kvevict.stores.content import StoreContent, WindowGroup
from vllm_kvevict.stores.files import StoreFiles
from vllm_kvevict.stores.host import HostStores
from vllm_kvevict.worker.shared_stores import SharedStores

HEADS, BLOCK, SIZE, BLOCKS = 2, 8, 4, 12
NAMES = ("a", "b")


def layout(seed: int) -> PageLayout:
    """Offsets of every element of a page in some order."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randperm(2 * BLOCK * SIZE, generator=generator).view(2, BLOCK, SIZE)
    return PageLayout(offsets[0], offsets[1])


class Rank:
    """The device state of one server, filled at random."""

    def __init__(
        self, seed: int, dtype: torch.dtype, values: bool, token_format: TokenFormat = AS_CACHED
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = BLOCKS * HEADS, 2 * BLOCK * SIZE
        self.caches = {
            name: LayerCache(
                torch.rand(shape, generator=generator).to(dtype),
                layout(seed + index),
                1.0,
                0.0,
                token_format=token_format,
            )
            for index, name in enumerate(NAMES)
        }
        rule = EvictionRule(block_size=BLOCK, window=8, interval=16, budget_tokens=64)
        self.state = GroupState(
            0, NAMES, rule, HEADS, 4, 512, torch.device("cpu"), num_slots=BLOCKS
        )
        self.state._kept.random_(0, 5, generator=generator)
        self.values = None
        if values:
            self.values = TokenStats(self.caches, dict.fromkeys(NAMES, HEADS), 2)
            for name in NAMES:
                self.values.layer(name).uniform_(generator=generator)
        self.content = StoreContent({0: self.state}, self.caches, self.values)

    def holds(self, blocks: StoreBlocks) -> list[torch.Tensor]:
        """Everything that stands in some blocks, as their layers mean it."""
        stored, tail = (
            torch.tensor([b * HEADS + h for b in some for h in range(HEADS)], dtype=torch.int64)
            for some in (blocks.store, blocks.tail)
        )
        found = [self.state.split_kept(blocks.store[0])] if blocks.store else []
        for name, cache in self.caches.items():
            found += [*cache.stored_tokens(stored)]
            found += [cache.keys(tail), cache.values(tail)]
            if self.values is not None:
                found.append(self.values.layer(name)[torch.cat([stored, tail])])
        return [tensor.clone() for tensor in found]


OLD, NEW = StoreBlocks(0, [3, 1], [7, 2]), StoreBlocks(0, [9, 4], [0, 11])


@pytest.mark.parametrize("values", [False, True], ids=["", "values"])
@pytest.mark.parametrize(
    "dtype, name",
    [(torch.float32, "as cached"), (torch.bfloat16, "as cached"), (torch.float32, "bytes")],
)
def test_another_server_reads_it_whatever_its_kernel(dtype, name, values):
    here, there = (Rank(seed, dtype, values, FORMATS[name]) for seed in (1, 5))
    expected, others = here.holds(OLD), there.holds(OLD)
    there.content.write([NEW], dict(here.content.read([OLD])))
    for found, one in zip(there.holds(NEW), expected, strict=True):
        assert torch.equal(found, one)
    for found, one in zip(there.holds(OLD), others, strict=True):
        assert torch.equal(found, one), "nothing else is written to"


def test_a_group_that_had_nothing_to_evict_has_no_split():
    rank, tail = Rank(1, torch.float32, False), StoreBlocks(0, [], [7, 2])
    assert set(dict(rank.content.read([tail]))) == {"0.0.pages", "0.1.pages"}


@pytest.mark.parametrize("name", FORMATS)
def test_layers_with_a_window_are_read_as_they_are(name):
    """They have no split, no statistics and nothing in the format of stored tokens."""
    here, there = (Rank(seed, torch.float32, True, FORMATS[name]) for seed in (1, 5))
    old, new = StoreBlocks(3, [], [7, 2]), StoreBlocks(3, [], [0, 11])
    others = there.holds(OLD)
    for rank in (here, there):
        rank.content = StoreContent({}, rank.caches, rank.values, {3: WindowGroup(NAMES, HEADS)})
    tensors = dict(here.content.read([old]))
    assert set(tensors) == {"3.0.pages", "3.1.pages"}
    there.content.write([new], tensors)
    to, of = (
        torch.tensor([block * HEADS + head for block in one.tail for head in range(HEADS)])
        for one in (new, old)
    )
    for layer in NAMES:
        mine, theirs = there.caches[layer], here.caches[layer]
        assert torch.equal(mine.keys(to), theirs.keys(of))
        assert torch.equal(mine.values(to), theirs.values(of))
    for found, one in zip(there.holds(OLD), others, strict=True):
        assert torch.equal(found, one), "nothing else is written to"


def test_host_memory_holds_what_it_is_told_to(tmp_path):
    rank, files = Rank(1, torch.float32, True), StoreFiles(tmp_path, {})
    host = HostStores(rank.content, files, rank=0)
    expected = rank.holds(OLD)
    host.save([], [StoreCopy("x", [OLD], keep=True), StoreCopy("y", [OLD], keep=False, write=True)])
    for cache in rank.caches.values():
        cache.pages[torch.tensor([b * HEADS for b in OLD.blocks])] = 0
    host.flush()
    assert files.path("y", 0).exists() and not files.path("x", 0).exists()
    host.load([StoreCopy("x", [NEW], keep=True)])
    assert all(map(torch.equal, rank.holds(NEW), expected))
    host.save(["x"], [])
    host.load([StoreCopy("x", [NEW], keep=True)])
    assert host.news().lost == ["x"]
    without = HostStores(rank.content, None, rank=0)
    without.load([StoreCopy("x", [NEW], keep=True)])
    assert without.news().lost == ["x"] and without.news() is None
    content = files.read("y", 0, 10**6)
    host.load([StoreCopy("y", [OLD], keep=True, payload=[content.handle])])
    del content
    assert all(map(torch.equal, rank.holds(OLD), expected))
    host.load([StoreCopy("y", [NEW], keep=True)])
    assert all(map(torch.equal, rank.holds(NEW), expected))


def no_descriptor(*_, **__):
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("fault", ["file gone", "file changed", "no descriptors", "no mapping"])
def test_a_store_that_cannot_be_loaded_is_reported(tmp_path, monkeypatch, fault):
    """The rank is on another host, or the process has no descriptor or memory left."""
    rank, files = Rank(1, torch.float32, True), StoreFiles(tmp_path, {})
    host = HostStores(rank.content, files, rank=0)
    host.save([], [StoreCopy("y", [OLD], keep=False, write=True)])
    host.flush()
    content, before = files.read("y", 0, 10**6), rank.holds(NEW)
    assert host.news().written == {"y": True}
    if fault == "no descriptors":
        monkeypatch.setattr("os.open", no_descriptor)
    elif fault == "no mapping":
        monkeypatch.setattr("mmap.mmap", no_descriptor)
    else:
        monkeypatch.setattr("vllm_kvevict.stores.host.open_region", lambda handle: None)
    if fault == "file gone":
        files.remove("y", 1)
    elif fault == "file changed":
        files.path("y", 0).write_bytes(b"another file")
    host.load([StoreCopy("y", [NEW], keep=True, payload=[content.handle])])
    news = host.news()
    assert news.lost == ["y"] and host.news() is None
    assert all(map(torch.equal, rank.holds(NEW), before))


def test_a_rank_that_cannot_map_a_region_reads_the_file(tmp_path, monkeypatch):
    rank, files = Rank(1, torch.float32, True), StoreFiles(tmp_path, {})
    host = HostStores(rank.content, files, rank=0)
    expected = rank.holds(OLD)
    host.save([], [StoreCopy("y", [OLD], keep=False, write=True)])
    host.flush()
    content, mapped, refused = files.read("y", 0, 10**6), mmap.mmap, []

    def once(*args, **options):
        if refused:
            return mapped(*args, **options)
        refused.append(args)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", once)
    host.load([StoreCopy("y", [NEW], keep=True, payload=[content.handle])])
    assert refused and not host.news().lost
    assert all(map(torch.equal, rank.holds(NEW), expected))


def test_a_store_that_another_rank_cannot_load_is_not_kept(tmp_path):
    rank, files = Rank(1, torch.float32, True), StoreFiles(tmp_path, {})
    asked = []

    def everywhere(loaded):
        asked.append(loaded)
        return [True, False]

    host = HostStores(rank.content, files, rank=0, everywhere=everywhere)
    host.save([], [StoreCopy(name, [OLD], keep=True) for name in "xy"])
    host.load([StoreCopy(name, [NEW], keep=True) for name in "xy"])
    assert asked == [[True, True]] and host.news().lost == ["y"]
    host.load([])
    assert len(asked) == 1, "ranks exchange nothing for a step without loads"
    host._everywhere = lambda loaded: loaded
    host.load([StoreCopy(name, [NEW], keep=True) for name in "xy"])
    assert host.news().lost == ["y"]


@pytest.mark.parametrize("folder", [True, False], ids=["files", ""])
def test_no_more_stores_are_kept_without_memory(tmp_path, monkeypatch, folder):
    """The engine ended, hours after its start."""
    rank, files = Rank(1, torch.float32, True), StoreFiles(tmp_path, {}) if folder else None
    host = HostStores(rank.content, files, rank=0)
    expected = rank.holds(OLD)
    host.save([], [StoreCopy("x", [OLD], keep=True)])
    read = rank.content.read

    def full(groups):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")

    monkeypatch.setattr(rank.content, "read", full)
    host.save([], [StoreCopy("y", [OLD], keep=True, write=folder)])
    news = host.news()
    assert news.full and news.written == ({"y": False} if folder else {})
    monkeypatch.setattr(rank.content, "read", read)
    host.save([], [StoreCopy("z", [OLD], keep=True)])
    host.load([StoreCopy(name, [NEW], keep=True) for name in "yz"])
    assert host.news().lost == ["y", "z"] and host.news() is None
    host.load([StoreCopy("x", [NEW], keep=True)])
    assert all(map(torch.equal, rank.holds(NEW), expected)), "what was kept stays"


def test_a_server_that_sleeps_keeps_no_host_memory():
    """A trainer that lets vLLM sleep uses the memory; a store is lost where nobody reset it."""
    rank = Rank(1, torch.float32, True)
    host = HostStores(rank.content, None, rank=0)
    host.save([], [StoreCopy("x", [OLD], keep=True)])
    stores = SharedStores({}, lambda request: 0)
    stores.clear()
    stores.tiers = host
    alive = weakref.ref(host._kept["x"]["0.0.pages"])
    stores.clear()
    gc.collect()
    assert alive() is None
    host.load([StoreCopy("x", [NEW], keep=True)])
    assert host.news().lost == ["x"]


def test_what_a_failed_policy_kept_is_neither_kept_nor_written(tmp_path):
    rank, files = Rank(1, torch.float32, True), StoreFiles(tmp_path, {})
    stores = SharedStores({}, lambda request: 0)
    stores.tiers = HostStores(rank.content, files, rank=0)
    group = GroupEviction(0, 0, 8, [], [], OLD.store, 0)
    for failed in (True, False):
        stores.chosen(group, failed)
        plan = StepPlan(saves=[StoreCopy("x", [OLD], keep=True, write=True)])
        stores.begin_step(plan)
        stores.end_step([])
        stores.tiers.flush()
        assert files.path("x", 0).exists() is not failed
        stores.tiers.load([StoreCopy("x", [NEW], keep=True)])
        assert stores.tiers.news().lost == (["x"] if failed else [])
