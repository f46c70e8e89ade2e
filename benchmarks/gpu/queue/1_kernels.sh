#!/usr/bin/env bash
# Call 1, 220 s: are the kernels right, and which defaults of the decode kernel are the best?
# shellcheck source=benchmarks/gpu/parts.sh
source "$(dirname "$0")/../parts.sh"
begin 220
# One process for all, because each would import vLLM in 8 workers. First come the networks.
MOST=70 part tests "$PYTHON" -m pytest -p no:cacheprovider -m gpu -n 8 --dist load -q --timeout 60 --tb short \
    tests/gpu/test_kernels.py tests/gpu/test_fused.py tests/gpu/test_backend.py tests/gpu/test_triton.py \
    -k "test_fused or test_backend or (test_kernels and networks) or (test_triton and (decode or slices))"
measured store_bits
# As many of its rows as fit.
measured tune --stages 3,5 --before 0,96 --tile 32,64 --sigma 0.5 --repeats 6
ended
