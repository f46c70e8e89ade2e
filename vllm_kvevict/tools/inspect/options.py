"""The command line: our options, vLLM's engine arguments and the ``--kv-eviction`` flags."""

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvevict.config.budget import parse_budget
from vllm_kvevict.config.plugins import policy_names, unknown
from vllm_kvevict.serving.command import CommandError, evict_by_default, first_line


@dataclass(frozen=True)
class Options:
    """The runs and the outputs that the command line asks for.

    ``after`` is ``prefill`` or ``decode``. Without ``budgets`` the server's is the only one;
    ``compare`` is a second policy.
    """

    model: str
    prompt_file: Path
    output: Path | None
    json: Path | None
    find: tuple[str, ...]
    question: str | None
    at: int | None
    chat: bool
    after: str
    max_tokens: int
    spans: int
    html: Path | None = None
    compare: str | None = None
    budgets: tuple[int | str, ...] = ()


def parse(argv: list[str]) -> tuple[Options, Any]:
    """Read the command line.

    Returns:
        The options, and vLLM's ``EngineArgs`` with eviction configured.

    Raises:
        CommandError: A wrong option, in one sentence.
        SystemExit: argparse has printed its help or what is wrong.

    """
    # The flags, where the entry point is not loaded (VLLM_PLUGINS).
    from vllm_kvevict.serving.plugin import register

    register()
    from vllm.engine.arg_utils import EngineArgs

    args = _parser().parse_args(argv)
    options = Options(
        model=args.model_tag,
        prompt_file=args.prompt_file,
        output=args.output or (None if args.html else Path("kept.png")),
        json=args.json,
        find=tuple(args.find),
        question=args.question,
        at=args.at,
        chat=args.chat,
        after=args.after,
        max_tokens=args.max_tokens,
        spans=args.spans,
        html=args.html,
        compare=args.compare,
        budgets=_budgets(args.budgets),
    )
    _check(options)
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        raise CommandError("inspect runs on one rank: leave --tensor-parallel-size and -pp at 1")
    args.model = options.model
    evict_by_default(args)
    try:
        _set_variants(args, options)
        # Offline, this looks for the model already.
        return options, EngineArgs.from_cli_args(args)
    except (OSError, ValueError) as error:
        raise CommandError(first_line(error)) from None


def _parser() -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="vllm-kvevict inspect",
        usage="%(prog)s MODEL --prompt-file FILE [--kv-eviction POLICY] [options]",
        description="Run one prompt with KV eviction and draw what was kept of it.",
    )
    group = parser.add_argument_group(
        title="Inspect", description="The prompt, and what to draw and print."
    )
    group.add_argument("model_tag", metavar="MODEL", help="Folder or name of the model.")
    group.add_argument(
        "--prompt-file", type=Path, required=True, metavar="FILE", help="The prompt, as text."
    )
    group.add_argument(
        "--output", type=Path, help="The picture (PNG); kept.png where there is no --html."
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="The same data as JSON.")
    group.add_argument(
        "--html", type=Path, metavar="FILE", help="A page with the prompt's text, shaded."
    )
    group.add_argument(
        "--compare", metavar="POLICY", help="A second policy, next to the first one on the page."
    )
    group.add_argument(
        "--budgets", metavar="LIST", help="Budgets to choose from on the page, such as 6%%,256."
    )
    group.add_argument(
        "--find",
        action="append",
        default=[],
        metavar="TEXT",
        help="Mark this text and print in how many KV heads it survived; may be repeated.",
    )
    point = group.add_mutually_exclusive_group()
    point.add_argument(
        "--question",
        metavar="TEXT",
        help="Asked after the prompt; the eviction runs before it is seen.",
    )
    point.add_argument(
        "--at", type=int, metavar="N", help="Evict after N tokens of the prompt, not at its end."
    )
    group.add_argument("--chat", action="store_true", help="Use the model's chat template.")
    group.add_argument(
        "--after",
        choices=["prefill", "decode"],
        default="prefill",
        help="Draw the state when decode starts, or after the last eviction.",
    )
    group.add_argument("--max-tokens", type=int, default=64, help="Tokens to generate.")
    group.add_argument("--spans", type=int, default=8, help="How many kept spans to show.")
    EngineArgs.add_cli_args(parser)
    # One prompt: nothing to share, nothing worth compiling for.
    parser.set_defaults(enforce_eager=True, max_num_seqs=1, enable_prefix_caching=False)
    return parser


def _budgets(text: str | None) -> tuple[int | str, ...]:
    try:
        return () if text is None else tuple(map(parse_budget, text.split(",")))
    except ValueError as error:
        raise CommandError(f"--budgets: {error}") from None


def _set_variants(args: argparse.Namespace, options: Options) -> None:
    """Let the requests of one engine choose among the policies and budgets of ``options``."""
    from vllm_kvevict.serving.plugin import fold_flags

    if options.compare is not None:
        args.kv_eviction_allow = options.compare
    if options.budgets and hasattr(args, "kv_eviction_budget"):
        raise CommandError(
            f"--budgets {','.join(map(str, options.budgets))}: --kv-eviction-budget "
            f"{args.kv_eviction_budget} is given too; give one of the two"
        )
    fold_flags(args)
    for budget in options.budgets:
        args.kv_eviction_budget = budget
        try:
            fold_flags(args)
        except ValueError as error:
            raise CommandError(f"--budgets: {first_line(error)}") from None


def _check(options: Options) -> None:
    if options.output is not None and find_spec("matplotlib") is None:
        raise CommandError(
            "inspect draws with matplotlib, which is not installed: pip install 'matplotlib>=3.9'"
        )
    if not options.prompt_file.is_file():
        raise CommandError(f"--prompt-file: there is no file {options.prompt_file}")
    for name in ("output", "json", "html"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"--{name}: there is no folder {path.parent}")
    for name in ("compare", "budgets"):
        if getattr(options, name) and options.html is None:
            raise CommandError(f"--{name} is for the page: add --html FILE")
    if options.compare is not None and options.compare not in policy_names():
        raise CommandError(f"--compare: {unknown(options.compare, policy_names())}")
    if options.max_tokens < 2:
        # A request that ends with its first token is not evicted.
        raise CommandError(f"--max-tokens: must be at least 2, not {options.max_tokens}")
    if options.spans < 0:
        raise CommandError(f"--spans: must be at least 0, not {options.spans}")
    looks_local = options.model.startswith(("/", ".", "~")) or options.model.count("/") > 1
    if looks_local and not Path(options.model).is_dir():
        raise CommandError(f"there is no model folder {options.model}")
