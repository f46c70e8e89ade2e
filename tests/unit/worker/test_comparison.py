"""What an audit compares: torch's own divergence, and rings of every alignment."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvevict.rules.step_plan import HiddenStateSpan, Replay, StepPlan
from vllm_kvevict.worker.comparison import Comparison, divergence

WINDOW = 12
"""More than are compared at once."""


def test_divergence_is_torchs_own():
    torch.manual_seed(0)
    full, replayed = torch.randn(2, 19, 50).bfloat16()
    replayed[3] = full[3]
    nats, agreed = divergence(full, replayed).mean(0).tolist()
    p, q = full.double().log_softmax(-1), replayed.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert nats == pytest.approx(float(expected), rel=1e-5)
    same = sum(int(a.argmax()) == int(b.argmax()) for a, b in zip(full, replayed, strict=True))
    assert agreed == pytest.approx(same / 19)
    assert divergence(full, full).tolist() == [[0, 1]] * 19


def test_tokens_that_are_never_said():
    full = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 2.0, -torch.inf]])
    replayed = torch.tensor([[1.0, 2.0, -torch.inf], [2.0, 1.0, 0.0]])
    same, other = divergence(full, replayed).tolist()
    assert same == [0, 1] and 0 < other[0] < 10 and other[1] == 0


class Rows:
    """Batches of one request, whose hidden states say whose a token is and where it stands."""

    def __init__(self) -> None:
        self.owner = self.first = self.last = 0

    def hidden_states(self, _: object) -> tuple[torch.Tensor, dict[str, int]]:
        tokens = [(self.owner, p) for p in range(self.first, self.last)]
        return torch.tensor(tokens, dtype=torch.float32), {str(self.owner): 0}


@given(st.integers(1, 60), st.integers(0, WINDOW - 1), st.lists(st.integers(1, 9), max_size=8))
def test_the_positions_of_both_are_the_same(end, late, cuts):
    """However the prompt and the replay are cut into steps, and wherever the window lies."""
    start = max(0, end - WINDOW + late)
    if start == end:
        return
    seen: list[torch.Tensor] = []
    compared: list[Replay] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return hidden

    rows, replay = Rows(), Replay("1", "0", "snapkv", 0.5, start, end)
    one = Comparison(rows, WINDOW, logits, lambda told, _: compared.append(told))
    output = SchedulerOutput.make_empty()

    def step(owner: int, first: int, last: int, **plan: list[Replay]) -> None:
        rows.owner, rows.first, rows.last = owner, first, last
        heard = {str(owner): HiddenStateSpan(first, max(first, last - WINDOW), last)}
        one.begin_step(output, StepPlan(hidden_states=heard, **plan))
        one.keep_hidden_states(output)
        one.end_step()

    for owner, begin in ((0, 0), (1, start)):
        at = begin
        for cut in [*cuts, end]:
            until = min(end, at + cut)
            if until == at:
                break
            over = until == end
            named = {"replays": [replay]} if owner == 0 else {"compared": [replay]}
            step(owner, at, until, **(named if over else {}))
            at = until
    halves = [both.chunk(2) for both in seen]
    for owner in (0, 1):
        found = torch.cat([half[owner] for half in halves]).tolist()
        assert found == [[owner, p] for p in range(start, end)]
    assert compared == [replay]
    assert not one._hidden and not one._full


def test_requests_that_are_gone_leave_nothing():
    rows = Rows()
    one = Comparison(rows, WINDOW, lambda hidden: hidden, lambda *_: None)
    one._hidden["a"] = one._full["b"] = torch.zeros(WINDOW, 2)
    output = SimpleNamespace(finished_req_ids={"a"}, preempted_req_ids={"b"})
    one.begin_step(output, StepPlan(compared=[Replay("b", "a", "snapkv", 1.0, 0, 1)]))
    assert not one._hidden and not one._full
    one.end_step()
