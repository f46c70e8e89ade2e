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

assert LLM and transformers and vllm
gc.freeze()
