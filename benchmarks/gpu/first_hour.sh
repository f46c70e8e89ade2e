#!/usr/bin/env bash
# The first hour on a GPU machine, in parts of less than ten minutes, without a network.
#
#   OUT=folder benchmarks/gpu/first_hour.sh PART...
#
# Parts: unpack env tests attention tune eviction smoke serving fp8 needle sanitizer report. Each
# writes OUT/PART.log and a line of OUT/parts.tsv (part, seconds, exit status); a part that fails does
# not stop the others. Files in EARLIER (a folder) are continued: result files of the same commit and machine.
# The following variables change parts:
#   DEADLINE         seconds after the start at which everything has ended (570)
#   SITE             folder with vLLM and this package's metadata (/tmp/site); "unpack" fills it
#                    from .gpu/one/*.tar.xz, which prepare.sh makes
#   MODEL            folder of a model with weights, which the part "needle" serves
#   TESTS            arguments of pytest instead of "tests/gpu"
#   ATTENTION_ARGS, TUNE_ARGS, EVICTION_ARGS, SERVING_ARGS, SMOKE_ARGS, FP8_ARGS, NEEDLE_ARGS   are
#                    added to each command
#   DRY=1            writes each command to OUT/PART.log, quoted, instead of running it
set -uo pipefail
started=$(date +%s)
cd "$(dirname "$0")/../.."
: "${OUT:?the folder that takes logs and results}"
mkdir -p "$OUT"
export until=0 OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# The bundle has no FlashInfer, whose sampler vLLM would import.
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export SITE=${SITE:-/tmp/site} PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}
if [[ -e $SITE/commit ]]; then
    KVEVICT_COMMIT=$(<"$SITE/commit")
    export KVEVICT_COMMIT
fi
until=$((started + ${DEADLINE:-570} - 10))
[[ ${EARLIER:-} ]] && cp -n "$EARLIER"/*.json "$OUT/" 2>/dev/null

# Runs a command, or writes it, with the program on its standard input if it reads one.
run() {
    if [[ ! ${DRY:-} ]]; then
        "$@"
        return
    fi
    printf '%q ' "$@"
    echo
    if [[ ${2:-} == - ]]; then cat; fi
}
export -f run

unpack() {
    run mkdir -p "$SITE"
    local archive
    for archive in .gpu/one/*.tar.xz; do
        run tar -x -I "xz -T0" -f "$archive" -C "$SITE" || return
    done
    run cp "$SITE/_C.abi3.so" vllm_kvevict/ops/cuda/
}

env_() {
    run nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.limit --format=csv
    run nvcc --version | tail -n 2
    run "$PYTHON" - <<'PY'
from importlib import metadata
import torch, triton, vllm
print("vllm", vllm.__version__, "torch", torch.__version__, "triton", triton.__version__)
print(*metadata.entry_points(group="vllm.general_plugins"))
import vllm._custom_ops
from vllm.vllm_flash_attn import is_fa_version_supported
print("FlashAttention 3:", is_fa_version_supported(3))
from vllm_kvevict.ops.cuda import extension
print("CUDA extension:", extension.obstacle() or "loads")
PY
}

tests_() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m pytest -p no:cacheprovider -m gpu -n 8 --dist load -v --timeout 150 \
        --tb short --durations 8 ${TESTS:-tests/gpu}
}

attention() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m benchmarks.gpu.attention --until "$until" --output "$OUT/attention.json" ${ATTENTION_ARGS:-}
}

tune() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m benchmarks.gpu.tune --until "$until" --output "$OUT/tune.json" ${TUNE_ARGS:-}
}

eviction() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m benchmarks.gpu.eviction --until "$until" --output "$OUT/eviction.json" ${EVICTION_ARGS:-}
}

smoke() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m benchmarks.gpu.serving --output "$OUT/smoke.json" --loads 2000/64/4/8 \
        --only 8x-2000 --until "$until" ${SMOKE_ARGS:-}
}

serving() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m benchmarks.gpu.serving --until "$until" --output "$OUT/serving.json" ${SERVING_ARGS:-}
}

fp8() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m benchmarks.gpu.serving --until "$until" --output "$OUT/fp8.json" --loads 6000/500/4/32 \
        --only stock-6000,8x-6000 --serve-args=--kv-cache-dtype=fp8 ${FP8_ARGS:-}
}

needle() {
    # shellcheck disable=SC2086
    run "$PYTHON" -m benchmarks.quality --model "${MODEL:?names the folder of a model with weights}" \
        --tasks s-niah,mk-niah --policies ada-snapkv,ada-defensive --budgets 12.5%,25% --samples 20 \
        --length 4000 --kv-memory 8G --no-kvpress --no-like-for-like --resume \
        --work "$OUT/needle" --output "$OUT/needle.json" ${NEEDLE_ARGS:-}
}

sanitizer() {
    run compute-sanitizer --tool memcheck "$PYTHON" -m pytest -p no:cacheprovider -m gpu -q -x \
        ${SANITIZED:-tests/gpu/test_kernels.py -k scores}
}

report() { run "$PYTHON" -m benchmarks.gpu.report "$OUT"; }

failed=()
for part in "$@"; do
    left=$((until - $(date +%s)))
    if ((left < 5)); then
        printf '%s\t0\tno time\n' "$part" >>"$OUT/parts.tsv"
        failed+=("$part")
        continue
    fi
    begun=$(date +%s)
    name=$part
    [[ $part == env || $part == tests ]] && name=${part}_
    export -f "${name?}"
    # In a session of its own: what a part leaves running ends with it.
    timeout --kill-after=10 "$left" bash -c "$name" >"$OUT/$part.log" 2>&1
    status=$?
    printf '%s\t%s\t%s\n' "$part" "$(($(date +%s) - begun))" "$status" | tee -a "$OUT/parts.tsv"
    tail -n "${TAIL:-12}" "$OUT/$part.log"
    ((status)) && failed+=("$part")
done
if ((${#failed[@]})); then
    echo "failed, or no time: ${failed[*]}" >&2
    exit 1
fi
