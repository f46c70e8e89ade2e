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

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.policy_options import PolicyOptions

pytestmark = pytest.mark.usefixtures("registered")

ADA = {"policy": "ada-snapkv"}


def settings(parser: Any, *flags: str) -> Any:
    """The eviction settings that ``vllm serve m FLAGS`` arrives at."""
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
        "import sys, vllm_kvevict.serving.plugin, vllm_kvevict.config.config; "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_register_wraps_once() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    from vllm_kvevict.serving.plugin import register

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

    from vllm_kvevict.serving.plugin import register

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


def test_only_what_was_given_is_passed_on(parser: Any) -> None:
    assert settings(parser, "--kv-eviction", "ada-snapkv") == ADA


def test_a_switch_needs_no_value(parser: Any) -> None:
    given = settings(parser, "--kv-eviction", "snapkv", "--kv-eviction-protect-system")
    assert given == {"policy": "snapkv", "protect_system": True}
    words = "--kv-eviction", "snapkv", "--kv-eviction-protect-system", "false"
    assert settings(parser, *words) == {"policy": "snapkv", "protect_system": False}
    with pytest.raises(SystemExit, match="--kv-eviction-protect-system"):
        settings(parser, *words[:3], "perhaps")


def test_every_flag_reaches_its_field(parser: Any) -> None:
    flags = {
        "--kv-eviction": "snapkv",
        "--kv-eviction-budget": "600",
        "--kv-eviction-window": "16",
        "--kv-eviction-interval": "0",
        "--kv-eviction-prefill-interval": "500",
        "--kv-eviction-every": "0",
        "--kv-eviction-when": "always",
        "--kv-eviction-profile": "auto",
        "--kv-eviction-calibrate-seconds": "60",
        "--kv-eviction-allow": "ada-snapkv, streaming-llm",
        "--kv-eviction-max-budget": "50%",
        "--kv-eviction-protect-system": "true",
        "--kv-eviction-shared-blocks": "evict",
        "--kv-eviction-attention": "triton",
        "--kv-eviction-kernels": "optional",
        "--kv-eviction-ring-memory": "1G",
        "--kv-eviction-store-memory": "4G",
        "--kv-eviction-store-path": "/var/stores,max=1T",
        "--kv-eviction-store-dtype": "int4",
        "--kv-eviction-audit": "1%",
        "--kv-eviction-options": '{"pool": "avg", "pool_kernel": 5, "low_mark": 0.02}',
    }
    expected = {
        "policy": "snapkv",
        "budget": 600,
        "window": 16,
        "interval": 0,
        "prefill_interval": 500,
        "every": 0,
        "when": "always",
        "profile": "auto",
        "calibrate_seconds": 60.0,
        "allow": ["ada-snapkv", "streaming-llm"],
        "max_budget": "50%",
        "protect_system": True,
        "shared_blocks": "evict",
        "attention": "triton",
        "kernels": "optional",
        "ring_memory": "1G",
        "store_memory": "4G",
        "store_path": "/var/stores,max=1T",
        "store_dtype": "int4",
        "audit": "1%",
        "options": {"pool": "avg", "pool_kernel": 5, "low_mark": 0.02},
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
        json.dumps({"kv_eviction": {"policy": "snapkv", "budget": 512, "window": 16}, "other": 1}),
    ]
    merged = settings(parser, *given, "--kv-eviction-budget", "2048")
    assert merged == {"policy": "snapkv", "budget": 2048, "window": 16}
    merged = settings(parser, *given, "--kv-eviction", "streaming-llm")
    assert merged == {"policy": "streaming-llm", "budget": 512, "window": 16}


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
    assert settings(parser, *flags) == ADA | {"budget": 512}


def test_other_additional_config_stays(parser: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parser.parse_args(
        ["m", "--model=/", "--additional-config", '{"other": 1}', "--kv-eviction", "snapkv"]
    )
    config = AsyncEngineArgs.from_cli_args(args).additional_config
    assert config == {"other": 1, "kv_eviction": {"policy": "snapkv"}}
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
        # A rollback, whatever else is wrong.
        ["--kv-eviction", "none", "--kv-eviction-window", "x", "--kv-eviction-allow", "nobody"],
    ],
)
def test_off(parser: Any, flags: list[str]) -> None:
    """Further API servers read it, and switch eviction off as well."""
    assert settings(parser, *flags) == "none"


def test_yaml_config(parser: Any, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    path = tmp_path / "serve.yaml"
    path.write_text("kv-eviction: snapkv\nkv-eviction-budget: 25%\nkv_eviction_window: 8\n")
    args = parser.parse_args(["--model=/", "--config", str(path), "--kv-eviction-window", "16"])
    folded = AsyncEngineArgs.from_cli_args(args).additional_config["kv_eviction"]
    assert folded == {"policy": "snapkv", "budget": "25%", "window": 16}


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
    assert fields["additional_config"] == {"kv_eviction": ADA | {"budget": 512}}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-eviction", "nope"], "choose from ada-snapkv, snapkv, ada-defensive, defensive"),
        (["--kv-eviction", "snapkv", "--kv-eviction-window", "x"],
         "--kv-eviction-window: must be a valid integer, not 'x'"),
        (["--kv-eviction", "ada-snapkv", "--kv-eviction-options.floor", "low"],
         "--kv-eviction-options: floor must be a valid number, not 'low'"),
        (["--kv-eviction", "snapkv", "--kv-eviction-budget", "32"], "leaves no room beyond"),
        (["--kv-eviction-budget", "512"],
         "--kv-eviction-budget needs a policy; add --kv-eviction and one of ada-snapkv"),
        (["--kv-eviction-options.sinks", "5"],
         "--kv-eviction-options needs a policy"),
        (["--additional-config", '{"kv_eviction": {"budget": 512}}'], "--kv-eviction is missing"),
        (["--additional-config", '{"kv_eviction": {"policy": "snapkv", "colour": 1}}'],
         "unknown key 'colour'"),
        (["--additional-config", '{"kv_eviction": 3}', "--kv-eviction-budget", "512"],
         "must be a policy name"),
    ],
)  # fmt: skip
def test_wrong_flags_exit_with_one_sentence(parser: Any, flags: list[str], says: str) -> None:
    assert says in complaint(parser, *flags)


def test_options_one_by_one(parser: Any) -> None:
    flags = ("--kv-eviction-options.floor", "0.5", "--kv-eviction-options.pool", "avg")
    found = settings(parser, "--kv-eviction", "ada-snapkv", *flags)
    assert found == ADA | {"options": {"floor": 0.5, "pool": "avg"}}


def test_help_shows_the_group(
    parser: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_kvevict.config.names import POLICIES

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--help=kv-eviction"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in EvictionConfig.model_fields.items():
        flag = "--kv-eviction" if name == "policy" else f"--kv-eviction-{name.replace('_', '-')}"
        value = f"[{name.upper()}]" if field.annotation is bool else name.upper()
        assert f"{flag} {value}" in text
        assert (field.description or "missing") in text
        default = {"policy": "off", "options": None}.get(name, field.default)
        assert f"(default: {'not set' if default in ((), None) else default})" in text
    for name, field in PolicyOptions.model_fields.items():
        assert f"- {name} (" in text and f"default: {field.default}): {field.description}" in text
    for name, (_, summary) in POLICIES.items():
        assert f"- {name}: {summary}" in text
    assert "--model" not in text and "%%" not in text


def test_namespace_of_another_parser() -> None:
    """Programs fill a namespace by themselves; it may lack our flags and additional_config."""
    from vllm_kvevict.serving.plugin import fold_flags

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
