"""What a test needs of the installed version of vLLM, without an import of it."""

from importlib.metadata import version

import pytest
from packaging.version import Version

installed = Version(version("vllm")).release[:2]
"""Of vLLM, as ``(0, 32)``."""

MEDUSA = pytest.mark.skipif(installed >= (0, 33), reason="vLLM 0.33 has no Medusa")
