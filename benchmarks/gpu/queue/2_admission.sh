#!/usr/bin/env bash
# Call 2, 230 s: how many requests fit, and the output, of stock vLLM and of an eighth under auto.
# shellcheck source=benchmarks/gpu/parts.sh
source "$(dirname "$0")/../parts.sh"
begin 230
measured serving --loads 6000/500/4/96 --only stock-6000,8x-6000 --together 2
ended
