"""Servers share files if, and only if, their stores are the same, wherever their model lies."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bare_scheduler import layer_shares
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.policies.requirements import floats_per_token
from vllm_kvevict.stores import fingerprint as fingerprint_module
from vllm_kvevict.stores.fingerprint import (
    EXCLUDED,
    INCLUDED,
    SAMPLE_BYTES,
    SAMPLES,
    fingerprint,
    weights,
)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(bytes(range(256)) * 2048)
    return folder


def test_a_copy_is_the_same_model(model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / "README.md").write_text("not weights")
    assert weights(str(model), None) == weights(str(other), None)
    assert weights(str(model / "a.safetensors"), None) == weights(str(model), None)


@pytest.mark.parametrize("change", ["bytes", "size", "name", "another"])
def test_other_weights_are_another_model(model, change):
    before, file = weights(str(model), None), model / "a.safetensors"
    data = bytearray(file.read_bytes())
    assert len(data) > 2 * SAMPLES * SAMPLE_BYTES / 2
    if change == "bytes":  # As training changes them: everywhere.
        file.write_bytes(bytes(byte ^ 1 for byte in data))
    elif change == "size":
        file.write_bytes(data + b"x")
    elif change == "name":
        file.rename(model / "b.safetensors")
    else:
        (model / "b.safetensors").write_bytes(b"x")
    assert weights(str(model), None) != before


def test_a_model_that_is_not_here_is_its_name(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert weights("nobody/nothing", "main") == "nobody/nothing main"


class Server:
    """What the fingerprint reads of a server; the weights are not read."""

    def __init__(self, max_model_len: int = 4096, cache_dtype: str = "auto", **rope: Any) -> None:
        text = SimpleNamespace(rope_parameters=rope)
        model = SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2, "rope": rope}),
            hf_text_config=text,
            model="m",
            revision=None,
            quantization=None,
            seed=0,
            dtype="float32",
            max_model_len=max_model_len,
        )
        self.vllm: Any = SimpleNamespace(
            model_config=model,
            load_config=SimpleNamespace(load_format="auto"),
            cache_config=SimpleNamespace(
                cache_dtype=cache_dtype, prefix_caching_hash_algo="sha256"
            ),
            parallel_config=SimpleNamespace(world_size=1),
        )

    def fingerprint(self, **settings: Any) -> dict[str, Any]:
        config = EvictionConfig(**{"policy": "ada-snapkv", **settings})
        groups: Any = SimpleNamespace(kv_cache_groups=[])
        return fingerprint(self.vllm, groups, config, floats_per_token(config))


@pytest.fixture
def server(monkeypatch) -> Server:
    monkeypatch.setattr(fingerprint_module, "weights", lambda *_: "weights")
    return Server()


OTHER = {
    "policy": "snapkv",
    "budget": 512,
    "window": 16,
    "interval": 64,
    "prefill_interval": 256,
    "every": 256,
    "when": "pressure",
    "calibrate_seconds": 5.0,
    "allow": "snapkv,none",
    "max_budget": 2048,
    "protect_system": True,
    "shared_blocks": "evict",
    "attention": "triton",
    "kernels": "optional",
    "ring_memory": "1G",
    "store_memory": "1G",
    "store_path": "/other",
    "store_dtype": "int4",
    "audit": "1%",
    "options": {"floor": 0.5},
    "profile": layer_shares((1.5, 0.5)),
}
"""Another value of every setting."""


def test_each_setting_is_included_or_not_for_a_reason():
    assert not INCLUDED.keys() & EXCLUDED.keys()
    assert INCLUDED.keys() | EXCLUDED.keys() == EvictionConfig.model_fields.keys() == OTHER.keys()
    assert all(INCLUDED.values()) and all(EXCLUDED.values())


@pytest.mark.parametrize("name", OTHER)
def test_servers_that_differ_in_what_is_included_share_nothing(server, name):
    own, other = server.fingerprint(), server.fingerprint(**{name: OTHER[name]})
    assert (own != other) == (name in INCLUDED)


@pytest.mark.parametrize(
    "allow, shares",
    [("snapkv,none", True), ("ada-defensive", False), ("defensive", False)],
)
def test_servers_whose_files_hold_other_floats_share_nothing(server, allow, shares):
    """Under ``ada-defensive`` a float of each token is in every file, whoever asked for it."""
    assert (server.fingerprint() == server.fingerprint(allow=allow)) == shares


def test_policies_with_the_same_floats_share(server):
    assert server.fingerprint(allow="defensive") == server.fingerprint(allow="ada-defensive,none")


def test_two_formats_of_one_element_type_are_apart(server):
    formats = ["auto", "fp8_e4m3", "fp8_e5m2"]
    assert len({str(Server(cache_dtype=name).fingerprint()) for name in formats}) == 3


def test_rotations_that_depend_on_the_longest_sequence_are_apart(server):
    long_rope = dict(rope_type="longrope", original_max_position_embeddings=4096)
    short, longer, longest = (
        Server(length, **long_rope).fingerprint() for length in (4096, 8192, 16384)
    )
    assert short != longer == longest
    other = dict(rope_type="yarn", original_max_position_embeddings=4096)
    assert Server(4096, **other).fingerprint() == Server(8192, **other).fingerprint()
