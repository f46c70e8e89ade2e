"""Probes in a profile's file: written, read in another process, and refused in one sentence."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.profiles import random_weights
from vllm_kvevict.config import probe_weights
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.profile import ModelIdentity, ProbeFile, Profile
from vllm_kvevict.serving.profile import check_learned, read, to_json

MODEL = ModelIdentity(architecture="any", layers=3, kv_heads=2, config="0123456789abcdef")


def profile(**changes: Any) -> Profile:
    return Profile(model=MODEL, policy="probe", budget="12.5%", layers=(1.0, 0.5, 1.5), **changes)


def prose(size: int = 8, **changes: Any) -> dict[str, Any]:
    """What a file has of prose, as lists."""
    found = random_weights(MODEL, size).prose
    assert found is not None
    arrays = dict(keys=found.keys, joined=found.joined, age=found.age)
    return {name: array.tolist() for name, array in arrays.items()} | changes


def network(**changes: Any) -> dict[str, Any]:
    """Build a profile's networks: five units each, over keys of eight dimensions."""
    value: dict[str, Any] = random_weights(MODEL, 8, units=5).to_json()["network"]
    return value | changes


def written(folder: Path, value: Any) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(value))
    return path


def test_every_process_reads_the_same_numbers(tmp_path: Path) -> None:
    weights = random_weights(MODEL, 8, units=5)
    path = written(tmp_path, to_json(profile(), weights))
    found = read(path)
    assert isinstance(found.probe, ProbeFile) and found.probe.file == str(path)
    config = EvictionConfig(policy="probe", profile=found)
    told = json.dumps(config.model_dump(mode="json"))
    assert len(told) < 3000, "the numbers stay in the file"
    again = EvictionConfig.parse(json.loads(told))
    assert again == config
    there = probe_weights.read(again.profile.probe, MODEL)
    assert len(there.arrays) == 7
    for mine, theirs in zip(there.arrays, weights.arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert there.head_size == 8 and there.rotated is None


def test_nested_lists_serve_too(tmp_path: Path) -> None:
    weights = random_weights(MODEL, 8)
    arrays = dict(keys=weights.keys, joined=weights.joined)
    lists = {name: array.tolist() for name, array in arrays.items()} | dict(rotated=[True] * 3)
    found = probe_weights.decode(lists, MODEL)
    np.testing.assert_array_equal(found.keys, weights.keys)
    assert found.rotated == (True, True, True) and found.prose is None


def test_a_file_that_is_gone_or_another_one(tmp_path: Path) -> None:
    path = written(tmp_path, to_json(profile(), random_weights(MODEL, 8)))
    where = read(path).probe
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match="has changed since the server began to start"):
        probe_weights.read(where, MODEL)
    path.unlink()
    with pytest.raises(ValueError, match="every machine of the server needs the file"):
        probe_weights.read(where, MODEL)


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(keys="%"), "probe.keys: must be base64 of float32, or nested lists"),
        (dict(keys="AAAA"), "probe.keys: "),
        (dict(keys=[[1.0]]), "probe.keys: must have 3 layers of 2 KV heads"),
        (dict(keys=[[[float("nan")] * 10] * 2] * 3), "probe.keys: must be numbers"),
        (dict(joined=[[[1.0] * 10] * 2] * 3), "probe.joined: must have one more number"),
        (dict(prose=[1.0]), "probe.prose: must be a mapping with keys and joined"),
        (dict(prose=prose(age=[1.0])), "probe.prose.age: must be numbers of shape [3, 2, 2, 2]"),
        (
            dict(prose=prose(keys="%")),
            "probe.prose.keys: must be base64 of float32, or nested lists",
        ),
        (dict(prose=prose(size=7)), "probe.prose: must have as many numbers as the probe"),
        (dict(rotated=[True]), "probe.rotated: must be a list of 3 booleans"),
        (dict(network=[1]), "probe.network: must be a mapping with units (at least 1), hidden and"),
        (dict(network=network(units=0)), "probe.network: must be a mapping with units"),
        (dict(network=network(units=4)), "probe.network.hidden: must be numbers of shape [3, 2, 4"),
        (dict(network=network(hidden="%")), "probe.network.hidden: must be base64 of float32"),
        (dict(network=network(out=[1.0])), "probe.network.out: must be numbers of shape [3, 2, 6]"),
        (dict(network=network(out=[math.nan] * 36)), "probe.network.out: must be numbers"),
    ],
)
def test_what_are_no_probes(tmp_path: Path, changes: Any, says: str) -> None:
    value = to_json(profile(), random_weights(MODEL, 8))
    value["probe"] |= changes
    with pytest.raises(ValueError) as caught:
        read(written(tmp_path, value))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    value["probe"] = [1]
    with pytest.raises(ValueError, match="probe: must be a mapping"):
        read(written(tmp_path, value))


def test_a_learned_policy_needs_a_profile_with_probes() -> None:
    check_learned(EvictionConfig(policy="snapkv"), "m")
    for settings in (dict(policy="probe"), dict(policy="snapkv", allow="ada-probe")):
        with pytest.raises(ValueError, match=r"--kv-eviction-profile .* vllm-kvevict calibrate m"):
            check_learned(EvictionConfig(**settings), "m")
    with pytest.raises(ValueError, match="the file has shares, but no scores for probe"):
        check_learned(EvictionConfig(policy="probe", profile=profile()), "m")


def test_prose_counts_in_full_where_many_are_kept() -> None:
    weights = [probe_weights.prose_weight(kept / 8000, 8000) for kept in (0, 256, 512, 1024, 8000)]
    assert weights == [0, 0, 0.5, 1, 1]
    assert probe_weights.prose_weight(1 / 8, 1400) == 0.3


def test_prose_counts_nothing_inside_a_named_context() -> None:
    for share in (1 / 16, 1 / 8, 1 / 4, 1):
        assert probe_weights.prose_weight(share, 16_000, in_context=True) == 0
        assert probe_weights.prose_weight(share, 16_000) == 1
        assert probe_weights.prose_weights(share, 16_000) == (0, 1)


def test_prose_counts_the_more_the_more_is_kept() -> None:
    shares = (0, 1 / 16, 1 / 8, 1 / 4, 2)
    weights = {share: probe_weights.prose_weight(share, 100) for share in shares}
    assert weights == {0: 0, 1 / 16: 0, 1 / 8: 0.3, 1 / 4: 1, 2: 1}
    found = [probe_weights.prose_weight(share / 1000, 1400) for share in range(1, 1001)]
    assert found == sorted(found)
    assert {round(weight * 10, 6) for weight in found} <= set(map(float, range(11)))
