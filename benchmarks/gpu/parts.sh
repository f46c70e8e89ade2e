# Functions of the four calls in benchmarks/gpu/queue, which source this file: parts of one log.
#
# A call writes OUT/CALL.log, and for each part a line of OUT/parts.tsv (part, seconds, exit status).
# A part that fails does not stop the others, and one is not begun in the last 5 seconds.
#
#   OUT        folder that takes logs and results
#   EARLIER    folder of result files of earlier calls (/tmp/kvevict-results on a held machine): those
#              of the same commit and machine are continued, the report reads all of them, and each
#              part adds its own
#   SECONDS_   seconds after which the call has ended, instead of the call's own number
#   SITE       folder with vLLM and this package's metadata (/tmp/kvevict-site), which "unpack" fills
#   MOST       seconds that a part may take, if less than what is left: MOST=60 part NAME COMMAND
#   DRY=1      writes each command to the log, quoted, instead of running it
# shellcheck shell=bash
set -uo pipefail
started=$(date +%s)
call=$(basename "$0" .sh)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
: "${OUT:?the folder that takes logs and results}"
mkdir -p "$OUT"
export OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# The bundle has no FlashInfer, whose sampler vLLM would import.
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export SITE=${SITE:-/tmp/kvevict-site} PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}
export EARLIER=${EARLIER:-/tmp/kvevict-results}
failed=()

# begin SECONDS: of the whole call. A held machine keeps what an earlier call unpacked.
begin() {
    until=$((started + ${SECONDS_:-$1} - 5))
    if [[ ${DRY:-} || ! -e $SITE/commit ]]; then
        part unpack bash -ec 'mkdir -p "$SITE"
for archive in .gpu/one/*.tar.xz; do tar -x -I "xz -T0" -f "$archive" -C "$SITE"; done'
    fi
    # The transfer of a call may have taken it away.
    [[ ${DRY:-} ]] || cp "$SITE/_C.abi3.so" vllm_kvevict/ops/cuda/
    if [[ -e $SITE/commit ]]; then
        KVEVICT_COMMIT=$(<"$SITE/commit")
        export KVEVICT_COMMIT
    fi
}

# part NAME COMMAND...: what the command leaves running ends with it.
part() {
    local name=$1 left most begun status=0
    shift
    left=$((until - $(date +%s)))
    if ((left < 5)); then
        printf '%s\t0\tno time\n' "$name" >>"$OUT/parts.tsv"
        failed+=("$name")
        return
    fi
    most=${MOST:-$left}
    ((most < left)) && left=$most
    begun=$(date +%s)
    printf '== %s\n' "$name" >>"$OUT/$call.log"
    if [[ ${DRY:-} ]]; then
        { printf '%q ' "$@"; echo; } >>"$OUT/$call.log"
    else
        timeout --kill-after=10 "$left" "$@" >>"$OUT/$call.log" 2>&1 || status=$?
        tail -n "${TAIL:-8}" "$OUT/$call.log"
    fi
    printf '%s\t%s\t%s\n' "$name" "$(($(date +%s) - begun))" "$status" | tee -a "$OUT/parts.tsv"
    ((status)) && failed+=("$name")
    return 0
}

# measured MODULE ARGUMENTS...: a part of the benchmarks, which ends by itself in time.
measured() {
    local module=$1
    shift
    [[ ${DRY:-} ]] || cp -n "$EARLIER/$module"{.json,-*.json} "$OUT/" 2>/dev/null
    part "$module" "$PYTHON" -m "benchmarks.gpu.$module" --until "$until" --output "$OUT/$module.json" "$@"
    [[ ${DRY:-} ]] && return
    mkdir -p "$EARLIER"
    cp "$OUT/$module"{.json,-*.json} "$EARLIER/" 2>/dev/null
    return 0
}

# At the end of a call: what failed or had no time.
ended() {
    if ((${#failed[@]})); then
        echo "failed, or no time: ${failed[*]}" >&2
        exit 1
    fi
}
