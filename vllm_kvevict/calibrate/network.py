"""A network with one hidden layer for each KV head, trained on what its probe should say."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from vllm_kvevict.calibrate.regression import LEAST
from vllm_kvevict.ops.torch.probe import Network, network_scores

UNITS = 32
"""Hidden units of a head."""

SEEDS = 2
"""Networks trained for each head, of which the one with the lowest held-out loss is kept."""

STEPS, BATCH, RATE = 400, 512, 3e-3
DECAY, DROPOUT = 1e-2, 0.1

PASSES, MOST_STEPS = 7, 2000
"""Times that each token is learned from, in at least :data:`STEPS` and at most so many steps."""

CHUNK = 8192
"""Tokens whose features are in float32 at once."""

EVERY = 25
"""Steps between measurements of the held-out loss."""

JUDGED = 4096
"""Most held-out tokens by which networks are judged."""

HEADS = 32
"""Heads that are trained together: their activations stay in the caches of a CPU."""


@dataclass(frozen=True)
class Examples:
    """Tokens of prompts, as training holds them.

    Args:
        x: [H, n, D + 2] float16: the key before rotation, its norm, and the logarithm of the head's
            share of the value norms.
        y: [H, n] float32: what a probe should say.
        seen: [H, n] float32: the logarithm of the window's score.

    """

    x: torch.Tensor
    y: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(
        cls, keys: torch.Tensor, shares: torch.Tensor, y: torch.Tensor, seen: torch.Tensor
    ) -> "Examples":
        """Tokens from keys with their norms and 1 [H, n, D + 2], and shares [H, n]."""
        logs = shares.clamp(min=LEAST).log()
        return cls(torch.cat([keys[..., :-1], logs[..., None]], -1).half(), y.float(), seen)

    def thinned(self, count: int, rng: torch.Generator) -> "Examples":
        """At most ``count`` of the tokens, drawn at random."""
        tokens = self.y.shape[1]
        if tokens <= count:
            return self
        some = torch.randperm(tokens, generator=rng)[:count].to(self.y.device)
        return Examples(self.x[:, some], self.y[:, some], self.seen[:, some])

    @classmethod
    def joined(cls, parts: Sequence["Examples"]) -> "Examples":
        """Tokens of several prompts."""
        return cls._cat(parts, 1)

    @classmethod
    def of_heads(cls, parts: Sequence["Examples"]) -> "Examples":
        """The same tokens in the heads of several layers."""
        return cls._cat(parts, 0)

    @classmethod
    def _cat(cls, parts: Sequence["Examples"], dim: int) -> "Examples":
        rows = zip(*((one.x, one.y, one.seen) for one in parts), strict=True)
        return cls(*(torch.cat(one, dim) for one in rows))

    def scores(self, linear: torch.Tensor, network: Network) -> torch.Tensor:
        """[H, n] what a linear probe [H, D + 2] and a network say."""
        x = self.x.float()
        keys, shares = x[..., :-2], x[..., -1]
        line = torch.baddbmm(linear[:, -1:, None], x[..., :-1], linear[:, :-1, None])[..., 0]
        return line + network_scores(keys, network, shares)


@dataclass(frozen=True)
class Trained:
    """The probe of each head: ``linear . (k, |k|, 1) + out . (gelu(hidden . (k, |k|, 1, s)), s)``.

    k is the key before rotation and s the logarithm of the head's share of the value norms.

    Args:
        linear: [H, D + 2] float32.
        hidden: [H, U, D + 3] float32.
        out: [H, U + 1] float32.
        loss: [H, 2] held-out mean squared error relative to the targets' variance: of the linear
            probe that training started from, and of the network.

    """

    linear: torch.Tensor
    hidden: torch.Tensor
    out: torch.Tensor
    loss: torch.Tensor

    def split(self, heads: int) -> list["Trained"]:
        """The probes of so many heads each, in their order."""
        parts = (self.linear, self.hidden, self.out, self.loss)
        return [Trained(*some) for some in zip(*(one.split(heads) for one in parts), strict=True)]


def trained(
    x: torch.Tensor,
    y: torch.Tensor,
    held_x: torch.Tensor,
    held_y: torch.Tensor,
    linear: torch.Tensor,
) -> Trained:
    """Train the networks of some heads together, starting from their linear probes.

    The state of a network that counts is the one with the lowest held-out loss, so that it is
    never worse than the linear probe on the held-out tokens.

    Args:
        x: [H, n, D + 2] features of tokens, in any float type: the key before rotation, its norm,
            and the logarithm of the head's share of the value norms.
        y: [H, n] float32 targets.
        held_x: [H, m, D + 2] features of held-out tokens.
        held_y: [H, m] float32.
        linear: [H, D + 2] float32: weights of the key, of its norm, and of 1.

    """
    parts = []
    # Weights that were made in inference mode cannot be trained, and vLLM switches gradients off.
    with torch.inference_mode(False), torch.enable_grad():
        for first in range(0, len(y), HEADS):
            some = slice(first, first + HEADS)
            parts.append(_trained(x[some], y[some], held_x[some], held_y[some], linear[some]))
    return Trained(*(torch.cat(one) for one in zip(*parts, strict=True)))


def _trained(
    x: torch.Tensor,
    y: torch.Tensor,
    held_x: torch.Tensor,
    held_y: torch.Tensor,
    linear: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    heads, tokens, size = x.shape
    device = x.device
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    steps = min(max(STEPS, PASSES * tokens // BATCH), MOST_STEPS)
    mean = x.mean(1, keepdim=True, dtype=torch.float32)
    squares = [(some.float() - mean).square_().sum(1, keepdim=True) for some in x.split(CHUNK, 1)]
    scale = torch.stack(squares).sum(0).div_(tokens).sqrt_()
    # A feature that never changes says nothing; a column of zeros has no gradient.
    scale[scale < 1e-6 * (1 + mean.abs())] = torch.inf
    y_mean, y_scale = y.mean(1, keepdim=True), y.std(1, keepdim=True).clamp(min=1e-6)
    step = max(1, held_x.shape[1] // JUDGED)
    judged = (held_x[:, ::step].float() - mean) / scale
    wanted = ((held_y[:, ::step] - y_mean) / y_scale)[..., None]

    # [k, |k|] of the linear probe in standard scores; nothing of the share so far.
    a = functional.pad(linear[:, :-1], (0, 1))[..., None]
    at_mean = (a * mean.mT).sum(1) + linear[:, -1:]
    finite = torch.where(scale.isinf(), 0, scale)
    start = (a * finite.mT / y_scale[..., None]).expand(-1, -1, SEEDS)
    bias = ((at_mean - y_mean) / y_scale)[:, None].expand(-1, -1, SEEDS)
    weights = [
        drawn(heads, size, SEEDS * UNITS) / size**0.5,
        torch.zeros(heads, 1, SEEDS * UNITS, device=device),
        0.1 * drawn(heads, 1, SEEDS, UNITS) / UNITS**0.5,
        start.clone(),
        bias.clone(),
    ]
    weights = [one.requires_grad_() for one in weights]

    def said(x: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """[H, n, SEEDS] standard scores."""
        into, shift, out, line, constant = weights
        hidden = functional.gelu(torch.baddbmm(shift, x, into))
        hidden = functional.dropout(hidden, dropout, dropout > 0).unflatten(-1, (SEEDS, UNITS))
        return (hidden * out).sum(-1) + torch.baddbmm(constant, x, line)

    best = [one.detach().clone() for one in weights]
    lowest = torch.full((heads, SEEDS), torch.inf, device=device)

    @torch.no_grad()
    def judge() -> torch.Tensor:
        loss = (said(judged) - wanted).square().mean(1)
        better = loss < lowest
        lowest[better] = loss[better]
        units = better.repeat_interleave(UNITS, 1)
        masks = units, units, better[..., None], better, better
        for kept, new, mask in zip(best, weights, masks, strict=True):
            torch.where(mask[:, None], new, kept, out=kept)
        return loss

    # At its start a network is the linear probe and a tenth of noise.
    with torch.no_grad():
        out, line = weights[2].clone(), weights[2].zero_()
        first = judge()[:, 0]
        line.copy_(out)
    optimizer = torch.optim.AdamW(weights, RATE, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for count in range(1, steps + 1):
        at = torch.randint(0, tokens, (BATCH,), generator=generator).to(device)
        batch = (x[:, at].float() - mean) / scale
        target = ((y[:, at] - y_mean) / y_scale)[..., None]
        loss = (said(batch, DROPOUT) - target).square().mean(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if count % EVERY == 0:
            judge()

    seed = lowest.argmin(1)
    rows = torch.arange(heads, device=device)
    into, shift, out, line, constant = best
    into = into.unflatten(-1, (SEEDS, UNITS))[rows, :, seed].mT / scale
    shift = shift.unflatten(-1, (SEEDS, UNITS))[rows, :, seed].mT
    out, line, constant = out[rows, 0, seed], line[rows, :, seed], constant[rows, :, seed]
    shift = shift - (into * mean).sum(-1, keepdim=True)
    line = y_scale * line / scale[:, 0]
    constant = y_scale * constant + y_mean - (line * mean[:, 0]).sum(-1, keepdim=True)
    hidden = torch.cat([into[..., :-1], shift, into[..., -1:]], -1)
    return (
        torch.cat([line[:, :-1], constant], -1),
        hidden,
        torch.cat([y_scale * out, line[:, -1:]], -1),
        torch.stack([first, lowest.amin(1)], -1),
    )
