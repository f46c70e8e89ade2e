"""What ``make test`` leaves out, ``make nightly`` runs."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_every_nightly_test_is_run_at_night():
    """One target runs all of them but of some files, and each of these another one runs whole."""
    asked = ["make", "-n", "cells", "kernels", "architectures", "clients"]
    printed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = printed.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if "-m pytest" in line]
    whole = [words for words in commands if "nightly or not nightly" in words]
    (cells,) = [words for words in commands if "nightly" in words]
    ignored = [word.partition("=")[2] for word in cells if word.startswith("--ignore=")]
    assert len(whole) == 3 and len(ignored) > 10
    assert not [word for word in cells if word.startswith("tests")], "all folders"
    for path in ignored:
        assert (ROOT / path).exists()
        assert any(path in words for words in whole), path
