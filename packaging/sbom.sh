#!/usr/bin/env bash
# Makes dist/vllm_kvevict-*.cdx.json: a CycloneDX bill of materials of what `pip install` of the
# wheel in dist/ brings, with licences. vLLM and torch are not among it: the plugin installs neither.
#   SBOM_PYTHON=.venv/bin/python   of another environment, for example one with vLLM
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

TOOL="$ROOT/.venv-sbom"
one_at_a_time
stamp="$(hash_of packaging/requirements-sbom.txt)"
if ! is_current "$TOOL" "$stamp"; then
    make_venv "$TOOL"
    "$TOOL/bin/pip" install -qq -r packaging/requirements-sbom.txt
    echo "$stamp" >"$TOOL/.setup-stamp"
fi
wheel=(dist/vllm_kvevict-*.whl)
[[ -f "${wheel[0]}" ]] || fail "no wheel in dist/; run make dist first"
make_work
if [[ -z "${SBOM_PYTHON:-}" ]]; then
    make_venv "$WORK/env"
    "$WORK/env/bin/pip" install -qq "${wheel[0]}"
    "$WORK/env/bin/pip" uninstall -qq -y setuptools pip
    SBOM_PYTHON="$WORK/env/bin/python"
fi
target="${wheel[0]%-py3*}" target="${target%-cp3*}.cdx.json"
"$TOOL/bin/cyclonedx-py" environment "$SBOM_PYTHON" --pyproject pyproject.toml --mc-type library \
    --gather-license-texts --output-reproducible --of JSON -o "$target"
"$TOOL/bin/python" packaging/licences.py "$target"
say "ready: $target"
