"""vLLM in this process: runs the prompt and records what eviction kept."""

import math
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvevict.front.command import first_line
from vllm_kvevict.inspect.kept import Group, History, Snapshot
from vllm_kvevict.inspect.options import InspectError, Options
from vllm_kvevict.inspect.prompt import Prompt, read_prompt
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.names import AUTO, KEY

BLOCKS_TO_SPARE = 16


@dataclass(frozen=True)
class Run:
    """One prompt, run with eviction.

    ``evictions`` counts those of the whole run; ``snapshot`` is the state to show.
    """

    prompt: Prompt
    config: EvictionConfig
    block_size: int
    answer: str
    answer_ids: list[int]
    evictions: int
    snapshot: Snapshot
    tokenizer: Any

    @property
    def budget(self) -> int:
        """Tokens kept per KV head, window included."""
        return self.config.timeline(self.block_size).budget(self.prompt.context)

    def decode(self, start: int, stop: int) -> str:
        """Text of positions [start, stop), generated ones included."""
        text: str = self.tokenizer.decode([*self.prompt.ids, *self.answer_ids][start:stop])
        return text


def run(options: Options, engine_args: Any) -> Run:
    """Run the prompt of ``options`` once.

    Args:
        options: What to run.
        engine_args: vLLM's ``EngineArgs`` with eviction configured.

    Raises:
        InspectError: The model cannot be loaded, or nothing was evicted.

    """
    config = EvictionConfig.parse((engine_args.additional_config or {}).get(KEY))
    if config is None:
        raise InspectError("eviction is off, so there is nothing to draw: give --kv-eviction")
    tokenizer = load_tokenizer(engine_args)
    try:
        text = options.prompt_file.read_text(encoding="utf-8")
        prompt = read_prompt(tokenizer, text, options.question, options.at, options.chat)
        for wanted in options.find:
            prompt.find(wanted)
    except UnicodeDecodeError:
        raise InspectError(f"--prompt-file: {options.prompt_file} is no UTF-8 text") from None
    except ValueError as error:
        raise InspectError(str(error)) from None
    if config.policy != AUTO:
        _check_budget(options, config, prompt)
    llm = start(sized(engine_args, len(prompt.ids) + options.max_tokens))
    config = EvictionConfig.parse(llm.llm_engine.vllm_config.additional_config[KEY])
    assert config is not None
    try:
        return _generate(llm, options, config, prompt, tokenizer)
    finally:
        llm.llm_engine.engine_core.shutdown()


def load_tokenizer(engine_args: Any) -> Any:
    """The tokenizer of vLLM's ``EngineArgs``.

    Raises:
        InspectError: There is none.

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
        raise InspectError(f"no tokenizer of {engine_args.model}: {first_line(error)}") from None


def _check_budget(options: Options, config: EvictionConfig, prompt: Prompt) -> None:
    """Say before the model is loaded what can be known by then."""
    decoded = len(prompt.ids) + options.max_tokens
    end = prompt.context if options.after == "prefill" else decoded
    rule = config.timeline(block_size=1)
    if not rule.evictable(end):
        raise InspectError(_too_short(config, end, prompt.context))


def _too_short(config: EvictionConfig, end: int, context: int, block_size: int = 1) -> str:
    rule = config.timeline(block_size)
    needed = (rule.store_blocks(context) + 1) * block_size + rule.protected
    blocks = f" in blocks of {block_size}" if block_size > 1 else ""
    return (
        f"nothing was evicted, because {end} tokens fit the budget of {rule.budget(context)} "
        f"tokens per KV head (eviction starts at {needed} tokens{blocks}); give a longer prompt "
        "or lower --kv-eviction-budget"
    )


def sized(engine_args: Any, num_tokens: int) -> Any:
    """Room for this one request, where the user has not said how much there is.

    Without a size vLLM plans for the model's longest context, and its CPU worker takes most
    of the machine's memory.
    """
    from vllm.platforms import current_platform

    if engine_args.max_model_len is None:
        engine_args = replace(engine_args, max_model_len=num_tokens)
    if engine_args.kv_cache_memory_bytes is not None or not current_platform.is_cpu():
        return engine_args
    try:
        model = engine_args.create_model_config()
    except (OSError, ValueError) as error:
        raise InspectError(first_line(error)) from None
    layers = model.hf_text_config.num_hidden_layers
    token = 2 * layers * model.get_total_num_kv_heads() * model.get_head_size()
    block = engine_args.block_size or 128
    # The prompt, a store as long as the prompt, and what decode adds before it evicts.
    blocks = 2 * math.ceil(num_tokens / block) + BLOCKS_TO_SPARE
    return replace(engine_args, kv_cache_memory_bytes=blocks * block * token * model.dtype.itemsize)


def start(engine_args: Any) -> Any:
    """An ``LLM`` in this process.

    Raises:
        InspectError: vLLM refuses to start, in its words.

    """
    from vllm import LLM

    try:
        return LLM.from_engine_args(engine_args)
    except (OSError, ValueError) as error:
        raise InspectError(first_line(error)) from None


def _generate(
    llm: Any, options: Options, config: EvictionConfig, prompt: Prompt, tokenizer: Any
) -> Run:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMError

    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker.kv_eviction
    history = History(_groups(worker))
    worker.listeners.append(history)
    extra = {"kv_eviction_at": prompt.evict_at} if prompt.evict_at is not None else None
    try:
        (output,) = llm.generate(
            {"prompt_token_ids": prompt.ids},
            SamplingParams(temperature=0, max_tokens=options.max_tokens, extra_args=extra),
            use_tqdm=False,
        )
    except (ValueError, VLLMError) as error:
        raise InspectError(first_line(error)) from None
    n = len(prompt.ids)
    if options.after == "prefill":
        snapshot = history.after_prefill(n)
    else:
        snapshot = history.snapshots[-1] if history.snapshots else None
    block_size = max(state.timeline.block_size for state in worker.states.values())
    if snapshot is None:
        postponed = core.scheduler.eviction_counters.postponed
        if postponed:
            raise InspectError(
                f"nothing was evicted, because the KV cache had no room for the store in "
                f"{postponed} steps: raise --kv-cache-memory-bytes"
            )
        decoded = n + len(output.outputs[0].token_ids)
        end = prompt.context if options.after == "prefill" else decoded
        raise InspectError(_too_short(config, end, prompt.context, block_size))
    assert worker.evictions >= 1
    answer = output.outputs[0]
    return Run(
        prompt, config, block_size, answer.text, list(answer.token_ids), worker.evictions,
        snapshot, tokenizer,
    )  # fmt: skip


def _groups(worker: Any) -> dict[int, Group]:
    from vllm.model_executor.models.utils import extract_layer_index

    return {
        group_id: Group(
            tuple(extract_layer_index(name) for name in state.layer_names),
            state.num_heads,
            state.timeline.block_size,
        )
        for group_id, state in worker.states.items()
    }
