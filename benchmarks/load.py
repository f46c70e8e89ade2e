"""One measured load on a server: `vllm bench serve`, with peak sequences and preemptions."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.server import VLLM, Server, Watch


class BenchArguments(Protocol):
    """A dataset and how it is sent, as ``vllm bench serve`` is told."""

    def args(self) -> list[str]: ...


@dataclass
class Load:
    """Random prompts through ``vllm bench serve``. Lengths in tokens."""

    input_len: int
    output_len: int
    num_prompts: int
    concurrency: int
    seed: int = 0

    def args(self) -> list[str]:
        return [
            "--dataset-name", "random",
            "--random-input-len", str(self.input_len),
            "--random-output-len", str(self.output_len),
            "--num-prompts", str(self.num_prompts),
            "--max-concurrency", str(self.concurrency),
            "--seed", str(self.seed),
            "--ignore-eos",
        ]  # fmt: skip


def measure(
    server: Server,
    model: Path,
    load: BenchArguments,
    finished: Callable[[int], object] = lambda _: None,
) -> dict[str, float]:
    """Run a load.

    ``finished`` is called with the number of requests that ended since the last call.

    Returns:
        Output tokens per second, median and p99 TTFT, TPOT, ITL in ms, peak running
        sequences, preemptions, completed and failed requests.

    Raises:
        RuntimeError: ``vllm bench serve`` failed.

    """
    preempted = server.metric("vllm:num_preemptions_total")
    with tempfile.TemporaryDirectory() as folder, Watch(server, finished=finished) as watch:
        result = Path(folder) / "result.json"
        command = [
            *VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url,
            "--model", str(model), "--endpoint", "/v1/completions", *load.args(),
            "--save-result", "--result-filename", str(result),
            "--percentile-metrics", "ttft,tpot,itl",
        ]  # fmt: skip
        # vLLM makes the tokens of a trace from Python's hash of its numbers.
        env = os.environ | {"PYTHONHASHSEED": "0"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=env)
        if done.returncode or not result.exists():
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        data = json.loads(result.read_text())
    return {
        "output_tokens_per_s": data["output_throughput"],
        "ttft_ms_median": data["median_ttft_ms"],
        "ttft_ms_p99": data["p99_ttft_ms"],
        "tpot_ms_median": data["median_tpot_ms"],
        "tpot_ms_p99": data["p99_tpot_ms"],
        "itl_ms_median": data["median_itl_ms"],
        "itl_ms_p99": data["p99_itl_ms"],
        "peak_running": watch.peak_running,
        "preemptions": server.metric("vllm:num_preemptions_total") - preempted,
        "completed": data["completed"],
        "failed": data["failed"],
    }
