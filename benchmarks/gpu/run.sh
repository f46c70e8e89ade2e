#!/usr/bin/env bash
# One command on a GPU host with vLLM 0.32.0: build, test, measure, one JSON and one Markdown file.
#
#   benchmarks/gpu/run.sh [OUT]         OUT defaults to benchmarks/results/gpu
#
# PYTHON names the interpreter (python3). STEPS chooses steps, in order:
#   STEPS="build test attention eviction serving" benchmarks/gpu/run.sh
# ATTENTION_ARGS, EVICTION_ARGS and SERVING_ARGS are added to each part's command.
# TRIAL=1 tries everything that a CPU can, tiny, in a few minutes; its numbers mean nothing.
# Each part writes its file row by row and, run again with the same settings and commit, goes on
# where it was cut off. A step that fails is named at the end, the others still run, and the exit status is 1.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
steps="build test attention eviction serving"
interpreted=()
small=() attention=() eviction=() serving=()
if [[ ${TRIAL:-} ]]; then
    steps="attention eviction serving"
    interpreted=(env TRITON_INTERPRET=1 "PYTHONPATH=$PWD:$PWD/tests/triton_cpu")
    small=(--device cpu --dtype float32 --layers 2 --heads 2 --group 2 --copy-bytes 1048576)
    attention=("${small[@]}" --head-size 32 --batches 1,2 --budgets 32 --max-model-len 512)
    eviction=("${small[@]}" --head-size 64 --prompts 200 --ranks 1,2 --budget 48)
    serving=(--tiny --loads 200/20/2/4 --prefills 200 --few 2 --max-num-seqs 4 --block-size 32
        --free-memory 16777216 --serve-args "--enforce-eager")
fi
out=${1:-benchmarks/results/gpu${TRIAL:+-trial}}
mkdir -p "$out"
failed=()

step() {
    local name=$1
    shift
    case " ${STEPS:-$steps} " in *" $name "*) ;; *) return ;; esac
    echo "== $name: $*"
    "$@" || failed+=("$name")
}

step build env KVEVICT_CUDA=1 "$python" -m pip install --no-build-isolation --no-deps -e .
step test "$python" -m pytest -m gpu tests/gpu -q
# shellcheck disable=SC2086
step attention "${interpreted[@]}" "$python" -m benchmarks.gpu.attention "${attention[@]}" --output "$out/attention.json" ${ATTENTION_ARGS:-}
# shellcheck disable=SC2086
step eviction "$python" -m benchmarks.gpu.eviction "${eviction[@]}" --output "$out/eviction.json" ${EVICTION_ARGS:-}
# shellcheck disable=SC2086
step serving "$python" -m benchmarks.gpu.serving "${serving[@]}" --output "$out/serving.json" ${SERVING_ARGS:-}
"$python" -m benchmarks.gpu.report "$out" || failed+=(report)
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
