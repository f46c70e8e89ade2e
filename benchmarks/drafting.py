"""How many drafts of layers that draft are accepted, without and with eviction.

    python -m benchmarks.drafting

Tiny Llamas with random weights, each with a drafter that makes what the model does
(drafters.py), so that what eviction costs in drafts is seen apart from what a drafter does
not know. A draft that was made before an eviction and is verified after it is the model's own no
more.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

RESULT = Path(__file__).parent / "results" / "drafting.json"
METHODS = ("draft_model", "eagle", "mtp")
POLICIES = (None, "ada-snapkv", "ada-defensive", "streaming-llm")
PROMPTS, PROMPT, ANSWER, BUDGET, INTERVAL = 8, 512, 256, 256, 64


def measure(method: str, policy: str | None) -> dict[str, Any]:
    """Drafts of one server, and how many of them were accepted."""
    from benchmarks.drafters import checkpoints
    from benchmarks.oracles.engine import engine
    from benchmarks.tiny_model import random_prompt

    prompts = [random_prompt(PROMPT, seed=seed) for seed in range(PROMPTS)]
    eviction = dict(policy=policy, budget=BUDGET, interval=INTERVAL) if policy else None
    with tempfile.TemporaryDirectory() as folder:
        _, served, speculative = checkpoints(method, Path(folder))
        with engine(served, eviction, speculative_config=speculative, max_model_len=1024) as run:
            from vllm import SamplingParams

            llm = run.llm if policy else run
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            update, counts = scheduler.update_from_output, [0, 0]

            def counted(scheduled: Any, output: Any) -> Any:
                for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
                    sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
                    counts[0] += len(drafts)
                    counts[1] += len(sampled) - 1
                return update(scheduled, output)

            scheduler.update_from_output = counted
            sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            llm.generate(requests, sampling, use_tqdm=False)
            evictions = scheduler.eviction_counters.evictions if policy else 0
    assert bool(policy) == (evictions >= 3 * PROMPTS)
    return dict(drafted=counts[0], accepted=counts[1], evictions=evictions)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Accepted of drafted, and the tokens that a step makes of one request."""
    lines = ["| drafter | policy | drafts | accepted | tokens a step |", "|" + " --- |" * 5]
    for name, row in rows.items():
        method, policy = name.split("/")
        share = row["accepted"] / row["drafted"]
        steps = PROMPTS * ANSWER - row["accepted"]
        speed = PROMPTS * ANSWER / steps
        lines.append(f"| {method} | {policy} | {row['drafted']} | {share:.1%} | {speed:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "POLICY"), help="a server, as JSON")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.one:
        method, policy = args.one
        print(json.dumps(measure(method, None if policy == "none" else policy)))
        return
    rows = {}
    for method in METHODS:
        for policy in POLICIES:
            command = [
                sys.executable,
                "-m",
                "benchmarks.drafting",
                "--one",
                method,
                policy or "none",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[f"{method}/{policy or 'none'}"] = json.loads(done.stdout.splitlines()[-1])
            print(table(rows).splitlines()[-1], flush=True)
    sizes = dict(prompts=PROMPTS, prompt=PROMPT, answer=ANSWER, budget=BUDGET, interval=INTERVAL)
    args.out.write_text(json.dumps(provenance() | dict(sizes=sizes, rows=rows), indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
