"""Activation and inertness, through vLLM's ``EngineArgs``."""

import json
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugins import importable
from tests.unit.serving.test_plugin import settings
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving import host_memory

pytestmark = pytest.mark.usefixtures("registered")

DEFAULTS = {
    "policy": "ada-snapkv",
    "budget": 1024,
    "window": 32,
    "interval": 128,
    "prefill_interval": 0,
    "every": 0,
    "when": "always",
    "profile": None,
    "calibrate_seconds": 900.0,
    "allow": [],
    "max_budget": None,
    "protect_system": False,
    "shared_blocks": "keep",
    "attention": "auto",
    "kernels": "required",
    "ring_memory": "512M",
    "store_memory": 0,
    "store_path": None,
    "store_dtype": "auto",
    "audit": 0,
    "options": {},
}
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def test_activation(build: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker.cpu_worker import CPUWorker

    asked = {"kv_eviction": "ada-snapkv", "other": 1}
    config = build(additional_config=asked)
    assert config.additional_config == {"kv_eviction": DEFAULTS, "other": 1}
    assert asked == {"kv_eviction": "ada-snapkv", "other": 1}
    # As it travels to the engine core and the workers.
    config = pickle.loads(pickle.dumps(config))
    assert config.additional_config["kv_eviction"] == DEFAULTS
    worker_cls = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    assert issubclass(worker_cls, CPUWorker) and worker_cls is not CPUWorker
    scheduler_cls = config.scheduler_config.get_scheduler_cls()
    assert scheduler_cls.__module__ == "vllm_kvevict.engine.scheduler"
    assert not issubclass(scheduler_cls, AsyncScheduler)


def test_activation_keeps_async_scheduling(build: Any) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    config = build()
    config.scheduler_config.async_scheduling = True
    _activate(config)
    assert issubclass(config.scheduler_config.get_scheduler_cls(), AsyncScheduler)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "optional", [{}, {"store_memory": "1G"}, {"store_path": "/tmp/stores"}, {"audit": "1%"}]
)
def test_every_server_has_one_of_two_schedulers(
    build: Any, optional: Any, asynchronous: bool
) -> None:
    config = build({"policy": "snapkv"} | optional)
    config.scheduler_config.async_scheduling = asynchronous
    _activate(config, config.additional_config["kv_eviction"])
    kind = config.scheduler_config.get_scheduler_cls()
    assert kind.__module__ == "vllm_kvevict.engine.scheduler"
    assert ("Async" in kind.__name__) == asynchronous


def test_tiers_need_prefix_caching(build: Any) -> None:
    with pytest.raises(ValueError, match=r"--kv-eviction-store-memory.*prefix cache"):
        build({"policy": "snapkv", "store_memory": "1G"}, enable_prefix_caching=False)


def test_stores_do_not_get_more_memory_than_there_is(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine's, or the limit of its container."""
    build({"policy": "snapkv", "store_memory": "1G"})
    with pytest.raises(ValueError, match=r"--kv-eviction-store-memory 900T is more than the [0-9]"):
        build({"policy": "snapkv", "store_memory": "900T"})
    (tmp_path / "memory.max").write_text(f"{2**29}\n")
    monkeypatch.setattr(host_memory, "LIMITS", (str(tmp_path / "memory.max"), "/missing"))
    with pytest.raises(ValueError, match=r"--kv-eviction-store-memory 1G is more than the 0.5 GiB"):
        build({"policy": "snapkv", "store_memory": "1G"})
    (tmp_path / "memory.max").write_text("max\n")
    build({"policy": "snapkv", "store_memory": "1G"})


def test_blocks_that_do_not_hold_a_sequence_in_all_groups(build: Any) -> None:
    """vLLM ends with a traceback that names neither the flag nor the groups."""
    asked = {"policy": "pyramidkv", "budget": 64}
    with pytest.raises(
        ValueError, match=r"--num-gpu-blocks-override 9 counts .* 2 with indiv"
    ) as e:
        build(asked, num_gpu_blocks_override=9)
    needed = int(re.search(r"needs (\d+); give", str(e.value))[1])
    build(asked, num_gpu_blocks_override=needed)
    build({"policy": "snapkv", "budget": 64}, num_gpu_blocks_override=9)
    with pytest.raises(ValueError, match="--num-gpu-blocks-override"):
        build(asked, num_gpu_blocks_override=needed - 1)


def test_tiers_need_all_layers_in_one_process(build: Any) -> None:
    build("snapkv", pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"--kv-eviction-store-path.*--pipeline-parallel-size"):
        build({"policy": "snapkv", "store_path": "/tmp/stores"}, pipeline_parallel_size=2)


def test_tiers_need_one_scheduler_for_all_ranks(build: Any) -> None:
    launched = dict(distributed_executor_backend="external_launcher")
    build({"policy": "snapkv", "store_path": "/tmp/stores"}, **launched)
    build("snapkv", tensor_parallel_size=2, **launched)
    for tier in (dict(store_path="/tmp/stores"), dict(store_memory="1G")):
        with pytest.raises(ValueError, match=r"external_launcher on several ranks.*remove these"):
            build({"policy": "snapkv", **tier}, tensor_parallel_size=2, **launched)


def test_a_folder_that_cannot_hold_stores_is_refused(build: Any, tmp_path: Path) -> None:
    asked = {"policy": "snapkv", "store_path": f"{tmp_path},max=1G"}
    build(asked)
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match=r"--kv-eviction-store-path: every user may write"):
        build(asked)
    (tmp_path / "file").touch()
    asked["store_path"] = str(tmp_path / "file" / "stores")
    with pytest.raises(ValueError, match=r"--kv-eviction-store-path: the folder .* is not a fol"):
        build(asked)


@pytest.mark.parametrize(
    "options, flag",
    [
        (dict(enable_prefix_caching=False), "--no-enable-prefix-caching"),
        (dict(enable_lora=True), "--enable-lora"),
        (dict(disable_log_stats=True), "--disable-log-stats"),
    ],
)
def test_where_audits_cannot_run(build: Any, options: Any, flag: str) -> None:
    build({"policy": "snapkv", "audit": "0%"}, **options)
    with pytest.raises(ValueError, match=f"--kv-eviction-audit .*{flag}"):
        build({"policy": "snapkv", "audit": "1%"}, **options)


def test_activation_twice(build: Any) -> None:
    config = build("snapkv")
    hashed = config.compute_hash()
    before = pickle.dumps(config.parallel_config), pickle.dumps(config.scheduler_config)
    _activate(config, config.additional_config["kv_eviction"])
    after = pickle.dumps(config.parallel_config), pickle.dumps(config.scheduler_config)
    assert before == after
    assert config.compute_hash() == hashed


def test_the_hash_tells_settings_apart(build: Any) -> None:
    hashes = {
        build(e).compute_hash()
        for e in (None, "snapkv", {"policy": "snapkv", "options": {"pool_kernel": 5}})
    }
    assert len(hashes) == 3
    assert build("ada-snapkv").compute_hash() == build(dict(DEFAULTS)).compute_hash()


def test_worker_and_scheduler_of_vllm_may_be_named(build: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    config = build("snapkv", worker_cls=CPU_WORKER, scheduler_cls=Scheduler)
    assert config.parallel_config.worker_cls == "vllm_kvevict.worker.cpu.EvictingCPUWorker"
    assert config.scheduler_config.scheduler_cls == (
        "vllm_kvevict.engine.scheduler.EvictingScheduler"
    )


def test_refuses_custom_classes(build: Any) -> None:
    with pytest.raises(ValueError, match=r"worker class 'my\.Worker'.*remove --worker-cls"):
        build("snapkv", worker_cls="my.Worker")
    with pytest.raises(ValueError, match=r"scheduler class 'my\.Sched'.*remove --scheduler-cls"):
        build("snapkv", scheduler_cls="my.Sched")
    assert build(worker_cls="my.Worker").parallel_config.worker_cls == "my.Worker"


def test_refusal_leaves_the_configuration_alone(build: Any) -> None:
    config = build(scheduler_cls="my.Sched")
    with pytest.raises(ValueError):
        _activate(config)
    assert config.parallel_config.worker_cls == CPU_WORKER
    assert config.additional_config == {}


@pytest.mark.parametrize(
    ("eviction", "says"),
    [
        ("ada-snapkv", ["policy ada-snapkv", "budget 1024 tokens", "window 32", "interval 128",
                        "1.0 MiB of observation rings on a rank"]),
        ({"policy": "snapkv", "budget": "25%"}, ["budget 25% of the tokens so far"]),
        ("streaming-llm", ["0.0 MiB of observation rings"]),
    ],
)  # fmt: skip
def test_says_what_is_on(
    build: Any, records: list[logging.LogRecord], eviction: Any, says: list[str]
) -> None:
    build(eviction)
    assert levels(records) == ["INFO"]
    for part in says:
        assert part in records[-1].getMessage()


def levels(records: list[logging.LogRecord]) -> list[str]:
    """Those of what is said of the settings, without the warning of a version."""
    of_version = "the Python code was tested"
    return [one.levelname for one in records if of_version not in one.getMessage()]


def test_of_several_api_servers_one_speaks(
    model: str, parser: Any, records: list[logging.LogRecord]
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parser.parse_args(["m", "--kv-eviction", "snapkv", "--kv-cache-memory-bytes", "64M"])
    args.model, args.skip_tokenizer_init = model, True
    configs = []
    for rank in (-1, 0, 1):
        engine_args = AsyncEngineArgs.from_cli_args(args)
        engine_args._api_process_count, engine_args._api_process_rank = 2, rank
        configs.append(engine_args.create_engine_config())
    assert levels(records) == ["INFO"]
    assert len({config.parallel_config.worker_cls for config in configs}) == 1
    assert all("kv_eviction" in config.additional_config for config in configs)


def test_refusal_exits_without_traceback_where_flags_asked(model: str, parser: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    args = parser.parse_args(["m", "--kv-eviction", "snapkv", "--block-size", "16"])
    args.model, args.skip_tokenizer_init = model, True
    with pytest.raises(SystemExit) as caught:
        AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert str(caught.value.code).startswith("error: KV eviction does not support this block size")
    engine_args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        block_size=16,
        additional_config={"kv_eviction": "snapkv"},
    )
    with pytest.raises(ValueError, match=r"^KV eviction does not support this block size"):
        engine_args.create_engine_config()


def test_wrong_settings_stop_llm_before_the_model_is_read() -> None:
    from vllm.engine.arg_utils import EngineArgs

    engine_args = EngineArgs(model="/", additional_config={"kv_eviction": "nope"})
    with pytest.raises(ValueError, match=r"^KV eviction: --kv-eviction: unknown policy 'nope'"):
        engine_args.create_engine_config()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0"])
def test_other_vllm_versions(
    build: Any, parser: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ValueError) as caught:
        build("snapkv")
    assert version in str(caught.value) and ">=0.32,<0.34" in str(caught.value)
    with pytest.raises(SystemExit) as left:
        settings(parser, "--kv-eviction", "snapkv")
    assert left.value.code == f"error: {caught.value}"
    assert build().parallel_config.worker_cls == CPU_WORKER
    assert settings(parser) is None


def test_a_version_that_is_not_fully_tested_gives_one_warning(
    build: Any, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    build("snapkv")
    warnings = [r.getMessage() for r in records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "vLLM 0.33.0" in warnings[0]


@pytest.mark.slow
def test_installed_but_not_asked_for(model: str) -> None:
    """In a fresh process, as the entry point loads it: nothing wrapped acts, nothing speaks."""
    code = f"""
import json, sys
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(model={model!r}, skip_tokenizer_init=True, enforce_eager=True,
                    kv_cache_memory_bytes=64 << 20).create_engine_config()
print(json.dumps({{
    "wrapped": hasattr(EngineArgs.create_engine_config, "__wrapped__"),
    "worker": config.parallel_config.worker_cls,
    "scheduler": config.scheduler_config.scheduler_cls,
    "additional": config.additional_config,
    "ours": sorted(m for m in sys.modules if m.startswith("vllm_kvevict")),
}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *said, found = done.stdout.splitlines()
    assert json.loads(found) == {
        "wrapped": True,
        "worker": CPU_WORKER,
        "scheduler": None,
        "additional": {},
        "ours": ["vllm_kvevict", "vllm_kvevict.serving", "vllm_kvevict.serving.plugin"],
    }
    assert any(" INFO " in line for line in said), "vLLM's own lines must be seen"
    assert "evict" not in ("".join(said) + done.stderr).replace(model, "").lower()


def _activate(config: Any, eviction: Any = "snapkv") -> None:
    from vllm_kvevict.serving.activate import activate

    parsed = EvictionConfig.parse(eviction)
    assert parsed is not None
    activate(config, parsed)


def test_says_what_requests_may_choose(build: Any, records: list[logging.LogRecord]) -> None:
    build("snapkv")
    assert not [record for record in records if "may choose" in record.getMessage()]
    build({"policy": "snapkv", "budget": 512, "allow": "streaming-llm", "max_budget": "50%"})
    (line,) = [record.getMessage() for record in records if "may choose" in record.getMessage()]
    assert "snapkv, streaming-llm" in line and "at most 50%" in line


def test_a_policy_that_does_not_load_is_refused_at_start_up(build, tmp_path):
    metadata = tmp_path / "theirs-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: theirs\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text("[vllm_kvevict.policies]\nmine = not_there:build\n")
    with importable(tmp_path):
        for eviction in (dict(policy="mine"), dict(policy="snapkv", allow="mine")):
            with pytest.raises(
                ValueError, match=r"mine of the package theirs 2.0 .* does not load"
            ):
                build(eviction)
        assert build(dict(policy="snapkv")) is not None
