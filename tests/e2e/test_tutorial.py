"""The commands of docs/tutorial.md as they stand there, with the model that it fetches.

Installing (section 1) is `make setup` of this checkout, and section 5 is e2e/test_calibrate.py.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import Server
from benchmarks.smollm2 import ModelUnavailable, real_model
from tests.snippets import ROOT, blocks
from vllm_kvevict.serving.cpu_dtype import fast_dtype

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

PAGE = ROOT / "docs" / "tutorial.md"
ADDRESS = "http://127.0.0.1:8000"
QUESTIONS = [
    dict(context="The ferry to Lund leaves at 7.", question="When does it leave?", answer="7"),
    dict(context="The door of room 4 is red.", question="Which colour is it?", answer="red"),
]


def block(begin: str) -> str:
    """The only block of the page that begins so."""
    (found,) = (one for one in blocks(PAGE) if one.startswith(begin))
    return found


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return real_model()
    except ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Section 2, on a free port."""
    words = shlex.split(block("vllm serve ").replace("\\\n", " ").replace("$DTYPE", fast_dtype()))
    assert words[:3] == ["vllm", "serve", "$MODEL"] and words[-2:] == ["--host", "127.0.0.1"]
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(model, words[3:-2], log) as running:
        yield running


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the pages that the commands read, in which they may write."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    return tmp_path


def run(script: str, folder: Path, **environment: str) -> str:
    """Run a script of the page with the commands of this environment, and return its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "PATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_type_is_the_fast_one(clone: Path) -> None:
    (line,) = (one for one in block("git clone").splitlines() if one.startswith("DTYPE="))
    assert run(f"{line}\necho $DTYPE", clone).split() == [fast_dtype()]


def test_the_log_has_the_three_lines(server: Server) -> None:
    """They begin as the page says; the shipped profile has probes."""
    text = " ".join(PAGE.read_text().split())
    shown = re.findall(r"`(KV eviction[^`]* is[^`]*) \.\.\.`", text)
    log = server.log.read_text()
    assert len(shown) == 3 and all(one in log for one in shown), shown


def test_asking(server: Server, clone: Path) -> None:
    """Section 3: an answer, and counters above 0."""
    printed = run(block("python - <<'END'").replace(ADDRESS, server.url), clone)
    body, end = json.JSONDecoder().raw_decode(printed)
    assert body["choices"][0]["message"]["content"].strip()
    counted = re.findall(r"^vllm_kvevict:(\w+)_total\{.*\} (\S+)$", printed[end:], re.MULTILINE)
    assert {name for name, value in counted if float(value) > 0} == {"evictions", "freed_blocks"}
    asked = json.loads((clone / "question.json").read_text())
    whole = asked | dict(vllm_xargs={"kv_eviction": "none"})
    before = server.evictions()["evictions"]
    assert server.post("/v1/chat/completions", whole)["choices"]
    assert server.evictions()["evictions"] == before


def test_looking_at_what_was_kept(model: Path, clone: Path) -> None:
    """Section 4: a picture, and heads that hold the text."""
    printed = run(block("vllm-kvevict inspect"), clone, MODEL=str(model))
    assert "head page" in printed and (clone / "kept.png").stat().st_size > 10_000


def test_measuring_questions(server: Server, clone: Path) -> None:
    """Section 6: a table with a row for the full cache and for each budget."""
    lines = [json.dumps(question) for question in QUESTIONS]
    (clone / "QUESTIONS.jsonl").write_text("\n".join(lines) + "\n")
    printed = run(block("vllm-kvevict measure").replace(ADDRESS, server.url), clone)
    assert "full cache" in printed and "25%" in printed
