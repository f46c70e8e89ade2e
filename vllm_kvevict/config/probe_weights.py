"""Weights of the probes in a profile's file: how they are written, read and checked."""

import base64
import binascii
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvevict.config.profile import ModelIdentity, ProbeFile

DTYPE = "<f4"

PROSE = ((1 / 16, 0.0), (1 / 8, 0.3), (1 / 4, 1.0))
"""What the prose that follows counts beside what is asked, by the share of tokens kept.

Tokens that prose needs take the places of facts, so it counts little where places are few."""

PLACES = ((256, 0.0), (1024, 1.0))
"""The same by the number of tokens kept in a KV head; the larger weight counts.

A budget of 512 is a falling share of a prompt of 8,000 tokens that is evicted as it streams in: by
shares alone its first tokens, scored when prose counted in full, stay before all later ones. Prose
then loses 0.095 nats, so 0.082. Of 4,100 tokens 261 answer 82% of questions where prose counts
nothing and 66% where it counts in full, 518 answer 90% where it counts 0.3 and 88% in full
(50 samples)."""

STEPS = 10
"""Weights between 0 and 1 that there are: evictions of one weight run together."""


def prose_weight(share: float, tokens: int) -> float:
    """What prose counts where an eviction keeps this share of so many tokens."""
    found = max(_between(PROSE, share), _between(PLACES, share * tokens))
    return round(found * STEPS) / STEPS


def _between(points: Sequence[tuple[float, float]], value: float) -> float:
    """The weight of ``value`` between points of values and weights, on a logarithmic scale."""
    values, weights = zip(*points, strict=True)
    return float(np.interp(math.log(max(value, 1e-9)), np.log(values), weights))


@dataclass(frozen=True)
class ProseWeights:
    """What both probes gain, times :func:`prose_weight`, of a context that is read on.

    Of a key it is added where it is above 0, which is its average in a layer
    (:func:`~vllm_kvevict.ops.torch.probe.with_prose`).

    Args:
        keys: [L, H, D + 2] float32, as in :class:`ProbeWeights`.
        joined: [L, H, D + 3] float32; the window's part is added to its weight.
        age: [L, H, 2, 2] float32: in each of the two, weights of
            :func:`~vllm_kvevict.ops.torch.probe.age_features`.

    """

    keys: np.ndarray
    joined: np.ndarray
    age: np.ndarray


@dataclass(frozen=True)
class NetworkWeights:
    """A network with one hidden layer of U units for each KV head, which both probes gain.

    Args:
        hidden: [L, H, U, D + 3] float32: weights of an unrotated key's dimensions, of its norm, of
            1, and of the logarithm of the head's share of the norms of the token's values.
        out: [L, H, U + 1] float32: weights of the units, then that of the same logarithm.

    """

    hidden: np.ndarray
    out: np.ndarray


@dataclass(frozen=True)
class ProbeWeights:
    """Two probes of each KV head of each layer that evicts, by depth.

    Args:
        keys: [L, H, D + 2] float32: weights of an unrotated key's dimensions, of its norm, and
            of 1, for a score without a window.
        joined: [L, H, D + 3] float32: as ``keys``, then the weight of the logarithm of
            ``defensive``'s score, for a score with a window.
        prose: What the text that follows adds; None where nothing was learned of it.
        rotated: [L] whether keys of the layer are rotated; None where their modules say.
        network: What the score of a key gains; None where it is linear.

    """

    keys: np.ndarray
    joined: np.ndarray
    prose: ProseWeights | None = None
    rotated: tuple[bool, ...] | None = None
    network: NetworkWeights | None = None

    @property
    def head_size(self) -> int:
        return int(self.keys.shape[-1]) - 2

    @property
    def arrays(self) -> list[np.ndarray]:
        """All of its numbers."""
        prose = self.prose
        more = [] if prose is None else [prose.keys, prose.joined, prose.age]
        if self.network is not None:
            more += [self.network.hidden, self.network.out]
        return [self.keys, self.joined, *more]

    def to_json(self) -> dict[str, Any]:
        """As the ``probe`` of a profile's file: arrays as base64 of little-endian float32."""
        found: dict[str, Any] = {"head_size": self.head_size, **_encoded(self, "keys", "joined")}
        if self.prose is not None:
            found["prose"] = _encoded(self.prose, "keys", "joined", "age")
        if self.rotated is not None:
            found["rotated"] = list(self.rotated)
        if self.network is not None:
            units = int(self.network.out.shape[-1]) - 1
            found["network"] = {"units": units, **_encoded(self.network, "hidden", "out")}
        return found


def decode(value: Any, model: ModelIdentity) -> ProbeWeights:
    """The ``probe`` of a profile's file; arrays may also be nested lists.

    Raises:
        ValueError: In one sentence, what is wrong with it.

    """
    keys, joined = _both(value, value, "probe", model)
    prose = None
    if (given := value.get("prose")) is not None:
        more = _both(given, value, "probe.prose", model)
        if [one.shape for one in more] != [keys.shape, joined.shape]:
            raise ValueError("probe.prose: must have as many numbers as the probe")
        age = _array(given.get("age", ()), "probe.prose.age")
        shape = model.layers, model.kv_heads, 2, 2
        if age.size != math.prod(shape) or not np.isfinite(age).all():
            raise ValueError(f"probe.prose.age: must be numbers of shape {list(shape)}")
        prose = ProseWeights(*more, age.reshape(shape))
    rotated = value.get("rotated")
    if rotated is not None and (
        not isinstance(rotated, list)
        or len(rotated) != model.layers
        or not all(isinstance(one, bool) for one in rotated)
    ):
        raise ValueError(f"probe.rotated: must be {model.layers} times true or false")
    turned = None if rotated is None else tuple(rotated)
    network = None
    if (given := value.get("network")) is not None:
        network = _network(given, keys.shape[2] - 2, model)
    return ProbeWeights(keys, joined, prose, turned, network)


def _network(given: Any, size: int, model: ModelIdentity) -> NetworkWeights:
    """Networks over keys of ``size`` dimensions."""
    units = given.get("units") if isinstance(given, Mapping) else None
    if not isinstance(units, int) or units < 1 or not {"hidden", "out"} <= given.keys():
        raise ValueError(
            "probe.network: must be a mapping with units (at least 1), hidden and out, as "
            "vllm-kvevict calibrate makes it"
        )
    found, heads = [], (model.layers, model.kv_heads)
    for name, shape in (("hidden", (*heads, units, size + 3)), ("out", (*heads, units + 1))):
        array = _array(given[name], f"probe.network.{name}")
        if array.size != math.prod(shape) or not np.isfinite(array).all():
            raise ValueError(f"probe.network.{name}: must be numbers of shape {list(shape)}")
        found.append(array.reshape(shape))
    return NetworkWeights(*found)


def _encoded(weights: Any, *names: str) -> dict[str, str]:
    arrays = {name: getattr(weights, name).astype(DTYPE).tobytes() for name in names}
    return {name: base64.b64encode(array).decode("ascii") for name, array in arrays.items()}


def _both(
    value: Any, top: Mapping[str, Any], where: str, model: ModelIdentity
) -> tuple[np.ndarray, np.ndarray]:
    """[L, H, D + 2] and [L, H, D + 3] of a mapping; ``top`` has the head size."""
    if not isinstance(value, Mapping) or not {"keys", "joined"} <= value.keys():
        raise ValueError(
            f"{where}: must be a mapping with keys and joined, as vllm-kvevict calibrate makes it"
        )
    size, arrays = top.get("head_size"), []
    for name, more in (("keys", 2), ("joined", 3)):
        array = _array(value[name], f"{where}.{name}")
        if array.ndim == 1 and isinstance(size, int) and size > 0:
            array = array.reshape(-1, size + more) if array.size % (size + more) == 0 else array
            if len(array) == model.layers * model.kv_heads:
                array = array.reshape(model.layers, model.kv_heads, size + more)
        if array.ndim != 3 or array.shape[:2] != (model.layers, model.kv_heads):
            raise ValueError(
                f"{where}.{name}: must have {model.layers} layers of {model.kv_heads} KV heads"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"{where}.{name}: must be numbers")
        arrays.append(array)
    keys, joined = arrays
    if keys.shape[2] < 3 or joined.shape[2] != keys.shape[2] + 1:
        raise ValueError(f"{where}.joined: must have one number more in a KV head than keys")
    return keys, joined


def _array(value: Any, name: str) -> np.ndarray:
    try:
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value, validate=True), DTYPE).astype(np.float32)
        return np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError(f"{name}: is neither base64 of float32 nor lists") from None


def digest(content: bytes) -> str:
    """What tells a file's content from another's."""
    return hashlib.sha256(content).hexdigest()


def read(where: ProbeFile, model: ModelIdentity) -> ProbeWeights:
    """Weights as the front end found them, in a process that may run on another machine.

    Raises:
        ValueError: In one sentence: no such file here, or another one than the front end's.

    """
    flag = "KV eviction: --kv-eviction-profile"
    try:
        content = Path(where.file).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{flag}: {where.file}: {error.strerror} on {os.uname().nodename}; every machine of "
            "the server needs the file under the same path"
        ) from None
    if digest(content) != where.sha256:
        raise ValueError(
            f"{flag}: {where.file}: has changed since the server began to start, or is another "
            f"file on {os.uname().nodename}; start again with the same file everywhere"
        )
    return decode(json.loads(content)["probe"], model)
