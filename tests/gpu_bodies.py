"""Runs the bodies of ``tests/gpu`` on a CPU, as a plugin of pytest: ``-p tests.gpu_bodies``.

Tensors on ``cuda`` are CPU tensors, Triton's interpreter runs its kernels, and the CUDA kernels are
those compiled for the host. A body that reaches something that only a device can do (the replay of
a graph, an engine) ends there and passes. Fixtures, imports, signatures and arguments are thereby
those of a run on a GPU. Of each test one case is run, or as many as ``KVEVICT_CASES`` says, and
those of ``ALSO``. Results are compared by shape only, because the interpreter's products in
bfloat16 are wrong; other tests compare them on the CPU.
"""

import contextlib
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests import conftest, ragged
from vllm_kvevict.ops.cuda import extension

CASES = int(os.environ.get("KVEVICT_CASES", "1"))
ALSO = ("ada-probe--128-fp8", "ada-probe with networks--128-fp8")
"""Parts of the names of cases that run in addition: those that failed on a GPU, or never ran."""
LEFT_OUT = ("131072", "long_requests", "many_pieces", "decode_blocks_and_groups", "opcheck")
"""Parts of the names of tests that emulated kernels cannot run, because their tensors are too large
or because they trace CUDA."""


LONGEST_TAIL = 40
"""Tokens after a store in a random batch, at most: the interpreter takes a second for thousands."""
FEWER = {"programs": 8, "requests": 3, "heads": 3, "layers": 1}
"""At most, in checks of Triton kernels: the interpreter takes as long for a program with nothing to
do, and layers are called one after the other."""


class Reached(Exception):
    """A body came to what only a device can do."""


def reached(*_: Any, **__: Any) -> Any:
    raise Reached


def on_cpu(value: Any) -> Any:
    """The same argument, with the CPU in place of a CUDA device."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


class CudaIsCpu(TorchFunctionMode):
    """Creates and moves tensors on the CPU if a CUDA device is named."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)
        return func(*map(on_cpu, args), **named)


class Stream:
    """A stream on which everything has ended."""

    def wait_stream(self, other: "Stream") -> None: ...

    def synchronize(self) -> None: ...


def alike(actual: torch.Tensor, expected: torch.Tensor, **_: Any) -> None:
    assert actual.shape == expected.shape


@contextlib.contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def shorter(random_ragged: Callable[..., ragged.Ragged]) -> Callable[..., ragged.Ragged]:
    """Batches with short tails, otherwise as the test asks."""

    def made(*args: Any, **options: Any) -> ragged.Ragged:
        longest = min(LONGEST_TAIL, options.get("longest_tail", LONGEST_TAIL))
        return random_ragged(*args, **options | dict(longest_tail=longest))

    return made


def fewer(check: Callable[..., None]) -> Callable[..., None]:
    """The check with :data:`FEWER` of everything."""

    def checked(*args: Any, **options: Any) -> None:
        few = {name: min(most, options[name]) for name, most in FEWER.items() if name in options}
        check(*args, **options | few)

    return checked


def pytest_configure(config: pytest.Config) -> None:
    # Before a test module imports them by name.
    ragged.random_ragged = shorter(ragged.random_ragged)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 1
    conftest.no_gpu_reason = lambda: None
    extension.is_built = lambda: True
    from tests import triton_cases

    for name in ("check_decode", "check_unpack"):
        setattr(triton_cases, name, fewer(getattr(triton_cases, name)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        seen[name] += 1
        wanted = seen[name] <= CASES or any(part in item.name for part in ALSO)
        few = wanted and not any(part in name for part in LEFT_OUT)
        (kept if few else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def pretended_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Everything of ``torch.cuda`` that the bodies use, and the emulated kernels."""
    from tests.emulation.build import NAMESPACE, build
    from vllm_kvevict.ops.triton import gather

    # The interpreter takes as long for a program that has nothing to copy as for one that has.
    monkeypatch.setattr(gather, "_PROGRAMS", 2)
    library = build()
    extension.load(library, NAMESPACE, "cpu")
    monkeypatch.setattr(extension, "NAMESPACE", NAMESPACE)
    for name in ("synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("_sleep", "Event"):
        monkeypatch.setattr(torch.cuda, name, reached)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch.testing, "assert_close", alike)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=reached))
    if hasattr(request.module, "engine"):
        monkeypatch.setattr(request.module, "engine", engine_of(request.module.engine))
        monkeypatch.setattr(request.module, "cached_tiny_llama", lambda **_: Path("model"))
    with CudaIsCpu():
        yield


def engine_of(real: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for an engine: it checks its arguments, and what the test replaced."""
    from vllm_kvevict.worker.fused import FusedEvictions

    signature, run = inspect.signature(real), inspect.signature(FusedEvictions.run)

    def engine(*args: Any, **options: Any) -> None:
        signature.bind(*args, **options)
        inspect.signature(FusedEvictions.run).bind(*run.parameters)
        raise Reached

    return engine


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    with contextlib.suppress(Reached):
        return (yield)
    return True  # type: ignore[return-value]
