#!/usr/bin/env bash
# Installs Debian's chromium, in which tests open the page of `vllm-kvevict inspect`. Needs root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# The names that tests/unit/tools/inspect/test_page.py looks for.
for name in chromium chromium-browser google-chrome chrome; do
    # One that was unpacked when an interrupt came may lack its libraries.
    if "$name" --version >/dev/null 2>&1; then exit; fi
done
command -v apt-get >/dev/null || fail "apt-get is not here; the tests take chromium from the PATH, too"
((EUID == 0)) || fail "apt-get install needs root; the tests take chromium from the PATH, too"
export DEBIAN_FRONTEND=noninteractive
# What an interrupt left unpacked is configured first.
{ dpkg --configure -a && apt-get -qq update &&
    apt-get -qq install --fix-broken --no-install-recommends chromium; } >&2 ||
    fail "Debian's package chromium could not be installed"
say "ready: $(chromium --version)"
