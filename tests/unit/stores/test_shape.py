"""Sizes of stores are those of what is copied, and what comes from outside is checked."""

from dataclasses import replace

import pytest
import torch

from tests.token_formats import FORMATS
from tests.unit.stores.test_content import BLOCK, HEADS, NAMES, SIZE, Rank
from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import StoreBlocks
from vllm_kvevict.stores.key import ShareKey
from vllm_kvevict.stores.shape import GroupShape, StoreSizes, group_shapes

RULE = EvictionRule(block_size=BLOCK, window=8, interval=16, budget_tokens=64)


def sizes(channels: int = 2, name: str = "as cached") -> StoreSizes:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    full = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32
    )
    return StoreSizes(
        {0: EvictableAttentionSpec.from_spec(full, RULE)}, {0: len(NAMES)}, channels,
        token_format=FORMATS[name],
    )  # fmt: skip


def store(channels: bool = True, name: str = "as cached"):
    rank = Rank(2, torch.float32, channels, FORMATS[name])
    blocks = StoreBlocks(0, [3, 1], [7])
    rank.state._kept[:, 3] = torch.tensor([0, 3, 4], dtype=torch.int32)
    return GroupShape(64, 2, 1), dict(rank.content.read([blocks]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [0, 2])
def test_sizes_are_those_of_the_tensors(channels, name):
    shape, tensors = store(bool(channels), name)
    sizes(channels, name).check({0: shape}, tensors)
    each = [t.nbytes for t in tensors.values()]
    assert sizes(channels, name).num_bytes({0: shape}) == sum(each)
    assert sizes(channels, name).host_bytes({0: shape}) == sum(each)
    # A whole power of two is no less than what is in it, and no twice of it.
    pinned = replace(sizes(channels, name), pinned=True)
    assert sum(each) <= pinned.host_bytes({0: shape}) < 2 * sum(each)
    assert pinned.host_bytes({}) == 0


def key(point: int, blocks: int) -> ShareKey:
    return ShareKey(b"", (), None, point, "snapkv", 0, ((0, blocks),))


@pytest.mark.parametrize("recent", [None, 3], ids=["window", "recent"])
@pytest.mark.parametrize("point", [100, 104, 105])
def test_shapes_follow_the_requests_rule(point, recent):
    """A request may choose a policy that protects fewer tokens than the server's."""
    rules = {0: replace(RULE, recent=recent)}
    tail_start = (point - (recent or 8)) // BLOCK * BLOCK
    blocks = -(-point // BLOCK)
    assert group_shapes(key(point, 7), rules)[0] == GroupShape(
        tail_start, 7, blocks - tail_start // BLOCK
    )
    assert group_shapes(key(point, 0), rules)[0] == GroupShape(0, 0, blocks)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("point", [100, 104, 105])
def test_a_group_with_a_window_has_what_the_next_token_reads(point, name):
    """A window of 20 tokens, the next one included; its blocks are those of the cache."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    sliding = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32, sliding_window=20
    )
    plain = sizes(2, name)
    both = replace(
        plain,
        specs={**plain.specs, 1: sliding},
        layers={**plain.layers, 1: 3},
        windows={1: lambda n: max(0, n - 19)},
    )
    shapes = both.shapes(key(point, 2), {0: RULE})
    read = {position // BLOCK for position in range(point - 19, point)}
    assert shapes == group_shapes(key(point, 2), {0: RULE}) | {
        1: GroupShape(min(read) * BLOCK, 0, len(read))
    }
    page = 2 * BLOCK * SIZE * 4
    own = 3 * len(read) * HEADS * page
    assert both.num_bytes(shapes) == plain.num_bytes({0: shapes[0]}) + own


def broken(tensors):
    split = tensors["0.split"]
    yield {name: tensor for name, tensor in tensors.items() if name != "0.1.pages"}
    yield tensors | {"0.2.pages": tensors["0.1.pages"]}
    yield tensors | {"0.1.pages": tensors["0.1.pages"][1:]}
    yield tensors | {"0.1.values": tensors["0.1.values"].double()}
    yield tensors | {"0.split": split + 1}
    yield tensors | {"0.split": torch.tensor([[0, 9, 4]] * 2, dtype=torch.int32)}
    yield tensors | {"0.split": torch.tensor([[0, 2, 5]] * 2, dtype=torch.int32)}


@pytest.mark.parametrize("number", range(7))
def test_what_is_no_such_store_is_refused(number):
    shape, tensors = store()
    with pytest.raises(ValueError):
        sizes().check({0: shape}, list(broken(tensors))[number])
