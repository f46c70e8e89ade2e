"""``vllm-kvevict``: one name for the commands."""

import shutil
import subprocess
from importlib.metadata import entry_points

import pytest

from tests import forked
from vllm_kvevict.__main__ import COMMANDS, main


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run("vllm_kvevict", *words)


def test_the_name_is_installed():
    (found,) = entry_points(group="console_scripts", name="vllm-kvevict")
    assert found.load() is main


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_help_lists_the_commands(words, capsys):
    assert main(list(words)) == 0
    text = capsys.readouterr().out
    assert all(f"vllm-kvevict {name}" in text and what in text for name, what in COMMANDS.items())


def test_an_unknown_command_names_the_known_ones():
    done = run("plam")
    assert done.returncode == 2 and "there is no command 'plam'" in done.stderr
    assert "vllm-kvevict plan" in done.stderr


@pytest.mark.slow
def test_a_command_is_the_module(model):
    """It gets the arguments and stdout, and its exit status is the command's."""
    words = ("--gpu-memory", "1G", "--prompt", "100", "--json")
    done = run("plan", f"{model}/config.json", *words)
    assert done.returncode == 0 and '"eviction"' in done.stdout, done.stderr
    assert run("plan", "nowhere", *words).returncode == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_and_flags():
    script = run("completion").stdout
    for words, wanted in (("pl", "plan"), ("plan --kv-eviction-bu", "--kv-eviction-budget")):
        typed = f"COMP_WORDS=(vllm-kvevict {words}); COMP_CWORD={len(words.split())}"
        asked = f"{script}\n{typed}; _vllm_kvevict; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
        assert done.stdout.split() == [wanted], done.stderr
