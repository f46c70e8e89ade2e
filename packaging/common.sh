# Sourced by the setup scripts: virtual environments that are made once and kept up to date.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
export PIP_DISABLE_PIP_VERSION_CHECK=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR

say() { echo "[setup] $*"; }

fail() {
    echo "[setup] error: $*" >&2
    exit 1
}

# usable_python: the command of $PYTHON, or of the first usable Python from 3.11 on.
usable_python() {
    local python
    for python in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    fail "no Python 3.11 or newer; set PYTHON=/path/to/python"
}

# Bash waits for the command that it runs before it heeds a signal, and goes on if that command ends
# by itself at SIGINT, as pip does. So a process above the script heeds signals, and ends the script
# with everything below it; these ignore SIGINT, which a terminal sends to all.
if [[ -z "${SETUP_IS_REAPED:-}" ]]; then
    reaper="$(usable_python)"
    SETUP_IS_REAPED=1 exec "$reaper" "$ROOT/packaging/run_and_reap.py" "$BASH" "$0" "$@"
fi
unset SETUP_IS_REAPED
trap '' INT

# make_work: $WORK, a folder that is gone when the script ends. A rename from it to a place in .cache
# makes that whole or not at all.
make_work() {
    mkdir -p "$ROOT/.cache"
    WORK="$(mktemp -d "$ROOT/.cache/making.XXXXXX")"
    trap 'rm -rf "$WORK"' EXIT
}

# One setup of an environment at a time: two concurrent `make` would install into the same folder.
one_at_a_time() {
    mkdir -p "$ROOT/.cache"
    exec 9>"$ROOT/.cache/setup$(basename "${VENV:-}").lock"
    flock 9
}

# hash_of FILE...: of their contents, of this folder's path and of the interpreter asked for.
hash_of() {
    { echo "$ROOT ${PYTHON:-} ${KVEVICT_DEVICE:-}"; cat "$@"; } | sha256sum | cut -c1-32
}

# is_current VENV HASH
is_current() {
    [[ -x "$1/bin/python" && "$(cat "$1/.setup-stamp" 2>/dev/null)" == "$2" ]]
}

# make_venv VENV: with a usable Python.
make_venv() {
    local python package
    if [[ -x "$1/bin/pip" ]]; then
        # pip writes RECORD last, and takes a package that lacks it, as after an interrupt, for whole.
        for package in "$1"/lib/python3*/site-packages/*.dist-info; do
            [[ -f "$package/RECORD" ]] || rm -rf "$package"
        done
        return
    fi
    python="$(usable_python)"
    say "$1 with $("$python" --version)"
    "$python" -m venv "$1" || fail "$python cannot make a virtual environment;" \
        "on Debian and Ubuntu install python3-venv"
}

# install_lock VENV LOCK: a resolved set. torch comes first and alone: its CPU build is on
# PyTorch's own index, unless pip's configuration already names a place that has it. pip compiles
# in one process; where PYTHONDONTWRITEBYTECODE is set, nobody would compile it later.
install_lock() {
    local torch
    torch="$(grep '^torch==' "$2")"
    if ! "$1/bin/pip" install -qq --no-compile --no-deps "$torch" 2>/dev/null; then
        say "$torch is not on the configured index; trying $TORCH_CPU_INDEX"
        "$1/bin/pip" install -qq --no-compile --no-deps --index-url "$TORCH_CPU_INDEX" "$torch" ||
            fail "$torch was not found. It is on PyTorch's CPU index;" \
                "where that is mirrored: export PIP_EXTRA_INDEX_URL=<mirror of $TORCH_CPU_INDEX>"
    fi
    "$1/bin/pip" install -qq --no-compile --no-deps -r "$2"
    # Some packages have files of other Pythons.
    "$1/bin/python" -m compileall -q -j 0 "$1"/lib/python3*/site-packages >/dev/null || true
}
