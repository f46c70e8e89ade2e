"""What deploy/ asks vLLM, Ray and pip for, as far as that can be tried without a cluster."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.simulate.model import write_config
from vllm_kvevict.compat.versions import check_vllm
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.tools.plan.command import main as plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
RAY = sorted((DEPLOY / "ray").glob("*.yaml"))


def test_the_image_is_of_a_supported_vllm():
    text = (DEPLOY / "Dockerfile").read_text()
    (version,) = re.findall(r"^ARG VLLM_IMAGE=vllm/vllm-openai:v([\d.]+)$", text, re.MULTILINE)
    assert check_vllm(version) is None
    assert "ENTRYPOINT" not in text and "CMD" not in text
    # A digest goes where the tag is: the name is an argument, and both stages take it.
    assert text.count("FROM ${VLLM_IMAGE}") == 2 and "@sha256:" in text


def test_the_image_runs_as_somebody():
    (user,) = re.findall(r"^USER (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert int(user.split(":")[0]) > 0


def test_what_the_image_copies_is_enough_for_a_wheel(tmp_path):
    copied = [
        name
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored), "left out of the build context"
    for name in copied:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, tmp_path / name, ignore=skip)
        else:
            shutil.copy(source, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", "wheels", "."],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "KVEVICT_CUDA": "0"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "vllm_kvevict.serving.plugin:register" in archive.read(entry).decode()
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / "vllm_kvevict").rglob("*.py")}
    assert ours <= set(names)


def settings(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("file", RAY, ids=lambda file: file.stem)
def test_ray_replicas_finish_their_streams(file):
    """Replicas with a model, and those in front of them."""
    for application in settings(file)["applications"]:
        args = application["args"]
        models = [model["deployment_config"] for model in args["llm_configs"]]
        for deployment in (*models, args["ingress_deployment_config"]):
            assert deployment["graceful_shutdown_timeout_s"] >= 120


@pytest.mark.parametrize("file", RAY, ids=lambda file: file.stem)
def test_ray_files_ask_for_eviction_that_is_valid(file):
    for application in settings(file)["applications"]:
        assert application["import_path"] == "ray_serve:app"
        for model in application["args"]["llm_configs"]:
            asked = model["engine_kwargs"]["additional_config"][CONFIG_KEY]
            config = EvictionConfig.parse(asked)
            assert (config.policy, config.budget) == ("auto", "25%,min=1024")
            assert config.when == "pressure" and config.allow == ("none",)


def test_the_target_of_replicas_follows_from_the_plan(tmp_path, capsys):
    """Three quarters of the sequences that the page's command prints for the file's settings."""
    ((model,),) = (
        application["args"]["llm_configs"]
        for application in settings(DEPLOY / "ray" / "replicas.yaml")["applications"]
    )
    engine = model["engine_kwargs"]
    (command,) = re.findall(
        r"^    vllm-kvevict plan MODEL_CONFIG (.*\\\n.*)$",
        (DEPLOY / "README.md").read_text(),
        re.MULTILINE,
    )
    words = command.replace("\\\n", " ").split()
    write_config("llama-3.1-8b", tmp_path)
    assert plan([str(tmp_path), *words, "--json"]) == 0
    printed = capsys.readouterr().out
    planned = json.loads(printed[printed.index("{\n") :])
    asked = engine["additional_config"][CONFIG_KEY]
    assert {name: planned["eviction"][name] for name in ("budget", "when")} == {
        name: asked[name] for name in ("budget", "when")
    }
    assert planned["model"]["max_model_len"] == engine["max_model_len"]
    target = model["deployment_config"]["autoscaling_config"]["target_ongoing_requests"]
    assert target == int(0.75 * planned["with_eviction"]["sequences"])
    # vLLM would take up to 1,024, of which most would be preempted.
    assert target < engine["max_num_seqs"] <= planned["with_eviction"]["sequences"]
    helm = settings(DEPLOY / "helm" / "values.yaml")["servingEngineSpec"]["modelSpec"][0]
    words = helm["vllmConfig"]["extraArgs"]
    assert words[words.index("--max-num-seqs") + 1] == str(engine["max_num_seqs"])


def test_a_container_keeps_what_it_downloads_and_measures_and_asks_for_a_key():
    dockerfile, page = (DEPLOY / "Dockerfile").read_text(), (DEPLOY / "README.md").read_text()
    commands = re.findall(r"docker run (?:.*\\\n)?.*", dockerfile + page)
    assert len(commands) == 2
    for command in commands:
        assert "-v vllm-kvevict:/home/vllm/.cache" in command and "-e VLLM_API_KEY" in command
        assert "-p 127.0.0.1:" in command
    (home,) = re.findall(r"^ENV HOME=(.*)$", dockerfile, re.MULTILINE)
    # A new volume takes the owner of this folder, which has weights, code and profiles.
    assert f"mkdir -p {home}/.cache && chown -R 2000:0 {home}" in dockerfile


@pytest.mark.parametrize("file", RAY, ids=lambda file: file.stem)
def test_ray_listens_where_something_else_checks_who_asks(file):
    assert settings(file)["http_options"]["host"] == "127.0.0.1"
    assert "**Ray Serve\nchecks no key**" in (DEPLOY / "README.md").read_text()


@pytest.mark.parametrize("file", RAY, ids=lambda file: file.stem)
def test_a_file_without_a_profile_says_what_that_costs(file):
    for application in settings(file)["applications"]:
        for model in application["args"]["llm_configs"]:
            engine = model["engine_kwargs"]
            assert engine["max_num_seqs"] <= 256
            profile = engine["additional_config"][CONFIG_KEY]["profile"]
            assert profile.startswith("/") or "runs ada-defensive" in file.read_text()


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; `make setup` does it")
@pytest.mark.parametrize("file", RAY, ids=lambda file: file.stem)
def test_ray_takes_the_files(file, monkeypatch):
    """Ray's own schema, and the application that it would deploy; no cluster is started."""
    from ray.serve import Application
    from ray.serve.llm import LLMServingArgs
    from ray.serve.schema import ServeDeploySchema

    monkeypatch.syspath_prepend(file.parent)
    from ray_serve import EvictingLLMServer, app

    (application,) = ServeDeploySchema.model_validate(settings(file)).applications
    serving = LLMServingArgs.model_validate(application.args)
    built = app(application.args)
    deployments = [built._bound_deployment]
    for deployment in deployments:
        inner = [*deployment.init_args, *deployment.init_kwargs.values()]
        values = [v for one in inner for v in (one.values() if isinstance(one, dict) else [one])]
        values = [v for one in values for v in (one if isinstance(one, list) else [one])]
        deployments += [v._bound_deployment for v in values if isinstance(v, Application)]
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 120, deployment.name
    assert len(deployments) == 2
    assert EvictingLLMServer.__mro__[1].__name__ == "LLMServer"
    engine = serving.llm_configs[0].get_engine_config()
    workers = engine.tensor_parallel_degree * engine.pipeline_parallel_degree
    assert len(engine.placement_bundles) == workers
    assert engine.get_initialization_kwargs()["distributed_executor_backend"] == "ray"


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; `make setup` does it")
@pytest.mark.parametrize(
    "eviction, says",
    [
        (None, "no model sets engine_kwargs.additional_config.kv_eviction"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"policy": "ada-snapkv", "budgets": 3}, "unknown key 'budgets'"),
    ],
)
def test_ray_applications_that_are_refused(eviction, says, monkeypatch):
    monkeypatch.syspath_prepend(DEPLOY / "ray")
    from ray_serve import app

    args = settings(RAY[0])["applications"][0]["args"]
    args["llm_configs"][0]["engine_kwargs"]["additional_config"] = {CONFIG_KEY: eviction}
    with pytest.raises(ValueError, match=says):
        app(args)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; `make setup` does it")
@pytest.mark.parametrize("file", RAY, ids=lambda file: file.stem)
def test_a_ray_application_is_rolled_back(file, monkeypatch):
    """The policy none, whatever the other settings are: Ray's own server."""
    monkeypatch.syspath_prepend(DEPLOY / "ray")
    import ray_serve

    built: list[Any] = []
    monkeypatch.setattr(ray_serve, "build_openai_app", built.append)
    args = settings(file)["applications"][0]["args"]
    ray_serve.app(args)
    for config in args["llm_configs"]:
        config["engine_kwargs"]["additional_config"][CONFIG_KEY] |= dict(policy="none", budget=-1)
    ray_serve.app(args)
    classes = [{config.server_cls for config in serving.llm_configs} for serving in built]
    assert classes == [{ray_serve.EvictingLLMServer}, {None}]
