"""What processes of tests import first; see ``tests/forked.py``."""

import gc

import torch
import transformers
import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker
from vllm import LLM
from vllm.platforms.cpu import CpuPlatform

from tests import kernels_once
from vllm_kvevict.ops.cpu.move import TokenMoves

assert LLM and transformers and vllm and kernels_once
CpuPlatform.register_triton_kernel_overrides()
# A server that evicts compiles this at its first eviction.
for dtype in (torch.float32, torch.bfloat16):
    one = torch.zeros(1, dtype=torch.int64)
    TokenMoves(torch.zeros(1, 1, dtype=torch.int64))(torch.zeros(1, 1, dtype=dtype), *[one] * 3)
gc.freeze()
