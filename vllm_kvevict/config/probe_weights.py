"""Weights of the probes in a profile's file: encoding, decoding and checks."""

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
"""Weight of the following prose relative to the question, by the share of tokens kept.

Tokens that prose needs displace facts, so the weight is small if few tokens are kept.
"""

PLACES = ((256, 0.0), (1024, 1.0))
"""The same weight by the number of tokens kept in a KV head; the larger of the two applies.

A budget of 512 is a decreasing share of a prompt of 8,000 tokens that is evicted during prefill. By
shares alone, its first tokens, which were scored with the full weight of prose, would be kept in
preference to all later ones, and prose would lose 0.095 nats instead of 0.082. Of 4,100 tokens, 261
answer 82% of questions with weight 0 and 66% with weight 1; 518 answer 90% with weight 0.3 and 88%
with weight 1 (50 samples).
"""

STEPS = 10
"""Number of steps between the weights 0 and 1. Evictions of equal weight run together."""


def prose_weight(share: float, tokens: int, in_context: bool = False) -> float:
    """Return the weight of prose for an eviction that keeps ``share`` of ``tokens`` tokens.

    It is 0 ``in_context``, inside a context that the request names: what follows there is asked.
    """
    if in_context:
        return 0.0
    weight = max(_between(PROSE, share), _between(PLACES, share * tokens))
    return round(weight * STEPS) / STEPS


def prose_weights(share: float, tokens: int) -> tuple[float, float]:
    """Return the weights of prose for scores of keys alone, which evictions inside a named context
    use, and for scores that are joined with the window."""
    return prose_weight(share, tokens, in_context=True), prose_weight(share, tokens)


def _between(points: Sequence[tuple[float, float]], value: float) -> float:
    """Return the weight of ``value``, interpolated between points on a logarithmic scale."""
    values, weights = zip(*points, strict=True)
    return float(np.interp(math.log(max(value, 1e-9)), np.log(values), weights))


@dataclass(frozen=True)
class ProseWeights:
    """Additional weights of both probes for the continuation of a text, scaled by
    :func:`prose_weight`.

    The result for a key is added if it is above 0, its average in a layer

    Args:
        keys: [L, H, D + 2] float32, as in :class:`ProbeWeights`.
        joined: [L, H, D + 3] float32; the part for the window is added to the window's weight.
        age: [L, H, 2, 2] float32: for each of the two probes, weights of
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
        keys: [L, H, D + 2] float32: weights of an unrotated key's dimensions, of its norm, and of
            1, for a score without a window.
        joined: [L, H, D + 3] float32: as ``keys``, then the weight of the logarithm of
            ``defensive``'s score, for a score with a window.
        prose: Additional weights for the continuation of a text; None if none were learned.
        rotated: [L] True if keys of the layer are rotated; None if the modules of the layers
            determine it.
        network: The network that is added to the score of a key; None if the score is linear.

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
        """All weight arrays."""
        prose = self.prose
        more = [] if prose is None else [prose.keys, prose.joined, prose.age]
        if self.network is not None:
            more += [self.network.hidden, self.network.out]
        return [self.keys, self.joined, *more]

    def to_json(self) -> dict[str, Any]:
        """Return the ``probe`` entry of a profile's file: arrays as base64 of little-endian
        float32."""
        fields: dict[str, Any] = {"head_size": self.head_size, **_encoded(self, "keys", "joined")}
        if self.prose is not None:
            fields["prose"] = _encoded(self.prose, "keys", "joined", "age")
        if self.rotated is not None:
            fields["rotated"] = list(self.rotated)
        if self.network is not None:
            units = int(self.network.out.shape[-1]) - 1
            fields["network"] = {"units": units, **_encoded(self.network, "hidden", "out")}
        return fields


def decode(value: Any, model: ModelIdentity) -> ProbeWeights:
    """Decode the ``probe`` entry of a profile's file; arrays may also be nested lists.

    Raises:
        ValueError: The entry is invalid; the message is one sentence.

    """
    keys, joined = _both(value, value, "probe", model)
    prose = None
    if (given := value.get("prose")) is not None:
        more = _both(given, value, "probe.prose", model)
        if [array.shape for array in more] != [keys.shape, joined.shape]:
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
        or not all(isinstance(flag, bool) for flag in rotated)
    ):
        raise ValueError(f"probe.rotated: must be a list of {model.layers} booleans")
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
    """Return arrays [L, H, D + 2] and [L, H, D + 3] of a mapping; ``top`` has the head size."""
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
        raise ValueError(f"{where}.joined: must have one more number per KV head than keys")
    return keys, joined


def _array(value: Any, name: str) -> np.ndarray:
    try:
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value, validate=True), DTYPE).astype(np.float32)
        return np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError(f"{name}: must be base64 of float32, or nested lists of numbers") from None


def digest(content: bytes) -> str:
    """Return a digest of a file's content."""
    return hashlib.sha256(content).hexdigest()


def read(where: ProbeFile, model: ModelIdentity) -> ProbeWeights:
    """Return the weights that the front end found, in a process that may run on another machine.

    Raises:
        ValueError: The file is missing here, or differs from the front end's; the message is one
            sentence.

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
            f"{flag}: {where.file}: has changed since the server began to start, or is a different "
            f"file on {os.uname().nodename}; restart with the same file on every machine"
        )
    return decode(json.loads(content)["probe"], model)
