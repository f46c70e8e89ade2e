"""``python -m vllm_kvevict.inspect MODEL --prompt-file FILE``: see docs/inspect.md."""

import json
import os
import sys


def main(argv: list[str]) -> int:
    """Run, print, draw. Returns the exit status; errors are one sentence on stderr."""
    # vLLM reads these when it is imported. The recorder needs the worker in this process, and
    # the report stdout.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_kvevict.inspect.options import InspectError, parse

    try:
        options, engine_args = parse(argv)
        from vllm_kvevict.inspect.engine import run
        from vllm_kvevict.inspect.view import View

        view = View.of(options, run(options, engine_args))
    except InspectError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from vllm_kvevict.inspect.picture import draw
    from vllm_kvevict.inspect.report import as_json, as_text

    draw(view, options.output)
    print(as_text(view))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(view)) + "\n")
    written = [str(path) for path in (options.output, options.json) if path is not None]
    print(f"\nwritten  {', '.join(written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
