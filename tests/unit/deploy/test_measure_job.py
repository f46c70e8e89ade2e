"""The CronJob that measures a canary: the parser takes its command, and its pod is bounded."""

from pathlib import Path

import yaml

from vllm_kvevict.tools.measure.__main__ import _check, _parser

DEPLOY = Path(__file__).parents[3] / "deploy"
JOB = yaml.safe_load((DEPLOY / "measure.yaml").read_text())
POD = JOB["spec"]["jobTemplate"]["spec"]["template"]
VALUES = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text())


def test_the_command_is_measures_own():
    (container,) = POD["spec"]["containers"]
    name, command, *words = container["command"]
    assert (name, command) == ("vllm-kvevict", "measure")
    options = _parser().parse_args(words)
    _check(options)
    assert options.push and options.recorded.is_relative_to(
        container["volumeMounts"][0]["mountPath"]
    )
    assert JOB["kind"] == "CronJob" and JOB["spec"]["concurrencyPolicy"] == "Forbid"
    secret = container["env"][0]["valueFrom"]["secretKeyRef"]
    engines = VALUES["servingEngineSpec"]["vllmApiKey"]
    assert (secret["name"], secret["key"]) == (engines["secretName"], engines["secretKey"])


def test_engines_let_its_pod_in():
    (policy,) = (one for one in VALUES["extraObjects"] if one["kind"] == "NetworkPolicy")
    allowed = [
        one.get("podSelector", {}).get("matchLabels")
        for one in policy["spec"]["ingress"][0]["from"]
    ]
    assert POD["metadata"]["labels"] in allowed


def test_its_pod_has_no_rights():
    (container,) = POD["spec"]["containers"]
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert not POD["spec"]["automountServiceAccountToken"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"]
    assert container["image"].rpartition(":")[2] not in ("", "latest")
