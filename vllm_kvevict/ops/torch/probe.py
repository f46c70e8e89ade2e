"""probe: what a probe of its unrotated key says a cached token is worth. Reference."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import gelu

from vllm_kvevict.ops.torch.buffers import Buffers, by_dimension


@dataclass(frozen=True)
class Rotation:
    """The inverse rotation of keys at N positions.

    R pairs of dimensions are rotated, from ``first`` on; the others are not.

    Args:
        cos: [N, R] float32: cosine of each pair's angle, over the square of what the model's
            rotary module scales lengths by.
        sin: [N, R] float32, as ``cos``.
        interleaved: Whether a pair is (2i, 2i + 1), else (i, i + R).
        first: The first rotated dimension.

    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    first: int = 0

    @cached_property
    def by_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines as [R, N], contiguous."""
        return self.cos.T.contiguous(), self.sin.T.contiguous()


def unrotated(
    keys: torch.Tensor,
    rotation: Rotation | None,
    buffers: Buffers | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys as they were before the model rotated them.

    Args:
        keys: [H, N, D] of any float type.
        rotation: Of these N tokens; None for keys that were not rotated.
        buffers: Memory for the keys in float32; None for new memory.
        out: [H, N, D] float32 to write to; None for a new tensor.

    Returns:
        [H, N, D] float32.

    """
    if rotation is None:
        return keys.float() if out is None else out.copy_(keys)
    pairs, begin = rotation.cos.shape[-1], rotation.first
    end = begin + 2 * pairs
    keys = keys.float() if buffers is None else buffers.floats("keys", keys)
    found = torch.empty_like(keys) if out is None else out
    cos, sin = rotation.cos, rotation.sin
    if by_dimension(keys):
        cos, sin = (part.mT for part in rotation.by_pair)
    if rotation.interleaved:
        first, second = keys[..., begin:end:2], keys[..., begin + 1 : end : 2]
        out_first, out_second = found[..., begin:end:2], found[..., begin + 1 : end : 2]
    else:
        first, second = keys[..., begin : begin + pairs], keys[..., begin + pairs : end]
        out_first, out_second = found[..., begin : begin + pairs], found[..., begin + pairs : end]
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=-1)
    found[..., :begin], found[..., end:] = keys[..., :begin], keys[..., end:]
    return found


def key_scores(
    keys: torch.Tensor, rotation: Rotation | None, weights: torch.Tensor
) -> torch.Tensor:
    """``a . k + b * |k| + c`` of every key k, its rotation taken out, for C probes of each head.

    Args:
        keys: [H, N, D] of any float type.
        rotation: Of these N tokens; None for keys that were not rotated.
        weights: [H, C, D + 2] float32: a, b, c.

    Returns:
        [H, N, C] float32.

    """
    found = unrotated(keys, rotation)
    # Of keys that lie dimension by dimension, torch's norm takes ten times as long on a CPU.
    norms = found.square().sum(-1, keepdim=True).sqrt_()
    a, b, c = weights.split([found.shape[-1], 1, 1], dim=-1)
    if by_dimension(found):
        scores = torch.baddbmm(c, a, found.mT).mT
    else:
        scores = torch.baddbmm(c.mT, found, a.mT)
    return scores.addcmul_(norms, b.mT)


def probe_scores(
    keys: torch.Tensor,
    rotation: Rotation | None,
    weights: torch.Tensor,
    prose: "Prose | None" = None,
    network: "Network | None" = None,
    shares: torch.Tensor | None = None,
    buffers: Buffers | None = None,
) -> torch.Tensor:
    """Return the scores of keys by C probes of each head and their network.

    Args:
        keys: [H, N, D] of any float type.
        rotation: Inverse rotation of these N tokens; None for keys that were not rotated.
        weights: [H, C, D + 2] float32, for :func:`key_scores`; with ``prose`` [H, 2 * C, D + 2].
        prose: Arguments of :func:`with_prose`.
        network: Of these heads: :func:`network_scores` are added to every score.
        shares: [H, N] argument of the same function.
        buffers: Memory for intermediate results; None for new memory.

    Returns:
        [H, N, C] float32.

    """
    if network is None:
        scores = key_scores(keys, rotation, weights)
        return scores if prose is None else with_prose(scores, *prose)
    buffers = buffers or Buffers()
    scores, more = _all_scores(keys, rotation, weights, network, shares, buffers)
    if prose is None:
        return scores + more[..., None]
    return with_prose(scores, *prose).add_(more[..., None])


def _all_scores(
    keys: torch.Tensor,
    rotation: Rotation | None,
    weights: torch.Tensor,
    network: "Network",
    shares: torch.Tensor | None,
    buffers: Buffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`key_scores` and :func:`network_scores` of keys that are read once.

    One matrix product serves both: a probe is a unit of the network without an activation.

    Returns:
        [H, N, C] in the buffers, and [H, N], both float32.

    """
    heads, tokens, size = keys.shape
    device = keys.device
    if by_dimension(keys):
        inputs = buffers.take("inputs", (heads, size + 3, tokens), device).mT
    else:
        inputs = buffers.take("inputs", (heads, tokens, size + 3), device)
    found = unrotated(keys, rotation, buffers, inputs[..., :size])
    squares = torch.mul(found, found, out=buffers.like("keys", keys))
    torch.sum(squares, -1, out=inputs[..., size]).sqrt_()
    inputs[..., size + 1] = 1
    inputs[..., size + 2] = 0 if shares is None else shares
    count = weights.shape[1]
    units = torch.cat([network.keys, network.rest], dim=-1)
    both = torch.cat([torch.nn.functional.pad(weights, (0, 1)), units], dim=1)
    # Units first: keys in a CPU's cache lie dimension by dimension.
    rows = buffers.take("rows", (heads, both.shape[1], tokens), device)
    torch.bmm(both, inputs.mT, out=rows)
    more = torch.bmm(network.out, torch.ops.aten.gelu_(rows[:, count:]))[:, 0]
    if shares is not None:
        more.addcmul_(shares, network.shares)
    return rows[:, :count].mT, more


@dataclass(frozen=True)
class Network:
    """One hidden layer of U units for each of H heads, of a key and of the token's values.

    Args:
        keys: [H, U, D] float32: weights of an unrotated key's dimensions.
        rest: [H, U, 3] float32: weights of the key's norm, of 1, and of the logarithm of the head's
            share of the norms of the token's values.
        out: [H, 1, U] float32.
        shares: [H, 1] float32: weight of the logarithm of the share, in addition to the units.

    """

    keys: torch.Tensor
    rest: torch.Tensor
    out: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def of(cls, hidden: torch.Tensor, out: torch.Tensor) -> "Network":
        """A network from weights as a profile has them, [H, U, D + 3] and [H, U + 1]."""
        keys, rest = hidden[..., :-3].contiguous(), hidden[..., -3:].contiguous()
        return cls(keys, rest, out[:, None, :-1].contiguous(), out[:, -1:].contiguous())


def network_scores(
    keys: torch.Tensor, network: Network, shares: torch.Tensor | None
) -> torch.Tensor:
    """``out . gelu(keys . k + rest . (|k|, 1, s)) + shares * s`` of every key k.

    Args:
        keys: [H, N, D] float32, unrotated.
        network: Of these heads.
        shares: [H, N] float32: s, logarithms of each head's share of the value norms; None where
            they are 0, as those of a head that has all of a token's values.

    Returns:
        [H, N] float32.

    """
    norms = keys.square().sum(-1).sqrt_()
    rest = torch.stack([norms, torch.ones_like(norms)], dim=1)
    if shares is not None:
        rest = torch.cat([rest, shares[:, None]], dim=1)
    # Units first: keys in a CPU's cache lie dimension by dimension.
    units = torch.bmm(network.keys, keys.mT)
    units.baddbmm_(network.rest[..., : rest.shape[1]], rest)
    found = torch.bmm(network.out, gelu(units))[:, 0]
    return found if shares is None else found.addcmul_(shares, network.shares)


def logged_ages(ages: torch.Tensor) -> torch.Tensor:
    """[N, 2] float64 logarithms of ages [N], and their squares."""
    logs = ages.double().log()
    return torch.stack([logs, logs.square()], dim=-1)


def age_features(ages: torch.Tensor) -> torch.Tensor:
    """[N, 2] float32: the logarithm of a token's age, and its square, less their means.

    Less the means, so that what is new in an eviction is worth no more than what was new in an
    earlier one: scores are made once and kept.

    Args:
        ages: [N] of the tokens that an eviction scores: tokens from each to the end of the cache.

    """
    found = logged_ages(ages)
    return (found - found.mean(0)).float()


Prose = tuple[torch.Tensor, torch.Tensor]
"""Ages and their weights, as :func:`with_prose` takes them."""


def with_prose(said: torch.Tensor, ages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Scores [H, N, C] of what answers taught, and what prose adds to some of them.

    What is read on is added where it is above the average, and takes nothing from the others: a
    sum of both cost unseen facts 5 of 100 at a quarter where this costs 2, and is no better for
    prose.

    Args:
        said: [H, N, 2 * C] of :func:`key_scores`: by answers, then by prose.
        ages: [N, 2] of :func:`age_features`.
        weights: [H, C, 2] float32 of these.

    """
    answers, prose = said.chunk(2, dim=-1)
    more = torch.baddbmm(prose, ages.expand(len(said), -1, -1), weights.mT)
    return more.clamp_(min=0).add_(answers)
