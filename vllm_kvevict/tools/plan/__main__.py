"""``vllm-kvevict plan MODEL_CONFIG --gpu-memory 80G``: see docs/operations.md."""

import logging
import os
import sys

from vllm_kvevict.processes import guard
from vllm_kvevict.tools.plan.command import main

if __name__ == "__main__":
    guard()
    # vLLM reads these when it is imported; the answer has stdout for itself.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # It says that Triton has no backend for CPUs, whatever the level is.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    sys.exit(main(sys.argv[1:]))
