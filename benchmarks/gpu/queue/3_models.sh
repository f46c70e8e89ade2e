#!/usr/bin/env bash
# Call 3, 130 s: greedy answers of SmolLM2-135M-Instruct, against those of a CPU. MODEL: its folder.
# shellcheck source=benchmarks/gpu/parts.sh
source "$(dirname "$0")/../parts.sh"
begin 130
export MODEL=${MODEL:-/tmp/kvevict-model}
# Its GGUF file came in two transfers, with the package that reads it.
part model bash -ec 'mkdir -p "$MODEL"
cat .gpu/two/model.a? .gpu/three/model.a? | tar -x -C "$MODEL"'
part convert env PYTHONPATH="$PYTHONPATH:$MODEL" "$PYTHON" -c 'import os
from pathlib import Path
from benchmarks.gguf_llama import convert
folder = Path(os.environ["MODEL"])
convert(next(folder.rglob("*.gguf")), folder)'
measured real_weights --model "$MODEL" --reference .gpu/three/reference.json
ended
