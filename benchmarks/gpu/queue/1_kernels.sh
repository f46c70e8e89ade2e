#!/usr/bin/env bash
# Call 1, 180 s: are the kernels right, and which defaults of the decode kernel are the best?
# shellcheck source=benchmarks/gpu/parts.sh
source "$(dirname "$0")/../parts.sh"
begin 180
pytest=("$PYTHON" -m pytest -p no:cacheprovider -m gpu -n 8 --dist load -q --timeout 100 --tb short)
part networks "${pytest[@]}" tests/gpu/test_kernels.py -k networks
part tests "${pytest[@]}" tests/gpu/test_fused.py tests/gpu/test_backend.py
part decode "${pytest[@]}" tests/gpu/test_triton.py -k "decode or slices"
measured tune --stages 3,5 --before 0,96 --tile 32,64 --sigma 0.5 --repeats 6
measured store_bits
ended
