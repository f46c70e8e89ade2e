"""Teacher forcing through the sampler, and the means made of it."""

import argparse
import math
import random
from itertools import pairwise

import pytest
import torch
from vllm import SamplingParams

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Followed
from benchmarks.quality.fidelity import check
from benchmarks.quality.fidelity_report import markdown, summarize
from benchmarks.quality.forced import Follow, ForcedTokens
from benchmarks.quality.ruler.prose import passage, sentences, spread
from benchmarks.quality.ruler.source_code import files, piece
from vllm_kvevict.calibrate.lessons import source


def test_follow_leaves_no_choice_and_then_every_choice():
    follow, logits = Follow([3, 1]), torch.randn(8)
    assert follow([], logits).argmax() == 3
    assert follow([3], logits).argmax() == 1
    assert follow([3, 1], logits) is logits


@pytest.mark.parametrize("tokens", ["1 2", [1, -2], [0.5]])
def test_other_things_than_tokens_are_refused(tokens):
    with pytest.raises(ValueError, match="forced_tokens"):
        ForcedTokens.validate_params(SamplingParams(extra_args={"forced_tokens": tokens}))
    ForcedTokens.validate_params(SamplingParams())


def test_summary_is_paired_and_leaves_the_first_token_out():
    cell = Cell("prose", "snapkv", "25%")
    full = Followed((-9.0, -1.0, -2.0, -3.0, -4.0), (0, 1, 2, 3, 4))
    other = Followed((-5.0, -1.5, -2.5, -3.0, -6.0), (7, 1, 9, 3, 9))
    whole = {e["label"]: e for e in summarize([{FULL_CELL: full, cell: other}] * 3, bins=1)}
    assert whole["full cache"]["nll"]["mean"] == pytest.approx(2.5)
    assert whole["full cache"]["same"]["mean"] == 1 and whole["full cache"]["excess"]["mean"] == 0
    assert whole["snapkv"]["nll"]["mean"] == pytest.approx(13 / 4)
    assert whole["snapkv"]["excess"]["mean"] == pytest.approx(0.75)
    assert whole["snapkv"]["same"]["mean"] == pytest.approx(0.5)

    halves = [e for e in summarize([{FULL_CELL: full, cell: other}], bins=2) if e["budget"]]
    assert [(e["first"], e["last"]) for e in halves] == [(1, 2), (3, 4)]
    assert [e["excess"]["mean"] for e in halves] == pytest.approx([0.5, 1.0])
    result = {
        "cells": halves,
        "options": dict(texts=1, source="code", context=9, continuation=5, interval=0),
        "command": "c", "date": "d", "commit": "e", "machine": "m",
    }  # fmt: skip
    assert "| snapkv | 25% | 3-4 | 4.500 | +1.000" in markdown(result)
    assert not math.isnan(halves[0]["same"]["low"])


def test_a_run_that_did_not_evict_in_decode_is_no_result():
    options = argparse.Namespace(
        policies=["snapkv", "tova"], budgets=["25%", "512"], interval=128, continuation=1024
    )
    rows: list = [{}] * 3
    due = 3 * 4 * (1 + 7)
    check(options, rows, {"evictions": due})
    with pytest.raises(SystemExit, match="95 of at least 96"):
        check(options, rows, {"evictions": due - 1})
    options.interval = 0
    check(options, rows, {"evictions": 12})


def test_spread_texts_begin_at_equal_distances():
    lengths = [len(sentence) + 1 for sentence in sentences()]
    starts = [sum(lengths[: spread(part, 20)]) for part in range(20)]
    gaps = [after - before for before, after in pairwise(starts)]
    assert starts[0] == 0 and min(gaps) > 0
    assert max(abs(gap - sum(lengths) / 20) for gap in gaps) <= max(lengths)
    first, place = sentences()[spread(3, 20)], spread(3, 20)
    assert passage(random.Random(0), 100, place)[0] == first


def test_pieces_of_code_begin_at_a_line_and_were_not_learned_from():
    texts = [piece(random.Random(seed), 9000) for seed in range(20)]
    assert texts == [piece(random.Random(seed), 9000) for seed in range(20)]
    assert len(set(texts)) == 20
    learned = {line for part in source() for line in part.splitlines() if len(line) > 50}
    for text in texts:
        assert len(text) >= 9000 and text.count("\n") > 100
        assert any(file.endswith(text) and f"\n{text}" in f"\n{file}" for file in files())
        assert not learned & set(text.splitlines())
    with pytest.raises(ValueError, match="no source file has 10000000 characters"):
        piece(random.Random(0), 10**7)
