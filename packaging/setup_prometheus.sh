#!/usr/bin/env bash
# Unpacks Debian's promtool and prometheus (19 MB) into .cache/prometheus, for the tests of
# deploy/grafana. Installs nothing and needs no root, but apt-get and its lists.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

FOLDER="$ROOT/.cache/prometheus"
[[ -x "$FOLDER/usr/bin/promtool" ]] && exit
command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    fail "apt-get and dpkg are not here; the tests take promtool and prometheus from the PATH, too"
package="$(mktemp -d)"
trap 'rm -rf "$package"' EXIT
(cd "$package" && apt-get -qq download prometheus 2>/dev/null) ||
    fail "Debian's package prometheus could not be downloaded; 'apt-get update' may be missing"
rm -rf "$FOLDER"
mkdir -p "$FOLDER"
dpkg -x "$package"/prometheus_*.deb "$FOLDER"
say "ready: $("$FOLDER/usr/bin/promtool" --version 2>&1 | head -1)"
