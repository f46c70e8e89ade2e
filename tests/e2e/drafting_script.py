"""Runs in a process of its own: layers that draft, evicted beside those of the model."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafters import ZERO, checkpoints
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Kept, Life, MaskedModel, check_tokens
from vllm_kvevict.ops.torch.observe import window_queries

PROMPTS = [random_prompt(n, seed=n) for n in (333, 150)]
NEW_TOKENS = 110
EVERY = 4


class Drafter:
    """Around a real drafter: it runs, and then its drafts may be replaced by the answers.

    Args:
        run: The engine.
        prompts: Of all requests; no two begin alike where drafts are replaced.

    """

    def __init__(self, run: Any, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self.answers: list[list[int]] = []
        self.phase: int | None = None
        """Where every fourth token is wrong; None leaves the drafts as they are."""
        self.drafted = self.accepted = 0
        self.made: list[tuple[int, int, list[int]]] = []
        """Prompt, tokens of its cache, and what the drafter itself drafted then."""
        self.given: list[dict[int, int]] = [{} for _ in prompts]
        """What vLLM said is the next token, by prompt and entry of the cache, before its end."""
        self.rejected_at: list[tuple[str, int]] = []
        self._runner = run.worker.model_runner
        self._propose = self._runner.drafter.propose
        self._runner.drafter.propose = self.propose
        self._update = run.scheduler.update_from_output
        run.scheduler.update_from_output = self.update
        self._requests = run.scheduler.requests

    def propose(self, **kwargs: Any) -> torch.Tensor:
        lengths = kwargs["common_attn_metadata"].seq_lens.clone()
        if kwargs["num_rejected_tokens_gpu"] is not None:
            lengths -= kwargs["num_rejected_tokens_gpu"]
        drafts = self._propose(**kwargs)
        first = self._runner.input_batch.token_ids_cpu[:, 0]
        for row, cached in enumerate(lengths.tolist()):
            index = [prompt[0] for prompt in self._prompts].index(first[row])
            prompt = self._prompts[index]
            if cached < len(prompt):
                # vLLM takes the prompt's last token for the one that follows a chunk.
                self.given[index][cached - 1] = int(kwargs["next_token_ids"][row])
                continue
            self.made.append((index, cached, drafts[row].tolist()))
            if self.phase is not None:
                coming = [*prompt, *self.answers[index]][cached + 1 :][: drafts.shape[1]]
                for i, token in enumerate(coming):
                    wrong = (cached + i) % EVERY == self.phase
                    drafts[row, i] = (token + 1) % 1024 if wrong else token
        return drafts

    def update(self, scheduled: Any, output: Any) -> Any:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.drafted += len(drafts)
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            self.accepted += len(sampled) - 1
            if len(sampled) - 1 < len(drafts):
                start = self._requests[request_id].num_computed_tokens - 1 - len(drafts)
                self.rejected_at.append((request_id, start))
        return self._update(scheduled, output)


class Oracle:
    """What a drafter drafts, by transformers over the positions that its layers kept.

    Args:
        path: The drafter as a Llama.
        first: The drafter's layers are those from this one on.
        method: Of drafting.

    """

    def __init__(self, path: Path, first: int, method: str) -> None:
        self.model, self.first, self.method = MaskedModel(path), first, method
        # Entry p of its cache is of token p; with EAGLE and MTP of token p + 1.
        self.shift = int(method != "draft_model")
        if method == "eagle3":
            self._cut_residual()

    def _cut_residual(self) -> None:
        layer, before = self.model.model.model.layers[0], []
        layer.register_forward_pre_hook(lambda _, args: before.__setitem__(slice(None), args[:1]))
        layer.self_attn.register_forward_hook(
            lambda _, args, output: (output[0] - before[0], *output[1:])
        )

    def read(self, tokens: list[int], given: dict[int, int]) -> list[int]:
        """The tokens of the drafter's cache."""
        if self.method == "draft_model":
            return tokens
        seen = [given.get(entry, token) for entry, token in enumerate(tokens[1:])]
        return [ZERO, *seen[1:]] if self.method == "mtp" else seen

    def agreed(self, seen: list[int], cached: int, drafts: list[int], life: Life) -> int:
        """How many drafts that follow ``cached`` tokens and a sampled one, ``seen``, are right.

        EAGLE-3 feeds back a state that is not modelled here: all of its drafts count as the first.
        """
        if self.method == "eagle3":
            return len(drafts) * self.agreed_all(seen, cached, drafts[:1], life)
        return self.agreed_all(seen, cached, drafts, life)

    def agreed_all(self, seen: list[int], cached: int, drafts: list[int], life: Life) -> int:
        """:meth:`agreed` for drafts that follow from tokens alone."""
        evictions = [
            Kept(kept.n, kept.tail_start, kept.positions[self.first :])
            for kept in life.evictions
            if kept.n < cached
        ]
        mine = Life(len(seen), evictions)
        expected = self.model.predictions([*seen, *drafts[:-1]], mine).argmax(-1).tolist()
        return sum(a == b for a, b in zip(expected, drafts, strict=True))

    def queries(self, tokens: list[int]) -> torch.Tensor:
        """[T, query heads, D]: rotated queries of a first layer, which depend on tokens alone."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        model = self.model.model.model
        ids = torch.tensor([tokens])
        layer, embedded = model.layers[0], model.embed_tokens(ids)
        query = layer.self_attn.q_proj(layer.input_layernorm(embedded))
        query = query.unflatten(-1, (self.model.heads, -1)).transpose(1, 2)
        turn = model.rotary_emb(embedded, torch.arange(ids.shape[1])[None])
        return apply_rotary_pos_emb(query, query, *turn)[0][0].transpose(0, 1).detach()


class Windows:
    """The recorded queries of the drafter's first layer at every eviction."""

    def __init__(self, run: Any, name: str) -> None:
        self.seen: list[tuple[str, int, torch.Tensor]] = []
        self._rings, self._name, self._window = run.worker.kv_eviction.rings, name, 32
        run.worker.kv_eviction.listeners.append(self)

    def __call__(self, record: Any) -> None:
        one = record.eviction
        if one.ring is None:
            return
        ring = self._rings.layer(self._name)
        recorded = window_queries(ring, one.ring, one.num_tokens, self._window)
        self.seen.append((one.request_id, one.num_tokens, recorded))


def places(run: Any) -> list[list[int]]:
    return [[kept.n for kept in lives[0].evictions] for lives in run.lives()]


def main(method: str, policy: str, folder: Path, **options: Any) -> None:
    model, served, speculative = checkpoints(method, folder)
    eviction = dict(policy=policy, budget=96, interval=32)
    with engine(
        served, eviction, speculative_config=speculative, max_model_len=1024, **options
    ) as run:
        names = run.worker.kv_eviction.states[0].layer_names
        target = MaskedModel(model)
        first = len(target.model.model.layers)
        oracle = Oracle(model, first, method)
        drafter, windows = Drafter(run, PROMPTS), Windows(run, names[first])
        free = run.free_blocks()
        drafter.answers = expected = run.generate(PROMPTS, NEW_TOKENS)
        natural = drafter.drafted, drafter.accepted
        where = places(run)
        evicted_at = {
            (key, kept.n)
            for key in run.recorder.lives
            for kept in run.recorder.lives[key][-1].evictions
        }
        unexplained = sum(at not in evicted_at for at in drafter.rejected_at)
        alike = total_kept = recorded_windows = agreed = full = right = made = unlike = 0
        for drafter.phase in (None, *range(EVERY)):
            drafter.made.clear(), windows.seen.clear()
            assert run.generate(PROMPTS, NEW_TOKENS) == expected
            assert places(run) == where
            lives = run.lives()
            for prompt, output, mine in zip(PROMPTS, expected, lives, strict=True):
                agreed += check_tokens(target, prompt, output, mine)[0]
                full += check_tokens(target, prompt, output, [Life(len(prompt))])[0]
                for kept in mine[0].evictions:
                    assert len(kept.positions) == len(names) > first
                    total_kept += 1
                    alike += kept.positions[:first] == kept.positions[first:]
            for index, cached, drafts in drafter.made:
                tokens = [*PROMPTS[index], *expected[index]]
                if cached < len(tokens) - 1:
                    seen = oracle.read(tokens[: cached + 1], drafter.given[index])
                    right += oracle.agreed(seen, cached, drafts, lives[index][0])
                    made += len(drafts)
            for request_id, n, recorded in windows.seen:
                order = sorted(run.recorder.lives, key=lambda key: int(key.split("-")[0]))
                index = order.index(request_id)
                tokens = [*PROMPTS[index], *expected[index]][: n + oracle.shift]
                tokens = oracle.read(tokens, drafter.given[index])
                recorded_windows += 1
                near = torch.isclose(recorded, oracle.queries(tokens)[-32:], atol=1e-3)
                unlike += int((~near).sum())
        result = dict(
            agreed=agreed,
            total=(1 + EVERY) * len(PROMPTS) * NEW_TOKENS,
            full_attention_agreed=full,
            evictions_of_a_request=min(map(len, where)),
            layers_that_draft=len(names) - first,
            natural=natural,
            rejected_far_from_evictions=unexplained,
            accepted=drafter.accepted,
            rejected=drafter.drafted - drafter.accepted,
            drafts_right=right,
            drafts=made,
            kept_alike=alike,
            kept=total_kept,
            queries_unlike=unlike,
            windows=recorded_windows,
            postponed=run.counters.postponed_ring,
            blocks_leaked=free - run.free_blocks(),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), **json.loads(sys.argv[4]))
