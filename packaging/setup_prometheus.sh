#!/usr/bin/env bash
# Unpacks Debian's promtool and prometheus (19 MB) into .cache/prometheus, for the tests of
# deploy/grafana. Installs nothing and needs no root, but apt-get and its lists.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

FOLDER="$ROOT/.cache/prometheus"
is_there() { [[ -x "$FOLDER/usr/bin/promtool" ]]; }
is_there && exit
command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    fail "apt-get and dpkg are not here; the tests take promtool and prometheus from the PATH, too"
one_at_a_time
is_there && exit
make_work
(cd "$WORK" && apt-get -qq download prometheus 2>/dev/null) ||
    fail "Debian's package prometheus could not be downloaded; 'apt-get update' may be missing"
dpkg -x "$WORK"/prometheus_*.deb "$WORK/prometheus"
rm -rf "$FOLDER"
mv -T "$WORK/prometheus" "$FOLDER"
say "ready: $("$FOLDER/usr/bin/promtool" --version 2>&1 | head -1)"
