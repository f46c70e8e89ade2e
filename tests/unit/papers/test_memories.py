"""What is remembered of a request ends with its row."""

from vllm_kvevict.papers.memories import Memories


def test_a_cleared_row_forgets_and_others_do_not():
    memories = Memories()
    assert memories.of(3, "a") is None
    memories.keep(3, "a", "first")
    memories.keep(3, "b", "other layer")
    memories.keep(5, "a", "other row")
    memories.keep(3, "a", "second")
    assert (memories.of(3, "a"), memories.of(3, "b")) == ("second", "other layer")
    memories.clear([3, 4])
    assert memories.of(3, "a") is None and memories.of(3, "b") is None
    assert memories.of(5, "a") == "other row" and len(memories) == 1
