"""What is remembered of a request ends with its row."""

from vllm_kvevict.policies.state import PolicyState


def test_a_cleared_row_forgets_and_others_do_not():
    state = PolicyState()
    assert state.get(3, "a") is None
    state.keep(3, "a", "first")
    state.keep(3, "b", "other layer")
    state.keep(5, "a", "other row")
    state.keep(3, "a", "second")
    assert (state.get(3, "a"), state.get(3, "b")) == ("second", "other layer")
    state.clear([3, 4])
    assert state.get(3, "a") is None and state.get(3, "b") is None
    assert state.get(5, "a") == "other row" and len(state) == 1
