#!/usr/bin/env bash
# One call on the machine that prepare.sh gathered for: install what is missing, measure, bring back.
#
#   OUT=folder bash benchmarks/gpu/session.sh
#
# OUT takes the result files. What run.sh reads works here too (STEPS, SERVING_ARGS, ...); STEPS=smoke
# starts one server and evicts, and measures nothing. A call may take DEADLINE seconds (570).
set -euo pipefail
started=$(date +%s)
cd "$(dirname "$0")/../.."
: "${OUT:?the folder whose files come back}"
export PYTHON=${PYTHON:-python3} SITE=${SITE:-/tmp/site} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTHONPATH=$PWD:$PWD/.gpu/plugin:$SITE
limit=${DEADLINE:-570}
KVEVICT_COMMIT=$(<.gpu/plugin/commit)
export KVEVICT_COMMIT
if [[ -d .gpu/bundle/part4 && ! -e $SITE/.part4 ]]; then
    bash .gpu/bundle/part4/install.sh
    touch "$SITE/.part4"
fi
cp .gpu/plugin/_C.abi3.so vllm_kvevict/ops/cuda/
"$PYTHON" - <<'END'
from importlib import metadata
import torch, triton, vllm
print("vllm", vllm.__version__, "torch", torch.__version__, "triton", triton.__version__)
print(*metadata.entry_points(group="vllm.general_plugins"))
from vllm_kvevict.ops.cuda import extension
print("CUDA extension:", extension.obstacle() or "loads")
END
cp .gpu/results/{attention,eviction,serving}*.json "$OUT/" 2>/dev/null || true
if [[ ${STEPS:-} == smoke ]]; then
    # shellcheck disable=SC2086
    exec "$PYTHON" -m benchmarks.gpu.serving --output "$OUT/smoke.json" --loads 2000/64/4/8 \
        --only 8x-2000 --until $((started + limit - 20)) ${SERVING_ARGS:-}
fi
DEADLINE=$((limit - ($(date +%s) - started))) exec benchmarks/gpu/run.sh "$OUT"
