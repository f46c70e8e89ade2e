"""Profiles of small models, with random probes and equal shares."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_kvevict.config.probe_weights import NetworkWeights, ProbeWeights, ProseWeights
from vllm_kvevict.config.profile import ModelIdentity, Profile
from vllm_kvevict.serving.identity import identity
from vllm_kvevict.serving.profile import to_json


def identity_of(model: Path) -> ModelIdentity:
    """Whose profile a checkpoint wants."""
    from vllm.engine.arg_utils import EngineArgs

    return identity(EngineArgs(model=str(model)).create_engine_config())


def random_weights(
    mine: ModelIdentity, size: int, seed: int = 0, window: float = 1.0, units: int = 0
) -> ProbeWeights:
    """Probes for keys of ``size`` dimensions; ``window`` scales what the window counts.

    With ``units`` they have networks of so many hidden units.
    """
    rng = np.random.default_rng(seed)
    shape = mine.layers, mine.kv_heads

    def drawn() -> list[np.ndarray]:
        keys, joined = (rng.normal(size=(*shape, size + n)).astype(np.float32) for n in (2, 3))
        # As learned ones: more attention now, more attention later.
        joined[..., -1] = window * np.abs(joined[..., -1])
        return [keys, joined]

    answers = drawn()
    age = 0.2 * rng.normal(size=(*shape, 2, 2)).astype(np.float32)
    keys, joined = drawn()
    # As learned: what follows is told by the window a tenth as much as what is asked.
    joined[..., -1] *= 0.1
    network = None
    if units:
        hidden = rng.normal(size=(*shape, units, size + 3)).astype(np.float32)
        out = rng.normal(size=(*shape, units + 1)).astype(np.float32)
        network = NetworkWeights(hidden, out)
    return ProbeWeights(*answers, ProseWeights(keys, joined, age), network=network)


def prose_counts(share: float) -> float:
    """What prose counts where this share is kept: 0 at 1/16, 0.3 at 1/8, 1 at 1/4, in tenths."""
    halvings = math.log2(share) if share else -math.inf
    found = 0.3 * (halvings + 4) if halvings < -3 else 0.3 + 0.7 * (halvings + 3)
    return round(10 * min(1.0, max(0.0, found))) / 10


def said(
    weights: ProbeWeights, share: float, x: torch.Tensor, ages: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, H, n] what is said of tokens where this share is kept; [L, H] of the window beside it.

    Args:
        weights: The probes.
        share: That an eviction keeps; 0 inside a context that the request names, where prose
            counts nothing.
        x: [L, H, n, D + 2] float64: keys before rotation, their norms, 1.
        ages: [L, H or 1, n] of tokens when they were scored, all in one eviction.
        kind: 0 for keys alone, 1 for what the window is joined with.

    """
    prose, counts = weights.prose, prose_counts(share)
    assert prose is not None
    arrays = (weights.keys, prose.keys), (weights.joined, prose.joined)
    first, more = (torch.from_numpy(one).double() for one in arrays[kind])
    logs, size = ages.double().log(), x.shape[-1]
    found = torch.stack([logs, logs**2], -1)
    found = found - found.mean(-2, keepdim=True)
    age = torch.from_numpy(prose.age[:, :, kind]).double()
    added = (x * more[:, :, None, :size]).sum(-1) + (found * age[:, :, None]).sum(-1)
    alone = (x * first[:, :, None, :size]).sum(-1) + counts * added.clamp(min=0)
    return alone, first[..., -1] + counts * more[..., -1]


def said_by_network(
    weights: ProbeWeights, x: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor | float:
    """[L, H, n] float64 what networks add to both kinds of scores; 0 without networks.

    Args:
        weights: The probes.
        x: As :func:`said` has it.
        shares: [L, H, n] float64 logarithms of each head's share of the value norms.

    """
    if weights.network is None:
        return 0.0
    hidden, out = (
        torch.from_numpy(array).double()[:, :, None]
        for array in (weights.network.hidden, weights.network.out)
    )
    found = out[..., -1] * shares
    for unit in range(hidden.shape[3]):
        mine = hidden[:, :, :, unit]
        z = (x * mine[..., :-1]).sum(-1) + mine[..., -1] * shares
        found = found + out[..., unit] * z * (1 + torch.erf(z / math.sqrt(2))) / 2
    return found


def of_layers(weights: ProbeWeights, layers: slice) -> ProbeWeights:
    """The probes of some layers."""
    keys, joined, *prose = (array[layers] for array in weights.arrays[:5])
    network = weights.network
    if network is not None:
        network = NetworkWeights(network.hidden[layers], network.out[layers])
    return ProbeWeights(keys, joined, ProseWeights(*prose), network=network)


def random_profile(
    folder: Path,
    model: Path,
    size: int = 32,
    seed: int = 0,
    window: float = 1.0,
    units: int = 0,
    **changes: Any,
) -> tuple[Path, ProbeWeights]:
    """Write a profile of ``model`` into ``folder``; its path and its probes."""
    mine = identity_of(model)
    weights = random_weights(mine, size, seed, window, units)
    settings: dict[str, Any] = dict(
        model=mine,
        policy="probe",
        budget="25%",
        layers=(1.0,) * mine.layers,
        heads=((1.0,) * mine.kv_heads,) * mine.layers,
    )
    profile = Profile(**settings | changes)
    path = folder / "profile.json"
    path.write_text(json.dumps(to_json(profile, weights)))
    return path, weights
