"""The command line: our options, vLLM's engine arguments and the ``--kv-eviction`` flags."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvevict.config.names import COMPARABLE, LEARNED
from vllm_kvevict.serving.command import CommandError, evict_by_default, first_line

POLICY = "probe"
DEFAULT_BUDGET = "12.5%"
PROSE, MOST_PROSE = 1.0, 10
LEAST_ANSWERED = 0.5


class CalibrateError(CommandError):
    """Calibration failed. The message is one sentence."""


@dataclass(frozen=True)
class Options:
    """The measurement that was asked for, and the place of the profile.

    ``output`` is None for the place where ``--kv-eviction-profile auto`` finds it. ``prompts`` is
    the operator's file, None for ``samples`` built-in texts of ``length`` tokens (None for as many
    as the model needs). Their prose is that of ``documents`` if there are some. ``answers`` is the
    number of texts by which the shares of heads are measured, ``prose`` the weight of the text that
    follows in comparison with what is asked.
    ``least_answered`` is the share of questions that the full cache must answer, and ``seconds``
    is the time in which all is expected to end.
    """

    output: Path | None
    prompts: Path | None
    samples: int | None
    length: int
    documents: tuple[Path, ...] = ()
    answers: int = 6
    prose: float = PROSE
    least_answered: float = LEAST_ANSWERED
    seconds: float = math.inf


def parse(argv: list[str]) -> tuple[Options, Any]:
    """Read the command line.

    Returns:
        The options, and vLLM's ``EngineArgs`` with eviction configured.

    Raises:
        CalibrateError: A wrong option, in one sentence.
        SystemExit: argparse has printed its help or what is wrong.

    """
    # The flags, where the entry point is not loaded (VLLM_PLUGINS).
    from vllm_kvevict.serving.plugin import register

    register()
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.config.names import CONFIG_KEY

    args = _parser().parse_args(argv)
    options = Options(
        args.output, args.prompts, args.samples, args.length, tuple(args.documents),
        args.answers, args.prose, args.least_answered, args.seconds,
    )  # fmt: skip
    if args.pipeline_parallel_size > 1:
        raise CalibrateError("calibrate runs on one pipeline stage: drop --pipeline-parallel-size")
    samples = 1 if options.samples is None else options.samples
    if min(samples, options.answers) < 1 or options.length < 64:
        raise CalibrateError(
            "--samples and --answers must be at least 1, and --length at least 64 tokens"
        )
    if not options.seconds > 0:
        raise CalibrateError(f"--seconds must be a number above 0, not {options.seconds}")
    if not 0 <= options.prose <= MOST_PROSE:
        raise CalibrateError(
            f"--prose must be a number from 0 to {MOST_PROSE}, not {options.prose}"
        )
    if not 0 <= options.least_answered <= 1:
        raise CalibrateError(
            f"--least-answered must be a number from 0 to 1, not {options.least_answered}"
        )
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise CalibrateError(f"--output: there is no folder {options.output.parent}")
    args.model = args.model_tag
    evict_by_default(args, POLICY, DEFAULT_BUDGET)
    try:
        engine_args = EngineArgs.from_cli_args(args)
    except (OSError, ValueError) as error:
        raise CalibrateError(first_line(error)) from None
    config = EvictionConfig.parse((engine_args.additional_config or {}).get(CONFIG_KEY))
    profiled = config is not None and (config.has_groups or config.profile is not None)
    if config is None or config.policy not in COMPARABLE or profiled:
        raise CalibrateError(
            f"--kv-eviction: give a policy whose scores compare across layers "
            f"({', '.join(COMPARABLE)}), without --kv-eviction-profile"
        )
    if config.policy not in LEARNED and args.tensor_parallel_size > 1:
        raise CalibrateError(
            f"shares under {config.policy} are measured on one rank, and serve any number of them"
        )
    return options, engine_args


def _parser() -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="vllm-kvevict calibrate",
        usage="%(prog)s MODEL [--output FILE] [--prompts FILE] [options of vllm serve]",
        description="Make the model's profile: the scores of probe, and which share of the budget "
        f"each layer and KV head needs under a policy (default: {POLICY}) and a budget "
        f"(default: {DEFAULT_BUDGET}).",
    )
    group = parser.add_argument_group(title="Calibrate", description="Prompts and result.")
    group.add_argument("model_tag", metavar="MODEL", help="Folder or name of the model.")
    group.add_argument(
        "--output",
        type=Path,
        help="The profile's file (default: where --kv-eviction-profile auto looks for it, below "
        "vLLM's cache root).",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines, each a text or a list of chat messages (default: a built-in set).",
    )
    group.add_argument(
        "--documents",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="Texts, or folders of them, used as prose instead of Python's docstrings.",
    )
    group.add_argument(
        "--samples",
        type=int,
        help="Most texts of the built-in set (default: 30, or 60 for a model with few KV heads, "
        "which each see little of a text; 12 without probe). Of several hundreds so many are "
        "learned from as lower the error on others.",
    )
    group.add_argument(
        "--answers", type=int, default=6, help="Texts by which heads are measured under probe."
    )
    group.add_argument(
        "--prose",
        type=float,
        default=PROSE,
        metavar="FACTOR",
        help="Factor of the text that follows under probe, relative to what is asked later, which "
        "grows with the share that is kept; 0 learns of questions alone.",
    )
    group.add_argument(
        "--least-answered",
        type=float,
        default=LEAST_ANSWERED,
        metavar="SHARE",
        help="Of the questions about built-in texts, which the full cache must answer under probe: "
        "a model that answers fewer gets no profile.",
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="Time in which the command is expected to end under probe: fewer texts are learned "
        "from if not all fit.",
    )
    group.add_argument("--length", type=int, default=1400, help="Their length in tokens.")
    EngineArgs.add_cli_args(parser)
    # One prompt at a time: nothing to share, nothing worth compiling for.
    parser.set_defaults(enforce_eager=True, max_num_seqs=1, enable_prefix_caching=False)
    return parser
