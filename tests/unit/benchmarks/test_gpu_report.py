"""The report of a GPU run joins the files of several calls."""

import json
from typing import Any

from benchmarks.gpu import report

CARD = "NVIDIA H100 80GB HBM3, 132 SMs, 79 GiB"


def content(*rows: dict[str, Any]) -> str:
    source = dict(command="python", commit="c", date="d")
    return json.dumps(dict(device=CARD, settings={}, rows=list(rows), provenance=source))


def load(setting: str, output: float) -> dict[str, Any]:
    return dict(
        case="memory-bound", input=6000, output=500, setting=setting, output_tokens_per_s=output,
        prompts=96, completed=96, failed=0, evictions=90 * (setting != "stock"),
        cuda_kernels=setting != "stock",
    )  # fmt: skip


def test_a_report_joins_the_files_of_earlier_calls(tmp_path):
    now, earlier = tmp_path / "now", tmp_path / "earlier"
    now.mkdir()
    earlier.mkdir()
    tuned = dict(requests=16, budget=1024, programs=2, stages=3, before=96, tile=64)
    layer = dict(median_ms=0.034, low_ms=0.034, high_ms=0.034)
    tuned |= {"layer": layer, "share of copy bandwidth": 0.71}
    (earlier / "tune.json").write_text(content(tuned))
    (earlier / "real_weights.json").write_text(content(dict(setting="full", equal=768)))
    (earlier / "serving.json").write_text(content(load("stock", 100.0)))
    (now / "serving.json").write_text(content(load("stock", 100.0), load("8x", 360.0)))
    report.main(now, earlier)
    text = (now / "gpu.md").read_text()
    assert "| output at 8x over stock, 6000/500 | >= 3.5 | 3.6 | reached |" in text
    assert "| slices, 16 requests of 1,024, us of a layer | 34 | 34 | 1.00 | as predicted |" in text
    assert "## real_weights" in text and "| full | 768 |" in text
    assert list(json.loads((now / "gpu.json").read_text())) == ["serving", "tune", "real_weights"]
    assert not (earlier / "gpu.json").exists()
