"""The result as Markdown."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.audit.figures import HIGH, Row
from benchmarks.audit.report import origin
from benchmarks.quality.table import row
from vllm_kvevict.metrics.counters import CHOSEN

HEAD = ("n", "kept", "answer, mean", "answer, worst", f"above {HIGH}, %", *CHOSEN.values())


def fields(rows: Sequence[Row]) -> list[str]:
    """What some rows come to; there must be one."""
    answers, rungs = [one["answer"] for one in rows], Counter(one["rung"] for one in rows)
    above = sum(nats > HIGH for nats in answers)
    return [
        str(len(rows)), f"{100 * fmean(one['kept'] for one in rows):.1f}%", f"{fmean(answers):.4f}",
        f"{max(answers):.4f}", f"{100 * above / len(rows):.1f}",
        *(str(rungs[kept]) for kept in CHOSEN.values()),
    ]  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """A line for each policy and kind of prompts, and one over all kinds."""
    rows: list[Row] = result["rows"]
    lines = [
        "# Budgets by target",
        "",
        origin(result),
        "",
        "Each prompt takes the smallest of 6.25, 12.5, 25 and 50% that is expected to lose at "
        f"most {result['target']} nats, else it keeps everything. Answer: KL divergence in nats of "
        "the answer's tokens from those of the full cache, teacher-forced on its greedy answer, "
        "mean over the tokens that were predicted behind the eviction. The last columns count "
        "prompts by what they came to; `short`: no trial could run.",
        "",
    ]
    for policy, one in result["counted"].items():
        mine = [each for each in rows if each["policy"] == policy]
        tokens = sum(each["tokens"] for each in mine)
        lines.append(
            f"- {policy}: {one['trials']} trials, which computed {one['tokens_tried']} tokens, "
            f"{100 * one['tokens_tried'] / max(1, tokens):.1f}% of those of the prompts."
        )
    lines += ["", row("policy", "prompt", *HEAD), row("---", "---", *["---:"] * len(HEAD))]
    for policy in dict.fromkeys(one["policy"] for one in rows):
        mine = [one for one in rows if one["policy"] == policy]
        for kind in dict.fromkeys(one["kind"] for one in mine):
            lines.append(row(policy, kind, *fields([one for one in mine if one["kind"] == kind])))
        lines.append(row(policy, "all", *fields(mine)))
    return "\n".join(lines) + "\n"
