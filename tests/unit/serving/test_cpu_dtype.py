"""The type that this CPU multiplies fast, beside the flags of Linux and a real product."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvevict.serving import cpu_dtype

FLAGS = Path("/proc/cpuinfo").read_text().split()


def has_instructions() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & set(FLAGS))


@pytest.fixture
def on_cpu() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM runs on a GPU here")


def test_it_is_what_linux_says(on_cpu: None) -> None:
    limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL") != "ALL"
    expected = "bfloat16" if has_instructions() and not limited else "float32"
    assert cpu_dtype.fast_dtype() == expected


@pytest.mark.nightly
def test_a_limit_of_onednn_counts(on_cpu: None) -> None:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    words = [sys.executable, "-m", "vllm_kvevict.serving.cpu_dtype"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["float32"], done.stderr


@dataclass(frozen=True)
class EngineArgs:
    """What is read of vLLM's."""

    dtype: str
    quantization: str | None

    def create_model_config(self) -> Any:
        return SimpleNamespace(quantization=self.quantization)


@pytest.mark.parametrize(
    "dtype, quantization, lacks, found",
    [
        ("auto", None, True, "float32"),
        ("auto", None, False, "auto"),
        ("bfloat16", None, True, "bfloat16"),
        ("auto", "awq", True, "auto"),
    ],
)
def test_nothing_that_was_asked_for_changes(
    monkeypatch: pytest.MonkeyPatch, dtype: str, quantization: str | None, lacks: bool, found: str
) -> None:
    monkeypatch.setattr(cpu_dtype, "lacks_bfloat16", lambda: lacks)
    asked = EngineArgs(dtype, quantization)
    assert cpu_dtype.in_fast_dtype(asked).dtype == found and asked.dtype == dtype


def test_instructions_are_those_of_torch() -> None:
    supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert supported == has_instructions()
