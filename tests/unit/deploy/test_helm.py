"""Values and filter for vLLM's production-stack chart: flags, streams at a rollout, rights of pods.

The chart itself is rendered where ``helm`` is and KVEVICT_HELM_CHART names its folder.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.serving.plugin import fold_flags

DEPLOY = Path(__file__).parents[3] / "deploy"
VALUES = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text())
ENGINE, ROUTER = VALUES["servingEngineSpec"], VALUES["routerSpec"]
OWN = DEPLOY.parent / ".cache" / "kubectl"
"""Where packaging/setup_kubectl.sh unpacks kubectl and helm."""

PATH = os.pathsep.join([os.environ["PATH"], str(OWN)])
CHART = os.environ.get("KVEVICT_HELM_CHART")
COMPONENT = "app.kubernetes.io/component"
MEMORY = ("limitMemory", "requestMemory")
EXIT_S = 20
"""What is left of the grace period for memory to be given back."""


def arguments(model: dict[str, Any]) -> list[str]:
    """What the chart puts after `vllm serve`, in its order."""
    config = model["vllmConfig"]
    words = [model["modelURL"], "--host", "0.0.0.0", "--port", "8000", "--enable-prefix-caching"]
    words += ["--max-model-len", str(config["maxModelLen"])]
    words += ["--gpu_memory_utilization", str(config["gpuMemoryUtilization"])]
    return [*words, *config["extraArgs"], "--revision", model["modelRevision"]]


@pytest.mark.parametrize("model", ENGINE["modelSpec"], ids=lambda model: model["name"])
def test_vllm_takes_the_flags(model, parser):
    assert all(isinstance(word, str) for word in model["vllmConfig"]["extraArgs"])
    folded = fold_flags(parser.parse_args(arguments(model))).additional_config[CONFIG_KEY]
    config = EvictionConfig.parse(folded)
    assert (config.policy, config.when, config.allow) == ("auto", "pressure", ("none",))
    assert config.budget == "25%,min=1024" and config.audits
    assert config.profile.startswith("/"), "a file: its absence is an error"
    assert re.fullmatch(r"[0-9a-f]{40}", model["modelRevision"])
    assert not model["lmcacheConfig"]["enabled"]


@pytest.mark.parametrize("model", ENGINE["modelSpec"], ids=lambda model: model["name"])
def test_pods_are_bounded_and_budgeted(model):
    limit, request = (int(model[name].removesuffix("Gi")) for name in MEMORY)
    assert limit > request
    for part, replicas in (
        (model, model["keda"]["minReplicaCount"]),
        (ROUTER, ROUTER["replicaCount"]),
    ):
        assert replicas > 1, "with one replica a drained node waits, or takes all"
        assert part["pdb"] == {"enabled": True, "maxUnavailable": 1}


def test_pods_run_as_the_user_of_the_image():
    (user,) = re.findall(r"^USER (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    pod, container = ENGINE["securityContext"], ENGINE["containerSecurityContext"]
    assert f"{pod['runAsUser']}:{pod['runAsGroup']}" == user
    assert pod["runAsNonRoot"] and container["runAsNonRoot"]
    assert not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}


def test_every_pod_drops_its_capabilities():
    for part in (ENGINE, ROUTER):
        assert part["containerSecurityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert part["containerSecurityContext"]["allowPrivilegeEscalation"] is False
        assert part["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_images_have_no_tag_that_moves():
    for part in (*ENGINE["modelSpec"], ROUTER):
        assert part["tag"] not in ("latest", "") and part["repository"]


def extra(kind: str) -> dict[str, Any]:
    (found,) = (one for one in VALUES["extraObjects"] if one["kind"] == kind)
    return found


def test_engines_are_reached_by_routers_and_prometheus():
    spec = extra("NetworkPolicy")["spec"]
    assert spec["podSelector"]["matchLabels"] == {COMPONENT: "serving-engine"}
    (rule,) = spec["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == {COMPONENT: "router"}
    assert rule["ports"] == [{"port": 8000}]
    assert ENGINE["vllmApiKey"]["secretName"] and ENGINE["vllmApiKey"]["secretKey"]


@pytest.mark.parametrize("model", ENGINE["modelSpec"], ids=lambda model: model["name"])
def test_replicas_follow_waiting_requests_and_gaps_between_tokens(model):
    spec = model["keda"]
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    assert "vllm:num_requests_waiting" in queries[0]
    assert "vllm:inter_token_latency_seconds_bucket" in queries[1]
    assert all(f'model_name="{model["modelURL"]}"' in query for query in queries)
    assert not any("usage" in query for query in queries)
    # Without a value of its own kind, KEDA divides the latency by the number of replicas.
    assert [trigger.get("metricType") for trigger in spec["triggers"]] == [None, "Value"]


@pytest.mark.parametrize("model", ENGINE["modelSpec"], ids=lambda model: model["name"])
def test_scaling_survives(model):
    """The chart renders no number of replicas where KEDA has it, and KEDA keeps what it has."""
    spec = model["keda"]
    assert spec["enabled"] and "replicaCount" not in model
    assert 1 < spec["minReplicaCount"] <= spec["maxReplicaCount"]
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert spec["fallback"]["replicas"] == spec["minReplicaCount"]


def rolled_out(replicas: int, gpus: int, surge: int, unavailable: int) -> tuple[bool, int]:
    """Whether a Deployment's rolling update ends, and the fewest replicas that serve meanwhile.

    A new pod is created while there are fewer than ``replicas + surge`` pods, and serves if it has
    a GPU. An old pod leaves while more than ``replicas - unavailable`` serve.
    """
    old, new, serving, fewest = replicas, 0, 0, replicas
    for _ in range(4 * replicas):
        new += max(0, min(replicas - new, replicas + surge - old - new))
        serving = min(new, gpus - old)
        old -= max(0, min(old, old + serving - (replicas - unavailable)))
        fewest = min(fewest, old + serving)
    return old == 0 and serving == replicas, fewest


@pytest.mark.parametrize("model", ENGINE["modelSpec"], ids=lambda model: model["name"])
def test_a_rollout_ends_where_every_gpu_is_taken(model):
    rolling = ENGINE["strategy"]["rollingUpdate"]
    steps = rolling["maxSurge"], rolling["maxUnavailable"]
    least, most = (model["keda"][f"{name}ReplicaCount"] for name in ("min", "max"))
    for replicas in range(least, most + 1):
        assert rolled_out(replicas, replicas, *steps) == (True, replicas - 1)
    # A replica more at first needs another GPU.
    assert rolled_out(most, most, 1, 0) == (False, most)
    assert rolled_out(most, most + 1, 1, 0) == (True, most)


PROGRESS_S = 1200
"""progressDeadlineSeconds of the chart's Deployments."""


@pytest.mark.parametrize("model", ENGINE["modelSpec"], ids=lambda model: model["name"])
def test_a_model_is_downloaded_once_and_in_time(model):
    """Every pod reads one volume. The first has time for the weights before it counts as failed."""
    assert model["pvcAccessMode"] == ["ReadWriteMany"] and model["storageClass"]
    bytes_of_weights = 16.1e9
    room = int(model["pvcStorage"].removesuffix("Gi")) << 30
    assert room > 2 * bytes_of_weights, "a new revision is beside the old one"
    probe = ENGINE["startupProbe"]
    starts = probe["initialDelaySeconds"] + probe["periodSeconds"] * probe["failureThreshold"]
    assert bytes_of_weights / 20e6 + 180 < starts < PROGRESS_S


def test_a_server_that_stalls_leaves_duty_before_it_is_restarted():
    def patience(probe: dict[str, Any]) -> int:
        return probe["periodSeconds"] * probe["failureThreshold"]

    assert patience(ENGINE["readinessProbe"]) <= 15 < 60 <= patience(ENGINE["livenessProbe"])
    probes = [ENGINE[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all(probe["httpGet"] == {"path": "/health", "port": 8000} for probe in probes)


def check_streams_end_in_peace(deployment: dict[str, Any]) -> None:
    """A pod is told to end, is sent nothing more, drains, and has time to give memory back."""
    pod = deployment["spec"]["template"]["spec"]
    waits = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    words = VALUES["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"]
    drains = int(words[words.index("--shutdown-timeout") + 1])
    assert waits >= 5 and drains >= 60
    assert pod["terminationGracePeriodSeconds"] >= waits + drains + EXIT_S


def drained(manifests: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [DEPLOY / "helm" / "drain.sh"], input=manifests, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PATH": PATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def manifest(kind: str, component: str, spec: dict[str, Any]) -> dict[str, Any]:
    about = {"name": f"{component}-{kind.lower()}", "labels": {COMPONENT: component}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": about, "spec": spec}


@pytest.mark.skipif(
    shutil.which("kubectl", path=PATH) is None,
    reason="kubectl is not here; packaging/setup_kubectl.sh unpacks it",
)
def test_the_filter_gives_engines_and_routers_time():
    def pod(name: str) -> dict[str, Any]:
        return {"template": {"spec": {"containers": [{"name": name, "image": "i"}]}}}

    names = ("serving-engine", "router", "cache-server")
    given = [manifest("Deployment", name, pod(name)) for name in names]
    given.append(manifest("Service", "router", {"ports": [{"port": 80}]}))
    found = {one["metadata"]["name"]: one for one in drained(yaml.safe_dump_all(given))}
    assert len(found) == len(given)
    for name in names[:2]:
        check_streams_end_in_peace(found[f"{name}-deployment"])
        pod = found[f"{name}-deployment"]["spec"]["template"]["spec"]
        (spread,) = pod["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == {COMPONENT: name}
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        # Routers find engines by the cluster's API.
        assert pod.get("automountServiceAccountToken", True) == (name == "router")
    for one in given[2:]:
        assert found[one["metadata"]["name"]] == one


@pytest.mark.skipif(
    CHART is None or not all(shutil.which(name, path=PATH) for name in ("helm", "kubectl")),
    reason="needs helm, kubectl and KVEVICT_HELM_CHART, the folder of production-stack's chart",
)
def test_the_chart_takes_the_values():
    helm = shutil.which("helm", path=PATH)
    command = [str(helm), "template", "vllm", str(CHART), "-f", DEPLOY / "helm" / "values.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made = [one for one in drained(done.stdout) if one]
    parts: dict[str, Any] = {
        one["metadata"]["labels"][COMPONENT]: one for one in made if one["kind"] == "Deployment"
    }
    engine = parts["serving-engine"]["spec"]
    assert "replicas" not in engine and engine["strategy"] == ENGINE["strategy"]
    assert engine["progressDeadlineSeconds"] == PROGRESS_S
    for part in ("serving-engine", "router"):
        check_streams_end_in_peace(parts[part])
    pod = parts["serving-engine"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (model,) = ENGINE["modelSpec"]
    assert container["command"] == ["vllm", "serve", *arguments(model)]
    assert pod["securityContext"] == ENGINE["securityContext"]
    assert container["securityContext"] == ENGINE["containerSecurityContext"]
    assert container["resources"]["limits"]["memory"] == model["limitMemory"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe].items() >= ENGINE[probe].items()
    assert sum(one["kind"] == "PodDisruptionBudget" for one in made) == 2
    kinds = {one["kind"]: one for one in made}
    assert kinds.keys() >= {"ServiceMonitor", "NetworkPolicy"}
    scaled = kinds["ScaledObject"]["spec"]
    assert scaled.pop("scaleTargetRef")["name"] == parts["serving-engine"]["metadata"]["name"]
    assert scaled == {name: value for name, value in model["keda"].items() if name != "enabled"}
    # The cache of models is on the volume.
    (home,) = (one["value"] for one in container["env"] if one["name"] == "HF_HOME")
    (mount,) = (one for one in container["volumeMounts"] if one["mountPath"] == home)
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
    claim = kinds["PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == model["pvcAccessMode"]


@pytest.mark.skipif(CHART is None, reason="needs KVEVICT_HELM_CHART")
def test_the_charts_schema_takes_the_values():
    import jsonschema

    schema = json.loads((Path(str(CHART)) / "values.schema.json").read_text())
    errors = jsonschema.Draft7Validator(schema).iter_errors(VALUES)
    # Its template and its README take a list of triggers; the schema, which is not in the package,
    # says "object".
    paths = [list(error.absolute_path) for error in errors]
    assert paths == [["servingEngineSpec", "modelSpec", 0, "keda", "triggers"]]
