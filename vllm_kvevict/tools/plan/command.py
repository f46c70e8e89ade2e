"""The command ``vllm-kvevict plan``: how many sequences a GPU would hold."""

import json
import sys


def main(argv: list[str]) -> int:
    """Print the sizes. Returns the exit status; errors are one sentence on stderr."""
    from vllm_kvevict.tools.plan.options import SizingError, parse

    try:
        options, vllm_config, config = parse(argv)
        from vllm_kvevict.tools.plan.report import Sizing, as_json, as_text

        sizing = Sizing.of(options, vllm_config, config)
    except SizingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(sizing), indent=1) if options.json else as_text(sizing))
    return 0
