#!/usr/bin/env bash
# Call 4, 120 s: an eviction with networks after 32,768 tokens; then an eighth with shorter steps.
# shellcheck source=benchmarks/gpu/parts.sh
source "$(dirname "$0")/../parts.sh"
begin 120
measured eviction --policies ada-probe --prompts 32768 --ranks 1
# Begins only if the start of the server and its load fit into the time that is left.
measured serving --loads 6000/500/4/96 --only 8x-6000-steps-2048 --start 50
part report "$PYTHON" -m benchmarks.gpu.report "$OUT" "$EARLIER"
ended
