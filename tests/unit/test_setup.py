"""Set-up scripts end at a signal, with all their processes, and repeat unfinished work when rerun.

The scripts run in a copy of their folder, with stand-ins for what they download and install with.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, Command
from tests.nightly import nightly

TOOL = f"""#!/usr/bin/env bash
# Works at what STALL matches, for ten minutes, and leaves what it unpacks half-made. At SIGINT it
# ends by itself, as pip does.
case "${{0##*/}} $*" in
    $STALL) ;;
    chromium* | *chrome*) exit 1 ;;
    "python3 -m "*) exit ;;
    python3*) exec {sys.executable} "$@" ;;
    *) exit ;;
esac
mkdir -p "${{!#}}/usr/bin" 2>/dev/null
for program in kubectl helm METADATA usr/bin/promtool; do
    touch "${{!#}}/$program" && chmod +x "${{!#}}/$program"
done 2>/dev/null
trap 'exit 1' INT
echo READY
sleep 600 & wait $!
"""

ON_PATH = "python3 pip apt-get dpkg chromium chromium-browser google-chrome chrome nvidia-smi"

VENV, DOWNLOAD, UNPACK = "python3 -m venv*", "python3 -m pip download*", "python3 - *"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="installing needs root")

STAGES = [
    ("setup_env.sh", VENV),
    nightly("setup_clients.sh", VENV),
    nightly("setup_kvpress.sh", VENV),
    nightly("setup_connectors.sh", "pip install*"),
    nightly("setup_suffix.sh", "pip download*"),
    nightly("setup_torchvision.sh", "pip install*"),
    ("setup_next_vllm.sh", DOWNLOAD),
    nightly("fetch_vllm_source.sh", DOWNLOAD),
    ("fetch_vllm_source.sh", UNPACK),
    nightly("setup_kubectl.sh", DOWNLOAD),
    ("setup_kubectl.sh", UNPACK),
    nightly("setup_prometheus.sh", "apt-get * download *"),
    ("setup_prometheus.sh", "dpkg -x *"),
    pytest.param("setup_chromium.sh", "apt-get * install *", marks=ROOT_ONLY),
    nightly("sbom.sh", VENV),
    nightly("dist.sh", VENV),
    nightly("build_wheel.sh", VENV),
]
"""A script, and the command during which it is interrupted."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone in which nothing was set up but what the scripts ask for."""
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    for name in ("pyproject.toml", "vllm_kvevict/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tool").write_text(TOOL)
    (tmp_path / "tool").chmod(0o755)
    for folder, names in (("bin", ON_PATH), (".venv/bin", "pip python")):
        (tmp_path / folder).mkdir(parents=True)
        for name in names.split():
            (tmp_path / folder / name).symlink_to(tmp_path / "tool")
    (tmp_path / ".venv" / ".setup-stamp").write_text("x")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", f"{tmp_path}/bin/python3")
    return tmp_path


def interrupted(script: Path, tree: Path, alone: bool) -> str:
    """Return the output of a script that is interrupted while a stand-in works."""
    command = Command(["bash", str(script)], tree / "log", tree)
    command.wait_for("READY")
    said = command.interrupt(signal.SIGINT, alone)
    assert command.process.returncode == 130
    return said


@pytest.mark.parametrize("script, stall", STAGES)
def test_an_interrupted_script_works_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch, script: str, stall: str
) -> None:
    """Both ways of SIGINT; after the first nothing half-made is taken for complete."""
    if script == "setup_env.sh":
        (tree / ".venv" / "bin" / "pip").unlink()
    monkeypatch.setenv("STALL", stall)
    for alone in (False, True):
        said = interrupted(tree / "packaging" / script, tree, alone)
        assert "error" not in said and "ready" not in said
        assert not list((tree / ".cache").glob("making*")), "work is removed"


def test_no_script_is_missing() -> None:
    texts = {file.name: file.read_text() for file in (ROOT / "packaging").glob("*.sh")}
    wanted = {name for name, text in texts.items() if "/common.sh" in text}
    stages = [getattr(stage, "values", stage) for stage in STAGES]
    assert {script for script, _ in stages} == wanted
    assert wanted == {*texts} - {"common.sh", "dist_env.sh"}


STUBBORN = """#!/usr/bin/env bash
trap '' INT TERM
[[ "${1:-}" == apart ]] || setsid "$0" apart &
while :; do sleep 600 & wait; done
"""
"""Ignores signals, and so does what it started in a session of its own and left."""


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("stubborn", [False, nightly(True)])
def test_a_script_ends_with_pip(
    tree: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool, alone: bool
) -> None:
    """Bash would go on after pip, or wait for it."""
    (tree / "lock").write_text("torch==1\n")
    monkeypatch.setenv("STALL", "pip install*")
    if stubborn:
        pip = tree / ".venv" / "bin" / "pip"
        pip.unlink()
        pip.write_text(STUBBORN.replace("while", "echo READY\nwhile", 1))
        pip.chmod(0o755)
    script = tree / "packaging" / "install.sh"
    script.write_text(
        f"set -euo pipefail; source {tree}/packaging/common.sh; install_lock {tree}/.venv lock"
    )
    said = interrupted(script, tree, alone)
    assert "not on the configured index" not in said


def test_what_pip_did_not_finish_is_installed_again(tree: Path) -> None:
    """pip takes a package for whole that has metadata; it writes RECORD last."""
    packages = tree / ".venv" / "lib" / "python3.11" / "site-packages"
    for name, files in (
        ("half-1.dist-info", ["METADATA"]),
        ("whole-1.dist-info", ["METADATA", "RECORD"]),
    ):
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).write_text("")
    script = tree / "packaging" / "make.sh"
    script.write_text(
        f"set -euo pipefail; source {tree}/packaging/common.sh; make_venv {tree}/.venv; echo READY"
    )
    command = Command(["bash", str(script)], tree / "log", tree)
    assert command.process.wait(60) == 0, command.log.read_text()
    assert [folder.name for folder in packages.iterdir()] == ["whole-1.dist-info"]
