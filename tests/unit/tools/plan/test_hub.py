"""A model at Hugging Face: what the plan reads of it, from a stand-in for the hub."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_stand_in import JsonHandler, served
from vllm_kvevict.tools.plan.command import main

NAME = "somebody/large-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOTAL = 140_000_000
LOAD = ["--prompt", "2000", "--block-size", "32", "--dtype", "float32", "--json"]


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub:
    """Serves files of one model as the hub does, and records what is asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        shards = {f"model-0000{i}-of-00002.safetensors": b"w" * 1000 for i in (1, 2)}
        index = {"metadata": {"total_size": TOTAL}, "weight_map": dict.fromkeys("ab", min(shards))}
        self.files = shards | {
            "config.json": json.dumps(config).encode(),
            "model.safetensors.index.json": json.dumps(index).encode(),
            "generation_config.json": b"{}",
            "tokenizer.json": b"{}",
            "tokenizer_config.json": b"{}",
            "modeling_large.py": b"raise RuntimeError('code of the hub was run')",
            "README.md": b"# A large model",
        }
        self.sent: list[str] = []
        hub = self

        class Handler(JsonHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                if self.path.startswith(f"/api/models/{NAME}/tree/"):
                    tree = [
                        {"type": "file", "path": name, "size": len(content), "oid": oid(content)}
                        for name, content in hub.files.items()
                    ]
                    return self.send(json.dumps(tree).encode(), body, "application/json")
                if self.path.startswith(f"/api/models/{NAME}"):
                    listed = [{"rfilename": name} for name in hub.files]
                    about = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": listed}
                    return self.send(json.dumps(about).encode(), body, "application/json")
                name = self.path.rpartition("/")[2]
                if not self.path.startswith(f"/{NAME}/resolve/") or name not in hub.files:
                    self.send_error(404)
                    return None
                if body:
                    hub.sent.append(name)
                return self.send(hub.files[name], body, "application/octet-stream")

            def send(self, content: bytes, body: bool, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{oid(content)}"')
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self.handler = Handler


@pytest.fixture
def hub(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    found = Hub(json.loads(Path(model, "config.json").read_text()))
    with served(found.handler) as url:
        template = url + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield found


def planned(capsys: Any, *argv: str) -> tuple[dict[str, Any], str]:
    assert main([NAME, *LOAD, "--gpu-memory", "1G", *argv]) == 0
    out, errors = capsys.readouterr()
    # vLLM logs to stdout here, in front of what the command prints.
    return json.loads(out[out.index("{\n") :]), errors


def test_only_what_is_said_is_downloaded(hub: Hub, capsys: Any) -> None:
    data, said = planned(capsys)
    assert sorted(hub.sent) == ["config.json", "model.safetensors.index.json"]
    assert all(name in said for name in hub.sent) and "no weights are downloaded" in said
    # Of the index, the files being elsewhere.
    assert data["memory"]["weights"] == TOTAL
    assert data["memory"]["weights_from"] == "the checkpoint's index"
    assert data["eviction"]["policy"] == "probe"
    # A second plan reads what is here.
    assert planned(capsys)[0] == data and len(hub.sent) == 2


def test_a_warning_names_the_model(hub: Hub, capsys: Any) -> None:
    data, _ = planned(capsys, "--load-format", "dummy")
    assert data["eviction"]["policy"] == "ada-defensive"
    (note,) = data["notes"]
    assert f"vllm-kvevict calibrate {NAME} makes a profile" in note
    assert sorted(hub.sent) == ["config.json", "model.safetensors.index.json"]


def test_code_of_the_hub_is_read_only_where_it_is_trusted(hub: Hub, capsys: Any) -> None:
    planned(capsys, "--trust-remote-code")
    assert "modeling_large.py" in hub.sent
    assert not any(name.endswith(".safetensors") for name in hub.sent)


def test_a_name_that_the_hub_does_not_know(hub: Hub, capsys: Any) -> None:
    assert main(["somebody/no-such-model", *LOAD, "--gpu-memory", "1G"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the configuration of somebody/no-such-model was not found")
    del hub.files["config.json"]
    assert main([NAME, *LOAD, "--gpu-memory", "1G"]) == 1
    assert f"{NAME} has no config.json at Hugging Face" in capsys.readouterr().err
