#!/usr/bin/env bash
# Makes dist/: an sdist and a wheel without compiled kernels, as a package index takes them, and
# lets twine check both. The kernels are built from the sdist where nvcc is (docs/gpu.md).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

VENV="$ROOT/.venv-dist"
one_at_a_time
stamp="$(hash_of packaging/requirements-dist.txt)"
if ! is_current "$VENV" "$stamp"; then
    make_venv "$VENV"
    "$VENV/bin/pip" install -qq --no-deps -r packaging/requirements-dist.txt
    echo "$stamp" >"$VENV/.setup-stamp"
fi
rm -rf build dist
# Its metadata would hide the installed one from Python started here, once it is out of date.
trap 'rm -rf build vllm_kvevict.egg-info' EXIT
KVEVICT_CUDA=0 "$VENV/bin/python" -m build --no-isolation --outdir dist . >/dev/null
"$VENV/bin/twine" check --strict dist/*
say "publish it: $VENV/bin/twine upload dist/*"
