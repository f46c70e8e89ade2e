"""Drafts that are accepted and rejected around evictions change no token."""

import pytest

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

PROMPTS = [random_prompt(n, seed=n) for n in (333, 150)]
NEW_TOKENS = 150
DRAFTS = 5
NGRAM = dict(method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=2)
EVERY = 4


class Drafter:
    """Stands in for the n-gram proposer: the answers themselves, every fourth token wrong.

    Args:
        run: The engine.

    """

    def __init__(self, run) -> None:
        self.answers: list[list[int]] = []
        self.phase = 0
        self.drafted = self.accepted = 0
        run.worker.model_runner.drafter.propose = self.propose
        self._update = run.scheduler.update_from_output
        run.scheduler.update_from_output = self.update

    def propose(self, most, sampled, lengths, tokens, slot_mappings=None) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled]
        for row, new in enumerate(sampled):
            for prompt, answer in zip(PROMPTS, self.answers, strict=False):
                if new and tokens[row, 0] == prompt[0]:
                    n = int(lengths[row])
                    coming = [*prompt, *answer][n : n + most]
                    drafts[row] = [self.spoilt(n + i, token) for i, token in enumerate(coming)]
        return drafts

    def spoilt(self, position: int, token: int) -> int:
        return (token + 1) % 1024 if position % EVERY == self.phase else token

    def update(self, scheduled, output):
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.drafted += len(drafts)
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            self.accepted += len(sampled) - 1
        return self._update(scheduled, output)


def of_size(policy: str):
    return pytest.param(policy, marks=() if policy == "ada-snapkv" else pytest.mark.nightly)


@pytest.mark.parametrize("policy", [of_size(p) for p in ("ada-snapkv", "pyramidkv")])
def test_tokens_and_evictions_are_those_without_drafts(policy, tiny_model):
    """Each place around an eviction sees a right draft and a wrong one."""
    eviction = dict(policy=policy, budget=96, interval=32)
    with engine(tiny_model, eviction, speculative_config=NGRAM, max_model_len=1024) as run:
        drafter, oracle = Drafter(run), MaskedModel(tiny_model)
        free = run.free_blocks()
        drafter.answers = expected = run.generate(PROMPTS, NEW_TOKENS)
        places = [[kept.n for kept in lives[0].evictions] for lives in run.lives()]
        assert min(map(len, places)) >= 3 and not drafter.drafted
        full = 0
        for drafter.phase in range(EVERY):
            assert run.generate(PROMPTS, NEW_TOKENS) == expected
            assert [[kept.n for kept in lives[0].evictions] for lives in run.lives()] == places
            for prompt, output, lives in zip(PROMPTS, expected, run.lives(), strict=True):
                assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
                full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
        assert full < 0.9 * EVERY * len(PROMPTS) * NEW_TOKENS, "full attention would agree as well"
        assert drafter.accepted > 0 and drafter.drafted - drafter.accepted > 0
        assert run.counters.postponed_ring == 0
        assert run.free_blocks() == free
