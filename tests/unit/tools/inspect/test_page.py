"""The page: counts against loops, texts against the tokenizer, and what a browser makes of it."""

import base64
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tools.inspect.test_picture import made_up
from vllm_kvevict.calibrate.read_prompt import Prompt
from vllm_kvevict.tools.inspect.find import Sighting
from vllm_kvevict.tools.inspect.kept import Layer, Snapshot
from vllm_kvevict.tools.inspect.page import as_html, held_counts, page_data, token_texts
from vllm_kvevict.tools.inspect.view import View

TEMPLATE = (files("vllm_kvevict.tools.inspect") / "page.html").read_text()
HOSTILE = (
    "</script><script>document.title = 'owned'</script><b onmouseover=alert(1)>bold</b>\n"
    "<!-- <script> &lt;&amp; \\u003c __DATA__ ${N} `x` \u2028 \u202e\x00\r\t<img src=x onerror="
    "\"document.title='owned'\">\n\n👩‍👩‍👧 é 数字 '\"\\ ]]> -->"
)
BYTES = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))


def decoded(run: dict[str, Any], num_layers: int) -> np.ndarray:
    counts = np.frombuffer(base64.b64decode(run["counts"]), dtype=np.uint8)
    return counts.reshape(num_layers, -1)


@given(st.data(), st.integers(1, 40), st.integers(1, 40))
def test_counts_equal_loops(data, prompt_tokens, num_tokens) -> None:
    """A snapshot within the prompt, at its end, or after it."""
    layers = []
    for index in range(data.draw(st.integers(1, 3))):
        tail = data.draw(st.integers(0, num_tokens))
        positions = st.sets(st.integers(0, max(0, tail - 1))) if tail else st.just(set())
        heads = data.draw(st.lists(positions, min_size=1, max_size=5))
        kept = tuple(np.array(sorted(head), dtype=np.int64) for head in heads)
        layers.append(Layer(index, tail, kept, (1,) * len(heads)))
    view: Any = SimpleNamespace(
        snapshot=Snapshot(num_tokens, tuple(layers), 0, 0),
        run=SimpleNamespace(prompt=SimpleNamespace(ids=list(range(prompt_tokens)))),
    )
    assert held_counts(view).tolist() == [
        [
            sum(position >= layer.tail_start or position in head for head in layer.heads)
            for position in range(prompt_tokens)
        ]
        for layer in layers
    ]


def test_data_is_that_of_the_runs(tmp_path: Path) -> None:
    views = [
        made_up(tmp_path, heads=(2, 4), find=("magic46 ",), policy=policy, store=store)
        for policy in ("snapkv", "ada-snapkv")
        for store in (4, 8)
    ]
    data = page_data(views)
    assert data["layers"] == [0, 1, 2, 3] and data["heads"] == [2, 4, 2, 4]
    assert data["model"] == "model" and data["file"] == "prompt.txt"
    assert "".join(data["tokens"]) == views[0].run.prompt.text
    ((found, start, stop),) = data["find"]
    assert found in "".join(data["tokens"][start:stop])
    assert [(run["policy"], run["budget"]) for run in data["runs"]] == [
        ("snapkv", "160"), ("snapkv", "288"), ("ada-snapkv", "160"), ("ada-snapkv", "288")
    ]  # fmt: skip
    for run, view in zip(data["runs"], views, strict=True):
        assert np.array_equal(decoded(run, 4), view.snapshot.counts())


@given(st.text(max_size=60))
def test_of_the_bytes_of_a_character_the_last_has_it(text) -> None:
    ids = list(text.encode())
    texts = token_texts(BYTES, ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    if "\ufffd" not in text:
        assert [one for one in texts if one] == list(text)


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text(ids) -> None:
    texts = token_texts(BYTES, ids)
    assert len(texts) == len(ids) and "".join(texts) == BYTES.decode(ids)


def test_a_tokenizer_that_drops_the_first_space() -> None:
    words = [" a", "b", " c", "\n", " d"]
    spaced = SimpleNamespace(decode=lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert token_texts(spaced, range(5)) == ["a", *words[1:]]


@given(text=st.text(max_size=60))
def test_texts_of_a_real_tokenizer(tokenizer, text) -> None:
    ids = tokenizer(text + HOSTILE)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, attrs))


def hostile(folder: Path) -> View:
    """A run whose prompt, looked-for text, answer and names are all hostile, a byte a token."""
    view = made_up(folder, prompt=2000)
    ids = list((HOSTILE * 40).encode()[:2000])
    run = replace(view.run, prompt=Prompt(ids, "", None), tokenizer=BYTES, answer=HOSTILE)
    options = replace(view.options, model="org/" + HOSTILE.replace("/", ""))
    found = Sighting(HOSTILE, 3, 90, (), True)
    return replace(view, run=run, options=options, sightings=[found])


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    page = as_html([hostile(tmp_path)])
    assert Tags(page).found == Tags(TEMPLATE).found
    head, tail = TEMPLATE.split("__DATA__")
    assert page.startswith(head) and page.endswith(tail) and page.isascii() == TEMPLATE.isascii()
    data = json.loads(page[len(head) : -len(tail)])
    assert data["runs"][0]["answer"] == HOSTILE and data["find"][0][0] == HOSTILE
    assert "".join(data["tokens"]).startswith(HOSTILE)


def test_nothing_comes_from_a_network() -> None:
    assert "default-src 'none'" in TEMPLATE
    assert not re.search(r"//\w|src=|href=|url\(|@import|fetch\(|eval\(|innerHTML", TEMPLATE)


def test_the_page_is_small(tmp_path: Path) -> None:
    views = [made_up(tmp_path, layers=30, heads=(3,), prompt=1500)] * 6
    assert len(as_html(views).encode()) < 400_000


PROBE = """
<script>
const look = () => ({
  title: document.title,
  about: document.getElementById("about").textContent,
  budget: document.getElementById("budget-text").value,
  layer: document.getElementById("layer-text").value,
  markup: document.querySelectorAll("main b, main img, main script").length,
  panels: [...document.querySelectorAll(".panel")].map((panel) => ({
    text: panel.querySelector(".text").textContent,
    shades: [...panel.querySelectorAll("[data-at]")].map((x) => x.style.getPropertyValue("--k")),
    gone: [...panel.querySelectorAll(".gone")].map((x) => Number(x.dataset.at)),
    found: [...panel.querySelectorAll(".find")].map((x) => Number(x.dataset.at)),
    button: panel.querySelector("button")?.textContent,
    answer: panel.querySelector(".answer").textContent,
  })),
});
const seen = [look()];
document.getElementById("budget").value = 1;
document.getElementById("layer").value = 2;
document.getElementById("layer").dispatchEvent(new Event("input"));
const over = new MouseEvent("mouseover", { bubbles: true });
document.querySelector("[data-at='40']").dispatchEvent(over);
seen.push({...look(), token: document.getElementById("token").textContent});
const bytes = new TextEncoder().encode(JSON.stringify(seen));
document.body.id = "seen" + Array.from(bytes, (x) => x.toString(16).padStart(2, "0")).join("");
</script>
"""


def in_browser(page: str, folder: Path) -> list[dict[str, Any]]:
    """What the page shows at first, and with the second budget and the second layer."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        missing = f"none of {', '.join(names)} is installed; make chromium installs Debian's"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    path = folder / "page.html"
    path.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}",
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=120)
    (seen,) = re.findall(rb'<body id="seen([0-9a-f]+)"', done.stdout)
    found: list[dict[str, Any]] = json.loads(bytes.fromhex(seen.decode()))
    return found


def test_a_browser_shades_what_is_held(tmp_path: Path) -> None:
    views = [
        made_up(tmp_path, heads=(2, 4), prompt=600, store=store, policy=policy, find=("magic46 ",))
        for policy in ("snapkv", "ada-snapkv")
        for store in (4, 6)
    ]
    views = [
        replace(view, run=replace(view.run, answer=f"answer {number}"))
        for number, view in enumerate(views)
    ]
    first, second = in_browser(as_html(views), tmp_path)
    assert (first["budget"], first["layer"]) == ("160 tokens", "all 4, 12 KV heads")
    assert (second["budget"], second["layer"]) == ("224 tokens", "layer 1, 4 KV heads")
    for panel in (0, 1):
        shown = views[2 * panel], views[2 * panel + 1]
        layers = slice(None), slice(1, 2)
        for seen, view, rows, heads in zip((first, second), shown, layers, (12, 4), strict=True):
            counts = view.snapshot.counts()[rows].sum(0)
            one = seen["panels"][panel]
            assert one["text"] == view.run.prompt.text
            assert one["answer"] == view.run.answer
            assert np.allclose(
                [float(x) for x in one["shades"]], np.sqrt(counts / heads), atol=1e-3
            )
            assert one["gone"] == np.flatnonzero(counts == 0).tolist()
            start, stop = view.sightings[0].start, view.sightings[0].stop
            assert one["found"] == list(range(start, stop))
            share = counts[start:stop].mean() / heads
            digits = 1 if 0 < share < 0.1 else 0
            assert one["button"] == f"“magic46 ”: {share * 100:.{digits}f}% held"
    counts = [view.snapshot.counts()[1, 40] for view in (views[1], views[3])]
    assert [f": {count} of 4 KV heads" in second["token"] for count in counts] == [True, True]
    assert second["token"].startswith("Token 40 ")


def test_a_browser_runs_none_of_the_text(tmp_path: Path) -> None:
    view = hostile(tmp_path)
    for seen in in_browser(as_html([view]), tmp_path):
        assert seen["title"] == "What the KV cache kept" and seen["markup"] == 0
        (panel,) = seen["panels"]
        assert panel["text"] == BYTES.decode(view.run.prompt.ids)
        assert panel["answer"] == HOSTILE and HOSTILE in panel["button"]
        assert "<script>" in seen["about"]
