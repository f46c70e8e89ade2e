"""Models are told apart by their weights, wherever they lie."""

import shutil

import pytest

from vllm_kvevict.stores.fingerprint import SAMPLE_BYTES, SAMPLES, weights


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
