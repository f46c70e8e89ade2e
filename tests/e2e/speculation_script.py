"""Runs in a process of its own: drafts without a KV cache beside evictions, by the oracle."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.drafters import medusa
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

PROMPTS = [random_prompt(n, seed=n) for n in (333, 150)]
NEW_TOKENS = 150
SPECULATIVE: dict[str, dict[str, Any]] = dict(
    ngram=dict(num_speculative_tokens=5, prompt_lookup_max=2),
    medusa=dict(num_speculative_tokens=3),
    suffix=dict(num_speculative_tokens=5),
)
EVERY = 4
WITHOUT, ITS_OWN = None, -1
"""Phases in which nothing is drafted, or what the drafter itself says."""


class Drafter:
    """Around vLLM's proposer: it runs, and then the answers may replace what it drafts.

    Args:
        run: The engine.
        prompts: Of the requests, whose numbers are theirs, over and over.

    """

    def __init__(self, run: Any, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self.answers: list[list[int]] = []
        self.phase: int | None = WITHOUT
        """Else where every fourth token is wrong."""
        self.drafted = self.accepted = 0
        self.made: list[tuple[int, int, list[int]]] = []
        """Prompt, tokens known by then, and what the proposer said."""
        self._runner = run.worker.model_runner
        self._most = run.scheduler.num_spec_tokens
        self._v2 = hasattr(self._runner, "req_states")
        proposer = self._runner.speculator if self._v2 else self._runner.drafter
        self._propose, proposer.propose = proposer.propose, self.propose
        self._update = run.scheduler.update_from_output
        run.scheduler.update_from_output = self.update
        self._take = run.core.model_executor.take_draft_token_ids
        run.core.model_executor.take_draft_token_ids = self.take

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        drafts = self._propose(*args, **kwargs)
        if self._v2:
            batch = args[0] if args else kwargs["input_batch"]
            known = self._runner.req_states.total_len.gpu[batch.idx_mapping]
        else:
            batch = self._runner.input_batch
            known = batch.num_tokens_no_spec
        for row in range(len(drafts)):
            index = int(batch.req_ids[row].split("-")[0]) % len(self._prompts)
            prompt, n = self._prompts[index], int(known[row])
            if n <= len(prompt):
                continue
            self.made.append((index, n, [int(token) for token in drafts[row]]))
            if self.phase is WITHOUT or self.phase == ITS_OWN:
                continue
            coming = [*prompt, *self.answers[index]][n : n + self._most]
            for i, token in enumerate(coming):
                coming[i] = (token + 1) % 1024 if (n + i) % EVERY == self.phase else token
            if torch.is_tensor(drafts):
                drafts[row, : len(coming)] = torch.tensor(coming, dtype=drafts.dtype)
            else:
                drafts[row] = coming
        return drafts

    def take(self) -> Any:
        drafts = self._take()
        if self.phase is WITHOUT and drafts is not None:
            drafts.draft_token_ids = [[] for _ in drafts.req_ids]
        return drafts

    def update(self, scheduled: Any, output: Any) -> Any:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.drafted += len(drafts)
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            self.accepted += len(sampled) - 1
        return self._update(scheduled, output)


class Heads:
    """What Medusa heads draft, by the state that transformers has where a token was chosen."""

    def __init__(self, oracle: MaskedModel, path: Path) -> None:
        self._oracle, self._weights = oracle, load_file(path / "model.safetensors")
        self._states: list[torch.Tensor] = []
        oracle.model.lm_head.register_forward_pre_hook(
            lambda _, args: self._states.append(args[0][0])
        )

    def drafts(self, tokens: list[int], life: Life) -> torch.Tensor:
        """[len(tokens) - prompt + 1, heads]: by the number of answered tokens, from 1 on."""
        self._states.clear()
        self._oracle.predictions(tokens, life)
        states, heads = torch.cat(self._states)[life.prefill_end - life.full :], []
        for index in range(SPECULATIVE["medusa"]["num_speculative_tokens"]):
            more = torch.nn.functional.silu(
                states @ self._weights[f"blocks.{index}.layers.0.weight"].T
            )
            heads.append((states + more) @ self._weights[f"lm_heads.{index}.weight"].T)
        return torch.stack([one.argmax(-1) for one in heads], dim=1)


def main(model: Path, method: str, policy: str, folder: Path) -> None:
    speculative = SPECULATIVE[method] | dict(method=method)
    if method == "medusa":
        speculative["model"] = str(medusa(folder / "medusa", model))
    eviction = dict(policy=policy, budget=96, interval=32)
    with engine(model, eviction, speculative_config=speculative, max_model_len=1024) as run:
        drafter, oracle = Drafter(run, PROMPTS), MaskedModel(model)
        free = run.free_blocks()
        drafter.answers = expected = run.generate(PROMPTS, NEW_TOKENS)
        places = [[kept.n for kept in lives[0].evictions] for lives in run.lives()]
        assert not drafter.drafted
        agreed = full = right = made = 0
        its_own = [0, 0]
        for drafter.phase in (ITS_OWN, *range(EVERY)):
            drafter.made.clear()
            assert run.generate(PROMPTS, NEW_TOKENS) == expected
            assert [[kept.n for kept in lives[0].evictions] for lives in run.lives()] == places
            if drafter.phase == ITS_OWN:
                its_own = [drafter.drafted, drafter.accepted]
                drafter.drafted = drafter.accepted = 0
            for index, lives in enumerate(run.lives()):
                prompt, output = PROMPTS[index], expected[index]
                agreed += check_tokens(oracle, prompt, output, lives)[0]
                full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
                if method == "medusa":
                    heads = Heads(oracle, folder / "medusa").drafts([*prompt, *output], lives[0])
                    for _, n, drafts in (one for one in drafter.made if one[0] == index):
                        right += drafts == heads[n - 1 - len(prompt)].tolist()
                        made += 1
        result = dict(
            agreed=agreed,
            total=(1 + EVERY) * len(PROMPTS) * NEW_TOKENS,
            full_attention_agreed=full,
            evictions_of_a_request=min(map(len, places)),
            accepted=drafter.accepted,
            rejected=drafter.drafted - drafter.accepted,
            its_own=its_own,
            heads=made,
            heads_right=right,
            runner=type(run.worker.model_runner).__module__,
            postponed=run.counters.postponed_ring,
            blocks_leaked=free - run.free_blocks(),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
