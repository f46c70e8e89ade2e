"""Memory of a rank without its KV cache: counted weights and assumed activations."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvevict.tools.plan.options import SizingError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INDEX = "model.safetensors.index.json"


def rank_weights(given: int | None, vllm_config: "VllmConfig") -> tuple[int, str]:
    """Bytes of the weights on one rank, and how they were found.

    From the checkpoint's index or its files; without them, the parameters of the model that
    transformers builds from the configuration, in the model's type. Shared out evenly over
    tensor- and pipeline-parallel ranks.

    Args:
        given: What ``--weights`` says, for one rank.
        vllm_config: The model and its ranks.

    Raises:
        SizingError: The weights can be neither found nor counted.

    """
    if given is not None:
        return given, "given"
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    total, how = _checkpoint(Path(vllm_config.model_config.model)) or _counted(vllm_config)
    return math.ceil(total / ranks), how


def _checkpoint(folder: Path) -> tuple[int, str] | None:
    # The files may be incomplete, the index is not.
    if (folder / INDEX).is_file():
        metadata = json.loads((folder / INDEX).read_text()).get("metadata", {})
        if "total_size" in metadata:
            return int(metadata["total_size"]), "the checkpoint's index"
    files = list(folder.glob("*.safetensors"))
    return (sum(file.stat().st_size for file in files), "the checkpoint's files") if files else None


def _counted(vllm_config: "VllmConfig") -> tuple[int, str]:
    import torch
    from transformers import AutoModelForCausalLM

    model = vllm_config.model_config
    if model.quantization is not None:
        raise SizingError(
            f"the weights of a {model.quantization} checkpoint cannot be counted from its "
            "configuration: give --weights"
        )
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(model.hf_text_config)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        raise SizingError(
            f"transformers cannot build this model to count its weights ({type(error).__name__}): "
            "give --weights"
        ) from None
    parameters = sum(parameter.numel() for parameter in built.parameters())
    return parameters * model.dtype.itemsize, "counted"


def assumed_activations(vllm_config: "VllmConfig") -> int:
    """Bytes at the peak of vLLM's profile run, assumed: hidden states, MLP and logits.

    vLLM measures this at start-up; nothing tells it before.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    text = model.hf_text_config
    wide = getattr(text, "intermediate_size", None) or 4 * model.get_hidden_size()
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    token = (3 * model.get_hidden_size() + 3 * wide // tensor_parallel) * model.dtype.itemsize
    logits = 2 * model.get_vocab_size() * 4
    return scheduler.max_num_batched_tokens * token + scheduler.max_num_seqs * logits
