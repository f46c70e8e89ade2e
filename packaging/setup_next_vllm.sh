#!/usr/bin/env bash
# Makes .venv-0.33: the Python files of vLLM 0.33.0 over the compiled extension of 0.32.0, because
# no CPU build of 0.33 is published. All other packages are those of .venv, torch included, where
# 0.33's own requirement is another one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VERSION=0.33.0
BASE="$ROOT/.venv"
VENV="$ROOT/.venv-0.33"
SOURCE="$ROOT/.cache/vllm-source/$VERSION"

one_at_a_time
stamp="$(cat "$BASE/.setup-stamp")-$(hash_of "$ROOT"/packaging/{setup_next_vllm.sh,fetch_vllm_source.sh})"
is_current "$VENV" "$stamp" && exit 0
"$ROOT/packaging/fetch_vllm_source.sh" "$VERSION"
say "vLLM $VERSION over the compiled extension of 0.32.0 (half a minute)"
rm -rf "$VENV"
"$BASE/bin/python" -m venv --without-pip "$VENV"
ours="$(echo "$VENV"/lib/python3*/site-packages)"
theirs="$(echo "$BASE"/lib/python3*/site-packages)"
cp -r "$SOURCE/vllm" "$ours/vllm"
(cd "$theirs/vllm" && find . -name '*.so' -exec cp --parents {} "$ours/vllm" \;)
# vLLM takes "cpu" in its version for the platform.
mkdir "$ours/vllm-$VERSION+cpu.dist-info"
sed "s/^Version: .*/Version: $VERSION+cpu/" "$SOURCE/METADATA" >"$ours/vllm-$VERSION+cpu.dist-info/METADATA"
# What 0.33 imports and 0.32 does not require.
"$BASE/bin/pip" install -qq --no-deps --no-compile --target "$ours" "orjson==3.11.9"
# The other packages, after ours; as a folder of site-packages, so that the editable install counts.
echo "import site; site.addsitedir('$theirs')" >"$ours/base.pth"
for script in vllm vllm-kvevict schemathesis; do
    sed "1s|^#!.*|#!$VENV/bin/python|" "$BASE/bin/$script" >"$VENV/bin/$script"
    chmod +x "$VENV/bin/$script"
done
"$VENV/bin/python" -m compileall -q -j 0 "$ours/vllm" >/dev/null || true
found="$(cd / && "$VENV/bin/vllm" --version 2>/dev/null | tail -1)"
[[ "$found" == "$VERSION"* ]] || fail "vllm --version says '$found' instead of $VERSION"
say "ready: vLLM $found in .venv-0.33"
echo "$stamp" >"$VENV/.setup-stamp"
