"""``python -m vllm_kvevict.plan MODEL_CONFIG --gpu-memory 80G``: see docs/operations.md."""

import json
import os
import sys


def main(argv: list[str]) -> int:
    """Print the plan. Returns the exit status; errors are one sentence on stderr."""
    from vllm_kvevict.plan.options import PlanError, parse

    try:
        options, vllm_config, config = parse(argv)
        from vllm_kvevict.plan.report import Plan, as_json, as_text

        plan = Plan.of(options, vllm_config, config)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(plan), indent=1) if options.json else as_text(plan))
    return 0


if __name__ == "__main__":
    # vLLM reads these when it is imported; the plan has stdout for itself.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main(sys.argv[1:]))
