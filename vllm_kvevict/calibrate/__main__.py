"""``vllm-kvevict calibrate MODEL``: see docs/layers.md."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_kvevict.processes import guard


def main(argv: list[str]) -> int:
    """Measure, write, print. Returns the exit status; errors are one sentence on stderr."""
    # vLLM reads these when it is imported. The recorder needs the worker in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_kvevict.calibrate.options import parse
    from vllm_kvevict.calibrate.prompts import PromptsError
    from vllm_kvevict.serving.command import CommandError

    try:
        options, engine_args = parse(argv)
        from vllm_kvevict.calibrate.engine import run

        print(
            "loading the model; its first answers tell how long calibrating takes",
            file=sys.stderr,
            flush=True,
        )
        profile, weights = run(options, engine_args)
    except (CommandError, PromptsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from vllm_kvevict.serving.identity import file_name
    from vllm_kvevict.serving.profile import AUTO, cache_folder, to_json

    path = options.output or cache_folder() / file_name(profile.model)
    write(path, to_json(profile, weights))
    print("shares by layer  " + " ".join(f"{share:.2f}" for share in profile.layers))
    print(f"between prompts a layer's share differs by {profile.made['spread']:.2f} on average")
    for name, rows in profile.quality.items():
        if isinstance(rows, dict):
            budgets = {at: row for at, row in rows.items() if at.endswith("%")}
            said = (
                f"{at}: {row['kl'][0]:.3f}" + (f" ({row['right'][0]:.0%})" if row["right"] else "")
                for at, row in budgets.items()
            )
            print(f"KL, {name:<12} " + "  ".join(said))
    use = AUTO if options.output is None else path
    print(f"written          {path}; serve with --kv-eviction-profile {use}")
    return 0


def write(path: Path, value: Any) -> None:
    """Write JSON under a name of its own first, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
        json.dump(value, draft)
        draft.write("\n")
    # As any new file: a temporary one is its owner's alone.
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(draft.name, 0o666 & ~mask)
    os.replace(draft.name, path)


if __name__ == "__main__":
    guard()
    sys.exit(main(sys.argv[1:]))
