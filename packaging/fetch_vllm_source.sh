#!/usr/bin/env bash
# Another vLLM without its compiled parts, to check our hooks against and for setup_next_vllm.sh:
# nothing of it is installed. About 340 MB of download, of which the Python files and their data
# stay, in .cache/vllm-source/VERSION.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VERSION="${1:-0.33.0}"
FOLDER="$ROOT/.cache/vllm-source/$VERSION"

[[ -f "$FOLDER/METADATA" ]] && exit
one_at_a_time
[[ -f "$FOLDER/METADATA" ]] && exit
make_work
platforms=()
for glibc in 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
say "vLLM $VERSION (about 340 MB) into $FOLDER"
python3 -m pip download -q --no-deps --only-binary :all: "${platforms[@]}" \
    --implementation cp --python-version 3.12 --abi abi3 -d "$WORK" "vllm==$VERSION" ||
    fail "vllm==$VERSION could not be downloaded"
mkdir "$WORK/source"
python3 - "$WORK"/vllm-*.whl "$WORK/source" "$VERSION" <<'PYTHON'
import sys
import zipfile

KEPT = (".py", ".json", ".jinja", ".js", ".css", ".txt", ".sh")
archive, folder, version = sys.argv[1:]
with zipfile.ZipFile(archive) as wheel:
    names = [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith(KEPT)]
    wheel.extractall(folder, names)
    metadata = wheel.read(f"vllm-{version}.dist-info/METADATA")
with open(f"{folder}/METADATA", "wb") as file:
    file.write(metadata)
PYTHON
mkdir -p "$(dirname "$FOLDER")"
rm -rf "$FOLDER"
mv -T "$WORK/source" "$FOLDER"
