"""What processes of tests import first; see ``tests/forked.py``."""

import gc

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

assert LLM and transformers and vllm and kernels_once
CpuPlatform.register_triton_kernel_overrides()
gc.freeze()
