#!/usr/bin/env bash
# One command on a GPU host with vLLM 0.32.0: build, test, measure, one JSON and one Markdown file.
#
#   benchmarks/gpu/run.sh [OUT]         OUT defaults to benchmarks/results/gpu
#
# PYTHON names the interpreter (python3). STEPS chooses steps, in order:
#   STEPS="build test attention eviction serving" benchmarks/gpu/run.sh
# ATTENTION_ARGS, EVICTION_ARGS and SERVING_ARGS are added to each part's command.
# Each part writes its file row by row and, run again with the same settings and commit, goes on
# where it was cut off. A step that fails is named at the end, the others still run, and the exit status is 1.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
failed=()

step() {
    local name=$1
    shift
    case " ${STEPS:-build test attention eviction serving} " in *" $name "*) ;; *) return ;; esac
    echo "== $name: $*"
    "$@" || failed+=("$name")
}

step build env KVEVICT_CUDA=1 "$python" -m pip install --no-build-isolation --no-deps -e .
step test "$python" -m pytest -m gpu tests/gpu -q
# shellcheck disable=SC2086
step attention "$python" -m benchmarks.gpu.attention --output "$out/attention.json" ${ATTENTION_ARGS:-}
# shellcheck disable=SC2086
step eviction "$python" -m benchmarks.gpu.eviction --output "$out/eviction.json" ${EVICTION_ARGS:-}
# shellcheck disable=SC2086
step serving "$python" -m benchmarks.gpu.serving --output "$out/serving.json" ${SERVING_ARGS:-}
"$python" -m benchmarks.gpu.report "$out" || failed+=(report)
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
