"""Python plans with the sizes that the kernels were compiled with."""

import re
from pathlib import Path

from vllm_kvevict.ops.cuda import limits
from vllm_kvevict.ops.cuda.defensive import NEIGHBOURS
from vllm_kvevict.ops.torch.defensive import AFTER, BEFORE
from vllm_kvevict.policies.probe import LEAST

HEADER = (Path(__file__).parents[4] / "csrc" / "sizes.h").read_text()


def listed(name: str) -> tuple[int, ...]:
    line = next(line for line in HEADER.splitlines() if line.startswith(f"#define {name}"))
    return tuple(map(int, re.findall(r"USE\((\d+)\)", line)))


def constant(name: str) -> int:
    found = re.search(rf"constexpr \w+ {name} = (\d+);", HEADER)
    assert found
    return int(found[1])


def test_limits():
    assert float(re.search(r"kLeastShare = (\S+)f;", HEADER)[1]) == LEAST
    assert listed("KVEVICT_HEAD_SIZES") == limits.HEAD_SIZES
    assert listed("KVEVICT_BLOCK_SIZES") == limits.BLOCK_SIZES
    assert constant("kMaxLayers") == limits.MAX_LAYERS
    assert constant("kChunk") == limits.CHUNK
    assert constant("kNeighbours") == NEIGHBOURS
    assert (constant("kBefore"), constant("kAfter")) == (BEFORE, AFTER)
    for size in limits.HEAD_SIZES:
        blocks = 2 if size <= constant("kWideHead") else 1
        assert constant("kScoreWarps") * 16 * blocks == limits.rows_at_once(size)
