#!/usr/bin/env bash
# One command on a GPU host with vLLM 0.32.0 and the CUDA extension: measure, one table.
#
#   benchmarks/gpu/run.sh [OUT]         OUT defaults to benchmarks/results/gpu
#
# PYTHON names the interpreter (python3). STEPS chooses steps, in order; build and test are not
# among those that run by themselves:
#   STEPS="build test attention eviction serving" benchmarks/gpu/run.sh
# ATTENTION_ARGS, EVICTION_ARGS and SERVING_ARGS are added to each part's command.
# DEADLINE=570 ends everything that many seconds after the start: a row that would take longer is
# not begun, and the report is written all the same.
# TRIAL=1 tries everything that a CPU can, tiny, in a few minutes; its numbers mean nothing.
# Each part writes its file row by row and, run again with the same GPU, settings and commit, goes
# on where it was cut off. A step that fails or has rows left is named at the end, the others still
# run, and the exit status is 1.
set -euo pipefail
started=$(date +%s)
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
steps="attention eviction serving"
interpreted=()
small=() attention=() eviction=() serving=()
if [[ ${TRIAL:-} ]]; then
    interpreted=(env TRITON_INTERPRET=1 "PYTHONPATH=$PWD:$PWD/tests/triton_cpu")
    small=(--device cpu --dtype float32 --layers 2 --heads 2 --group 2 --copy-bytes 1048576)
    attention=("${small[@]}" --head-size 32 --batches 1,2 --budgets 32 --max-model-len 512)
    eviction=("${small[@]}" --head-size 64 --prompts 200 --ranks 1,2 --budget 48)
    serving=(--tiny --policies auto --loads 600/20/2/4 --prefills 600 --few 2 --repeats 2 --max-num-seqs 4
        --block-size 32 "--serve-args=--enforce-eager")
fi
out=${1:-benchmarks/results/gpu${TRIAL:+-trial}}
mkdir -p "$out"
until=0
# The report and the end of a server need some seconds.
if [[ ${DEADLINE:-} ]]; then until=$((started + DEADLINE - 20)); fi
incomplete=()

step() {
    local name=$1 limit=()
    shift
    case " ${STEPS:-$steps} " in *" $name "*) ;; *) return 0 ;; esac
    echo "== $name: $*"
    if ((until)); then
        local left=$((until - $(date +%s)))
        if ((left < 1)); then
            incomplete+=("$name")
            return 0
        fi
        limit=(timeout --kill-after=5 "$left")
    fi
    "${limit[@]}" "$@" || incomplete+=("$name")
}

part() {
    local name=$1
    shift
    step "$name" "$@" --output "$out/$name.json" --until "$until"
}

step build env KVEVICT_CUDA=1 "$python" -m pip install --no-build-isolation --no-deps -e .
step test "$python" -m pytest -m gpu tests/gpu -q
# shellcheck disable=SC2086
part attention "${interpreted[@]}" "$python" -m benchmarks.gpu.attention "${attention[@]}" ${ATTENTION_ARGS:-}
# shellcheck disable=SC2086
part eviction "$python" -m benchmarks.gpu.eviction "${eviction[@]}" ${EVICTION_ARGS:-}
# shellcheck disable=SC2086
part serving "$python" -m benchmarks.gpu.serving "${serving[@]}" ${SERVING_ARGS:-}
"$python" -m benchmarks.gpu.report "$out" || incomplete+=(report)
if ((${#incomplete[@]})); then
    echo "failed, or with rows left: ${incomplete[*]}" >&2
    exit 1
fi
