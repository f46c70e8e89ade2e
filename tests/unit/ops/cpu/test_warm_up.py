"""The warm-up compiles all that evictions run: in a process that has compiled nothing yet."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from numba.core.dispatcher import Dispatcher
from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.cpu import pages, peaks, probe, select
from vllm_kvevict.ops.cpu.warm_up import warm_up
from vllm_kvevict.ops.places import Places
from vllm_kvevict.ops.reference.probe import Rotation

def compiled():
    found = {
        (module.__name__, name, str(one))
        for module in (pages, peaks, probe, select)
        for name, function in vars(module).items() if isinstance(function, Dispatcher)
        for one in function.signatures
    }
    assert len({name for _, name, _ in found}) >= 8, found
    return found

dtype = getattr(torch, sys.argv[1])
warm_up(dtype)
before = compiled()
cache, index = torch.randn(6, 512).to(dtype), torch.tensor([[0, 1], [2, 3]])
source = torch.tensor([0, 1, 2, 3] * 2), torch.tensor([0, 1, 2, 3] * 2), torch.tensor([4, 5])
by_token, by_element = torch.arange(32).view(4, 8), torch.arange(32).view(8, 4).T
odd, anyhow = by_token[:, :7], by_token[:, torch.randperm(8)]
weights, ages = torch.randn(2, 2, 10), (torch.randn(8, 2), torch.randn(2, 1, 2))
for offsets in (by_token, by_element, odd, anyhow):
    places, size = Places.of(offsets), offsets.shape[1]
    pages.copy_tokens(cache, *source, places)
    pages.read_floats(cache, index, places)
    pages.norms(cache, index, places)
    for rotation in (None, Rotation(torch.randn(8, 2), torch.randn(8, 2))):
        for prose in (None, ages):
            probe.key_scores(cache, index, places, rotation, weights[..., -size - 2:], prose)
scene = dict(window=2, num_candidates=6, scale=0.5)
valid = torch.ones(2, 8, dtype=torch.bool)
for more in (dict(), dict(sinks=torch.randn(2, 3)), dict(softcap=2.0)):
    seen = Candidates(torch.randn(2, 8, 4), valid, torch.randn(2, 3, 2, 4), **scene, **more)
    peaks.window_peaks(seen, kernel=5, reach=3)
select.select_tokens(torch.randn(2, 2, 8), torch.tensor([[1, 1], [2, 0]]), block_size=4)
late = compiled() - before
assert not late, late
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_eviction_waits_for_a_compiler(dtype, threads):
    env = os.environ | dict(OMP_NUM_THREADS=str(threads), NUMBA_NUM_THREADS="2")
    call = [sys.executable, "-c", SCRIPT, dtype]
    done = subprocess.run(call, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
