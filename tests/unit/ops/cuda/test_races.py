"""Every kernel under ThreadSanitizer, AddressSanitizer and UBSan; and that a race would be seen.

Threads of a block are fibers that ThreadSanitizer knows: only ``__syncthreads`` and ``__syncwarp``
order their memory, and nothing orders blocks.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests.emulation.build import (
    ASAN_OPTIONS,
    build_races,
    check_races,
    compiler,
    sanitizers_run,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        compiler() is None or shutil.which("setarch") is None, reason="needs g++ and setarch"
    ),
]

EVICTION = "bfloat16"
OTHERS = ["choose", "fp8", "float32", "chunks", "4 bits", "8 bits"]
SCENES = [EVICTION, *OTHERS]
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": ASAN_OPTIONS}


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    # ThreadSanitizer wants its addresses where no randomisation puts others.
    command = ["setarch", "-R", str(program), *map(str, arguments)]
    environment = os.environ | OPTIONS
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@cache
def undisturbed(scene: str) -> list[str]:
    """Digest of the results, then the barriers, atomics and waits that the scene passes."""
    done = run(build_races("thread"), scene, 0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_scenes_compile():
    """They name members of the kernels' structures, and run at night only."""
    check_races()


@pytest.mark.nightly
@pytest.mark.parametrize("scene", SCENES)
def test_no_race(scene):
    """In any order of blocks and threads, and the results are the same."""
    done = run(build_races("thread"), scene, 7)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == undisturbed(scene)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("scene", SCENES)
def test_no_bad_address_and_nothing_undefined(scene):
    if reason := sanitizers_run("address,undefined"):
        pytest.skip(f"sanitizers do not run here: {reason}")
    done = run(build_races("address,undefined"), scene, 0)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_without_any_barrier_atomic_or_wait_it_would_be_seen():
    """Each is left out once: a race is reported, the emulation refuses, or results differ."""
    program = build_races("thread")
    cases = {site: scene for scene in (EVICTION, "choose") for site in undisturbed(scene)[1:]}
    assert len(cases) > 20

    def seen(case: tuple[str, str]) -> bool:
        site, scene = case
        done = run(program, scene, 3, *site.split())
        return done.returncode != 0 or done.stdout.splitlines()[0] != undisturbed(scene)[0]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(seen, cases.items()))
    assert all(found), [site for site, one in zip(cases, found, strict=True) if not one]
