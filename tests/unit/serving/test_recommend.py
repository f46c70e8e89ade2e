"""``--kv-eviction auto``: what it stands for on which model and server."""

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.provenance import PROFILE_LINE
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.probe_weights import ProbeWeights
from vllm_kvevict.serving import calibrate, recommend
from vllm_kvevict.serving import profile as module
from vllm_kvevict.serving.identity import identity
from vllm_kvevict.serving.loss import share_for
from vllm_kvevict.serving.profile import SHIPPED, read
from vllm_kvevict.serving.recommend import LOSS, recommended

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(autouse=True)
def nothing_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of shipped profiles, empty; and no cache."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(module, "SHIPPED", folder)
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    return folder


def write(build: Any, path: Path, probe: bool = True, **changes: Any) -> Path:
    """A profile of the model that is built, of two layers with one KV head."""
    config = build()
    model = identity(config)
    value = dict(model=model.model_dump(), policy="probe", budget="12.5%", layers=[0.4, 1.6])
    if probe:
        size = config.model_config.get_head_size()
        heads = model.layers, model.kv_heads
        keys, joined = (np.zeros((*heads, size + more), np.float32) for more in (2, 3))
        value["probe"] = ProbeWeights(keys, joined, None, (True,) * model.layers).to_json()
    path.write_text(json.dumps(value | changes))
    return path


def settled(config: Any) -> EvictionConfig:
    found = EvictionConfig.parse(config.additional_config["kv_eviction"])
    assert found is not None
    return found


def said(records: list[logging.LogRecord]) -> str:
    (line,) = [r.getMessage() for r in records if r.msg.startswith("KV eviction auto is")]
    return line


def test_without_a_profile(build: Any, records: list[logging.LogRecord]) -> None:
    found = settled(build("auto"))
    assert (found.policy, found.budget, found.profile) == ("ada-defensive", "25%", None)
    line = said(records)
    assert "KV eviction auto is --kv-eviction ada-defensive --kv-eviction-budget 25% here" in line
    (warning,) = [r.getMessage() for r in records if "auto uses ada-defensive" in r.getMessage()]
    assert "vllm-kvevict calibrate" in warning, "how to have more"


def test_with_a_profile(build: Any, nothing_ships: Path, records: list[logging.LogRecord]) -> None:
    file = write(build, nothing_ships / "a.json")
    found = settled(build("auto"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    log = "".join(record.getMessage() for record in records)
    assert PROFILE_LINE.findall(log) == [(str(file), digest)], "result files read this line"
    assert (found.policy, found.budget) == ("probe", "12.5%")
    assert found.profile.layers == (0.4, 1.6) and found.profile.probe is not None
    line = said(records)
    assert "--kv-eviction probe --kv-eviction-budget 12.5% --kv-eviction-profile auto here." in line


MEASURED = {
    name: {
        share: {"kl": [upper / 2, 0.0, upper], "right": None}
        for share, upper in zip(("50.00%", "25.00%", "12.50%", "6.25%"), bounds, strict=True)
    }
    | {"answers": 50}
    for name, bounds in {
        "joined": (0.01, 0.03, 0.06, 0.3),
        "keys": (0.02, 0.025, 0.03, 0.045),
    }.items()
}
"""Losses by budget, with their upper bounds. Evictions at the end of a prompt are joined."""


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        (dict(policy="auto"), "25%"),
        (dict(policy="auto", budget="loss=0.31"), "6.25%"),
        (dict(policy="auto", budget="loss=0.25"), "12.5%"),
        (dict(policy="probe", budget="loss=0.061", profile="auto"), "12.5%"),
        (dict(policy="probe", budget="loss=0.06", profile="auto"), "25%"),
        (dict(policy="ada-probe", budget="loss=0.015", profile="auto"), "50%"),
        (dict(policy="ada-probe", budget="loss=0.01", profile="auto"), "100%"),
        (dict(policy="auto", options=dict(probe_window="none")), "6.25%"),
        (dict(policy="auto", budget="12.5%"), "12.5%"),
        (dict(policy="auto", max_budget="20%"), "20%"),
        (dict(policy="auto", prefill_interval=512), 1024),
    ],
)
def test_a_budget_from_what_answers_lose(
    build: Any, nothing_ships: Path, records: list[logging.LogRecord], asked: Any, budget: Any
) -> None:
    write(build, nothing_ships / "a.json", quality=MEASURED)
    assert settled(build(asked)).budget == budget
    mine = [r for r in records if r.name == "vllm.kv_eviction.loss"]
    lines = [r.getMessage() for r in mine]
    # A server that evicts nothing says so.
    assert [r.levelno >= logging.WARNING for r in mine] == [budget == "100%"] * len(mine)
    chosen = "prefill_interval" not in asked and asked.get("budget") != "12.5%"
    assert len(lines) == chosen + (budget == "50%"), "keys alone lose more at a half"
    if chosen and "options" not in asked:
        assert "12.5% 0.060" in lines[0] and "25% 0.030" in lines[0]


@pytest.mark.parametrize(
    ("asked", "tokens", "budget"),
    [
        (dict(policy="auto", store_dtype="int4"), "25%", "6.67%"),
        (dict(policy="auto", store_dtype="int8", budget="loss=0.25"), "12.5%", "6.67%"),
        (dict(policy="auto", store_dtype="int4", budget="loss=0.31"), "6.25%", "1.67%"),
        (dict(policy="auto", store_dtype="int4", budget="loss=0.001"), "", "100%"),
        (dict(policy="auto", store_dtype="int4", budget="12.5%"), "", "12.5%"),
    ],
)
def test_a_loss_is_one_of_tokens_and_a_budget_one_of_memory(
    build: Any,
    nothing_ships: Path,
    records: list[logging.LogRecord],
    asked: Any,
    tokens: str,
    budget: str,
) -> None:
    """A page of 16 tokens holds 60 in four bits, and 30 in eight."""
    write(build, nothing_ships / "a.json", quality=MEASURED)
    assert settled(build(asked, dtype="float32")).budget == budget
    lines = [r.getMessage() for r in records if r.name == "vllm.kv_eviction.loss"]
    told = [line for line in lines if "does not say what these bits lose" in line]
    assert len(told) == bool(tokens)
    if tokens:
        assert f"hold {tokens} of the tokens in {budget} of the memory" in told[0]


def test_contexts_that_requests_name_may_lose_more(
    build: Any, nothing_ships: Path, records: list[logging.LogRecord]
) -> None:
    """The choice is that of the end of prompts; a line says what the end of a context loses."""
    more = {"25.00%": {"kl": [0.08, 0.05, 0.115], "right": None}}
    quality = MEASURED | {"keys": MEASURED["keys"] | more}
    write(build, nothing_ships / "a.json", quality=quality)
    assert settled(build("auto")).budget == "25%"
    lines = [r.getMessage() for r in records if r.name == "vllm.kv_eviction.loss"]
    assert len(lines) == 2
    assert "(kv_eviction_at), answers may lose 0.115 nats per token at 25%" in lines[1]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (dict(policy="auto", budget="loss=0.05"), "does not say what answers lose"),
        (dict(policy="probe", budget="loss=0.05", profile="auto"), "does not say what answers"),
        (dict(policy="snapkv", budget="loss=0.05"), "loss=0.05 needs --kv-eviction probe"),
        (dict(policy="probe", budget="loss=0"), r"what answers may lose .* \(loss=0.05\), not"),
        (dict(policy="probe", budget="loss=x"), r"what answers may lose .* \(loss=0.05\), not"),
        (dict(policy="probe", budget="loss=inf"), r"what answers may lose .* \(loss=0.05\), not"),
    ],
)
def test_a_loss_that_nothing_says(build: Any, nothing_ships: Path, asked: Any, says: str) -> None:
    write(build, nothing_ships / "a.json", quality={"joined": {"12.50%": 0.03}})
    with pytest.raises(ValueError, match=says) as caught:
        build(asked)
    assert "\n" not in str(caught.value)


def test_what_was_set_stays(build: Any, tmp_path: Path) -> None:
    file = write(build, tmp_path / "own.json")
    asked = dict(policy="auto", profile=str(file), budget=256, interval=0, allow="none")
    found = settled(build(asked))
    assert (found.policy, found.budget, found.interval) == ("probe", 256, 0)
    assert found.choices == ("probe", "none")
    found = settled(build(dict(policy="auto", budget="50%")))
    assert (found.policy, found.budget) == ("ada-defensive", "50%")


def test_a_profile_without_probes(build: Any, tmp_path: Path) -> None:
    file = write(build, tmp_path / "own.json", probe=False, budget="20%")
    found = settled(build(dict(policy="auto", profile=str(file))))
    assert (found.policy, found.budget) == ("ada-defensive", "20%")
    assert found.profile is not None


def test_evictions_inside_prompts_keep_a_budget_in_tokens(build: Any, nothing_ships: Path) -> None:
    write(build, nothing_ships / "a.json")
    found = settled(build(dict(policy="auto", prefill_interval=512)))
    assert (found.policy, found.budget) == ("probe", 1024)


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        (dict(max_budget="20%"), "20%"),
        (dict(max_budget=512), "25%"),
        (dict(window=1024), "25%"),
        (dict(max_budget=512, prefill_interval=512), 512),
    ],
)
def test_a_budget_that_nobody_set_refuses_nothing(build: Any, asked: Any, budget: Any) -> None:
    found = settled(build(dict(policy="auto") | asked))
    assert (found.policy, found.budget) == ("ada-defensive", budget)


def test_a_budget_that_was_set_is_checked(build: Any) -> None:
    for asked in (dict(max_budget="20%", budget="25%"), dict(window=1024, budget=1024)):
        with pytest.raises(ValueError, match="--kv-eviction-budget"):
            build(dict(policy="auto") | asked)


def test_what_the_server_cannot_run(
    build: Any, nothing_ships: Path, monkeypatch: pytest.MonkeyPatch,
    records: list[logging.LogRecord],
) -> None:  # fmt: skip
    """Layers with budgets of their own are refused: then heads of like layers."""

    def refuse(_: Any, config: EvictionConfig) -> None:
        if config.has_groups:
            raise ValueError("KV eviction does not support budgets by layer here.")

    write(build, nothing_ships / "a.json")
    monkeypatch.setattr(recommend, "check", refuse)
    found = settled(build("auto"))
    assert (found.policy, found.profile) == ("ada-defensive", None)
    assert "does not support budgets by layer here)" in said(records)


def test_positions_of_images_that_the_runner_does_not_know(
    build: Any, nothing_ships: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(build, nothing_ships / "a.json")
    config = build()
    monkeypatch.setattr(type(config.model_config), "uses_mrope", True)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    found = recommended(config, EvictionConfig(policy="auto"))
    assert (found.policy, found.profile) == ("ada-defensive", None)
    assert not calibrate.is_usable(config, EvictionConfig(policy="auto", profile="auto"))


BUDGET_WARNING = "the budget is %s instead of %s"


@pytest.mark.parametrize(
    ("asked", "quality", "says"),
    [
        (dict(), {}, "12.5% instead of 25%, because the profile was measured at 12.5%"),
        (
            dict(options=dict(probe_window="none")),
            MEASURED,
            "6.25% instead of 25%, because the profile bounds the loss of answers by 0.05 nats",
        ),
        (dict(max_budget="20%"), MEASURED, "20% instead of 25%, because --kv-eviction-max-budget"),
        (dict(), MEASURED, None),
        (dict(budget="6.25%"), MEASURED, None),
        (dict(budget=64), {}, None),
        (dict(prefill_interval=512), MEASURED, None),
    ],
)
def test_a_budget_that_nobody_set_is_named_with_the_usual_one(
    build: Any, nothing_ships: Path, records: list[logging.LogRecord], asked: Any, quality: Any,
    says: str | None,
) -> None:  # fmt: skip
    write(build, nothing_ships / "a.json", quality=quality)
    settled(build(dict(policy="auto") | asked))
    lines = [r.getMessage() for r in records if BUDGET_WARNING in r.msg]
    assert len(lines) == (says is not None)
    assert says is None or says in lines[0]


def test_a_named_profile_that_does_not_fit_is_no_guess(build: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        build(dict(policy="auto", profile=str(tmp_path / "none.json")))


def test_options_are_checked_against_what_was_chosen(build: Any) -> None:
    assert settled(build(dict(policy="auto", options={"floor": 0.5}))).options.floor == 0.5
    with pytest.raises(ValueError, match="'sinks' is no option of ada-defensive"):
        build(dict(policy="auto", options={"sinks": 4}))


def test_what_auto_keeps_with_the_shipped_profile():
    """docs/layers.md says so."""
    profile = read(SHIPPED / "SmolLM2-135M-Instruct.json")
    config = EvictionConfig.parse(dict(policy="probe"))
    text = (Path(__file__).parents[3] / "docs" / "layers.md").read_text()
    (said,) = re.findall(r"With the profile that ships it keeps ([\d.]+%)", text)
    assert share_for(config, profile, LOSS) == said
