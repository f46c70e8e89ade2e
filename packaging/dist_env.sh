# Sourced by what builds for publication: .venv-dist, with setuptools, twine and auditwheel.

VENV="$ROOT/.venv-dist"

make_dist_env() {
    local stamp
    one_at_a_time
    stamp="$(hash_of "$ROOT/packaging/requirements-dist.txt")"
    is_current "$VENV" "$stamp" && return
    make_venv "$VENV"
    "$VENV/bin/pip" install -qq --no-deps -r "$ROOT/packaging/requirements-dist.txt"
    echo "$stamp" >"$VENV/.setup-stamp"
}
