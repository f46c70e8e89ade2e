"""The versions of vLLM that the plugin supports."""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_kvevict import __version__

SUPPORTED_VLLM = ">=0.32,<0.34"
"""Supported range, as a PEP 440 specifier; the ``vllm`` extra of the package repeats it."""

TESTED_VLLM = "==0.32.*"
"""The part of the supported range on which the whole test suite runs."""


def check_vllm(version: str) -> str | None:
    """Say why this vLLM cannot be used.

    Local builds (``0.32.0+cpu``) count as their release, development and pre-release builds
    as versions between two releases (``0.33.0rc1`` is inside, ``0.34.0.dev5`` outside).

    Args:
        version: What ``vllm.__version__`` says.

    Returns:
        One sentence with the supported and the given version, or None where it is supported.

    """
    try:
        if SpecifierSet(SUPPORTED_VLLM).contains(Version(version), prereleases=True):
            return None
    except InvalidVersion:
        pass
    return (
        f"KV eviction (vllm-kvevict {__version__}) needs vLLM {SUPPORTED_VLLM}, "
        f"but this is vLLM {version}"
    )


def untested(version: str) -> str | None:
    """Return a warning for a supported vLLM that is not fully tested, None for a tested one.

    Args:
        version: ``vllm.__version__``, which :func:`check_vllm` accepted.

    """
    if SpecifierSet(TESTED_VLLM).contains(Version(version), prereleases=True):
        return None
    return (
        f"KV eviction (vllm-kvevict {__version__}) supports vLLM {SUPPORTED_VLLM} and is fully "
        f"tested with {TESTED_VLLM}; of vLLM {version}, only the Python code was tested, on CPUs"
    )
