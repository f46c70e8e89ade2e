"""An engine in this process, for commands that run a model."""

import math
import sys
from dataclasses import replace
from typing import Any

from vllm_kvevict.serving.command import CommandError, first_line
from vllm_kvevict.serving.cpu_dtype import FASTER, in_fast_dtype

BLOCKS_TO_SPARE = 16
"""Blocks of the KV cache in addition to those that one request may hold."""


def load_tokenizer(engine_args: Any) -> Any:
    """The tokenizer of vLLM's ``EngineArgs``.

    Raises:
        CommandError: There is none.

    """
    from vllm.tokenizers import get_tokenizer

    try:
        return get_tokenizer(
            engine_args.tokenizer or engine_args.model,
            tokenizer_mode=engine_args.tokenizer_mode,
            trust_remote_code=engine_args.trust_remote_code,
            revision=engine_args.tokenizer_revision or engine_args.revision,
        )
    except (OSError, ValueError) as error:
        raise CommandError(f"no tokenizer of {engine_args.model}: {first_line(error)}") from None


def sized(engine_args: Any, num_tokens: int) -> Any:
    """Give the engine room for one request, and a type that is fast, if the user has set neither.

    Without a size vLLM plans for the model's longest context, and its CPU worker takes most
    of the machine's memory.

    Raises:
        CommandError: The model cannot be loaded.

    """
    from vllm.platforms import current_platform

    try:
        fast = in_fast_dtype(engine_args)
    except (OSError, ValueError) as error:
        raise CommandError(first_line(error)) from None
    if fast is not engine_args:
        print(f"{FASTER} (--dtype sets another type)", file=sys.stderr)
        engine_args = fast
    if engine_args.max_model_len is None:
        engine_args = replace(engine_args, max_model_len=num_tokens)
    if engine_args.kv_cache_memory_bytes is not None or not current_platform.is_cpu():
        return engine_args
    try:
        model = engine_args.create_model_config()
    except (OSError, ValueError) as error:
        raise CommandError(first_line(error)) from None
    layers = model.hf_text_config.num_hidden_layers
    token = 2 * layers * model.get_total_num_kv_heads() * model.get_head_size()
    block = engine_args.block_size or 128
    # The prompt, a store as long as the prompt, and what decode adds before it evicts.
    blocks = 2 * math.ceil(num_tokens / block) + BLOCKS_TO_SPARE
    return replace(engine_args, kv_cache_memory_bytes=blocks * block * token * model.dtype.itemsize)


def start(engine_args: Any) -> Any:
    """An ``LLM`` in this process.

    Raises:
        CommandError: vLLM refuses to start, in its words.

    """
    from vllm import LLM

    try:
        # A copy has the fields alone, without what our flags noted on the object.
        return LLM.from_engine_args(replace(engine_args))
    except (OSError, ValueError) as error:
        raise CommandError(first_line(error)) from None
