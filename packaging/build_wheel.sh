#!/usr/bin/env bash
# Makes dist/vllm_kvevict-*.whl with the CUDA extension for all supported GPUs. Needs nvcc 13 and
# torch (its CPU build is enough); no GPU.
#   KVEVICT_CUDA_ARCHS=90   for some GPUs only
#   KVEVICT_JOBS=1          files compiled at once
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf build dist
# Its metadata would hide the installed one from Python started here, once it is out of date.
trap 'rm -rf vllm_kvevict.egg-info' EXIT
KVEVICT_CUDA=1 "${PYTHON:-.venv/bin/python}" -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir dist .
ls -l dist
