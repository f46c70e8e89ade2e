#!/usr/bin/env bash
# Makes dist/: an sdist and a wheel without compiled kernels, as a package index takes them, and
# lets twine check both. The same commit gives the same bytes (build_dist.py). The kernels are built
# from the sdist where nvcc is, or by build_wheel.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$ROOT/packaging/dist_env.sh"
cd "$ROOT"

make_dist_env
rm -rf dist
"$VENV/bin/python" packaging/build_dist.py dist
"$VENV/bin/twine" check --strict dist/*
(cd dist && sha256sum -- *)
say "publish it: $VENV/bin/twine upload dist/*"
