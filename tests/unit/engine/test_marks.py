"""Marks of free blocks: where eviction under pressure begins and ends."""

from vllm_kvevict.engine.marks import Marks


def test_it_begins_below_the_low_mark_and_ends_at_the_high_one() -> None:
    marks = Marks(1000, 0.05, 0.1)
    assert (marks.low, marks.high) == (50, 100)
    seen = [(free, marks.missing(free), marks.pressing) for free in (100, 50, 49, 60, 99, 100, 60)]
    assert seen == [
        (100, 0, False),
        (50, 0, False),
        (49, 51, True),
        (60, 40, True),
        (99, 1, True),
        (100, 0, False),
        (60, 0, False),
    ]


def test_the_reserve_lifts_both_marks() -> None:
    marks = Marks(1000, 0.05, 0.1, reserve=30)
    assert (marks.low, marks.high) == (80, 130)
    assert marks.missing(79) == 51
    assert marks.missing(-20) == 150, "promised blocks are not free"


def test_marks_of_zero_begin_only_where_more_is_promised_than_there_is() -> None:
    marks = Marks(1000, 0.0, 0.0)
    assert marks.missing(0) == 0 and not marks.pressing
    assert marks.missing(-1) == 1 and marks.pressing
