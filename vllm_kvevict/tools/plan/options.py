"""The command line: the load, the memory and vLLM's own engine arguments."""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig


FILES = ("config.json", "model.safetensors.index.json", "hf_quant_config.json")
"""What is read of a model at Hugging Face: its shape, and the sizes and types of its weights."""


class SizingError(Exception):
    """A server cannot be sized. The message is one sentence."""


@dataclass(frozen=True)
class Options:
    """The load, in tokens, and the memory of one rank, in bytes.

    ``gpu_memory`` is the whole device; None where the KV cache's own size is given.
    ``weights`` and ``activations`` are None for counted and estimated, ``context`` where prompts
    share none. ``notes`` are what the server would warn of, and what the plan assumes.
    """

    gpu_memory: int | None
    prompt: int
    output: int
    weights: int | None
    activations: int | None
    json: bool
    context: int | None = None
    notes: tuple[str, ...] = ()


def parse(argv: list[str]) -> "tuple[Options, VllmConfig, EvictionConfig]":
    """Read the command line and build vLLM's configuration, without weights or tokenizer.

    Of a model at Hugging Face the files :data:`FILES` are downloaded, and a line on stderr says so.

    Raises:
        SizingError: A wrong option, an unknown model, or one that eviction does not support.
        SystemExit: argparse has printed its help or what is wrong.

    """
    check_early(argv)
    # The flags, where the entry point is not loaded (VLLM_PLUGINS).
    from vllm_kvevict.serving.plugin import register

    register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_kvevict.compat import shim
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.names import CONFIG_KEY
    from vllm_kvevict.serving.command import evict_by_default

    args = _parser().parse_args(argv)
    options = Options(
        args.gpu_memory,
        args.prompt,
        args.output,
        args.weights,
        args.activations,
        args.json,
        args.context,
    )
    _check(options, args.kv_cache_memory_bytes)
    if args.budget is not None:
        args.kv_eviction_budget = args.budget
    evict_by_default(args)
    # A tokenizer is neither needed nor downloaded, but the server has one.
    skips_tokenizer, args.skip_tokenizer_init, args.tokenizer = args.skip_tokenizer_init, True, None
    with tempfile.TemporaryDirectory() as folder:
        args.model = _model(args, Path(folder))
        try:
            engine_args = EngineArgs.from_cli_args(args)
            additional = dict(engine_args.additional_config)
            config = EvictionConfig.parse(additional.pop(CONFIG_KEY, None))
            if config is None:
                raise SizingError(
                    "eviction is off, so there is nothing to plan: give --kv-eviction"
                )
            # vLLM's own: a server calibrates the model where it has its weights.
            engine_args.additional_config = additional
            vllm_config = engine_args.create_engine_config(
                # A server's defaults differ from those of ``LLM``.
                usage_context=UsageContext.OPENAI_API_SERVER
            )
            vllm_config.model_config.skip_tokenizer_init = skips_tokenizer
            from vllm_kvevict.tools.plan.served import activated

            notes = activated(engine_args, vllm_config, config)
            notes = tuple(note.replace(args.model, args.model_config) for note in notes)
            options = replace(options, notes=notes)
        except SystemExit as error:
            raise SizingError(str(error.code).removeprefix("error: ")) from None
        except (OSError, ValueError) as error:
            raise SizingError(_sentence(args.model_config, error)) from None
        shim().choose_block_size(vllm_config)
    config = EvictionConfig.parse(vllm_config.additional_config[CONFIG_KEY])
    assert config is not None
    _check_length(options.prompt, options.output, vllm_config.model_config.max_model_len)
    return options, vllm_config, config


def check_early(argv: list[str]) -> None:
    """Check the load before vLLM is imported, which takes 20 seconds.

    What is not found here is left to the parser.

    Raises:
        SizingError: The load is missing or wrong, or longer than the model's longest sequence.

    """
    if not {"-h", "--help"}.isdisjoint(argv):
        return
    given: dict[str, str] = {}
    for index, word in enumerate(argv):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            value = value if equals else "".join(argv[index + 1 :][:1])
            given[name.removeprefix("--").replace("_", "-")] = value
    load = {"output": 256}
    for name in ("prompt", "output", "context"):
        if name in given:
            try:
                load[name] = int(given[name])
            except ValueError:
                raise SizingError(
                    f"--{name}: must be a whole number of tokens, not {given[name]!r}"
                ) from None
    if "prompt" not in load:
        if any("prompt".startswith(name) for name in given):
            return
        raise SizingError("give --prompt, the tokens of a prompt")
    _check_load(load["prompt"], load["output"], load.get("context"))
    longest = _longest(Path(argv[0]).expanduser())
    if longest is not None and not {"max-model-len", "hf-overrides"} & given.keys():
        _check_length(load["prompt"], load["output"], longest)


def _longest(path: Path) -> int | None:
    """Return the longest sequence that a configuration on this machine names; None if it names
    none, or if vLLM computes another one."""
    path = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(path.read_text())
        settings = settings.get("text_config") or settings
        rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        by_layer = any(isinstance(value, dict) for value in rope.values())
        if by_layer or kind not in ("default", "llama3"):
            return None
        return int(settings["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _check_length(prompt: int, output: int, longest: int) -> None:
    if prompt + output > longest:
        raise SizingError(
            f"--prompt {prompt} and --output {output} are longer together than this model's "
            f"longest sequence of {longest} tokens (--max-model-len)"
        )


def _parser() -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int

    parser = FlexibleArgumentParser(
        prog="vllm-kvevict plan",
        usage="%(prog)s MODEL_CONFIG --gpu-memory SIZE --prompt N [--output N] [--budget B] "
        "[options of vllm serve]",
        description="Blocks, sequences and buffers of a server with KV eviction, before it "
        "starts. SIZE is in bytes, as elsewhere in vLLM: 80G is 80 * 2**30, 80g is 80 * 10**9.",
    )
    group = parser.add_argument_group(title="Sizing", description="The load and the memory.")
    group.add_argument(
        "model_config", metavar="MODEL_CONFIG", help="A config.json, its folder, or a model's name."
    )
    size: dict[str, Any] = dict(type=human_readable_int, metavar="SIZE")
    group.add_argument("--gpu-memory", **size, help="Memory of one device.")
    group.add_argument("--prompt", type=int, required=True, metavar="N", help="Tokens of a prompt.")
    group.add_argument("--output", type=int, default=256, metavar="N", help="Tokens of an answer.")
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="First tokens of every prompt, the same for all, after which they evict "
        "(kv_eviction_at).",
    )
    group.add_argument("--budget", help="Short for --kv-eviction-budget.")
    group.add_argument("--weights", **size, help="Of one rank (default: counted).")
    group.add_argument(
        "--activations", **size, help="Of one rank, at their peak (default: assumed)."
    )
    group.add_argument("--json", action="store_true", help="The sizes as JSON.")
    EngineArgs.add_cli_args(parser)
    return parser


def _check_load(prompt: int, output: int, context: int | None) -> None:
    for name, value in (("prompt", prompt), ("output", output)):
        if value < 1:
            raise SizingError(f"--{name}: must be at least 1, not {value}")
    if context is not None and not 0 < context < prompt:
        raise SizingError(
            f"--context: must be at least 1 and less than --prompt {prompt}, not {context}"
        )


def _check(options: Options, kv_cache_memory: int | None) -> None:
    _check_load(options.prompt, options.output, options.context)
    if (options.gpu_memory is None) == (kv_cache_memory is None):
        raise SizingError(
            "give one of --gpu-memory (of the whole device) and --kv-cache-memory-bytes (of the "
            "KV cache alone)"
        )


def _model(args: argparse.Namespace, folder: Path) -> str:
    """Return the folder with the configuration of the model that is planned for.

    Args:
        args: The command line: the model, and how to find it at Hugging Face.
        folder: An empty folder for a configuration in a file of another name.

    Raises:
        SizingError: There is no configuration.

    """
    given = args.model_config
    path = Path(given).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SizingError(f"the folder {given} has no config.json")
        return str(path)
    if path.is_file():
        if path.name == "config.json":
            return str(path.parent)
        shutil.copy(path, folder / "config.json")
        return str(folder)
    if given.startswith(("/", ".", "~")) or given.count("/") > 1 or given.endswith(".json"):
        raise SizingError(f"there is no config.json or model folder {given}")
    return _downloaded(args)


def _downloaded(args: argparse.Namespace) -> str:
    """Return the folder of a model of the Hugging Face Hub, in which its weights need not be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    given = args.model_config
    # Configurations in code run only if that is asked for.
    files = [*FILES, *(["*.py"] if args.trust_remote_code else [])]
    print(
        f"reading {', '.join(files)} of {given} at Hugging Face, if they are not here yet; no "
        "weights are downloaded",
        file=sys.stderr,
    )
    try:
        folder = snapshot_download(
            given,
            revision=args.revision,
            cache_dir=args.download_dir,
            allow_patterns=files,
            token=args.hf_token,
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise SizingError(_sentence(given, OSError(str(error)))) from None
    if not (Path(folder) / "config.json").is_file():
        raise SizingError(f"{given} has no config.json at Hugging Face")
    return str(folder)


def _sentence(model: str, error: Exception) -> str:
    from vllm_kvevict.serving.command import first_line

    if isinstance(error, OSError):
        return (
            f"the configuration of {model} was not found here or at Hugging Face: "
            f"{first_line(error)}"
        )
    return first_line(error)
