"""Pictures and reports of made-up runs: short and long prompts, few and many layers."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest

from vllm_kvevict.calibrate.read_prompt import Prompt
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.tools.inspect.engine import Run
from vllm_kvevict.tools.inspect.kept import Layer, Snapshot
from vllm_kvevict.tools.inspect.options import Options
from vllm_kvevict.tools.inspect.report import as_json, as_text
from vllm_kvevict.tools.inspect.view import View, shorten

WORDS = ("red", "the", "magic", "$x$", "number", "is", "\n", "4711", "blue", "of", "a")


def made_up(
    folder: Path,
    *,
    layers: int = 4,
    heads: tuple[int, ...] = (4,),
    prompt: int = 2000,
    generated: int = 0,
    store: int = 8,
    find: tuple[str, ...] = (),
    policy: str = "ada-snapkv",
) -> View:
    """A run whose heads keep random pages, the first position, and one hot spot."""
    rng = np.random.default_rng(0)
    n, bs = prompt + generated, 32
    tail_start = (n - 32) // bs * bs
    hot = np.r_[0:1, int(tail_start * 0.4) : int(tail_start * 0.4) + 12]
    rows = []
    for index in range(layers):
        num_heads = heads[index % len(heads)]
        pages = 1 + rng.multinomial((store - 1) * num_heads, rng.dirichlet(np.ones(num_heads)))
        kept = []
        for count in pages:
            others = np.setdiff1d(np.arange(tail_start), hot)
            picked = rng.choice(others, count * bs - len(hot), replace=False)
            kept.append(np.sort(np.r_[hot, picked]))
        rows.append(Layer(index, tail_start, tuple(kept), tuple(pages.tolist())))
    snapshot = Snapshot(n, tuple(rows), -(-n // bs), store + -(-(n - tail_start) // bs))
    pieces = [f"{WORDS[i % len(WORDS)]}{i} " for i in range(prompt)]
    ends = np.cumsum([len(piece) for piece in pieces])
    offsets = [(int(end) - len(piece), int(end)) for end, piece in zip(ends, pieces, strict=True)]

    def decode(ids: list[int]) -> str:
        return "".join(f"{WORDS[i % len(WORDS)]}{i} " for i in ids)

    run = Run(
        prompt=Prompt(list(range(prompt)), "".join(pieces), offsets),
        config=EvictionConfig(policy=policy, budget=store * bs + 32),
        block_size=bs,
        answer="The \x14 number is $4711$\nand 数字.",
        answer_ids=list(range(generated)),
        evictions=2,
        snapshot=snapshot,
        tokenizer=SimpleNamespace(decode=decode),
    )
    options = Options(
        "org/model", folder / "prompt.txt", folder / "kept.png", None, find, None, None, False,
        "prefill", 8, 8,
    )  # fmt: skip
    return View.of(options, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        dict(),
        dict(layers=1, heads=(1,), prompt=130, store=1),
        dict(layers=32, heads=(8,), prompt=20_000, store=31, find=("magic46 ",)),
        dict(layers=6, heads=(2, 4), generated=300, find=("magic46 ", "a1990 ")),
        dict(policy="streaming-llm", prompt=600),
    ],
    ids=["plain", "smallest", "long", "uneven-heads", "sinks"],
)
def test_a_png_of_plausible_size(tmp_path: Path, shape: dict[str, Any]) -> None:
    from PIL import Image

    from vllm_kvevict.tools.inspect.picture import draw

    view = made_up(tmp_path, **shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(view, tmp_path / "kept.png")
    assert matplotlib.get_backend().lower() == "agg"
    with Image.open(tmp_path / "kept.png") as image:
        assert image.format == "PNG"
        assert 1400 <= image.width <= 2000
        assert 600 <= image.height <= 2600
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None and len(colours) > 100


def test_spans_are_the_hot_spots(tmp_path: Path) -> None:
    view = made_up(tmp_path)
    hot = int(view.snapshot.tail_start * 0.4)
    assert [(span.start, span.stop, span.share) for span in view.spans[:2]] == [
        (0, 1, 1.0),
        (hot, hot + 12, 1.0),
    ]


def test_report_and_json_agree(tmp_path: Path) -> None:
    view = made_up(tmp_path, find=("magic46 ",))
    data, report = as_json(view), as_text(view)
    (found,) = data["find"]
    start, stop = found["positions"]
    held = [
        [
            sum(a <= p < b for p in range(start, stop) for a, b in head["kept"])
            for head in layer["heads"]
        ]
        for layer in data["layers"]
    ]
    assert found["tokens_held"] == held
    whole = sum(count == stop - start for layer in held for count in layer)
    assert f"whole in {whole} of 16 heads" in report
    for span in data["spans"]:
        start, stop = span["positions"]
        assert f"{start:>7}-{stop - 1:<7}  {span['share_of_heads']:>5.0%}" in report


def test_text_fits_on_one_line() -> None:
    assert shorten("a\nb\tc\x14", 9) == "a⏎b c·"
    assert shorten("the first words and the last", 15) == "the firs … last"
