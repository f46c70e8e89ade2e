"""The CUDA kernels on CPU tensors: csrc/ compiled for the host."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.build import NAMESPACE, build, compiler, set_order
from vllm_kvevict.ops.cuda import extension


@pytest.fixture(scope="session")
def emulation() -> Path:
    if compiler() is None:
        pytest.skip("no g++ to compile the kernels for the host")
    library = build()
    extension.load(library, NAMESPACE, "cpu")
    return library


@pytest.fixture(params=[pytest.param("backwards", marks=pytest.mark.nightly), "shuffled"])
def emulated(request: pytest.FixtureRequest, emulation: Path) -> Iterator[None]:
    """Blocks, and their threads between barriers, run in another order: it may not matter."""
    set_order(emulation, 1 if request.param == "backwards" else 20)
    yield
    set_order(emulation, 0)
