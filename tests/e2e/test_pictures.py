"""Models that take images: evictions before, inside and behind them, token by token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHVISION = ROOT / ".cache" / "torchvision"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not TORCHVISION.is_dir(), reason="torchvision is not here: run `make architectures`"
    ),
]


@pytest.mark.parametrize(
    ("name", "least"), [("InternVL", 1.0), ("Qwen2_5_VL", 1.0), ("Qwen3VL", 1.0), ("Qwen3_5", 0.9)]
)
def test_images_beside_evictions(name, least, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.pictures_script", name, str(tmp_path / "model")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{TORCHVISION}"},
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert min(found["right"]) >= least * found["total"] > max(found["full"])
    assert min(found["evictions"]) >= 2
    assert not any(found["leaked"])
