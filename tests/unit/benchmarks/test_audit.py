"""The benchmark of audits: what is asked, its arithmetic, its report. No vLLM runs."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.audit import cost, figures, prompts
from benchmarks.audit.answers import answer_rows
from benchmarks.audit.engine import evicted, settings
from benchmarks.audit.listener import Listener, number, own
from benchmarks.audit.prompts import (
    FACTS,
    FOUR,
    FOUR_KNOWN,
    KINDS,
    NEEDLE,
    NEEDLE_KNOWN,
    PROSE,
    Mixture,
)
from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.ruler import facts
from vllm_kvevict.config.audit_share import parse_share
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import KEYS


def test_divergence_is_the_mean_over_rows_of_the_sum_over_the_vocabulary() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]), torch.tensor([[0.25, 0.5, 0.25]])
    # Logits may be shifted by any constant.
    full = p.log() + torch.tensor([[3.0], [-1.0]])
    wanted = [sum(a * np.log(a / b) for a, b in zip(one, q[0], strict=True)) for one in p.tolist()]
    found = figures.divergence(full, q.log().expand(2, -1))
    assert found == pytest.approx(np.mean(wanted), rel=1e-6)
    assert figures.divergence(full, full) == 0


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.3, 0.1, 0.2], [3, 1, 2]),
        ([5, 1, 5, 0], [3.5, 2, 3.5, 1]),
        ([2, 2, 2], [2, 2, 2]),
    ],
)
def test_ranks_share_the_mean_among_equals(values: list[float], wanted: list[float]) -> None:
    assert figures.ranks(values).tolist() == wanted


def test_rank_correlation_is_what_counting_pairs_of_ranks_gives() -> None:
    rng = np.random.default_rng(1)
    one = rng.permutation(50).astype(float)
    other = one + rng.normal(scale=20, size=50)
    # Without ties: 1 - 6 * sum of squares / (n^3 - n), of ranks that counting gives.
    placed = [[sum(a >= b for b in column) for a in column] for column in (one, other)]
    squares = sum((a - b) ** 2 for a, b in zip(*placed, strict=True))
    wanted = 1 - 6 * squares / (50**3 - 50)
    assert 0.2 < wanted < 0.95
    found = figures.spearman(one.tolist(), other.tolist())
    assert found == pytest.approx(wanted)
    # Any rising function leaves it alone.
    assert figures.spearman(np.exp(one / 10).tolist(), other.tolist()) == pytest.approx(wanted)
    assert figures.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert figures.spearman([1, 1], [1, 2]) is figures.spearman([1], [1]) is None


def row(audit: float, answer: float, **more: Any) -> figures.Row:
    given = dict(policy="probe", kind=PROSE, budget="25%", kept=0.25, again=None, tokens=9,
                 answer_tokens=7, seed=0)  # fmt: skip
    return {**given, "audit": audit, "answer": answer, **more}


def test_an_answer_has_slipped_through_where_its_audit_was_low() -> None:
    rows = [row(0.01, 0.5), row(0.2, 0.9), row(0.029, 0.31), row(0.01, 0.3), row(0.9, 0.1)]
    assert figures.slipped(rows) == (3, 2)
    found = figures.summary(rows)
    assert (found["above"], found["missed"], found["answer_worst"]) == (3, 2, 0.9)
    assert found["audit_mean"] == pytest.approx(0.2298) and found["below"] == 3


def test_cells_take_every_row_once_in_their_order() -> None:
    names = [(b, p) for p, b in product(("b", "a"), ("50%", "6.25%")) for _ in range(3)]
    rows = [row(i, i, policy=p, budget=b) for i, (b, p) in enumerate(names)]
    found = figures.cells(rows, ("policy", "budget"))
    assert [(one["policy"], one["budget"]) for one in found] == [
        ("b", "50%"), ("b", "6.25%"), ("a", "50%"), ("a", "6.25%")
    ]  # fmt: skip
    assert [one["audit_mean"] for one in found] == [1, 4, 7, 10]
    assert sum(one["prompts"] for one in figures.cells(rows, ("policy",))) == len(rows)
    # Each rises with its rows, and one alone has no rank correlation.
    assert figures.within(found) == pytest.approx(1)
    assert figures.within(figures.cells(rows[:1], ("policy",))) is None


def test_only_tokens_that_were_predicted_behind_the_eviction_count() -> None:
    # A prompt of 10 tokens and an answer of 4: rows 9 to 12 predict it.
    assert list(answer_rows(10, 4, 6)) == [9, 10, 11, 12]
    # Row 9 was computed before an eviction at the end of the prompt.
    assert list(answer_rows(10, 4, 10)) == [10, 11, 12]
    assert not answer_rows(10, 1, 10)


def test_documents_hold_each_kind_once_and_are_evicted_where_it_says(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading the docstrings of whole packages takes half a minute.
    pool = tuple(f"The {n}. of so many sentences stands here." for n in range(90))
    for module in (prompts, facts):
        monkeypatch.setattr(module, "sentences", lambda package: pool)
    chat = LocalChat(tiny_model)
    mixture = Mixture(chat, 400)
    found = mixture.documents(3)
    points = [(kind, document, p) for document in found for kind, p in document.points.items()]
    assert sorted(kind for kind, _, _ in points) == sorted(KINDS)
    for kind, document, point in points:
        at_end = kind in (NEEDLE_KNOWN, FOUR_KNOWN, PROSE)
        assert (point == len(document.ids)) == at_end and 0 < point <= len(document.ids)
        # The question stands behind the point, or nowhere.
        assert ("What" in chat.decode(list(document.ids[point:]))) == (kind in (NEEDLE, FOUR))
    assert found == Mixture(chat, 400).documents(3) != mixture.documents(4)
    (only,) = Mixture(chat, 400, [NEEDLE]).documents(3)
    assert list(only.points) == [NEEDLE]
    assert [list(one.points) for one in Mixture(chat, 400, [FACTS]).documents(0)] == [[FACTS]]


def test_the_engine_audits_everything_and_only_what_is_asked_for() -> None:
    for policy in ("ada-defensive", "probe"):
        config = EvictionConfig.model_validate(settings(policy))
        assert parse_share(config.audit) == 1 and config.interval == 0
        assert (config.profile == "auto") == (policy == "probe")
    assert set(evicted(7, "25%")) <= set(KEYS)


def test_the_listener_keeps_logits_by_position_and_leaves_replays_alone() -> None:
    hidden = torch.arange(12.0)[:, None]
    ended: list[Any] = []
    reported: list[Any] = []
    eviction = SimpleNamespace(
        _rows=SimpleNamespace(
            hidden_states=lambda _: (hidden, {"0-a": 0, "1-b": 4, "0-a-audit-1": 7})
        ),
        end_step=lambda output, run=True: ended.append(run),
    )
    model = SimpleNamespace(compute_logits=lambda rows: rows.expand(-1, 2))
    worker = SimpleNamespace(
        kv_eviction=eviction, model_runner=SimpleNamespace(get_model=lambda: model)
    )
    reporter = SimpleNamespace(measured=lambda **values: reported.append(values))
    core = SimpleNamespace(
        scheduler=SimpleNamespace(eviction_counters=None, _reporter=reporter),
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=worker)),
    )
    inner = SimpleNamespace(engine_core=core)
    listener = Listener(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=inner)))
    output = SimpleNamespace(
        total_num_scheduled_tokens=12,
        num_scheduled_tokens={"0-a": 4, "1-b": 3, "0-a-audit-1": 5},
        scheduled_cached_reqs=SimpleNamespace(req_ids=["0-a"], num_computed_tokens=[20]),
        scheduled_new_reqs=[
            SimpleNamespace(req_id="1-b", num_computed_tokens=21),
            SimpleNamespace(req_id="0-a-audit-1", num_computed_tokens=18),
        ],
    )
    eviction.end_step(output, run=True)
    assert not listener.logits
    listener.first = 22
    eviction.end_step(output, run=True)
    kept = {key: {p: float(v[0]) for p, v in of.items()} for key, of in listener.logits.items()}
    assert kept == {0: {22: 2, 23: 3}, 1: {22: 5, 23: 6}}
    eviction.end_step(output, run=False)
    assert ended == [True, True, False]
    audit = ("1-b", "probe", 0.25, 0.1, 0.9)
    reporter.measured(seconds=[], audits=[audit])
    assert listener.audits == {1: [audit]} and reported[0]["audits"] == [audit]
    assert number("17-x-audit-2") == 17 and own("17-x-audit-2") and not own("17-x")


def test_throughput_is_compared_within_a_round() -> None:
    def load(rate: float, audited: int) -> dict[str, Any]:
        return dict(output_tokens_per_s=rate, evictions=9, tokens_audited=audited,
                    audits_dropped=1, tokens=1000)  # fmt: skip

    rows = {"0": [load(100, 0), load(50, 0), load(10, 0)], "1%": [load(99, 32), load(51, 0)]}
    without, with_audits = cost.summary(rows)
    assert without["ratio"] == 1 and without["audited_share"] == 0
    assert with_audits["ratios"] == [0.99, 1.02] and with_audits["ratio"] == pytest.approx(1.005)
    assert with_audits["audited_share"] == pytest.approx(32 / 2000)
    assert "--kv-eviction-audit" not in cost.flags("probe", "25%", "0")
    assert cost.flags("probe", "25%", "1%")[-4:] == [
        "--kv-eviction-profile", "auto", "--kv-eviction-audit", "1%"
    ]  # fmt: skip
