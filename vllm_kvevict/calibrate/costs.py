"""What a head's tokens are worth to an answer: transformers runs it once for every head."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from vllm_kvevict.calibrate.divide import LEVELS
from vllm_kvevict.calibrate.options import CalibrateError
from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.reference.value_shares import value_shares
from vllm_kvevict.policies.base import Scorer

ATTENTION = "kvevict_calibrate"
ANSWER_TOKENS = 24
LAYERS_AT_ONCE = 6
"""Layers whose heads are tried in one pass: what stands in memory grows with them."""


@dataclass(frozen=True)
class Trial:
    """One row of a pass: ``head`` of ``layer`` sees ``columns`` of the context only."""

    layer: int
    head: int
    columns: torch.Tensor


@dataclass
class Pass:
    """What attention does: with no ``trials`` it records, else it reads a recorded context.

    ``seen`` maps a layer to its queries [1, Q, N, D], keys and values [1, H, N, D].
    """

    context: int = 0
    trials: Sequence[Trial] = ()
    seen: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        """An attention function of transformers, which puts its own mask aside.

        Raises:
            CalibrateError: The model's attention has a sliding window, a soft cap or sinks.

        """
        if any(given.get(key) is not None for key in ("sliding_window", "softcap", "s_aux")):
            raise CalibrateError(
                "--by answers: a layer has a sliding window, a soft cap or sinks; give --by scores"
            )
        layer, scale = module.layer_idx, given["scaling"]
        if not self.trials:
            self.seen[layer] = q, k, v
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2).contiguous(), None
        keys, values = (each[:, :, : self.context] for each in self.seen[layer][1:])
        rows = []
        for row, own in enumerate(zip(q[:, None], k[:, None], v[:, None], strict=True)):
            rows.append(_attend(own, keys, values, scale))
            # Row 0 is the answer of the whole cache.
            trial = self.trials[row - 1] if row else None
            if trial is not None and trial.layer == layer:
                group = q.shape[1] // k.shape[1]
                heads = slice(trial.head, trial.head + 1)
                mine = slice(trial.head * group, (trial.head + 1) * group)
                rows[row][:, mine] = _attend(
                    (own[0][:, mine], own[1][:, heads], own[2][:, heads]),
                    keys[:, heads, trial.columns], values[:, heads, trial.columns], scale,
                )  # fmt: skip
        return torch.cat(rows).transpose(1, 2).contiguous(), None


def _attend(
    own: Sequence[torch.Tensor], keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """[1, Q, n, D] of n tokens behind a context; ``own`` are their queries, keys and values."""
    q, k, v = own
    context, n = keys.shape[2], q.shape[2]
    mask = torch.ones(n, context + n, dtype=torch.bool, device=q.device).tril(context)
    # A group's queries as rows of one head: nothing is repeated, and CPU kernels stay fast.
    group = q.shape[1] // k.shape[1]
    out = functional.scaled_dot_product_attention(
        q.unflatten(1, (-1, group)).flatten(2, 3), torch.cat([keys, k], 2),
        torch.cat([values, v], 2), attn_mask=mask.repeat(group, 1), scale=scale,
    )  # fmt: skip
    return out.unflatten(2, (group, n)).flatten(1, 2)


class Costs:
    """A model in transformers, and what evicting each of its heads alone costs.

    Args:
        model: Folder or name of the model.
        scorer: Chooses what a head keeps.
        window: Observation window.

    Raises:
        CalibrateError: transformers cannot load the model, or the scorer needs sums that grow as
            the server runs.

    """

    def __init__(self, model: str, scorer: Scorer, window: int) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        if scorer.accumulates_attention:
            raise CalibrateError("--by answers: not for h2o, whose scores grow as a server runs")
        self._pass, self._scorer, self._window = Pass(), scorer, window
        AttentionInterface.register(ATTENTION, self._pass.attend)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                model, dtype="auto", attn_implementation=ATTENTION
            )
        except (OSError, ValueError) as error:
            raise CalibrateError(str(error).splitlines()[0]) from None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: Any = loaded.eval().to(device)

    @torch.inference_mode()
    def of(self, prompt: Sequence[int], context: int) -> torch.Tensor:
        """Costs of one prompt.

        Args:
            prompt: Token ids.
            context: Eviction point: tokens before it are scored by the window in front of it.

        Returns:
            [L, H, len(LEVELS)] float32 on the CPU: KL divergence of the answer's next-token
            distributions, mean over its tokens, from those of the whole cache, where this head
            alone keeps this share of the candidates; the answer is the whole cache's.

        """
        self._pass.trials = ()
        whole = self._model.generate(
            torch.tensor([list(prompt)], device=self._model.device),
            max_new_tokens=ANSWER_TOKENS, do_sample=False,
        )  # fmt: skip
        self._pass.context = context
        self._model(whole, use_cache=False, logits_to_keep=1)
        layers = self._layers
        costs = []
        for first in range(0, len(layers), LAYERS_AT_ONCE):
            trials = [t for x in layers[first : first + LAYERS_AT_ONCE] for t in self._trials(x)]
            costs.append(self._run(whole[:, context:], whole.shape[1] - len(prompt), trials))
        return torch.cat(costs).view(len(layers), -1, len(LEVELS))

    @torch.inference_mode()
    def scores(self, end: int) -> torch.Tensor:
        """[L, H, N] float32 scores where the first ``end`` tokens of the last prompt end."""
        return torch.stack([self._scores(layer, end).cpu() for layer in self._layers])

    @property
    def _layers(self) -> list[int]:
        return sorted(self._pass.seen)

    def _scores(self, layer: int, end: int) -> torch.Tensor:
        q, k, v = (each[0, :, :end] for each in self._pass.seen[layer])
        (heads, _, size), columns = k.shape, end - self._window
        return self._scorer.scores(
            Candidates(
                keys=k, valid=torch.ones(heads, end, dtype=torch.bool, device=k.device),
                queries=q[:, columns:].float().unflatten(0, (heads, -1)), window=self._window,
                num_candidates=columns, scale=size**-0.5, values=v.float(),
                value_shares=value_shares(v.float().norm(dim=-1)[None], lambda norms: norms)[0],
            )
        )  # fmt: skip

    def _trials(self, layer: int) -> list[Trial]:
        """Every head of a layer at every level."""
        context = self._pass.context
        best = self._scores(layer, context).argsort(dim=-1, descending=True)
        columns = best.shape[1]
        window = torch.arange(columns, context, device=best.device)
        return [
            Trial(layer, head, torch.cat([best[head, : max(1, int(level * columns))], window]))
            for head in range(len(best))
            for level in LEVELS
        ]

    def _run(self, tail: torch.Tensor, answer: int, trials: Sequence[Trial]) -> torch.Tensor:
        """KL divergence of every trial. The rows of a layer's trials begin in front of it."""
        at, hooks = self._pass.context, []
        self._pass.trials = trials
        decoder = self._model.get_decoder().layers
        for index in sorted({trial.layer for trial in trials}):
            count = sum(trial.layer == index for trial in trials)

            def grow(_: Any, args: tuple[torch.Tensor, ...], count: int = count) -> Any:
                return torch.cat([args[0], args[0][:1].expand(count, -1, -1)]), *args[1:]

            hooks.append(decoder[index].register_forward_pre_hook(grow))
        position = torch.arange(at, at + tail.shape[1], device=tail.device)[None]
        try:
            logits = self._model(
                tail, position_ids=position, use_cache=False, logits_to_keep=answer + 1
            ).logits[:, :-1]
        finally:
            for hook in hooks:
                hook.remove()
        full = logits[0].float().log_softmax(-1)
        found = [
            functional.kl_div(row.float().log_softmax(-1), full, log_target=True, reduction="sum")
            for row in logits[1:]
        ]
        return torch.stack(found).cpu() / answer
