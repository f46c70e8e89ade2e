"""Differences between the supported versions of vLLM, one file per version."""

from importlib import import_module
from typing import Any

from packaging.version import Version


def shim() -> Any:
    """The file for the installed vLLM, ``vllm_0_32`` for 0.32.0."""
    import vllm

    major, minor = Version(vllm.__version__).release[:2]
    return import_module(f"{__name__}.vllm_{major}_{minor}")
