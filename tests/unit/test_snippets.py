"""Every command and snippet of the pages runs here, or stands in a table with the reason."""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.config import KVTransferConfig

import vllm_kvevict
from benchmarks.simulate.model import write_config
from tests.snippets import HEREDOC, PAGES, ROOT, Shown, blocks, commands, other_blocks
from vllm_kvevict.__main__ import COMMANDS
from vllm_kvevict.config.requests import KEYS
from vllm_kvevict.metrics.prometheus import PREFIX
from vllm_kvevict.serving.plugin import fold_flags
from vllm_kvevict.tools.measure.recorded import read

pytestmark = pytest.mark.usefixtures("registered")

NOT_RUN = {
    "vllm serve MODEL --kv-eviction ada-key-norm": "policies/test_own_policy.py installs it",
    "vllm serve MODEL *kv_producer*": "stock vLLM; e2e/test_two_servers.py runs it",
    "vllm serve --help=kv-eviction": "e2e/test_startup_errors.py reads what it prints",
    "python -m benchmarks.smollm2": "it has no flags and fetches a model",
    "python -": "what it reads is run by test_the_tutorials_question",
    ".venv-dist/bin/twine *": "it publishes",
    "git clone *": "the reader's own address",
    "cd *": "the shell's own",
    "export *": "the shell's own",
    "source *": "the shell's own",
    "docker build *": "no Docker here; deploy/test_images.py reads the file",
    "helm *": "no cluster here; deploy/test_helm.py reads the values as the chart does",
    "deploy/helm/drain.sh": "deploy/test_helm.py runs it",
    "kubectl *": "no cluster here",
    "serve deploy *": "Ray is asked by e2e/test_ray.py",
    "benchmarks/gpu/run.sh": "it needs a GPU; interpreted/test_benchmarks.py runs its scripts",
}
"""Commands that no parser of this test takes, and why."""

PROSE = {
    "flowchart TD": "a diagram",
    "Engine 000:": "metrics/test_logger.py compares such lines",
    "max - l *": "a formula",
    "sum_j exp(": "a formula",
    "[build-system]": "policies/test_own_policy.py installs it",
}
"""How blocks begin that neither run nor are data, and why."""

SHOWN = commands()
LEFT = [one for one in SHOWN if not any(fnmatch(one.text, known) for known in NOT_RUN)]


class Parsed(Exception):
    """A command has read its arguments."""


def parse(run: Any, *words: str) -> None:
    """Run a command up to where it has its arguments; what it does not know ends the test."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Parsed(original(self, *args, **kwargs))

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        mock.patch.object(sys, "argv", ["", *words]),
        mock.patch.dict(os.environ),
        pytest.raises(Parsed),
    ):
        run()


def python(words: list[str], **_: Any) -> None:
    if words[:1] != ["-m"]:
        assert (ROOT / words[0]).exists()
        return parse(lambda: runpy.run_path(str(ROOT / words[0]), run_name="__main__"), *words[1:])
    _, module, *arguments = words
    if module == "pytest":
        return selected(arguments)
    assert find_spec(module), module
    if arguments:
        parse(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), *arguments)


def selected(words: list[str]) -> None:
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    assert paths and all(path.exists() for path in paths)
    if "-k" in words:
        assert f"def test_{words[words.index('-k') + 1]}" in paths[0].read_text()


def ours(words: list[str], **_: Any) -> None:
    name, *arguments = words
    assert name in COMMANDS
    if arguments:
        python(["-m", "vllm_kvevict", name, *arguments])


def serve(words: list[str], parser: Any) -> None:
    _, model, *flags = words
    assert not model.startswith("-")
    # The tutorial asks a command of its own.
    args = parser.parse_args([model, *(flag.replace("$DTYPE", "auto") for flag in flags)])
    assert "kv_eviction" in (fold_flags(args).additional_config or {})


def docker(words: list[str], parser: Any) -> None:
    serve(["serve", *words[words.index("vllm-kvevict") + 1 :]], parser)


def make(words: list[str], **_: Any) -> None:
    target, *variables = words
    text = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", text, re.MULTILINE), target
    assert all(f"{one.partition('=')[0]} ?=" in text for one in variables)


def pip(words: list[str], **_: Any) -> None:
    """Files have today's name and version; packages are those of an extra, in its version."""
    built = [
        f"dist/vllm_kvevict-{vllm_kvevict.__version__}{kind}"
        for kind in ("-py3-none-any.whl", ".tar.gz")
    ]
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for word in words[1:]:
        if word.startswith("dist/"):
            assert any(fnmatch(one, word) for one in built), word
        elif f'"{word}"' not in extras:
            assert word in (".", "--no-build-isolation") or (
                word in (ROOT / "deploy" / "README.md").read_text()
            )


def curl(words: list[str], **_: Any) -> None:
    (url,) = (word for word in words if word.startswith("http"))
    assert url.rpartition(":8000")[2] in ("/v1/chat/completions", "/metrics")


def grep(words: list[str], **_: Any) -> None:
    """It finds lines of our metrics as the page of metrics has them."""
    named, listed = words[-1], (ROOT / "docs" / "metrics.md").read_text()
    for name in re.findall(r"\w+", named.removeprefix(PREFIX)):
        assert f"{name}_total`" in listed or name == "_total", name


PROGRAMS = {
    "vllm serve": serve,
    "vllm-kvevict": ours,
    "python": python,
    ".venv/bin/python": python,
    "docker run": docker,
    "make": make,
    "pip": pip,
    "curl": curl,
    "grep": grep,
}


@pytest.mark.parametrize("shown", LEFT, ids=str)
def test_a_command_is_understood(parser: Any, shown: Shown, capsys: Any) -> None:
    words = shlex.split(shown.text)
    name = next(name for name in PROGRAMS if words[: len(name.split())] == name.split())
    PROGRAMS[name](words[1:], parser=parser)
    for word in words:
        if re.match(r"(docs|deploy|tests|benchmarks|packaging)/", word):
            assert (ROOT / word).exists(), word


def test_there_are_commands():
    assert sum(one.text.startswith("vllm serve") for one in LEFT) > 10 and len(LEFT) > 80


@pytest.mark.parametrize("known", NOT_RUN)
def test_what_is_not_run_is_still_shown(known: str) -> None:
    shown = [one.text for one in SHOWN if fnmatch(one.text, known)]
    assert shown
    for word in shlex.split(" ".join(shown)):
        if re.match(r"(docs|deploy|tests|benchmarks)/", word):
            assert (ROOT / word).exists(), word


def test_prose_is_still_shown():
    texts = [one.text for one in other_blocks()]
    assert all(any(text.startswith(known) for text in texts) for known in PROSE)


@pytest.mark.parametrize("reason", [*NOT_RUN.values(), *PROSE.values()])
def test_a_reason_names_a_test_that_is_there(reason: str) -> None:
    for path in re.findall(r"[\w/]*test_\w+\.py", reason):
        assert any((ROOT / folder / path).exists() for folder in ("tests", "tests/unit")), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_requests_have_known_keys(page: Path) -> None:
    for key in re.findall(r'"(kv_eviction\w*)":', page.read_text()):
        assert key in KEYS, key


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_prose_names_flags_and_keys_that_exist(page: Path, parser: Any) -> None:
    """Also in prose: a flag or a key that was removed is named nowhere."""
    text = page.read_text()
    flags = {flag.rstrip("-") for flag in re.findall(r"--kv-eviction[a-z-]*", text)}
    assert flags <= {flag for action in parser._actions for flag in action.option_strings}
    assert set(re.findall(r"\bkv_eviction_[a-z_]+", text)) <= set(KEYS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_one_paragraph_advises_goes_together(page: Path, parser: Any) -> None:
    """Settings that a paragraph names between backticks start a server, or it says that they are
    alternatives."""
    for paragraph in re.split(r"\n(?=\n|[-*|]|\d+\. )", page.read_text()):
        named = re.findall(r"`(--kv-eviction-(?:allow none|max-budget)[^`]*)`", paragraph)
        flags = {one.split()[0]: one.split()[1:] or ["50%"] for one in named}
        if re.search(r"\binstead\b|cannot be combined", paragraph):
            continue
        words = [word for flag, values in flags.items() for word in (flag, *values)]
        args = parser.parse_args(["MODEL", "--kv-eviction", "snapkv", *words])
        fold_flags(args)


@pytest.mark.parametrize("shown", other_blocks(), ids=lambda one: str(one)[:60])
def test_a_block_is_data_or_python(shown: Shown, build: Any, tmp_path: Path, capsys: Any) -> None:
    if any(shown.text.startswith(known) for known in PROSE):
        return
    if shown.text.startswith("{"):
        given = json.loads(shown.text)
        if "kv_connector" in given:
            build({"policy": "snapkv"}, kv_transfer_config=KVTransferConfig(**given))
            return
        if "request" in given:
            path = tmp_path / "recorded.jsonl"
            path.write_text(shown.text)
            assert read(path)[0].text
            return
        asked = given["vllm_xargs"]
        assert asked and set(asked) <= set(KEYS)
    elif shown.text.startswith("request of "):
        plan_prints(shown.text, tmp_path, capsys)
    elif shown.text.endswith(","):
        from vllm_kvevict.config.names import Entry

        (entry,) = eval(f"{{{shown.text}}}", dict(Entry=Entry)).values()
        assert entry.adaptive is True
    else:
        run_python(shown.text, build)


def run_python(text: str, build: Any) -> None:
    """What it imports is there, and an engine would take its settings."""
    given: dict[str, Any] = {}
    with mock.patch("vllm.LLM", lambda model, **options: given.update(options)):
        exec(compile(text, "snippet", "exec"), dict(MODEL="model", __name__="snippet"))
    if "LLM(" in text:
        made = build(given["additional_config"]["kv_eviction"])
        assert made.additional_config["kv_eviction"]["budget"] == "25%"


def plan_prints(rows: str, folder: Path, capsys: Any) -> None:
    """The page's command for the page's model, with the flags that it names."""
    from vllm_kvevict.tools.plan.command import main

    write_config("llama-3.1-8b", folder)
    text = (ROOT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^    vllm-kvevict plan MODEL_CONFIG (.*)$", text, re.MULTILINE)
    (flags,) = re.findall(r"Llama-3.1-8B with `([^`]*)`", text)
    assert main([str(folder), *command.split(), *flags.split()]) == 0
    printed = capsys.readouterr().out.split("\n")
    assert [row for row in rows.split("\n") if row not in printed] == []


def test_the_tutorials_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about text that holds the answer, and vLLM's API takes it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    page = ROOT / "docs" / "tutorial.md"
    (source,) = (found[1] for block in blocks(page) for found in HEREDOC.findall(block))
    monkeypatch.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, "question", "exec"), {})
    request = ChatCompletionRequest(**json.loads(out.getvalue()))
    text = request.messages[0]["content"]
    assert "contiguous run of" in text.rpartition("\n\n")[0]
    assert "contiguous run of" in text.rpartition("\n\n")[2]
