"""Runs in a process of its own: layers that draft, evicted beside those of the model."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Kept, Life, MaskedModel, check_tokens

PROMPTS = [random_prompt(n, seed=n) for n in (333, 150)]
NEW_TOKENS = 150
DRAFTS = 5
EVERY = 4


class Drafter:
    """Around a real drafter: it runs, and what it drafts may be replaced by the answers.

    Args:
        run: The engine.

    """

    def __init__(self, run: Any) -> None:
        self.answers: list[list[int]] = []
        self.phase: int | None = None
        self.drafted = self.accepted = self.steps = 0
        self._runner = run.worker.model_runner
        self._propose = self._runner.drafter.propose
        self._runner.drafter.propose = self.propose
        self._update = run.scheduler.update_from_output
        run.scheduler.update_from_output = self.update

    def propose(self, *args: Any, next_token_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        drafts = self._propose(*args, next_token_ids=next_token_ids, **kwargs)
        if self.phase is None:
            return drafts
        batch, counts = self._runner.input_batch, kwargs["common_attn_metadata"]
        del counts
        for row, request_id in enumerate(batch.req_ids):
            # `n` tokens are known: those before the step, and what it has just sampled.
            n = self._known(request_id, row, kwargs)
            for prompt, answer in zip(PROMPTS, self.answers, strict=True):
                if batch.token_ids_cpu[row, 0] == prompt[0]:
                    coming = [*prompt, *answer][n : n + drafts.shape[1]]
                    for i, token in enumerate(coming):
                        drafts[row, i] = self.spoilt(n + i, token)
        return drafts

    def spoilt(self, position: int, token: int) -> int:
        return (token + 1) % 1024 if position % EVERY == self.phase else token

    def update(self, scheduled: Any, output: Any) -> Any:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.drafted += len(drafts)
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            self.accepted += len(sampled) - 1
        return self._update(scheduled, output)
