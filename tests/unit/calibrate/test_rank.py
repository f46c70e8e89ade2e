"""Shares from scores, beside one sort of all layers' tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.calibrate import rank
from vllm_kvevict.config.profile import ModelIdentity, Profile


@given(seed=st.integers(0, 99), tokens=st.integers(2, 12))
def test_tokens_of_all_layers_are_ranked_together(seed, tokens):
    scores = torch.rand((3, 2, 20), generator=torch.Generator().manual_seed(seed))
    counts = rank.kept(scores, tokens)
    assert counts.sum() == tokens * 6 and counts.min() >= 1
    threshold = scores.flatten().sort(descending=True).values[tokens * 6 - 1]
    best = (scores >= threshold).sum(-1)
    if best.min() >= 1:
        assert torch.equal(counts, best)


def test_every_prompt_counts_as_much():
    short, long = torch.tensor([[1, 3], [0, 0]]), torch.tensor([[0, 0], [100, 300]])
    shares = rank.mean_shares([short, long])
    assert shares.tolist() == [[0.5, 1.5], [0.5, 1.5]]
    assert rank.by_layer(shares) == [1.0, 1.0]
    assert rank.by_head(shares) == [[0.5, 1.5], [0.5, 1.5]]
    # Each layer has 2 in one prompt and 0 in the other.
    assert rank.spread([short, long]) == 1.0
    assert rank.spread([short, short]) == 0.0


def test_what_is_rounded_is_still_a_file_of_shares():
    shares = rank.mean_shares([torch.randint(1, 50, (61, 7))])
    Profile(
        model=ModelIdentity(architecture="any", layers=61, kv_heads=7, config="any"),
        policy="snapkv",
        budget=256,
        layers=tuple(rank.by_layer(shares)),
        heads=tuple(map(tuple, rank.by_head(shares))),
    )


def test_no_share_is_rounded_to_nothing():
    shares = rank.mean_shares([torch.tensor([[1, 90_000], [90_000, 90_000]])])
    assert rank.by_head(shares)[0] == [10**-rank.DIGITS, 2.0]
    assert rank.by_layer(torch.tensor([[1e-6], [2.0]]))[0] > 0
