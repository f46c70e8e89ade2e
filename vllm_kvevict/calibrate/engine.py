"""Runs the prompts in vLLM and makes the profile of their scores."""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvevict import __version__
from vllm_kvevict.calibrate import rank
from vllm_kvevict.calibrate.local_engine import load_tokenizer, sized, start
from vllm_kvevict.calibrate.options import CalibrateError, Options
from vllm_kvevict.calibrate.prompts import builtin, from_file, token_ids
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY, LEARNED
from vllm_kvevict.config.probe_weights import ProbeWeights
from vllm_kvevict.config.profile import ModelIdentity, Profile
from vllm_kvevict.serving.identity import identity

if TYPE_CHECKING:
    from vllm_kvevict.worker.eviction import EvictionRecord

HELD_OUT = 8
"""Built-in contexts of which quality is measured, and nothing learned."""

FEW_HEADS, SAMPLES = 16, {True: 60, False: 30}
"""Built-in texts that probes are learned from, by whether a model has at most so many KV heads in
all its layers together. The fewer there are, the more each has to tell apart."""

SCORED = 12
"""Number of built-in texts if no probes are learned."""

QUESTION_TOKENS = 96
"""Kept free in a built-in prompt for facts, question and chat template."""


def run(options: Options, engine_args: Any) -> tuple[Profile, ProbeWeights | None]:
    """Make the profile of a model; its probes too under a policy that reads them.

    Args:
        options: The prompts.
        engine_args: vLLM's ``EngineArgs`` with eviction configured.

    Raises:
        CalibrateError: A prompt is too short to evict.
        CommandError: The model cannot be loaded.
        PromptsError: The prompts cannot be read.

    """
    config = EvictionConfig.parse(engine_args.additional_config[CONFIG_KEY])
    assert config is not None
    if config.policy in LEARNED:
        return probed(options, engine_args, config)
    prompts = prompts_of(options, load_tokenizer(engine_args))
    counts, model = ranked(engine_args, config, prompts)
    lengths = [len(ids) for ids in prompts]
    import vllm

    made = {
        "model": os.path.basename(str(engine_args.model).rstrip("/")),
        "prompts": len(prompts) if options.prompts else f"{options.samples or SCORED} built-in",
        "tokens": [min(lengths), max(lengths)],
        "spread": rank.spread(counts),
        "vllm": vllm.__version__,
        "vllm_kvevict": __version__,
    }
    return _profile(model, config, made, rank.mean_shares(counts)), None


def _profile(
    model: ModelIdentity,
    config: EvictionConfig,
    made: dict[str, Any],
    shares: torch.Tensor,
    **measured: Any,
) -> Profile:
    return Profile(
        model=model,
        policy=config.policy,
        budget=config.budget,
        made=made,
        layers=tuple(rank.by_layer(shares)),
        heads=tuple(map(tuple, rank.by_head(shares))),
        **measured,
    )


def probed(
    options: Options, engine_args: Any, config: EvictionConfig
) -> tuple[Profile, ProbeWeights]:
    """Learn the probes, in vLLM's workers; shares and quality under them."""
    import vllm

    from vllm_kvevict.calibrate import learn, lessons

    tokenizer = load_tokenizer(engine_args)
    if options.prompts is not None:
        texts = lessons.of_prompts(options.prompts, tokenizer)
        held_out = texts[-max(1, len(texts) // 6) :]
        texts = texts[: -len(held_out)] or held_out
    else:
        paragraphs = lessons.documents(options.documents) if options.documents else lessons.prose()
        # Prose of the contexts that judge is not learned from.
        cut = len(paragraphs) * 5 // 6
        most = options.samples or max(SAMPLES.values())
        made_of = (
            (paragraphs[:cut], most, "learn", True),
            (paragraphs[cut:], HELD_OUT, "held", False),
        )
        texts, held_out = (
            lessons.lessons(tokenizer, prose, count, options.length, seed, varied)
            for prose, count, seed, varied in made_of
        )
    longest = max(
        len(lesson.context) + len(later.ids)
        for lesson in (*texts, *held_out)
        for later in lesson.later
    )
    llm = start(sized(learn.extended(engine_args), longest + 1))
    try:
        mine = identity(llm.llm_engine.vllm_config)
        if options.prompts is None and options.samples is None:
            texts = texts[: SAMPLES[mine.layers * mine.kv_heads <= FEW_HEADS]]
        how = options.answers, options.prose, held_out, progress, options.least_answered
        found = learn.learned(llm, config, mine.kv_heads, texts, *how, options.seconds)
    finally:
        llm.llm_engine.engine_core.shutdown()
    texts = texts[: found.taught.learned]
    lengths = [len(lesson.context) for lesson in texts]
    made = {
        "model": os.path.basename(str(engine_args.model).rstrip("/")),
        "prompts": len(texts) if options.prompts else f"{len(texts)} built-in",
        "lessons": found.taught.to_json(),
        "digest": _digest(texts),
        "prose": options.prose,
        "tokens": [min(lengths), max(lengths)],
        "spread": rank.spread(found.each) if len(found.each) > 1 else 0.0,
        "seconds": found.seconds,
        "losses": found.losses,
        "vllm": vllm.__version__,
        "vllm_kvevict": __version__,
    }
    profile = _profile(mine, config, made, found.shares, quality=found.quality)
    return profile, found.weights


def _digest(texts: Sequence[Any]) -> str:
    """Return a digest of the prompts, from which no prompt can be recovered."""
    digest = hashlib.sha256()
    for lesson in texts:
        digest.update(json.dumps([lesson.context, [x.ids for x in lesson.later]]).encode())
    return digest.hexdigest()


def ranked(
    engine_args: Any, config: EvictionConfig, prompts: list[list[int]]
) -> tuple[list[torch.Tensor], ModelIdentity]:
    """Return the tokens [L, H] that heads keep of each prompt, by scores, and their owners."""
    llm = start(sized(engine_args, max(map(len, prompts)) + 2))
    try:
        mine = identity(llm.llm_engine.vllm_config)
        counts = [
            rank.kept(scores_of(llm, ids), kept_tokens(config, len(ids)))
            for ids in progress(prompts)
        ]
        return counts, mine
    finally:
        llm.llm_engine.engine_core.shutdown()


def prompts_of(options: Options, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts; built-in ones with their question and without."""
    if options.prompts is not None:
        return from_file(options.prompts, tokenizer)
    room = options.length - QUESTION_TOKENS
    samples = builtin(options.samples or SCORED, lambda text: len(tokenizer.encode(text)) <= room)
    return [ids for sample in samples for ids in token_ids(tokenizer, sample)]


def kept_tokens(config: EvictionConfig, length: int) -> int:
    """Return the tokens that a KV head keeps of a prompt on average, without the window."""
    return config.rule(block_size=1).store_blocks(length)


def scores_of(llm: Any, prompt: Sequence[int]) -> torch.Tensor:
    """[L, H, N] scores of all evictable layers, by depth, at the end of the prompt.

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


def progress(prompts: Sequence[Any], name: str = "prompts") -> Any:
    """The prompts, with a bar on stderr."""
    from tqdm import tqdm

    return tqdm(prompts, desc=name, unit="prompt")
