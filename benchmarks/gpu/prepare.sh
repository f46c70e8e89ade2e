#!/usr/bin/env bash
# Gathers in .gpu/ what a GPU machine without a network needs, and prints the commands to run there.
#
#   benchmarks/gpu/prepare.sh           once before measuring, on a host without a GPU
#
# It needs nvcc, a package index and ../shared/gpu/offline_bundle.sh (BUNDLE names another). What is
# there already is kept; the extension and the commit are made anew. ARCHS names what to compile
# for: 90, of H100 and H200.
# RESULTS names a folder of earlier result files that the machine goes on with.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
bundle=${BUNDLE:-../shared/gpu/offline_bundle.sh}
gpu=.gpu
most_mib=64
mkdir -p "$gpu/results" "$gpu/plugin"

if [[ ! -e $gpu/bundle/part4/install.sh ]]; then
    bash "$bundle" "$gpu/bundle"
fi

# Built from a copy: an extension that stands in the package is not touched.
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
git ls-files -z | tar -c --null -T - | tar -x -C "$build"
(
    cd "$build"
    export KVEVICT_CUDA=1 KVEVICT_CUDA_ARCHS=${ARCHS:-90}
    "$python" setup.py -q build_ext --inplace
    # By its entry point vLLM finds the plugin, without an installation.
    "$python" setup.py -q dist_info
)
rm -rf "$gpu/plugin"/*
cp -r "$build/vllm_kvevict/ops/cuda/_C.abi3.so" "$build"/*.dist-info "$gpu/plugin/"
git describe --always --dirty >"$gpu/plugin/commit"
if [[ -n ${RESULTS:-} ]]; then
    cp "$RESULTS"/{attention,eviction,serving}*.json "$gpu/results/" 2>/dev/null || true
fi

mib() { du -cm "$@" | tail -n 1 | cut -f 1; }
tracked=$(git ls-files -z --cached --others --exclude-standard | du -cm --files0-from=- |
    tail -n 1 | cut -f 1)
for number in 1 2 3; do
    case $number in
    1) carried=("$gpu/bundle/part1") ;;
    2) carried=("$gpu/bundle/part2" "$gpu/bundle/part3") ;;
    3) carried=("$gpu/bundle/part4" "$gpu/plugin" "$gpu/results") ;;
    esac
    total=$((tracked + $(mib "${carried[@]}")))
    if ((total >= most_mib)); then
        echo "error: call $number would carry $total MiB, and at most $most_mib travel" >&2
        exit 1
    fi
    echo "call $number carries about $total MiB"
done

cat <<'END'

Run on the device machine, in this order, each within 30 s of the end of the last. After a machine
was given back the next one is bare: begin again with call 1.

call 1: carry .gpu/bundle/part1
    SITE=/tmp/site bash .gpu/bundle/part1/install.sh
call 2: carry .gpu/bundle/part2 .gpu/bundle/part3
    for p in 2 3; do SITE=/tmp/site bash .gpu/bundle/part$p/install.sh; done
call 3: carry .gpu/bundle/part4 .gpu/plugin .gpu/results
    STEPS=smoke DEADLINE=200 bash benchmarks/gpu/session.sh
  says whether the kernels load, and whether a server starts and evicts.
call 4, and again until no row is left: carry .gpu/plugin .gpu/results
    bash benchmarks/gpu/session.sh

After each: cp files_at/*.json .gpu/results/ (what it names; gpu.md is the table so far).
END
