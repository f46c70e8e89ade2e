"""The compiled extension: is it there, does it load, and which one serves a device."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_kvevict.ops.cuda.fakes import register_fakes

LIBRARY = Path(__file__).parent / "_C.abi3.so"
NAMESPACE = "vllm_kvevict"

_namespaces: dict[str, str] = {}


def is_built() -> bool:
    """Whether this installation has the extension."""
    return LIBRARY.is_file()


def obstacle() -> str | None:
    """Why the extension does not serve this machine, in one sentence; None where it does."""
    if not is_built():
        return (
            "this installation has no CUDA kernels; install the wheel that make wheel builds where "
            "nvcc 13 is (deploy/README.md, CUDA kernels)"
        )
    try:
        _load_installed()
    except OSError as error:
        return f"the CUDA extension does not load ({str(error).splitlines()[0]})"
    ops = getattr(torch.ops, NAMESPACE)
    problem = driver_obstacle(ops.cuda_built(), ops.cuda_driver())
    if problem is None and not ops.cuda_serves():
        return (
            "the CUDA extension was not compiled for this GPU, which needs compute capability 8.0 "
            "or newer (docs/kernels.md, Building)"
        )
    return problem


def driver_obstacle(built: int, driver: int) -> str | None:
    """What is missing where a driver is older than the CUDA runtime in the extension.

    Args:
        built: 1000 * major + 10 * minor.
        driver: The newest version that the driver serves, likewise; 0 for no driver.

    """
    if driver // 1000 >= built // 1000:
        return None
    found = f"{driver // 1000}.{driver % 1000 // 10}" if driver else "none"
    return (
        f"the CUDA extension needs a driver for CUDA {built // 1000}.0 or newer, and this one "
        f"serves up to CUDA {found}; a newer driver, or a build with an older nvcc, runs it"
    )


def load(path: Path, namespace: str, device: str) -> None:
    """Register a library's operations and let it serve a device type.

    Args:
        path: The shared library.
        namespace: Below ``torch.ops``.
        device: "cuda"; tests serve "cpu" with the emulation.

    Raises:
        OSError: The library does not load, for example beside a torch older than 2.11.

    """
    if _namespaces.get(device) == namespace:
        return
    torch.ops.load_library(str(path))
    register_fakes(namespace)
    _namespaces[device] = namespace


def operations(tensor: torch.Tensor) -> Any:
    """The operations that serve the tensor's device.

    Raises:
        RuntimeError: There is no extension for it.

    """
    device = tensor.device.type
    if device == "cuda":
        _load_installed()
    if device not in _namespaces:
        raise RuntimeError(f"the CUDA operations take CUDA tensors, not {device} tensors")
    return getattr(torch.ops, _namespaces[device])


@cache
def _load_installed() -> None:
    if not is_built():
        raise RuntimeError(
            f"vllm-kvevict was installed without its CUDA extension ({LIBRARY.name}): reinstall "
            "it with nvcc and a CUDA build of torch, pip install --no-build-isolation ."
        )
    load(LIBRARY, NAMESPACE, "cuda")
