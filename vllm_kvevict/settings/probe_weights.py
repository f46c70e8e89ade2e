"""Weights of the probes in a profile's file: how they are written, read and checked."""

import base64
import binascii
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvevict.settings.profile import ModelIdentity, ProbeFile

DTYPE = "<f4"


@dataclass(frozen=True)
class ProbeWeights:
    """Two probes of each KV head of each layer that evicts, by depth.

    Args:
        keys: [L, H, D + 2] float32: weights of an unrotated key's dimensions, of its norm, and
            of 1, for a score without a window.
        joined: [L, H, D + 3] float32: as ``keys``, then the weight of the logarithm of
            ``defensive``'s score, for a score with a window.
        age: [L, H, 2, 2] float32: in each of the two, weights of the logarithm of the token's age,
            and of its square.
        rotated: [L] whether keys of the layer are rotated; None where their modules say.

    """

    keys: np.ndarray
    joined: np.ndarray
    age: np.ndarray
    rotated: tuple[bool, ...] | None = None

    @property
    def head_size(self) -> int:
        return int(self.keys.shape[-1]) - 2

    def to_json(self) -> dict[str, Any]:
        """As the ``probe`` of a profile's file: arrays as base64 of little-endian float32."""
        found: dict[str, Any] = {"head_size": self.head_size}
        for name, array in (("keys", self.keys), ("joined", self.joined), ("age", self.age)):
            found[name] = base64.b64encode(array.astype(DTYPE).tobytes()).decode("ascii")
        if self.rotated is not None:
            found["rotated"] = list(self.rotated)
        return found


def decode(value: Any, model: ModelIdentity) -> ProbeWeights:
    """The ``probe`` of a profile's file; arrays may also be nested lists.

    Raises:
        ValueError: In one sentence, what is wrong with it.

    """
    if not isinstance(value, Mapping) or not {"keys", "joined", "age"} <= value.keys():
        raise ValueError(
            "probe: must be a mapping with keys, joined and age, as vllm-kvevict calibrate makes it"
        )
    size = value.get("head_size")
    arrays = {}
    for name, more in (("keys", 2), ("joined", 3)):
        array = _array(value[name], name)
        if array.ndim == 1 and isinstance(size, int) and size > 0:
            array = array.reshape(-1, size + more) if array.size % (size + more) == 0 else array
            if len(array) == model.layers * model.kv_heads:
                array = array.reshape(model.layers, model.kv_heads, size + more)
        if array.ndim != 3 or array.shape[:2] != (model.layers, model.kv_heads):
            raise ValueError(
                f"probe.{name}: must have {model.layers} layers of {model.kv_heads} KV heads"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"probe.{name}: must be numbers")
        arrays[name] = array
    keys, joined = arrays["keys"], arrays["joined"]
    if keys.shape[2] < 3 or joined.shape[2] != keys.shape[2] + 1:
        raise ValueError("probe.joined: must have one number more in a KV head than probe.keys")
    age = _array(value["age"], "age")
    shape = model.layers, model.kv_heads, 2, 2
    if age.size != math.prod(shape) or not np.isfinite(age).all():
        raise ValueError(f"probe.age: must be numbers of shape {list(shape)}")
    rotated = value.get("rotated")
    if rotated is not None and (
        not isinstance(rotated, list)
        or len(rotated) != model.layers
        or not all(isinstance(one, bool) for one in rotated)
    ):
        raise ValueError(f"probe.rotated: must be {model.layers} times true or false")
    turned = None if rotated is None else tuple(rotated)
    return ProbeWeights(keys, joined, age.reshape(shape), turned)


def _array(value: Any, name: str) -> np.ndarray:
    try:
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value, validate=True), DTYPE).astype(np.float32)
        return np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError(f"probe.{name}: is neither base64 of float32 nor lists") from None


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
