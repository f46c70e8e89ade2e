"""Builds the CUDA extension where it can be built; everything else is in pyproject.toml.

KVEVICT_CUDA=1 demands it (an error says what is missing), KVEVICT_CUDA=0 leaves it out.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))

from csrc.build import architectures, compile_extension, find_nvcc

MODULE = "vllm_kvevict.ops.cuda._C"


class BuildWithNvcc(build_ext):
    """Compiles with nvcc rather than with the host compiler."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        assert nvcc is not None
        archs = architectures()
        print(f"vllm-kvevict: compiling the CUDA extension for {', '.join(archs)}", file=sys.stderr)
        target = Path(self.get_ext_fullpath(ext.name))
        compile_extension(nvcc, target, Path(self.build_temp) / "csrc", archs)


def reason_to_skip(demanded: bool) -> str | None:
    """Why the extension is not built, or None."""
    if os.environ.get("KVEVICT_CUDA") == "0":
        return "KVEVICT_CUDA=0"
    if find_nvcc() is None:
        return "nvcc was not found"
    try:
        import torch
    except ImportError:
        return "torch does not import here (try pip install --no-build-isolation)"
    if torch.version.cuda is None and not demanded:
        return f"torch {torch.__version__} is built without CUDA"
    return None


def extensions() -> list[Extension]:
    demanded = os.environ.get("KVEVICT_CUDA") == "1"
    reason = reason_to_skip(demanded)
    if reason is None:
        return [Extension(MODULE, sources=[], py_limited_api=True)]
    if demanded:
        raise SystemExit(f"vllm-kvevict: KVEVICT_CUDA=1, but {reason}")
    print(f"vllm-kvevict: the CUDA extension is not built: {reason}", file=sys.stderr)
    return []


found = extensions()
setup(
    ext_modules=found,
    cmdclass={"build_ext": BuildWithNvcc},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if found else {},
)
