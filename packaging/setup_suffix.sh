#!/usr/bin/env bash
# Puts the suffix trees of Arctic Inference into .cache/suffix, beside the environment: the whole
# package builds CUDA kernels and brings a plugin for another vLLM.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TARGET="$ROOT/.cache/suffix"
RELEASE="arctic-inference==0.1.1"

one_at_a_time
stamp="$(echo "$RELEASE" | cat - "$ROOT"/packaging/{common.sh,setup_suffix.sh} | sha256sum)"
[[ "$(cat "$TARGET/.setup-stamp" 2>/dev/null)" == "$stamp" ]] && exit 0
rm -rf "$TARGET"
say "suffix trees of $RELEASE (20 s)"
make_work
"$ROOT/.venv/bin/pip" download -qq --no-deps --no-binary :all: --no-build-isolation -d "$WORK" "$RELEASE"
"$ROOT/.venv/bin/pip" install -qq --no-deps --target "$WORK" "nanobind==2.9.2"
tar -xzf "$WORK"/*.tar.gz -C "$WORK" --strip-components 1
mkdir -p "$TARGET/arctic_inference"
cp -r "$WORK"/arctic_inference/{__init__.py,suffix_decoding} "$TARGET/arctic_inference"
include="$("$ROOT/.venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('include'))")"
g++ -O2 -std=c++20 -shared -fPIC -fvisibility=hidden -fno-strict-aliasing -w \
    -I"$include" -I"$WORK/nanobind/include" -I"$WORK/nanobind/ext/robin_map/include" \
    "$WORK"/nanobind/src/nb_combined.cpp "$WORK"/csrc/suffix_decoding/{bindings,suffix_tree}.cc \
    -o "$TARGET/arctic_inference/suffix_decoding/_C.so"
echo "$stamp" >"$TARGET/.setup-stamp"
