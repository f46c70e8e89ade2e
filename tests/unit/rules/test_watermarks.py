"""Watermarks of free blocks: where eviction under pressure begins and ends."""

from vllm_kvevict.rules.watermarks import Watermarks


def pressing(marks: Watermarks, free: int) -> bool:
    marks.update(free)
    return marks.pressing


def test_it_begins_below_the_low_one_and_ends_at_the_high_one() -> None:
    marks = Watermarks(1000, 0.05, 0.1)
    assert (marks.low, marks.high) == (50, 100)
    seen = [pressing(marks, free) for free in (100, 50, 49, 60, 99, 100, 60)]
    assert seen == [False, False, True, True, True, False, False]


def test_the_reserve_lifts_both() -> None:
    marks = Watermarks(1000, 0.05, 0.1, reserve=30)
    assert (marks.low, marks.high) == (80, 130)
    assert pressing(marks, 79) and not pressing(Watermarks(1000, 0.05, 0.1, reserve=30), 80)
    assert pressing(Watermarks(1000, 0.05, 0.1), -20), "promised blocks are not free"


def test_watermarks_of_zero_begin_only_where_more_is_promised_than_there_is() -> None:
    marks = Watermarks(1000, 0.0, 0.0)
    assert not pressing(marks, 0) and pressing(marks, -1)
