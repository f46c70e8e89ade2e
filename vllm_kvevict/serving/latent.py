"""Refuses combinations with models that have a latent cache (MLA)."""

from typing import TYPE_CHECKING

import torch

from vllm_kvevict.ops.fp8 import CACHE_DTYPES
from vllm_kvevict.serving.refusal import WITHOUT, Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _sparse(vllm_config: "VllmConfig") -> bool:
    text = vllm_config.model_config.hf_text_config
    return hasattr(text, "index_topk") or hasattr(text, "compress_ratios")


def _latent_backend(vllm_config: "VllmConfig") -> bool:
    """Return True if vLLM serves MLA with another backend than its reference for CPUs."""
    from vllm.platforms import current_platform

    named = vllm_config.attention_config.backend
    amx = torch.cpu._is_amx_tile_supported() and (named is None or named.name != "CPU_MLA")
    return not current_platform.is_cpu() or amx


LATENT_REFUSALS = (
    Refusal(
        "sparse MLA models",
        "their indexer keeps every token in a cache of its own",
        WITHOUT,
        _sparse,
    ),
    Refusal(
        "MLA models on GPUs and on CPUs with AMX",
        "it has run on vLLM's CPU_MLA backend only",
        "on a CPU set --attention-backend CPU_MLA, elsewhere serve this model without "
        "--kv-eviction",
        _latent_backend,
    ),
    Refusal(
        "MLA models with recurrent layers",
        "it has not been tried with them",
        WITHOUT,
        lambda c: c.model_config.is_hybrid,
    ),
    Refusal(
        "MLA models with pipeline parallelism",
        "it has not been tried with it",
        "set --pipeline-parallel-size to 1",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
    ),
    Refusal(
        "MLA models under Model Runner V2",
        "it has not been tried with it",
        "set VLLM_USE_V2_MODEL_RUNNER to 0",
        lambda c: c.use_v2_model_runner,
    ),
    Refusal(
        "LoRA adapters of MLA models",
        "it has not been tried with them",
        "remove --enable-lora or serve without --kv-eviction",
        lambda c: c.lora_config is not None,
    ),
    Refusal(
        "speculative decoding of MLA models",
        "it has not been tried with it",
        "remove --speculative-config or serve without --kv-eviction",
        lambda c: c.speculative_config is not None,
    ),
    Refusal(
        "FP8 caches of MLA models",
        "it has not been tried with them",
        "set --kv-cache-dtype to auto",
        lambda c: c.cache_config.cache_dtype in CACHE_DTYPES,
    ),
)
