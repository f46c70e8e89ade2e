"""Rows: every held request has its own, and a released one starts clean."""

from types import SimpleNamespace

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_kvevict.worker.runners import RowsV1, RowsV2


def step(new=(), resumed=(), finished=(), preempted=()):
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(name, [1], [], None, None, ([],), 0, None) for name in new
    ]
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.scheduled_cached_reqs.resumed_req_ids = set(resumed)
    output.finished_req_ids = set(finished)
    output.preempted_req_ids = set(preempted)
    return output


def test_v1_rows_follow_the_scheduler():
    batch = SimpleNamespace(req_ids=[])
    rows = RowsV1(SimpleNamespace(input_batch=batch), 2, lambda row: False)
    assert sorted(rows.begin_step(step(new=["a", "b"]))) == [0, 1]
    batch.req_ids = ["b", "a"]
    before = rows.batch_rows(None).tolist()
    assert before == rows.rows(["b", "a"]).tolist()
    assert rows.begin_step(step()) == []
    # A finished request and a new one of the same name are two requests.
    row = before[1]
    assert rows.begin_step(step(new=["a"], finished=["a"])) == [row]
    # A preempted request gives its row to the next one, and starts clean when it resumes.
    rows.begin_step(step(new=["c"], preempted=["b"]))
    batch.req_ids = ["c"]
    assert rows.batch_rows(None).tolist() == [before[0]]
    assert rows.begin_step(step(resumed=["b"], finished=["c"])) == [before[0]]
    # Preempted and resumed between two steps (reset_prefix_cache does that).
    assert rows.begin_step(step(resumed=["b"], preempted=["b"])) == [before[0]]


def test_v1_rows_of_sessions_that_wait_are_lent():
    """More sessions may wait for their turn than requests run; they hold nothing in their rows."""
    batch, evicted = SimpleNamespace(req_ids=[]), set()
    rows = RowsV1(SimpleNamespace(input_batch=batch), 2, evicted.__contains__)

    def run(*names, **changes):
        output = step(**changes)
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        cleared = rows.begin_step(output)
        evicted.difference_update(cleared)
        batch.req_ids = list(names)
        found = rows.batch_rows(None).tolist()
        assert len(set(found)) == len(names)
        return found, cleared

    (session,), _ = run("session", new=["session"])
    (own,), _ = run("evicted", new=["evicted"])
    evicted.add(own)
    assert run("a", new=["a"]) == ([session], [session]), "the session waits for its next turn"
    assert run("b", new=["b"], finished=["a"]) == ([session], [session])
    # Its row is another one by then, and clean.
    assert run("session", "b", finished=["evicted"]) == ([own, session], [own])
    evicted.clear()
    assert run("session", "b") == ([own, session], [])
    # One that ends without a row takes none along.
    assert run("c", "b", new=["c"])[0] == [own, session]
    assert run("d", "b", new=["d"], finished=["session", "c"])[0] == [own, session]


def test_v2_rows_are_the_runners():
    index = {"a": 3, "b": 1}
    prepared = []
    state = SimpleNamespace(prepare_attn=lambda batch, *more, **named: prepared.append(named))
    runner = SimpleNamespace(req_states=SimpleNamespace(req_id_to_index=index), model_state=state)
    rows = RowsV2(runner)
    assert sorted(rows.begin_step(step(finished=["a", "gone"], preempted=["b"]))) == [1, 3]
    assert rows.rows(["b", "a"]).tolist() == [1, 3]
    batch = SimpleNamespace(idx_mapping_np=np.array([3, 1]))
    state.prepare_attn(batch, None, for_capture=False)
    # Of models with recurrent layers the metadata does not say it.
    assert rows.batch_rows(SimpleNamespace(req_idx=None)).tolist() == [3, 1]
    assert prepared == [{"for_capture": False}]


def test_hidden_states_in_batch_order():
    output = step()
    output.num_scheduled_tokens = {"a": 3, "b": 1, "c": 4}
    for kind in (RowsV1, RowsV2):
        batch = SimpleNamespace(req_ids=["b", "c", "a"])
        runner = SimpleNamespace(
            input_batch=batch,
            execute_model_state=SimpleNamespace(hidden_states="hidden", input_batch=batch),
            req_states=SimpleNamespace(req_id_to_index={}),
            model_state=SimpleNamespace(prepare_attn=lambda *_: None),
        )
        rows = RowsV1(runner, 3, lambda row: False) if kind is RowsV1 else RowsV2(runner)
        assert rows.hidden_states(output) == ("hidden", {"b": 0, "c": 1, "a": 5})
