"""The result as Markdown, and the picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.audit.figures import HIGH, LOW, Row, cells, summary, within
from benchmarks.provenance import sentence
from benchmarks.quality.table import row

NOT_MEASURED = "Not measured."
HEAD = ("n", "kept", "audit, mean", "answer, mean", "answer, worst", f"answers above {HIGH}",
        f"audits below {LOW}", "both", "rank correlation")  # fmt: skip


COLUMNS = ("audit", "answer")
LEAST = 1e-5
"""Nats: what is smaller is drawn here."""


def markdown(result: dict[str, Any]) -> str:
    """All parts; one that is missing says that it was not measured."""
    parts = (
        ("Does the audit tell what happens to the answer?", "answers", _answers),
        ("Is it what transformers finds?", "oracle", _oracle),
        ("What does it cost?", "cost", _cost),
    )
    lines = ["# Audits of evictions"]
    for title, name, tell in parts:
        lines += ["", f"## {title}", ""]
        found = result.get(name)
        lines += [sentence(found), "", *tell(found)] if found else [NOT_MEASURED]
    return "\n".join(lines) + "\n"


def _nats(value: float) -> str:
    return f"{value:.4f}"


def _fields(one: dict[str, Any]) -> list[str]:
    correlation = one["spearman"]
    return [
        str(one["prompts"]), f"{100 * one['kept']:.1f}%", _nats(one["audit_mean"]),
        _nats(one["answer_mean"]), _nats(one["answer_worst"]), str(one["above"]),
        str(one["below"]), str(one["missed"]),
        "-" if correlation is None else f"{correlation:.2f}",
    ]  # fmt: skip


def _answers(found: dict[str, Any]) -> list[str]:
    rows: list[Row] = found["rows"]
    if not rows:
        return [NOT_MEASURED]
    again = [one["again"] for one in rows if one["again"] is not None]
    tokens = [one["tokens"] for one in rows]
    mean = fmean(one["answer_tokens"] for one in rows)
    lines = [
        "Every eviction is audited. Audit: KL divergence in nats of the next tokens at the last "
        "tokens before the eviction, computed once more over what it left. Answer: the same of the "
        "answer's tokens, teacher-forced on the full cache's greedy answer. It counts the tokens "
        "that were predicted behind the eviction: where a prompt is evicted at its end, the "
        "answer's first token is not among them. Worst is the answer with the highest mean. Both: "
        "the answer is above and its audit below, so the audit missed it.",
        "",
        f"Prompts have {min(tokens)} to {max(tokens)} tokens, and answers {mean:.1f} on average. "
        + (
            f"Rounding alone, the same tokens without any eviction: {_nats(fmean(again))} on "
            f"average, {_nats(max(again))} at most."
            if again
            else "What rounding alone comes to was not measured."
        ),
        "",
        *(_counted(policy, one) for policy, one in found["counted"].items()),
        "",
        row("policy", "prompt", "budget", *HEAD),
        row("---", "---", "---:", *["---:"] * len(HEAD)),
    ]
    each = cells(rows, ("policy", "kind", "budget"))
    for one in each:
        lines.append(row(one["policy"], one["kind"], one["budget"], *_fields(one)))
    lines += ["", row("over all of", *HEAD), row("---", *["---:"] * len(HEAD))]
    for names in (("policy",), ("kind",), ("policy", "kind")):
        for one in cells(rows, names):
            lines.append(row(", ".join(one[name] for name in names), *_fields(one)))
    lines.append(row("everything", *_fields(summary(rows))))
    inside = within(each)
    if inside is not None:
        lines += [
            "",
            "Rank correlations over several budgets or kinds hold what these do by themselves. "
            f"Inside a cell of the first table, the mean over the cells is {inside:.2f}.",
        ]
    return lines


def _counted(policy: str, one: dict[str, int]) -> str:
    audits = one["evictions"] - one["audits_dropped"]
    return (
        f"- {policy}: {one['evictions']} evictions, {one['audits_dropped']} without an audit, "
        f"{one['tokens_audited'] / max(1, audits):.1f} tokens replayed in each."
    )


def _oracle(found: dict[str, Any]) -> list[str]:
    rows: list[Row] = found["rows"]
    if not rows:
        return [NOT_MEASURED]
    lines = [
        f"{found['prompts']} prompts. The audit is the engine's, in bfloat16 as served; the "
        "offline value is transformers in float32 with masks of the same kept positions.",
        "",
        row("policy", "budget", "evictions", "audit, mean", "offline, mean", "ratio"),
        row("---", "---", *["---:"] * 4),
    ]
    both = [(one["policy"], one["budget"], one) for one in cells(rows, ("policy", "budget"))]
    for policy, budget, one in [*both, ("everything", "", summary(rows))]:
        ratio = one["audit_mean"] / one["answer_mean"]
        values = _nats(one["audit_mean"]), _nats(one["answer_mean"]), f"{ratio:.3f}"
        lines.append(row(policy, budget, str(one["prompts"]), *values))
    return lines


def _cost(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['load']}; {found['policy']}, budget {found['budget']}. The ratio is the median "
        "over rounds of output tokens per second over those of the server without audits in the "
        "same round. The share is of all tokens of prompts and answers.",
        "",
        row("audit", "loads", "output tokens/s", "ratio", "of the rounds", "evictions",
            "audits dropped", "tokens audited", "share"),
        row("---", *["---:"] * 8),
    ]  # fmt: skip
    for one in found["servers"]:
        each = ", ".join(f"{ratio:.3f}" for ratio in one["ratios"])
        lines.append(
            row(
                one["audit"], str(one["loads"]), f"{one['output_tokens_per_s']:.1f}",
                f"{one['ratio']:.3f}" if one["ratio"] else "-", each or "-", str(one["evictions"]),
                str(one["audits_dropped"]), str(one["tokens_audited"]),
                f"{100 * one['audited_share']:.3f}%",
            )
        )  # fmt: skip
    return lines


def plot(rows: Sequence[Row], output: Path) -> None:
    """Each prompt at each budget: the audit, and the answer's divergence; a panel a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    policies = list(dict.fromkeys(one["policy"] for one in rows))
    figure, panels = pyplot.subplots(
        1, len(policies), figsize=(1 + 4.5 * len(policies), 4.5), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, policy in zip(panels[0], policies, strict=True):
        for kind in dict.fromkeys(one["kind"] for one in rows):
            mine = [one for one in rows if one["policy"] == policy and one["kind"] == kind]
            audit, answer = ([max(one[name], LEAST) for one in mine] for name in COLUMNS)
            axes.scatter(audit, answer, s=8, alpha=0.5, linewidths=0, label=kind)
        axes.axvline(LOW, color="grey", linewidth=0.8, linestyle="--")
        axes.axhline(HIGH, color="grey", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(policy, fontsize=10)
        axes.set_xlabel("audit, nats")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("KL of the answer, nats")
    panels[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    # No date or version inside: the same results give the same file.
    figure.savefig(output, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
