"""What a test needs of the installed version of vLLM, without an import of it."""

from importlib.metadata import version

import pytest
from packaging.version import Version

installed = Version(version("vllm")).release[:2]
"""Of vLLM, as ``(0, 32)``."""

CLI_ARGS = f"vllm.entrypoints.{'launchers' if installed < (0, 33) else 'common'}.cli_args"
PLANNING = f"vllm.v1.core.kv_cache_{'utils' if installed < (0, 33) else 'planning'}"
"""Modules of names that 0.33 moved."""

MEDUSA = pytest.mark.skipif(installed >= (0, 33), reason="vLLM 0.33 has no Medusa")
