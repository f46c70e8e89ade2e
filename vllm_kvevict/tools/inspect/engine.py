"""vLLM in this process: runs the prompt and records what each eviction kept."""

from dataclasses import dataclass
from typing import Any

from vllm_kvevict.calibrate.local_engine import load_tokenizer, sized, start
from vllm_kvevict.calibrate.read_prompt import Prompt, read_prompt
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.requests import AT, BUDGET, POLICY
from vllm_kvevict.serving.command import CommandError, first_line
from vllm_kvevict.tools.inspect.kept import Group, History, Snapshot
from vllm_kvevict.tools.inspect.options import Options
from vllm_kvevict.tools.inspect.variants import check_length, too_short, variants


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
        return self.config.rule(self.block_size).budget(self.prompt.context)

    def decode(self, start: int, stop: int) -> str:
        """Text of positions [start, stop), generated ones included."""
        text: str = self.tokenizer.decode([*self.prompt.ids, *self.answer_ids][start:stop])
        return text


def run(options: Options, engine_args: Any) -> list[Run]:
    """Run the prompt of ``options`` once under each policy and budget, in one engine.

    Args:
        options: What to run.
        engine_args: vLLM's ``EngineArgs`` with eviction configured.

    Raises:
        CommandError: The model cannot be loaded, or a run evicted nothing.

    """
    from tqdm import tqdm

    config = EvictionConfig.parse((engine_args.additional_config or {}).get(CONFIG_KEY))
    if config is None:
        raise CommandError("eviction is off, so there is nothing to draw: give --kv-eviction")
    tokenizer = load_tokenizer(engine_args)
    try:
        text = options.prompt_file.read_text(encoding="utf-8")
        prompt = read_prompt(tokenizer, text, options.question, options.at, options.chat)
        for wanted in options.find:
            prompt.find(wanted)
    except UnicodeDecodeError:
        raise CommandError(f"--prompt-file: {options.prompt_file} is no UTF-8 text") from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    check_length(options, config, prompt)
    llm = start(sized(engine_args, len(prompt.ids) + options.max_tokens))
    config = EvictionConfig.parse(llm.llm_engine.vllm_config.additional_config[CONFIG_KEY])
    assert config is not None
    try:
        configs = variants(options, config)
        runs = tqdm(configs, desc="runs", unit="run", disable=len(configs) == 1)
        return [_generate(llm, options, one, prompt, tokenizer) for one in runs]
    finally:
        llm.llm_engine.engine_core.shutdown()


def _generate(
    llm: Any, options: Options, config: EvictionConfig, prompt: Prompt, tokenizer: Any
) -> Run:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMError

    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker.kv_eviction
    history = History(_groups(worker))
    worker.listeners.append(history)
    counters = core.scheduler.eviction_counters
    evictions, postponed = worker.evictions, counters.postponed
    extra: dict[str, Any] = {POLICY: config.policy}
    if options.budgets:
        extra[BUDGET] = config.budget
    if prompt.evict_at is not None:
        extra[AT] = prompt.evict_at
    try:
        (output,) = llm.generate(
            {"prompt_token_ids": prompt.ids},
            SamplingParams(temperature=0, max_tokens=options.max_tokens, extra_args=extra),
            use_tqdm=False,
        )
    except (ValueError, VLLMError) as error:
        raise CommandError(first_line(error)) from None
    finally:
        worker.listeners.remove(history)
    n = len(prompt.ids)
    if options.after == "prefill":
        snapshot = history.after_prefill(n)
    else:
        snapshot = history.snapshots[-1] if history.snapshots else None
    block_size = max(state.rule.block_size for state in worker.states.values())
    if snapshot is None:
        postponed = counters.postponed - postponed
        if postponed:
            raise CommandError(
                f"nothing was evicted, because the KV cache had no room for the store in "
                f"{postponed} steps: raise --kv-cache-memory-bytes"
            )
        decoded = n + len(output.outputs[0].token_ids)
        end = prompt.context if options.after == "prefill" else decoded
        raise CommandError(too_short(options, config, end, prompt.context, block_size))
    evictions = worker.evictions - evictions
    assert evictions >= 1
    answer = output.outputs[0]
    return Run(
        prompt, config, block_size, answer.text, list(answer.token_ids), evictions,
        snapshot, tokenizer,
    )  # fmt: skip


def _groups(worker: Any) -> dict[int, Group]:
    from vllm.model_executor.models.utils import extract_layer_index

    return {
        group_id: Group(
            tuple(extract_layer_index(name) for name in state.layer_names),
            state.num_heads,
            state.rule.block_size,
        )
        for group_id, state in worker.states.items()
    }
