"""Work that threads share is that of one; in processes of their own, which have several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EVERY_OPERATION = """
import torch
from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.cpu import pages, peaks, probe, select
from vllm_kvevict.ops.places import Places
from vllm_kvevict.ops.reference.probe import Rotation

torch.manual_seed(0)
block_size, size, heads, count = 4, 8, 3, 70
cache = torch.randn(2 * heads * count, 2 * block_size * size)
index = torch.randperm(len(cache))[: heads * count].view(heads, count)
rotation = Rotation(torch.randn(count * block_size, 3), torch.randn(count * block_size, 3))
weights, prose = torch.randn(heads, 2, 10), (torch.randn(280, 2), torch.randn(heads, 1, 2))
targets = torch.randperm(len(cache))[:41]
source = torch.randint(len(cache), (164,)), torch.randint(block_size, (164,)), targets
by_token, by_element = torch.arange(32).view(4, 8), torch.arange(32).view(8, 4).T
many = torch.randn(5, heads, 280).round(decimals=1)
kept = torch.tensor([[9, 0, 12], [7, 7, 7], [1, 19, 1], [0, 21, 0], [8, 6, 7]])
valid = torch.ones(heads, 50, dtype=torch.bool)
scene = dict(window=8, num_candidates=40, scale=0.3)
seen = Candidates(torch.randn(heads, 50, size), valid, torch.randn(heads, 2, 8, size), **scene)

def everything():
    found = []
    for offsets in (by_token, by_token[:, :7], by_element):
        mine = cache.clone()
        pages.copy_tokens(mine, *source, Places.of(offsets))
        found.append(mine)
        found.append(pages.read_floats(cache, index, Places.of(offsets)))
        found.append(pages.norms(cache, index, Places.of(offsets)))
    found.append(probe.key_scores(cache, index, Places.of(by_element), rotation, weights, prose))
    found.append(select.select_tokens(many, kept, block_size))
    found.append(peaks.window_peaks(seen, 5, 7))
    return found
"""

SHARED = """
import numba
import numpy as np
from vllm_kvevict.ops.cpu.compiled import exact, shared
from vllm_kvevict.ops.cpu.team import share

@exact
def alone(first, end, log):
    for i in range(first, end):
        log[0, i] += 1
        log[1, i] = first

@shared
def together(parts, pieces, log):
    for part in numba.prange(parts):
        alone(part * pieces // parts, (part + 1) * pieces // parts, log)

def parts_of(pieces):
    log = np.zeros((2, pieces), np.int64)
    share(together, alone, pieces, log)
    assert (log[0] == 1).all(), log
    return len(set(log[1]))
"""


def run(script: str, threads: int, **more: str) -> str:
    # NUMBA_NUM_THREADS stands for the cores that a machine of tests may not have.
    env = os.environ | dict(NUMBA_NUM_THREADS="4") | more
    begin = f"import torch\ntorch.set_num_threads({threads})\n"
    call = [sys.executable, "-c", begin + script]
    done = subprocess.run(call, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("threads", [2, 3])
def test_every_operation_finds_what_one_thread_finds(threads):
    script = f"""{EVERY_OPERATION}
import numba
shared = everything()
assert torch.get_num_threads() == numba.get_num_threads() == {threads}
torch.set_num_threads(1)
for mine, theirs in zip(shared, everything(), strict=True):
    assert torch.equal(mine, theirs)
"""
    run(script, threads)


@pytest.mark.parametrize(
    ("threads", "pieces", "parts"), [(1, 9, 1), (3, 9, 3), (3, 2, 2), (3, 1, 1)]
)
def test_parts(threads, pieces, parts):
    assert int(run(f"{SHARED}\nprint(parts_of({pieces}))", threads)) == parts


def test_threads_of_pytorch_stay_as_many():
    script = f"{SHARED}\nparts_of(9)\nassert torch.get_num_threads() == 2"
    run(script, 2)


def test_a_process_that_is_forked_works_alone():
    """Numba ends one that uses the threads of the process before it."""
    script = f"""{SHARED}
import os
assert parts_of(9) == 2
child = os.fork()
if child == 0:
    os._exit(parts_of(9))
assert os.waitpid(child, 0)[1] == 1 << 8
"""
    run(script, 2)


@pytest.mark.parametrize("layer", ["workqueue", "tbb"])
def test_threads_of_another_kind_are_not_used(layer):
    """They would wait for cores on which OpenMP's spin; TBB may not even be installed."""
    script = f"{SHARED}\nprint(parts_of(9))"
    assert int(run(script, 2, NUMBA_THREADING_LAYER=layer)) == 1


def test_another_thread_shares_too():
    script = f"""{SHARED}
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    print(pool.submit(lambda: (torch.set_num_threads(2), parts_of(9))[1]).result())
"""
    assert int(run(script, 2)) == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_worker_as_vllm_starts_it():
    """Its first thread is bound to one core from the beginning."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    bound = dict(OMP_NUM_THREADS="2", GOMP_CPU_AFFINITY=f"{first} {second}")
    openmp = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    script = f"{SHARED}\nprint(parts_of(9), torch.get_num_threads(), os.sched_getaffinity(0))"
    found = run("import os\n" + script, 2, **bound, LD_PRELOAD=str(openmp))
    assert found.split(maxsplit=2) == ["2", "2", f"{{{first}}}\n"]
