"""Runs in a process of its own: drafts beside evictions, checked by the oracle."""

import json
import sys
from pathlib import Path

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


def main(model: Path, policy: str) -> None:
    eviction = dict(policy=policy, budget=96, interval=32)
    with engine(model, eviction, speculative_config=NGRAM, max_model_len=1024) as run:
        drafter, oracle = Drafter(run), MaskedModel(model)
        free = run.free_blocks()
        drafter.answers = expected = run.generate(PROMPTS, NEW_TOKENS)
        places = [[kept.n for kept in lives[0].evictions] for lives in run.lives()]
        assert not drafter.drafted
        agreed = full = 0
        for drafter.phase in range(EVERY):
            assert run.generate(PROMPTS, NEW_TOKENS) == expected
            assert [[kept.n for kept in lives[0].evictions] for lives in run.lives()] == places
            for prompt, output, lives in zip(PROMPTS, expected, run.lives(), strict=True):
                agreed += check_tokens(oracle, prompt, output, lives)[0]
                full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
        result = dict(
            agreed=agreed,
            total=EVERY * len(PROMPTS) * NEW_TOKENS,
            full_attention_agreed=full,
            evictions_of_a_request=min(map(len, places)),
            accepted=drafter.accepted,
            rejected=drafter.drafted - drafter.accepted,
            postponed=run.counters.postponed_ring,
            blocks_leaked=free - run.free_blocks(),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
