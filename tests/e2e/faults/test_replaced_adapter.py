"""An adapter is replaced under its name, and no store of the old weights answers for the new."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.faults.conftest import EVICTION, PATIENCE_S, arguments
from tests.e2e.test_lora import RANK
from tests.e2e.test_own_settings import asks
from tests.models import random_prompt

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

LIMIT = 1024
DOCUMENT = 300
PROMPT = random_prompt(DOCUMENT + 20, seed=1)
ARGUMENTS = [
    *arguments(64, LIMIT), *EVICTION, "--kv-eviction-store-memory", "64M",
    "--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK),
    "--enable-prompt-tokens-details",
]  # fmt: skip


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write a random adapter of the keys and values of a model, and return its folder."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    modules = ("q_proj", "k_proj", "v_proj")
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            if any(f".{module}." in name for module in modules):
                rows, columns = weights.get_slice(name).get_shape()
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                    drawn = torch.randn(shape, generator=generator) * 0.1
                    tensors[f"{prefix}.{part}.weight"] = drawn
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=RANK, lora_alpha=16, bias="none")
    text = json.dumps(config | dict(target_modules=list(modules)))
    (folder / "adapter_config.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory) -> list[Path]:
    """Two adapters of different weights."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(tiny_model, root / str(seed), seed) for seed in (5, 6)]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("adapters-server") / "log"
    env = dict(VLLM_ALLOW_RUNTIME_LORA_UPDATING="1", VLLM_SERVER_DEV_MODE="1")
    with Server(tiny_model, ARGUMENTS, log, PATIENCE_S, env) as server:
        yield server


def ask(server: Server, model: str, salt: str) -> tuple[list[int], int]:
    """Tokens of the answer over a shared store, and how many of the prompt's were not computed."""
    answer = server.post(
        "/v1/completions",
        dict(
            model=model, prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True,
            return_token_ids=True, vllm_xargs=asks(at=DOCUMENT, interval=0), cache_salt=salt,
        ),
    )  # fmt: skip
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def call(server: Server, path: str, **body: Any) -> None:
    """An endpoint that answers with a sentence."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def turn_over(server: Server, seed: int) -> None:
    """Fill the KV cache with other prompts, so that no block of an earlier one is left."""
    for number in range(4):
        prompt = random_prompt(LIMIT - 1, seed=1000 * seed + number)
        body = dict(model="tiny", prompt=prompt, max_tokens=1, vllm_xargs=asks("none"))
        server.post("/v1/completions", body)


@pytest.mark.parametrize("how", ["in place", "unload and load", "reset"])
def test_a_replaced_adapter_computes_its_own_store(server, adapters, tmp_path, how):
    name, folder = f"mine-{how.split()[0]}", tmp_path / "adapter"
    shutil.copytree(adapters[0], folder)
    loads = dict(lora_name=name, lora_path=str(folder))
    call(server, "/v1/load_lora_adapter", **loads)
    before = server.evictions()["evictions"]
    old, _ = ask(server, name, "old")
    assert server.evictions()["evictions"] > before
    again, cached = ask(server, name, "old")
    assert again == old and cached >= DOCUMENT
    base, _ = ask(server, "tiny", "old")
    assert base != old

    shutil.rmtree(folder)
    shutil.copytree(adapters[1], folder)
    if how == "unload and load":
        call(server, "/v1/unload_lora_adapter", lora_name=name)
        call(server, "/v1/load_lora_adapter", **loads)
    else:
        call(server, "/v1/load_lora_adapter", **loads, load_inplace=True)
    if how == "reset":
        assert server.post("/reset_prefix_cache", {}) == dict(success=True)
    else:
        turn_over(server, seed=len(how))
    new, cached = ask(server, name, f"fresh {how}")
    assert cached == 0 and new not in (old, base)
    assert ask(server, name, "old") == (new, 0)
    # The model without an adapter keeps its own, which a reset alone takes from it.
    assert ask(server, "tiny", "old") == (base, 0 if how == "reset" else DOCUMENT)
