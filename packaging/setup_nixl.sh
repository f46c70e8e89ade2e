#!/usr/bin/env bash
# Puts NIXL into .cache/nixl, beside the environment: it brings CUDA libraries by its dependencies,
# which transfers between processes of a CPU do not need.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TARGET="$ROOT/.cache/nixl"
RELEASES=("nixl==1.5.1" "nixl-cu12==1.5.1")

one_at_a_time
stamp="$(hash_of "$ROOT"/packaging/{common.sh,setup_nixl.sh})"
[[ "$(cat "$TARGET/.setup-stamp" 2>/dev/null)" == "$stamp" ]] && exit 0
rm -rf "$TARGET"
say "${RELEASES[*]} (69 MB)"
"$ROOT/.venv/bin/pip" install -qq --no-deps --target "$TARGET" "${RELEASES[@]}"
(cd / && PYTHONPATH="$TARGET" "$ROOT/.venv/bin/python" -c "import nixl._api") ||
    fail "NIXL does not import"
echo "$stamp" >"$TARGET/.setup-stamp"
