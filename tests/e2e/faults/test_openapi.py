"""Schemathesis on the server's OpenAPI: every server error is one that stock vLLM gives too."""

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.faults.conftest import AMPLE_BLOCKS, AMPLE_LEN, EVICTION, PATIENCE_S, arguments
from tests.e2e.faults.sizes import size
from tests.e2e.faults.storm import POLICIES
from tests.e2e.test_server import complete, wait_for
from tests.models import random_prompt
from vllm_kvevict.config.requests import KEYS

EXCLUDED = ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/systemone")
"""The first two reshape a server of several data-parallel engines, which this is not; the last is
answered with 501 for every model but those made for it."""

FEW = {
    name: dict(type="integer", minimum=-1, maximum=8)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
} | {name: dict(type="integer", minimum=-1, maximum=3) for name in ("n", "best_of", "logprobs")}
"""Answers are kept short: what is tested is the front door."""

ASKED = dict(
    type="object",
    properties={key: {} for key in KEYS}
    | dict(
        kv_eviction=dict(enum=[*POLICIES, "x", 1]),
        kv_eviction_budget=dict(anyOf=[dict(type="integer"), dict(enum=["25%", "0%", "x"]), {}]),
    ),
    additionalProperties=True,
    minProperties=1,
)
PLAIN = dict(
    prompt=dict(
        type="array", items=dict(type="integer", minimum=7, maximum=1000), minItems=1, maxItems=300
    ),
    messages=dict(
        type="array",
        items=dict(
            type="object",
            properties=dict(role=dict(enum=["user", "system"]), content=dict(type="string")),
            required=["role", "content"],
            additionalProperties=False,
        ),
        minItems=1,
        maxItems=4,
    ),
    input=dict(type="string"),
    stream=dict(type="boolean"),
)
"""All that a plain request may have beside the model, its length and our settings."""

UNPLAIN = {"min_tokens", "n", "best_of", "logprobs"}


def cli() -> str:
    """The schemathesis command: of this environment, or named by SCHEMATHESIS."""
    beside = Path(sys.executable).with_name("schemathesis")
    found = os.environ.get("SCHEMATHESIS") or (beside if beside.exists() else None)
    assert found or shutil.which("schemathesis"), "schemathesis is missing: run `make setup`"
    return str(found or shutil.which("schemathesis"))


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the served model, short answers, and settings of this package."""

    def walk(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item)
        if not isinstance(node, dict):
            return
        properties = node.get("properties")
        if isinstance(properties, dict):
            # vLLM 0.32's CPU worker ends when a seeded prompt is computed in parts, in stock too.
            properties.pop("seed", None)
            for name in properties:
                if name in FEW:
                    properties[name] = FEW[name]
            needed = {name for name in properties if name.startswith("max_") and name in FEW}
            if "vllm_xargs" in properties:
                properties["vllm_xargs"] = ASKED
                needed.add("vllm_xargs")
            if "model" in properties and "vllm_xargs" in properties:
                properties["model"] = dict(enum=["tiny"])
                needed.add("model")
            node["required"] = sorted(needed | set(node.get("required", ())))
        for value in node.values():
            walk(value)

    walk(schema["components"]["schemas"])
    schema["paths"] = {path: v for path, v in schema["paths"].items() if path not in EXCLUDED}
    return schema


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Only requests that take our settings, of a shape that reaches the engine."""
    for body in schema["components"]["schemas"].values():
        given = body.get("properties", {})
        if "vllm_xargs" in given:
            kept = {"model", "vllm_xargs", *FEW, *PLAIN} - UNPLAIN
            body["properties"] = {
                name: PLAIN.get(name, given[name]) for name in given if name in kept
            }
            body["required"] = [name for name in body["properties"] if name != "stream"]
            body["additionalProperties"] = False
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
    schema["paths"] = {path: schema["paths"][path] for path in paths}
    return schema


def run(server: Server, schema: dict[str, Any], folder: Path, examples: int) -> list[Any]:
    """The requests that schemathesis sent, and what the server said."""
    folder.mkdir()
    (folder / "openapi.json").write_text(json.dumps(schema))
    done = subprocess.run(
        [
            cli(), "run", "openapi.json", "--url", server.url, "--checks", "not_a_server_error",
            "--phases", "fuzzing", "--max-examples", str(examples), "--seed", "1",
            "--generation-database", "none", "--no-shrink", "--continue-on-failure",
            "--suppress-health-check", "all", "--request-timeout", "120", "--no-color",
            "--report", "har", "--report-har-path", "run.har", "--workers", "2",
        ],
        cwd=folder, capture_output=True, text=True, timeout=7000,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "run.har").read_text())["log"]["entries"]


def replay(server: Server, entry: dict[str, Any]) -> int:
    """Send a recorded request again; its status."""
    sent = entry["request"]
    headers = {
        h["name"]: h["value"]
        for h in sent["headers"]
        if h["name"].lower() not in ("host", "content-length", "connection")
    }
    path = sent["url"].split("//", 1)[1].split("/", 1)[1]
    data = sent.get("postData", {}).get("text", "").encode() or None
    request = urllib.request.Request(
        f"{server.url}/{path}", data, headers, method=sent["method"]
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


SHORT = ["--override-generation-config", json.dumps(dict(max_new_tokens=8))]
"""Half of the requests lack a field, and without a limit of its own a request would generate up to
the length of the model: a thousand of them for hours."""


@pytest.fixture
def ample(tiny_model, tmp_path):
    args = [*arguments(AMPLE_BLOCKS, AMPLE_LEN), *EVICTION, *SHORT]
    with Server(tiny_model, args, tmp_path / "server.log", PATIENCE_S) as server:
        yield server


@pytest.mark.timeout(7200)
def test_no_server_error_of_ours(ample, tiny_model, tmp_path):
    prompt = random_prompt(200, seed=3)
    before = complete(ample, prompt)
    with urllib.request.urlopen(ample.url + "/openapi.json", timeout=30) as answer:
        published = answer.read()
    everything = run(ample, narrowed(json.loads(published)), tmp_path / "all", size(3, 200))
    front = plain(narrowed(json.loads(published)))
    ours = run(ample, front, tmp_path / "ours", size(25, 1000))
    for name, entries in (("all", everything), ("ours", ours)):
        statuses = Counter(entry["response"]["status"] for entry in entries)
        print(f"\n{name}: {len(entries)} requests, statuses {dict(sorted(statuses.items()))}")
    assert len({e["request"]["url"] for e in everything}) > 15
    accepted = Counter(
        entry["response"]["status"]
        for entry in ours
        if "kv_eviction" in entry["request"].get("postData", {}).get("text", "")
    )
    assert accepted[200] > 5 and accepted[400] > 5, accepted
    wait_for(ample, "vllm:num_requests_running", 0)
    wait_for(ample, "vllm:kv_cache_usage_perc", 0)
    assert complete(ample, prompt) == before

    entries = everything + ours
    failed = [e for e in entries if e["response"]["status"] >= 500 or not e["response"]["status"]]
    if failed:
        args = [*arguments(AMPLE_BLOCKS, AMPLE_LEN), *SHORT]
        with Server(tiny_model, args, tmp_path / "log", PATIENCE_S) as stock:
            new = [e["request"] for e in failed if replay(stock, e) < 500]
        print(f"{len(failed)} server errors, {len(failed) - len(new)} of them vLLM's own")
        assert new == []
