#!/usr/bin/env bash
# Makes .venv: vLLM 0.32.0, this package (editable) and the test tools. Idempotent, and
# instant where nothing changed.
#   KVEVICT_DEVICE=cpu|cuda  instead of looking for an NVIDIA GPU
#   PYTHON=python3.12        instead of the first of 3.11, 3.12, 3.13
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VENV="$ROOT/.venv"
HERE="$ROOT/packaging"

device() {
    if [[ -n "${KVEVICT_DEVICE:-}" ]]; then
        echo "$KVEVICT_DEVICE"
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo cuda
    else
        echo cpu
    fi
}

install_cpu() {
    say "vLLM 0.32.0 for CPU (about 4 GB, two to six minutes)"
    install_lock "$VENV" "$HERE/requirements-cpu.lock"
    # PyPI's builds are for CUDA; next to a CPU torch they break `from vllm import LLM`.
    "$VENV/bin/pip" uninstall -qq -y torchvision torchaudio torchcodec 2>/dev/null
    "$VENV/bin/pip" install -qq --no-build-isolation --no-deps "$HERE/vllm-cpu-metadata"
}

# Written for a machine with a GPU and PyPI; no such machine was there to run it.
install_cuda() {
    say "vLLM 0.32.0 for CUDA"
    "$VENV/bin/pip" install -q "vllm==0.32.0" "setuptools>=77,<81"
}

check() {
    local version
    env -C / "$VENV/bin/vllm" --version >"$VENV/.version" 2>/dev/null || true
    version="$(tail -n 1 "$VENV/.version")"
    [[ "$version" == 0.32.0* ]] || fail "vllm --version says '$version' instead of 0.32.0"
    env -C / "$VENV/bin/python" -c "import vllm_kvevict" || fail "vllm_kvevict does not import"
    say "ready: vLLM $version in .venv"
}

main() {
    local device stamp
    device="$(device)"
    case "$device" in cpu | cuda) ;; *) fail "KVEVICT_DEVICE is cpu or cuda, not $device" ;; esac
    one_at_a_time
    stamp="$device-$(hash_of "$HERE"/{common.sh,setup_env.sh,requirements-cpu.lock} \
        "$HERE"/{requirements-test.txt,vllm-cpu-metadata/pyproject.toml} \
        "$ROOT/pyproject.toml" "$ROOT/vllm_kvevict/__init__.py")"
    is_current "$VENV" "$stamp" && return
    make_venv "$VENV"
    rm -f "$VENV/.setup-stamp"
    "install_$device"
    "$VENV/bin/pip" install -qq --no-deps -r "$HERE/requirements-test.txt"
    "$VENV/bin/pip" install -qq --no-build-isolation --no-deps -e "$ROOT"
    check
    echo "$stamp" >"$VENV/.setup-stamp"
}

main
