"""What a target would have chosen: the smallest budget whose audit stays below it.

    python benchmarks/results/studies/target_ladder.py [benchmarks/results/audit.json]

Every prompt of `python -m benchmarks.audit --part answers` was evicted to 6.25, 12.5, 25 and 50%,
and audited, and the answer compared with the full cache's. Where no audit stays below the target
the prompt keeps everything.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

LADDER = ("6.25%", "12.5%", "25%", "50%")
TARGETS = (0.02, 0.025, 0.03, 0.04, 0.05)
MUCH = 0.3
Prompts = list[dict[str, dict[str, Any]]]


def budget_with(prompts: Prompts, loss: float) -> float:
    """Share that one budget for all would keep at this mean loss, between those of the ladder."""
    points = [
        (mean(p[b]["kept"] for p in prompts), mean(p[b]["answer"] for p in prompts)) for b in LADDER
    ]
    for (small, most), (large, least) in zip(points, [*points[1:], (1.0, 0.0)], strict=True):
        if least <= loss <= most:
            return small + (large - small) * (most - loss) / (most - least)
    raise ValueError(f"no budget of the ladder loses {loss}")


def row(prompts: Prompts, target: float) -> str:
    chosen = [
        next(
            ((p[b]["kept"], p[b]["answer"]) for b in LADDER if p[b]["audit"] <= target), (1.0, 0.0)
        )
        for p in prompts
    ]
    kept, loss = mean(share for share, _ in chosen), mean(loss for _, loss in chosen)
    much = sum(loss > MUCH for _, loss in chosen) * 100 / len(chosen)
    return f"{kept:.1%} | {budget_with(prompts, loss):.1%} | {loss:.4f} | {much:.1f} |"


def main(path: Path) -> None:
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for one in json.loads(path.read_text())["answers"]["rows"]:
        found[one["policy"]][one["kind"], one["seed"]][one["budget"]] = one
    print("| policy | prompts | target | kept | one budget of that loss | mean KL | above 0.3, % |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for policy, prompts in found.items():
        for name in ("all four kinds", "without other facts"):
            mine = [p for (kind, _), p in prompts.items() if name[0] == "a" or "facts" not in kind]
            for target in TARGETS:
                print(f"| {policy} | {name} | {target} | {row(mine, target)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/audit.json"))
