"""Builds the CUDA extension where it can be built; everything else is in pyproject.toml.

KVEVICT_CUDA=1 demands it (an error says what is missing), KVEVICT_CUDA=0 leaves it out.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))

from csrc.build import (
    OLDEST_NVCC,
    architectures,
    compile_extension,
    find_nvcc,
    find_torch,
    nvcc_version,
    torch_versions,
)

MODULE = "vllm_kvevict.ops.cuda._C"


class BuildWithNvcc(build_ext):
    """Compiles with nvcc rather than with the host compiler."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        assert nvcc is not None
        try:
            archs = architectures(nvcc)
        except ValueError as error:
            raise SystemExit(f"vllm-kvevict: {error}") from None
        said = f"vllm-kvevict: compiling the CUDA extension for {', '.join(archs)} with {nvcc}"
        print(said, file=sys.stderr)
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            compile_extension(nvcc, target, Path(self.build_temp) / "csrc", archs)
        except subprocess.CalledProcessError:
            raise SystemExit(
                f"vllm-kvevict: {nvcc} failed, as shown above; KVEVICT_CUDA_ARCHS=90 compiles for "
                f"one kind of GPU ({', '.join(archs)} were asked for), CUDA_HOME names another "
                "compiler, and KVEVICT_CUDA=0 installs without the CUDA kernels"
            ) from None


def reason_to_skip(demanded: bool) -> str | None:
    """Why the extension is not built, or None."""
    if os.environ.get("KVEVICT_CUDA") == "0":
        return "KVEVICT_CUDA=0"
    nvcc, torch = find_nvcc(), find_torch()
    if nvcc is None:
        return "nvcc was not found (set CUDA_HOME to a CUDA toolkit)"
    try:
        version = nvcc_version(nvcc)
    except ValueError as error:
        return str(error)
    if version < OLDEST_NVCC:
        return (
            f"{nvcc} is of CUDA {version[0]}.{version[1]}, and 12.0 is the oldest that compiles it"
        )
    if torch is None:
        return "torch was not found (try pip install --no-build-isolation)"
    name, cuda = torch_versions(torch)
    if cuda is None and not demanded:
        return f"torch {name} is built without CUDA"
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
