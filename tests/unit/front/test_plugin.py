"""The flags, through vLLM's own parser."""

import argparse
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_kvevict.settings.config import EvictionConfig

pytestmark = pytest.mark.usefixtures("registered")

DEFAULTS = {
    "policy": "ada-snapkv",
    "budget": 1024,
    "min_budget": 0,
    "window": 32,
    "interval": 128,
    "prefill_interval": 0,
    "when": "always",
    "low_mark": 0.05,
    "high_mark": 0.1,
    "floor": 0.2,
    "pool_kernel": 7,
    "pool": "max",
    "sinks": 4,
    "recent_share": 0.5,
    "random_share": 0.67,
    "seed": 0,
    "radius": 0.0,
    "cluster_samples": 4,
    "value_share": 0.25,
    "probe_window": "auto",
    "probe_recent": 8,
    "groups": None,
    "profile": None,
    "beta": 20.0,
    "allow": [],
    "max_budget": None,
    "shared_blocks": "keep",
    "attention": "auto",
}


def settings(parser: Any, *flags: str) -> Any:
    """The eviction settings that ``vllm serve m FLAGS`` arrives at, None for off."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parser.parse_args(["m", *flags])
    args.model = "/"
    return AsyncEngineArgs.from_cli_args(args).additional_config.get("kv_eviction")


def complaint(parser: Any, *flags: str) -> str:
    """What those flags are refused with: an exit status that is text, so not 0."""
    with pytest.raises(SystemExit) as caught:
        settings(parser, *flags)
    message = caught.value.code
    assert isinstance(message, str) and message.startswith("error: KV eviction: ")
    assert "\n" not in message
    return message


def test_import_is_light() -> None:
    code = (
        "import sys, vllm_kvevict.front.plugin, vllm_kvevict.settings.config; "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_register_wraps_once() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    from vllm_kvevict.front.plugin import register

    names = ("add_cli_args", "from_cli_args", "create_engine_config")
    before = [EngineArgs.__dict__[name] for name in names]
    register()
    assert [EngineArgs.__dict__[name] for name in names] == before
    for name in names:
        function = getattr(EngineArgs, name)
        assert not hasattr(function.__wrapped__, "__wrapped__")
    assert AsyncEngineArgs.from_cli_args.__func__ is EngineArgs.from_cli_args.__func__


def test_register_never_raises(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    from vllm.engine import arg_utils

    from vllm_kvevict.front.plugin import register

    monkeypatch.setattr(arg_utils, "EngineArgs", type("EngineArgs", (), {}))
    register()
    assert [record.levelname for record in records] == ["WARNING"]
    assert "vllm-kvevict does not fit this vLLM" in records[0].getMessage()


def test_taken_flag_does_not_break_the_parser(records: list[logging.LogRecord]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    parser.add_argument("--kv-eviction-window")
    EngineArgs.add_cli_args(parser)
    assert [record.levelname for record in records] == ["WARNING"]
    assert "--kv-eviction-window" in records[0].getMessage()


def test_no_flag_changes_nothing(parser: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parser.parse_args(["m", "--model=/", "--additional-config", '{"other": 1}'])
    assert not [name for name in vars(args) if name.startswith("kv_eviction")]
    assert AsyncEngineArgs.from_cli_args(args).additional_config is args.additional_config
    assert args.additional_config == {"other": 1}


def test_policy_alone_means_the_defaults(parser: Any) -> None:
    assert settings(parser, "--kv-eviction", "ada-snapkv") == DEFAULTS


def test_every_flag_reaches_its_field(parser: Any) -> None:
    flags = {
        "--kv-eviction": "snapkv",
        "--kv-eviction-budget": "600",
        "--kv-eviction-min-budget": "96",
        "--kv-eviction-window": "16",
        "--kv-eviction-interval": "0",
        "--kv-eviction-prefill-interval": "500",
        "--kv-eviction-when": "always",
        "--kv-eviction-low-mark": "0.02",
        "--kv-eviction-high-mark": "0.2",
        "--kv-eviction-floor": "0.5",
        "--kv-eviction-pool-kernel": "5",
        "--kv-eviction-pool": "avg",
        "--kv-eviction-sinks": "2",
        "--kv-eviction-recent-share": "0.25",
        "--kv-eviction-random-share": "0.5",
        "--kv-eviction-seed": "7",
        "--kv-eviction-radius": "1.5",
        "--kv-eviction-cluster-samples": "2",
        "--kv-eviction-value-share": "0.5",
        "--kv-eviction-probe-window": "none",
        "--kv-eviction-probe-recent": "4",
        "--kv-eviction-groups": "2",
        "--kv-eviction-profile": "auto",
        "--kv-eviction-beta": "8",
        "--kv-eviction-allow": "ada-snapkv, streaming-llm",
        "--kv-eviction-max-budget": "50%",
        "--kv-eviction-shared-blocks": "evict",
        "--kv-eviction-attention": "triton",
    }
    expected = {
        "policy": "snapkv",
        "budget": 600,
        "min_budget": 96,
        "window": 16,
        "interval": 0,
        "prefill_interval": 500,
        "when": "always",
        "low_mark": 0.02,
        "high_mark": 0.2,
        "floor": 0.5,
        "pool_kernel": 5,
        "pool": "avg",
        "sinks": 2,
        "recent_share": 0.25,
        "random_share": 0.5,
        "seed": 7,
        "radius": 1.5,
        "cluster_samples": 2,
        "value_share": 0.5,
        "probe_window": "none",
        "probe_recent": 4,
        "groups": 2,
        "profile": "auto",
        "beta": 8.0,
        "allow": ["ada-snapkv", "streaming-llm"],
        "max_budget": "50%",
        "shared_blocks": "evict",
        "attention": "triton",
    }
    assert set(expected) == set(EvictionConfig.model_fields)
    assert settings(parser, *[part for pair in flags.items() for part in pair]) == expected
    assert settings(parser, *[f"{flag}={value}" for flag, value in flags.items()]) == expected
    underscored = [f"--{flag[2:].replace('-', '_')}" for flag in flags]
    assert settings(
        parser, *[part for pair in zip(underscored, flags.values(), strict=True) for part in pair]
    ) == expected  # fmt: skip


def test_flags_override_additional_config(parser: Any) -> None:
    given = [
        "--additional-config",
        json.dumps({"kv_eviction": {"policy": "snapkv", "budget": 512, "sinks": 1}, "other": 1}),
    ]
    merged = settings(parser, *given, "--kv-eviction-budget", "2048")
    assert merged == DEFAULTS | {"policy": "snapkv", "budget": 2048, "sinks": 1}
    merged = settings(parser, *given, "--kv-eviction", "streaming-llm")
    assert merged == DEFAULTS | {"policy": "streaming-llm", "budget": 512, "sinks": 1}


@pytest.mark.parametrize(
    "flags",
    [
        ["--additional-config", '{"kv_eviction": "ada-snapkv"}', "--kv-eviction-budget", "512"],
        ["--additional-config.kv_eviction", "ada-snapkv", "--kv-eviction-budget", "512"],
        ["--additional-config.kv_eviction.policy", "ada-snapkv",
         "--additional-config.kv_eviction.budget", "512"],
        ["--additional-config", '{"kv_eviction": {"policy": "ada-snapkv", "budget": "512"}}'],
    ],
)  # fmt: skip
def test_additional_config_spellings(parser: Any, flags: list[str]) -> None:
    assert settings(parser, *flags) == DEFAULTS | {"budget": 512}


def test_other_additional_config_stays(parser: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parser.parse_args(
        ["m", "--model=/", "--additional-config", '{"other": 1}', "--kv-eviction", "snapkv"]
    )
    config = AsyncEngineArgs.from_cli_args(args).additional_config
    assert config == {"other": 1, "kv_eviction": DEFAULTS | {"policy": "snapkv"}}
    # Each API server may fold the same namespace again.
    assert args.additional_config == config
    assert AsyncEngineArgs.from_cli_args(args).additional_config == config


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-eviction", "none"],
        ["--kv-eviction", "off", "--kv-eviction-budget", "512"],
        ["--additional-config", '{"kv_eviction": "snapkv"}', "--kv-eviction", "none"],
        ["--additional-config", '{"kv_eviction": null}'],
    ],
)
def test_off(parser: Any, flags: list[str]) -> None:
    assert settings(parser, *flags) is None


def test_yaml_config(parser: Any, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    path = tmp_path / "serve.yaml"
    path.write_text("kv-eviction: snapkv\nkv-eviction-budget: 25%\nkv_eviction_sinks: 2\n")
    args = parser.parse_args(["--model=/", "--config", str(path), "--kv-eviction-sinks", "3"])
    folded = AsyncEngineArgs.from_cli_args(args).additional_config["kv_eviction"]
    assert folded == DEFAULTS | {"policy": "snapkv", "budget": "25%", "sinks": 3}


def test_bench_throughput() -> None:
    from vllm.benchmarks.throughput import add_cli_args
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(
        ["--model=/", "--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "512"]
    )
    # It hands LLM() the fields, one by one.
    fields = dataclasses.asdict(EngineArgs.from_cli_args(args))
    assert fields["additional_config"] == {"kv_eviction": DEFAULTS | {"budget": 512}}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-eviction", "nope"], "choose from ada-snapkv, snapkv, ada-defensive, defensive"),
        (["--kv-eviction", "snapkv", "--kv-eviction-window", "x"],
         "--kv-eviction-window: must be a valid integer, not 'x'"),
        (["--kv-eviction", "snapkv", "--kv-eviction-floor", "low"],
         "--kv-eviction-floor: must be a valid number, not 'low'"),
        (["--kv-eviction", "snapkv", "--kv-eviction-budget", "32"], "leaves no room beside"),
        (["--kv-eviction-budget", "512"],
         "--kv-eviction-budget needs a policy beside it; add --kv-eviction and one of ada-snapkv"),
        (["--kv-eviction-pool-kernel", "5", "--kv-eviction-sinks", "5"],
         "--kv-eviction-pool-kernel needs a policy beside it"),
        (["--additional-config", '{"kv_eviction": {"budget": 512}}'], "--kv-eviction is missing"),
        (["--additional-config", '{"kv_eviction": {"policy": "snapkv", "colour": 1}}'],
         "unknown key 'colour'"),
        (["--additional-config", '{"kv_eviction": 3}', "--kv-eviction-budget", "512"],
         "must be a policy name"),
    ],
)  # fmt: skip
def test_wrong_flags_exit_with_one_sentence(parser: Any, flags: list[str], says: str) -> None:
    assert says in complaint(parser, *flags)


def test_the_older_name_of_the_profile(parser: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = settings(parser, "--kv-eviction", "snapkv", "--kv-eviction-layers", "auto")
    assert found["profile"] == "auto" and "layers" not in found
    assert "--kv-eviction-layers is now called --kv-eviction-profile." in caplog.text
    assert EvictionConfig.parse({"policy": "snapkv", "layers": "x.json"}).profile == "x.json"
    with pytest.raises(ValueError, match="is an older name of --kv-eviction-profile"):
        EvictionConfig.parse({"policy": "snapkv", "layers": "x.json", "profile": "y.json"})


def test_help_shows_the_group(
    parser: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_kvevict.settings.names import POLICIES

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--help=kv-eviction"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in EvictionConfig.model_fields.items():
        flag = "--kv-eviction" if name == "policy" else f"--kv-eviction-{name.replace('_', '-')}"
        assert f"{flag} {name.upper()}" in text
        assert (field.description or "missing") in text
        default = "off" if name == "policy" else field.default
        assert f"(default: {'not set' if default in ((), None) else default})" in text
    for name, (_, summary) in POLICIES.items():
        assert f"- {name}: {summary}" in text
    assert "--model" not in text and "%%" not in text


def test_namespace_of_another_parser() -> None:
    """Programs fill a namespace by themselves; it may lack our flags and additional_config."""
    from vllm_kvevict.front.plugin import fold_flags

    args = argparse.Namespace(model="m")
    assert fold_flags(args) is args
    flags = argparse.Namespace(model="m", kv_eviction="snapkv")
    folded = fold_flags(flags)
    assert flags == argparse.Namespace(model="m", kv_eviction="snapkv")
    assert folded.additional_config["kv_eviction"]["policy"] == "snapkv"


def test_further_api_servers_get_the_settings_without_the_plugin(parser: Any) -> None:
    """vLLM hands them the parsed arguments, and they load plugins only after ``from_cli_args``."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    unwrapped = AsyncEngineArgs.from_cli_args.__func__.__wrapped__
    args = parser.parse_args(["m", "--kv-eviction", "snapkv", "--kv-eviction-allow", "none"])
    args.model = "/"
    ours = AsyncEngineArgs.from_cli_args(args).additional_config
    assert unwrapped(AsyncEngineArgs, args).additional_config == ours
    assert ours["kv_eviction"]["allow"] == ["none"]
