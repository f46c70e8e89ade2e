"""``vllm serve`` with wrong flags: one sentence, no traceback, no model loaded."""

import subprocess
from pathlib import Path

import pytest

from tests import forked
from vllm_kvevict.config.names import POLICY_NAMES


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``vllm serve ARGUMENTS`` to its end; none of these may start a server."""
    return forked.run("vllm.entrypoints.cli.main", "serve", *arguments, COLUMNS="200")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--kv-eviction", "best"],
            "error: KV eviction: --kv-eviction: unknown policy 'best'; "
            "choose from ada-snapkv, snapkv, ada-defensive, defensive, ada-probe, probe, ada-h2o, "
            "h2o, ada-pyramid, pyramidkv, streaming-llm, ada-scissorhands, scissorhands, ada-tova, "
            "tova, subgen, subgen-stream, nacl, auto",
        ),
        pytest.param(
            ["--additional-config", '{"kv_eviction": {"policy": "snapkv", "budget": 32}}'],
            "error: KV eviction: budget 32 leaves no room beyond the window of 32 tokens; "
            "raise --kv-eviction-budget or lower --kv-eviction-window",
            marks=pytest.mark.nightly,
        ),
        (
            ["--kv-eviction", "snapkv", "--block-size", "16"],
            "error: KV eviction does not support this block size, because the CPU kernel takes "
            "multiples of 32 tokens and the CUDA kernels multiples of 16; set --block-size to a "
            "multiple of 32.",
        ),
    ],
)
def test_one_sentence(tiny_model: Path, flags: list[str], sentence: str) -> None:
    done = serve(
        str(tiny_model), "--host", "127.0.0.1", "--port", "0",
        "--kv-cache-memory-bytes", "64M", *flags,
    )  # fmt: skip
    assert done.returncode not in (0, None)
    assert done.stderr.splitlines()[-1] == sentence
    assert "Traceback" not in done.stdout + done.stderr
    assert "Loading" not in done.stdout, "the model was loaded before the settings were read"


def test_several_api_servers_say_it_once(tiny_model: Path) -> None:
    done = serve(
        str(tiny_model), "--host", "127.0.0.1", "--port", "0", "--api-server-count", "2",
        "--kv-eviction-budget", "512",
    )  # fmt: skip
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("needs a policy") == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_help() -> None:
    done = serve("--help=kv-eviction")
    assert done.returncode == 0
    for name in ("", "-budget", "-window", "-interval", "-profile", "-options"):
        assert f"  --kv-eviction{name} " in done.stdout
    for policy in POLICY_NAMES:
        assert f"- {policy}: " in done.stdout
