#!/usr/bin/env bash
# The Python files of another vLLM, to check our hooks against: nothing of it is installed.
# About 340 MB of download, of which the Python files stay, in .cache/vllm-source/VERSION.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VERSION="${1:-0.33.0}"
FOLDER="$ROOT/.cache/vllm-source/$VERSION"

[[ -d "$FOLDER/vllm" ]] && exit
wheel="$(mktemp -d)"
trap 'rm -rf "$wheel"' EXIT
platforms=()
for glibc in 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
say "vLLM $VERSION (about 340 MB) into $FOLDER"
python3 -m pip download -q --no-deps --only-binary :all: "${platforms[@]}" \
    --implementation cp --python-version 3.12 --abi abi3 -d "$wheel" "vllm==$VERSION" ||
    fail "vllm==$VERSION could not be downloaded"
mkdir -p "$FOLDER" "$wheel/source"
python3 - "$wheel"/vllm-*.whl "$wheel/source" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.endswith(".py")])
PYTHON
# Whole or not there: an extraction that is cut short must not look like one.
mv "$wheel/source/vllm" "$FOLDER/vllm"
