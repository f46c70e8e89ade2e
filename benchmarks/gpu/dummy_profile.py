"""A profile for a model of dummy weights: random probes and networks, and equal shares.

What it keeps means nothing. The kernels, launches and bytes are those of a learned profile, so the
times of a server under ``--kv-eviction auto`` are those of a model that was calibrated.
"""

import json
from pathlib import Path

import numpy as np

from vllm_kvevict.calibrate.network import UNITS
from vllm_kvevict.config.probe_weights import NetworkWeights, ProbeWeights, ProseWeights
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.serving.identity import identity
from vllm_kvevict.serving.profile import to_json


def random_probes(layers: int, kv_heads: int, head_size: int) -> ProbeWeights:
    """Probes of every head, with networks of as many units as calibrate learns."""
    rand = np.random.default_rng(0)

    def drawn(*more: int) -> np.ndarray:
        return rand.normal(size=(layers, kv_heads, *more)).astype(np.float32) / head_size

    return ProbeWeights(
        drawn(head_size + 2),
        np.abs(drawn(head_size + 3)),
        ProseWeights(drawn(head_size + 2), np.abs(drawn(head_size + 3)), drawn(2, 2)),
        network=NetworkWeights(drawn(UNITS, head_size + 3), drawn(UNITS + 1)),
    )


def write(model: Path, path: Path, head_size: int) -> Path:
    """Write the profile of the model in a folder without weights."""
    from vllm.engine.arg_utils import EngineArgs

    engine = EngineArgs(model=str(model), load_format="dummy", max_model_len=1024)
    mine = identity(engine.create_engine_config())
    profile = Profile(
        model=mine,
        policy="probe",
        budget="25%",
        layers=(1.0,) * mine.layers,
        heads=((1.0,) * mine.kv_heads,) * mine.layers,
    )
    weights = random_probes(mine.layers, mine.kv_heads, head_size)
    path.write_text(json.dumps(to_json(profile, weights)))
    return path
