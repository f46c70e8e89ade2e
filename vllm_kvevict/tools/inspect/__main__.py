"""``vllm-kvevict inspect MODEL --prompt-file FILE``: see docs/inspect.md."""

import json
import os
import sys

from vllm_kvevict.processes import guard


def main(argv: list[str]) -> int:
    """Run, print, draw. Returns the exit status; errors are one sentence on stderr."""
    # vLLM reads these when it is imported. The recorder needs the worker in this process, and
    # the report stdout.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_kvevict.serving.command import CommandError
    from vllm_kvevict.tools.inspect.options import parse

    try:
        options, engine_args = parse(argv)
        from vllm_kvevict.tools.inspect.engine import run
        from vllm_kvevict.tools.inspect.view import View

        views = [View.of(options, one) for one in run(options, engine_args)]
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from vllm_kvevict.tools.inspect.report import as_json, as_text, in_short

    if options.output is not None:
        from vllm_kvevict.tools.inspect.picture import draw

        draw(views[0], options.output)
    print("\n\n".join([as_text(views[0]), *map(in_short, views[1:])]))
    if options.json is not None:
        data = as_json(views[0])
        if len(views) > 1:
            data["others"] = [as_json(view) for view in views[1:]]
        options.json.write_text(json.dumps(data) + "\n")
    if options.html is not None:
        from vllm_kvevict.tools.inspect.page import as_html

        options.html.write_text(as_html(views), encoding="utf-8")
    files = (options.output, options.json, options.html)
    written = [str(path) for path in files if path is not None]
    print(f"\nwritten  {', '.join(written)}")
    return 0


if __name__ == "__main__":
    guard()
    sys.exit(main(sys.argv[1:]))
