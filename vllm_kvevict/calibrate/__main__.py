"""``python -m vllm_kvevict.calibrate MODEL``: see docs/layers.md."""

import os
import sys


def main(argv: list[str]) -> int:
    """Measure, write, print. Returns the exit status; errors are one sentence on stderr."""
    # vLLM reads these when it is imported. The recorder needs the worker in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_kvevict.calibrate.options import CalibrateError, parse
    from vllm_kvevict.calibrate.prompts import PromptsError
    from vllm_kvevict.inspect.options import InspectError

    try:
        options, engine_args = parse(argv)
        from vllm_kvevict.calibrate.engine import run

        shares = run(options, engine_args)
    except (CalibrateError, PromptsError, InspectError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.output.write_text(shares.model_dump_json() + "\n")
    print("shares by layer  " + " ".join(f"{share:.2f}" for share in shares.layers))
    print(f"between prompts a layer's share differs by {shares.made['spread']:.2f} on average")
    print(f"written          {options.output}; serve with --kv-eviction-layers {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
