"""Runs in a process of its own: a scene beside drafts that are right, and wrong at any place."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafters import checkpoints
from tests.e2e.architectures import log_probabilities
from tests.e2e.speculation_script import SPECULATIVE
from tests.e2e.test_abort import BYSTANDER, NEW_TOKENS, VICTIM, abort_everywhere
from tests.e2e.test_features import (
    FREE,
    GRAMMAR,
    PROMPT,
    SCHEMA,
    check_items,
    check_letters,
    complete,
)
from tests.models import cached_tiny_llama, random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

EVERY = 4
WHOLE = 45 * 32
"""Tokens of a pool of 45 blocks."""


class Drafts:
    """Around a real drafter: it runs, and then the answers may replace what it drafts."""

    def __init__(self, run: Any) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt."""
        self.phase: int | None = None
        """Where every fourth token is wrong; None leaves the drafts as they are."""
        self.accepted = self.rejected = 0
        self._runner = run.worker.model_runner
        self._most = run.scheduler.num_spec_tokens
        drafter = self._runner.drafter
        self._propose, drafter.propose = drafter.propose, self.propose
        self._update = run.scheduler.update_from_output
        run.scheduler.update_from_output = self.update

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._runner.input_batch
        known = [int(n) for n in batch.num_tokens_no_spec]
        if "common_attn_metadata" in kwargs:
            lengths = kwargs["common_attn_metadata"].seq_lens + 1
            if kwargs["num_rejected_tokens_gpu"] is not None:
                lengths = lengths - kwargs["num_rejected_tokens_gpu"]
            known = lengths.tolist()
        drafts = self._propose(*args, **kwargs)
        for row in range(len(drafts)):
            prompt = list(self._runner.requests[batch.req_ids[row]].prompt_token_ids)
            answer, n = self.answers.get(tuple(prompt)), known[row]
            if self.phase is None or answer is None or n <= len(prompt):
                continue
            coming = [*prompt, *answer][n : n + self._most]
            for i, token in enumerate(coming):
                coming[i] = (token + 1) % 1024 if (n + i) % EVERY == self.phase else token
            if torch.is_tensor(drafts):
                drafts[row, : len(coming)] = torch.tensor(coming, dtype=drafts.dtype)
            else:
                drafts[row] = coming
        return drafts

    def update(self, scheduled: Any, output: Any) -> Any:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            self.accepted += max(0, len(sampled) - 1)
            self.rejected += len(drafts) - max(0, len(sampled) - 1)
        return self._update(scheduled, output)


def places(run: Any) -> list[list[int]]:
    return [[kept.n for kept in life.evictions] for lives in run.lives() for life in lives]


def played(run: Any, drafts: Drafts, oracle: MaskedModel, prompts: Any, new: int) -> dict[str, int]:
    """The prompts with the drafter's own drafts, then with replaced ones: the same each time."""
    found = dict(agreed=0, total=0, full_attention_agreed=0)
    drafts.phase, outputs, where = None, None, None
    for drafts.phase in (None, *range(EVERY)):
        mine = run.generate(prompts, new)
        outputs, where = outputs or mine, where or places(run)
        assert mine == outputs and places(run) == where
        drafts.answers |= {tuple(p): o for p, o in zip(prompts, outputs, strict=True)}
        for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
            found["agreed"] += check_tokens(oracle, prompt, output, lives)[0]
            found["total"] += len(output)
            full = check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
            found["full_attention_agreed"] += full
    return found | dict(evictions_of_a_request=min(map(len, where or [])))


def share(run: Any, drafts: Drafts, oracle: MaskedModel) -> dict[str, Any]:
    """A budget as a share of the tokens so far."""
    prompts = [random_prompt(n, seed=n) for n in (900, 600)]
    found = played(run, drafts, oracle, prompts, 110)
    layers = [lives[0].evictions[0].positions[0] for lives in run.lives()]
    stores = [sum(map(len, layer)) // len(layer) // 32 for layer in layers]
    return found | dict(stores=stores)


def filled(run: Any, drafts: Drafts, oracle: MaskedModel) -> dict[str, Any]:
    """Prompts that leave no block of the pool free."""
    pool, prompt = run.scheduler.kv_cache_manager.block_pool, random_prompt(WHOLE - 100, seed=1)
    held = pool.get_new_blocks(2)
    found = played(run, drafts, oracle, [prompt], 90)
    assert run.counters.evictions_in_place > 0
    drafts.phase = 1
    prompts = [random_prompt(700, seed=2), prompt]
    for prompt, output, lives in zip(prompts, run.generate(prompts, 90), run.lives(), strict=True):
        found["agreed"] += check_tokens(oracle, prompt, output, lives)[0]
        found["total"] += len(output)
    pool.free_blocks(held)
    return found


def aborts(run: Any, drafts: Drafts, oracle: MaskedModel) -> dict[str, Any]:
    """The victim of ``test_abort.py`` goes before, in and after each of its evictions."""
    for prompt in (BYSTANDER, VICTIM):
        drafts.answers[tuple(prompt)] = run.generate([prompt], NEW_TOKENS)[0]
    aborted = 0
    for drafts.phase in (None, 1, 3):
        aborted += abort_everywhere(run)
    return dict(aborted=aborted)


def stops(run: Any, drafts: Drafts, oracle: MaskedModel) -> dict[str, Any]:
    """Stop strings and tokens, a regular expression and a JSON schema."""

    def phases(**params: Any) -> Any:
        """The answer, which is the same whatever is drafted."""
        drafts.phase, first = None, complete(run, **params)[0]
        drafts.answers[tuple(PROMPT)] = list(first.token_ids)
        lives = run.lives()
        for drafts.phase in range(EVERY):
            mine = complete(run, **params)[0]
            assert (list(mine.token_ids), mine.text) == (list(first.token_ids), first.text)
            assert (mine.finish_reason, mine.stop_reason) == (
                first.finish_reason,
                first.stop_reason,
            )
            assert run.lives() == lives
        return first

    whole = phases()
    tokens = list(whole.token_ids)
    words = [word for word in whole.text[len(whole.text) * 2 // 3 :].split() if len(word) > 2]
    stop = next(word for word in words if word.isascii())
    stopped = phases(stop=[stop])
    assert stopped.stop_reason == stop and stopped.text == whole.text[: whole.text.index(stop)]
    stopped = phases(stop_token_ids=[tokens[70]])
    assert list(stopped.token_ids) == tokens[: tokens.index(tokens[70]) + 1]

    answer = phases(structured_outputs=GRAMMAR, **FREE)
    evictions = len(run.lives()[0][0].evictions)
    check_letters(run, oracle, answer)
    check_items(phases(structured_outputs=SCHEMA, **FREE))
    return dict(evictions_of_a_request=evictions)


def bfloat16(run: Any, drafts: Drafts, oracle: MaskedModel) -> dict[str, Any]:
    """Tokens near those of the oracle with the same weights; numbers are float32 there."""
    for parameter in oracle.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    prompts, found = [random_prompt(n, seed=n) for n in (333, 150)], dict(agreed=0, total=0)
    full = below = 0
    for drafts.phase in (None, *range(EVERY)):
        outputs = run.generate(prompts, 110)
        drafts.answers |= {tuple(p): o for p, o in zip(prompts, outputs, strict=True)}
        for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
            found["agreed"] += check_tokens(oracle, prompt, output, lives)[0]
            found["total"] += len(output)
            full += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
            rows = log_probabilities(oracle, prompt, output, lives[0])
            said = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
            below = max(below, float((rows.amax(1) - said).max()))
    evictions = min(map(len, places(run)))
    return found | dict(full_attention_agreed=full, below=below, evictions_of_a_request=evictions)


SCENES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = dict(
    share=(share, dict(policy="ada-snapkv", budget="25%", interval=32), {}),
    filled=(
        filled,
        dict(policy="ada-snapkv", budget=512, interval=32),
        dict(num_gpu_blocks_override=46, max_model_len=WHOLE, max_num_batched_tokens=256),
    ),
    aborts=(
        aborts,
        dict(policy="ada-snapkv", budget=96, interval=32, shared_blocks="evict"),
        dict(max_num_batched_tokens=96, enable_prefix_caching=True),
    ),
    stops=(
        stops,
        dict(policy="ada-snapkv", budget=96, interval=32),
        dict(structured_outputs_config=dict(backend="xgrammar", disable_any_whitespace=True)),
    ),
    bfloat16=(
        bfloat16,
        dict(policy="ada-snapkv", budget=96, interval=32),
        dict(dtype="bfloat16"),
    ),
)


def main(method: str, scene: str, folder: Path) -> None:
    if method in SPECULATIVE:
        model = served = cached_tiny_llama()
        speculative: dict[str, Any] = SPECULATIVE[method] | dict(method=method)
    else:
        model, served, speculative = checkpoints(method, folder)
    play, eviction, options = SCENES[scene]
    settings = dict(max_model_len=2048, speculative_config=speculative) | options
    with engine(served, eviction, **settings) as run:
        free, drafts = run.free_blocks(), Drafts(run)
        found = play(run, drafts, MaskedModel(model))
        found |= dict(accepted=drafts.accepted, rejected=drafts.rejected)
        found |= dict(blocks_leaked=free - run.free_blocks(), evictions=run.counters.evictions)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
