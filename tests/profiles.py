"""Profiles of small models, with random probes and equal shares."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvevict.front.profile import identity, to_json
from vllm_kvevict.settings.probe_weights import ProbeWeights
from vllm_kvevict.settings.profile import ModelIdentity, Profile


def identity_of(model: Path) -> ModelIdentity:
    """Whose profile a checkpoint wants."""
    from vllm.engine.arg_utils import EngineArgs

    return identity(EngineArgs(model=str(model)).create_engine_config())


def random_weights(mine: ModelIdentity, size: int, seed: int = 0) -> ProbeWeights:
    """Probes for keys of ``size`` dimensions."""
    rng = np.random.default_rng(seed)
    shape = mine.layers, mine.kv_heads
    keys, joined = (rng.normal(size=(*shape, size + n)).astype(np.float32) for n in (2, 3))
    # As learned ones: more attention now, more attention later.
    joined[..., -1] = np.abs(joined[..., -1])
    age = 0.2 * rng.normal(size=(*shape, 2, 2)).astype(np.float32)
    return ProbeWeights(keys, joined, age)


def random_profile(
    folder: Path, model: Path, size: int = 32, seed: int = 0, **changes: Any
) -> tuple[Path, ProbeWeights]:
    """Write a profile of ``model`` into ``folder``; its path and its probes."""
    mine = identity_of(model)
    weights = random_weights(mine, size, seed)
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
