"""The compiled CUDA extension: its availability and its operations by device type."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_kvevict.ops.cuda.fakes import register_fakes

LIBRARY = Path(__file__).parent / "_C.abi3.so"
NAMESPACE = "vllm_kvevict"

_namespaces: dict[str, str] = {}


def is_built() -> bool:
    """Return True if this installation has the extension."""
    return LIBRARY.is_file()


def obstacle() -> str | None:
    """Return the reason why the extension does not run on this machine; None if it does."""
    if not is_built():
        return (
            "this installation has no CUDA kernels (in a clone, on a machine with nvcc, "
            "KVEVICT_CUDA=1 pip install --no-deps . builds and installs them, and make wheel "
            "builds a wheel with them)"
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
            "or newer (docs/dev/kernels.md, Building)"
        )
    return problem


def driver_obstacle(built: int, driver: int) -> str | None:
    """Return the reason why the driver does not run the extension; None if it does.

    Args:
        built: CUDA version of the extension, 1000 * major + 10 * minor.
        driver: Newest CUDA version that the driver supports, in the same form; 0 for no driver.

    """
    if driver // 1000 >= built // 1000:
        return None
    version = f"{driver // 1000}.{driver % 1000 // 10}"
    found = f"this one supports up to CUDA {version}" if driver else "there is none"
    return (
        f"the CUDA extension needs a driver for CUDA {built // 1000}.0 or newer, but {found}; "
        "install a newer driver, or build with an older nvcc"
    )


def load(path: Path, namespace: str, device: str) -> None:
    """Load a library and register its operations for a device type.

    Args:
        path: The shared library.
        namespace: Namespace in ``torch.ops``.
        device: "cuda"; tests register the emulation for "cpu".

    Raises:
        OSError: The library does not load, for example with a torch older than 2.11.

    """
    if _namespaces.get(device) == namespace:
        return
    torch.ops.load_library(str(path))
    register_fakes(namespace)
    _namespaces[device] = namespace


def operations(tensor: torch.Tensor) -> Any:
    """Return the operations for the tensor's device.

    Raises:
        RuntimeError: No extension is loaded for the device.

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
            "it with nvcc and a CUDA build of torch, KVEVICT_CUDA=1 pip install --no-deps ."
        )
    load(LIBRARY, NAMESPACE, "cuda")
