"""Policies of other packages: which names count, and what is said of the others."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins import importable, write_package
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.config.plugins import plugin_policies, policy_names
from vllm_kvevict.policies.registry import build_policy

CODE = {
    "good": "from vllm_kvevict.policies.snapkv import build\n",
    "bad": "import a_module_that_is_not_there\n",
    "odd": "def build(config):\n    return 7\n",
    "forgetful": (
        "from vllm_kvevict.policies.streaming_llm import StreamingLLM\n"
        "class Forgetful(StreamingLLM):\n"
        "    def clear_rows(self, rows):\n"
        "        pass\n"
        "def build(config):\n"
        "    return Forgetful()\n"
    ),
    "weighing": "from vllm_kvevict.policies.subgen_stream import build\n",
}
PACKAGES = {
    "one": ["mine = good:build", "ada-mine = good:build", "twice = good:build"],
    "two": [
        "twice = odd:build",
        "snapkv = odd:build",
        "ada-streaming-llm = odd:build",
        "none = odd:build",
        "Loud = odd:build",
        "a,b = odd:build",
        "ada-alone = odd:build",
        "broken = bad:build",
        "absent = bad_too:build",
        "nothing = good:missing",
        "odd = odd:build",
        "forgetful = forgetful:build",
        "weighing = weighing:build",
    ],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for package, lines in PACKAGES.items():
        write_package(folder, package, CODE, lines)
    return folder


@pytest.fixture
def installed(site: Path) -> Iterator[None]:
    with importable(site):
        yield


def config(name: str, **settings: object) -> EvictionConfig:
    parsed = EvictionConfig.parse({"policy": name, **settings})
    assert parsed is not None
    return parsed


def test_names_that_may_be_chosen(installed: None) -> None:
    others = ("absent", "ada-mine", "broken", "forgetful", "mine", "nothing", "odd", "weighing")
    assert policy_names() == (*POLICY_NAMES, *others)


def test_a_policy_and_its_ada_form(installed: None) -> None:
    plain, adaptive = build_policy(config("mine")), build_policy(config("ada-mine"))
    assert plain.scorer == build_policy(config("snapkv")).scorer
    assert adaptive.scorer == plain.scorer
    assert adaptive.allocator == build_policy(config("ada-snapkv")).allocator
    assert (plain.summary, plain.name) == ("of the package one 1.0", "mine")
    assert adaptive.summary == "scores of mine; the heads of a layer share the budget (Ada-KV)"


def test_a_request_may_choose_it(installed: None) -> None:
    assert config("snapkv", allow="ada-mine,none").choices == ("snapkv", "ada-mine", "none")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("twice", "'twice' of the package one 1.0 is offered by two 1.0 too; uninstall one"),
        ("ada-streaming-llm", "is not used because a built-in policy has the same name"),
        ("Loud", "of the package two 1.0 needs another name: lower-case letters"),
        ("ada-alone", "needs 'alone' with the same value in the same package"),
        ("elsewhere", "unknown policy 'elsewhere'; choose from ada-snapkv, .*mine.*, weighing"),
    ],
)
def test_names_that_may_not(installed: None, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-eviction: .*{says}"):
        config(name)
    with pytest.raises(ValueError, match=f"--kv-eviction-allow: .*{says}"):
        config("snapkv", allow=[name])


def test_a_separator_in_a_name(installed: None) -> None:
    assert "needs another name" in plugin_policies()["a,b"].problem
    assert "needs another name" in plugin_policies()["none"].problem
    assert EvictionConfig.parse("none") is None


def test_built_in_names_stay(installed: None) -> None:
    assert "built-in" in plugin_policies()["snapkv"].problem
    assert type(build_policy(config("snapkv")).scorer).__name__ == "SnapKV"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "does not load: ModuleNotFoundError.*a_module_that_is_not_there"),
        ("absent", "does not load: ModuleNotFoundError.*bad_too"),
        ("nothing", "does not load: AttributeError.*missing"),
        ("odd", "returns 7, which is not a vllm_kvevict Scorer"),
        ("forgetful", "defines clear_rows, so its requirements need keeps_state=True"),
        ("weighing", "weighs tokens, which is supported for built-in policies only"),
    ],
)
def test_a_policy_that_does_not_load(installed: None, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} of the package two 1.0 \(.*\) {says}"):
        build_policy(config(name))


@pytest.mark.slow
def test_nobody_else_imports_it(site: Path) -> None:
    """Flags with their help, and a server with a built-in policy, import no other package."""
    code = (
        "import argparse, sys\n"
        "from vllm_kvevict.serving.plugin import add_flags\n"
        "from vllm_kvevict.policies.registry import build_policies\n"
        "from vllm_kvevict.config.config import EvictionConfig\n"
        "parser = argparse.ArgumentParser()\n"
        "add_flags(parser)\n"
        "assert '- ada-mine: ' in parser.format_help().replace('\\n', ' ')\n"
        "build_policies(EvictionConfig.parse('ada-snapkv'))\n"
        f"sys.exit(bool({set(CODE)!r} & set(sys.modules)))\n"
    )
    path = f"{site}:{Path(__file__).parents[3]}"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}).returncode == 0


def test_broken_metadata_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ValueError("not a valid file")

    monkeypatch.setattr("vllm_kvevict.config.plugins.entry_points", fail)
    plugin_policies.cache_clear()
    assert policy_names() == POLICY_NAMES
    monkeypatch.undo()
    plugin_policies.cache_clear()
