"""Teacher forcing through the sampler, and the means made of it."""

import math

import pytest
import torch
from vllm import SamplingParams

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Followed
from benchmarks.quality.fidelity_report import markdown, summarize
from benchmarks.quality.forced import Follow, ForcedTokens


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
        "cells": halves, "options": dict(texts=1, context=9, continuation=5, interval=0),
        "command": "c", "date": "d", "commit": "e", "machine": "m",
    }  # fmt: skip
    assert "| snapkv | 25% | 3-4 | 4.500 | +1.000" in markdown(result)
    assert not math.isnan(halves[0]["same"]["low"])
