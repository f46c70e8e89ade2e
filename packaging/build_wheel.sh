#!/usr/bin/env bash
# Makes dist/vllm_kvevict-*-manylinux_*.whl with the CUDA extension for all supported GPUs. Needs
# nvcc 13 and torch (its CPU build is enough); no GPU. The tag names the glibc that the result needs:
# build on an older Linux for an older one.
#   KVEVICT_CUDA_ARCHS=90   for some GPUs only
#   KVEVICT_JOBS=1          files compiled at once
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$ROOT/packaging/dist_env.sh"
cd "$ROOT"

make_dist_env
rm -rf build dist
built="$(mktemp -d)"
# Its metadata would hide the installed one from Python started here, once it is out of date.
trap 'rm -rf "$built" vllm_kvevict.egg-info' EXIT
KVEVICT_CUDA=1 "${PYTHON:-.venv/bin/python}" -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$built" .
# torch is the user's own: it is named here and not copied in.
PATH="$VENV/bin:$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' \
    --wheel-dir dist "$built"/*.whl
ls -l dist
