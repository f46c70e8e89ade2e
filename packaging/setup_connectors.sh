#!/usr/bin/env bash
# Puts NIXL into .cache/nixl and LMCache into .cache/lmcache, beside the environment: their
# dependencies bring CUDA libraries, which a CPU does not need.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

RELEASES_nixl=("nixl==1.5.1" "nixl-cu12==1.5.1")
RELEASES_lmcache=("lmcache==0.5.6" "aiofile==3.12.3" "caio==0.12.10")

one_at_a_time
hash="$(hash_of "$ROOT"/packaging/{common.sh,setup_connectors.sh})"
for name in nixl lmcache; do
    target="$ROOT/.cache/$name"
    [[ "$(cat "$target/.setup-stamp" 2>/dev/null)" == "$hash" ]] && continue
    rm -rf "$target"
    declare -n releases="RELEASES_$name"
    say "${releases[*]}"
    "$ROOT/.venv/bin/pip" install -qq --no-deps --target "$target" "${releases[@]}"
    env -C / PYTHONPATH="$target" "$ROOT/.venv/bin/python" -c "import $name" ||
        fail "$name does not import"
    echo "$hash" >"$target/.setup-stamp"
done
