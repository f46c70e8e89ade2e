"""Two replicas of a Ray Serve LLM application; run by test_ray.py in a process of its own.

Prints what it saw as one line of JSON behind ``RESULT``.
"""

import json
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import free_port

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "benchmarks" / "quality" / "model"
RESULT = "RESULT "
BUDGET = 128
QUICK = {
    # Two engines that start at once on two cores are slow to answer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def settings() -> dict[str, Any]:
    """What a file for ``serve deploy`` would hold as the application's ``args``."""
    return dict(
        llm_configs=[
            dict(
                model_loading_config=dict(model_id="retrieval", model_source=str(MODEL)),
                accelerator_config=dict(kind="cpu"),
                placement_group_config=dict(bundles=[dict(CPU=1)]),
                deployment_config=dict(num_replicas=2, health_check_timeout_s=120),
                engine_kwargs=dict(
                    dtype="float32",
                    enforce_eager=True,
                    block_size=32,
                    max_model_len=2048,
                    kv_cache_memory_bytes=16 << 20,
                    additional_config=dict(kv_eviction=dict(policy="ada-snapkv", budget=BUDGET)),
                ),
            )
        ]
    )


def ask(port: int, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(dict(model="retrieval", **body)).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def evictions(port: int) -> dict[str, float]:
    """Evictions by replica, from the metrics that Ray publishes."""
    found: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("vllm_kvevict_evictions_total"):
                found[sample.labels["ReplicaId"]] += sample.value
    return dict(found)


def load(port: int, metrics: int) -> dict[str, Any]:
    """Ask until both replicas have evicted, or for two minutes."""
    counted: dict[str, float] = {}
    asked, lengths = 0, set()
    deadline = time.monotonic() + 120
    with ThreadPoolExecutor(8) as threads:
        while time.monotonic() < deadline and sum(n > 0 for n in counted.values()) < 2:
            # Digits are a token each here, so every prompt is far longer than the budget.
            prompts = [f"{asked + n} " + "7 1 4 2 " * 100 for n in range(8)]
            asked += len(prompts)

            def one(prompt: str) -> int:
                status, answer = ask(
                    port, "/v1/completions", prompt=prompt, max_tokens=8, ignore_eos=True,
                    temperature=0,
                )  # fmt: skip
                assert status == 200, answer
                assert answer["usage"]["completion_tokens"] == 8
                return answer["usage"]["prompt_tokens"]

            lengths.update(threads.map(one, prompts))
            time.sleep(2)
            counted = evictions(metrics)
    return dict(asked=asked, shortest=min(lengths), evictions=counted)


def main(folder: str) -> None:
    # Ray would write a token of its own into the home folder.
    token = Path(folder) / "token"
    token.write_text(secrets.token_hex(32))
    os.environ.update(QUICK, RAY_AUTH_TOKEN_PATH=str(token))
    import psutil
    import ray
    from ray import serve
    from ray_serve import app

    port, metrics = free_port(), free_port()
    ray.init(
        num_cpus=6,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
        _metrics_export_port=metrics,
        _temp_dir=f"{folder}/ray",
    )
    serve.start(http_options=dict(host="127.0.0.1", port=port))
    serve.run(app(settings()))
    found = load(port, metrics)
    status, answer = ask(
        port, "/v1/completions", prompt="7", max_tokens=2, vllm_xargs=dict(kv_eviction_budget="no")
    )
    found["refused"] = [status, json.dumps(answer)]
    status, answer = ask(
        port, "/v1/chat/completions", messages=[dict(role="user", content="7 1 4")], max_tokens=4
    )
    found["chat"] = [status, json.dumps(answer)]
    processes = psutil.Process().children(recursive=True)
    serve.shutdown()
    ray.shutdown()

    def running(process: psutil.Process) -> bool:
        # Who adopted a process may leave it unreaped: it has ended all the same.
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + 60
    while (left := list(filter(running, processes))) and time.monotonic() < deadline:
        time.sleep(0.2)
    found |= dict(processes=len(processes), left=[str(process) for process in left])
    print(RESULT + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
