"""vLLM in this process: runs the prompts and ranks what their evictions scored."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvevict import __version__
from vllm_kvevict.calibrate import rank
from vllm_kvevict.calibrate.options import CalibrateError, Options
from vllm_kvevict.calibrate.prompts import builtin, from_file, token_ids
from vllm_kvevict.front.shares import identity
from vllm_kvevict.inspect.engine import load_tokenizer, sized, start
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.names import KEY
from vllm_kvevict.settings.shares import LayerShares

if TYPE_CHECKING:
    from vllm_kvevict.worker.eviction import EvictionRecord

QUESTION_TOKENS = 96
"""Kept free in a built-in prompt for facts, question and chat template."""


def run(options: Options, engine_args: Any) -> LayerShares:
    """Measure the shares of a model.

    Args:
        options: The prompts.
        engine_args: vLLM's ``EngineArgs`` with eviction configured.

    Raises:
        CalibrateError: A prompt is too short to evict.
        InspectError: The model cannot be loaded.
        PromptsError: The prompts cannot be read.

    """
    config = EvictionConfig.parse(engine_args.additional_config[KEY])
    assert config is not None
    prompts = prompts_of(options, load_tokenizer(engine_args))
    longest = max(map(len, prompts))
    llm = start(sized(engine_args, longest + 2))
    try:
        counts = [
            rank.kept(scores_of(llm, prompt), kept_tokens(config, len(prompt)))
            for prompt in progress(prompts)
        ]
        model = identity(llm.llm_engine.vllm_config)
    finally:
        llm.llm_engine.engine_core.shutdown()
    shares = rank.mean_shares(counts)
    import vllm

    return LayerShares(
        model=model,
        policy=config.policy,
        budget=config.budget,
        made={
            "model": os.path.basename(str(engine_args.model).rstrip("/")),
            "prompts": len(prompts) if options.prompts else f"{options.samples} built-in, twice",
            "tokens": [min(map(len, prompts)), longest],
            "spread": rank.spread(counts),
            "vllm": vllm.__version__,
            "vllm_kvevict": __version__,
        },
        layers=tuple(rank.by_layer(shares)),
        heads=tuple(map(tuple, rank.by_head(shares))),
    )


def prompts_of(options: Options, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts; built-in ones with their question and without."""
    if options.prompts is not None:
        return from_file(options.prompts, tokenizer)
    room = options.length - QUESTION_TOKENS
    samples = builtin(options.samples, lambda text: len(tokenizer.encode(text)) <= room)
    return [ids for sample in samples for ids in token_ids(tokenizer, sample)]


def kept_tokens(config: EvictionConfig, length: int) -> int:
    """Tokens that a KV head keeps of a prompt beside the window, on average."""
    return config.timeline(block_size=1).store_blocks(length)


def scores_of(llm: Any, prompt: Sequence[int]) -> torch.Tensor:
    """[L, H, N] scores of all evictable layers, by depth, where the prompt ends.

    Raises:
        CalibrateError: The prompt is too short to evict.

    """
    from vllm import SamplingParams
    from vllm.model_executor.models.utils import extract_layer_index

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.kv_eviction
    found: dict[int, torch.Tensor] = {}

    def listen(record: "EvictionRecord") -> None:
        names = worker.states[record.group.group_id].layer_names
        for name, scores in zip(names, record.scores, strict=True):
            found.setdefault(extract_layer_index(name), scores)

    worker.listeners.append(listen)
    try:
        # A request that ends with its first token is not evicted.
        llm.generate(
            {"prompt_token_ids": list(prompt)},
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
            use_tqdm=False,
        )
    finally:
        worker.listeners.remove(listen)
    if not found:
        raise CalibrateError(
            f"nothing was evicted of a prompt of {len(prompt)} tokens: give longer prompts or a "
            "lower --kv-eviction-budget"
        )
    return torch.stack([found[layer] for layer in sorted(found)])


def progress(prompts: list[list[int]]) -> Any:
    """The prompts, with a bar on stderr."""
    from tqdm import tqdm

    return tqdm(prompts, desc="prompts", unit="prompt")
