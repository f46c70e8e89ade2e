"""What a scorer finds in the padding of heads that keep fewer tokens than others."""

import pytest
import torch

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.plugins import importable, write_package

CODE = """
import torch
from vllm_kvevict.policies.base import Requirements, Scorer

SEEN = []

class Looking(Scorer):
    requirements = Requirements(values=True, value_shares=True, floats_per_token=1)

    def scores(self, candidates):
        SEEN.append(candidates)
        valid = candidates.valid[:, :candidates.num_candidates]
        norms = candidates.keys.float().norm(dim=-1)[:, :candidates.num_candidates]
        return norms.masked_fill(~valid, float("-inf"))

def build(config):
    return Looking()
"""


@pytest.mark.slow
def test_padding_is_0_whatever_the_null_block_holds(tiny_model, tmp_path):
    write_package(tmp_path, "look", {"look": CODE}, ["look = look:build", "ada-look = look:build"])
    settings = dict(policy="ada-look", budget=160, interval=32, options=dict(floor=0.0))
    with importable(tmp_path):
        from look import SEEN

        with engine(tiny_model, settings) as run:
            for state in run.worker.kv_eviction.states.values():
                for name in state.layer_names:
                    run.worker.kv_eviction.cache(name).pages[0] = 7.0
                    run.worker.kv_eviction.token_stats.layer(name)[0] = 7.0
            run.generate([random_prompt(400, seed=1)], 70)
            assert run.counters.evictions_decode >= 1
        padded = [one for one in SEEN if not one.valid.all()]
        assert padded
        for one in padded:
            padding = ~one.valid
            for given in (one.keys, one.values, one.value_shares):
                assert given.shape[:2] == padding.shape
                assert not given[padding].any() and given[one.valid].any()
            # A sum needs no mask, and a mean the number of a head's own tokens.
            for head, valid in zip(one.keys, one.valid, strict=True):
                torch.testing.assert_close(head.sum(0) / valid.sum(), head[valid].mean(0))
