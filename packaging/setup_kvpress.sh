#!/usr/bin/env bash
# Makes .venv-kvpress: kvpress 0.5.5, the reference that selections are compared with. It
# needs transformers below 5.3 and so cannot share vLLM's environment. Always on CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VENV="$ROOT/.venv-kvpress"
LOCK="$ROOT/packaging/requirements-kvpress.lock"

one_at_a_time
stamp="$(hash_of "$ROOT"/packaging/{common.sh,setup_kvpress.sh} "$LOCK")"
is_current "$VENV" "$stamp" && exit 0
make_venv "$VENV"
rm -f "$VENV/.setup-stamp"
say "kvpress 0.5.5 (about 1.4 GB, under a minute)"
install_lock "$VENV" "$LOCK"
env -C / "$VENV/bin/python" -c "from kvpress import AdaKVPress, SnapKVPress, StreamingLLMPress" ||
    fail "kvpress does not import"
say "ready: kvpress 0.5.5 in .venv-kvpress"
echo "$stamp" >"$VENV/.setup-stamp"
