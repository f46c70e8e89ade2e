#!/usr/bin/env bash
# Puts torchvision into .cache/torchvision, beside the environment: models that take images ask for
# it, and the CUDA build that package indexes have breaks `from vllm import LLM` where it is seen.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TARGET="$ROOT/.cache/torchvision"
RELEASE="torchvision==0.28.0"

one_at_a_time
stamp="$(echo "$RELEASE" | cat - "$ROOT"/packaging/{common.sh,setup_torchvision.sh} | sha256sum)"
[[ "$(cat "$TARGET/.setup-stamp" 2>/dev/null)" == "$stamp" ]] && exit 0
rm -rf "$TARGET"
say "$RELEASE (8 MB)"
"$ROOT/.venv/bin/pip" install -qq --no-deps --target "$TARGET" "$RELEASE"
echo "$stamp" >"$TARGET/.setup-stamp"
