"""Which KV connectors are served beside eviction, and what start-up says of the others."""

from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.unit.serving.configurations import NGRAM, Build, assert_sentence, build, refusal
from vllm_kvevict.config.connectors import DUMMY, LOADING, NIXL, SAVING, connector_names
from vllm_kvevict.config.profile import ModelIdentity, Profile
from vllm_kvevict.serving.connectors import BESIDE_SAVED, BESIDE_TRANSFERS, SERVED
from vllm_kvevict.serving.offload import CONNECTOR as OFFLOAD
from vllm_kvevict.serving.offload import OURS

__all__ = ["build"]

MODEL = ModelIdentity(architecture="LlamaForCausalLM", layers=2, kv_heads=1, config="any")
REFUSED = (
    "ExampleHiddenStatesConnector",
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "MoRIIOConnector",
    "MooncakeStoreConnector",
    "SimpleCPUOffloadConnector",
)


def transfer(**given: Any) -> dict[str, Any]:
    settings = dict(kv_connector=DUMMY, kv_role="kv_both") | given
    return dict(kv_transfer_config=KVTransferConfig(**settings))


def eviction(**given: Any) -> dict[str, Any]:
    return dict(additional_config={"kv_eviction": dict(policy="ada-snapkv") | given})


def test_load_tests_are_served(build: Build) -> None:
    config = build(**transfer())
    assert config.scheduler_config.scheduler_cls.startswith("vllm_kvevict.engine.scheduler")
    assert build(**transfer(), enable_prefix_caching=False).kv_transfer_config is not None


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(build: Build, name: str) -> None:
    message = refusal(build, **transfer(kv_connector=name))
    assert_sentence(message)
    assert "this KV connector" in message and ", ".join(SERVED) in message


def test_a_connector_of_another_module_is_refused(build: Build) -> None:
    module = "vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector"
    message = refusal(build, **transfer(kv_connector_module_path=module))
    assert "without kv_connector_module_path" in message


@pytest.mark.parametrize(
    ("options", "what", "advice"),
    [
        (eviction(policy="h2o"), "h2o, ada-h2o and subgen-stream", "--kv-eviction-allow"),
        (eviction(allow="ada-h2o"), "h2o, ada-h2o and subgen-stream", "--kv-eviction-allow"),
        (eviction(policy="subgen-stream"), "h2o, ada-h2o and subgen-stream", "another policy"),
        (
            eviction(prefill_interval=128),
            "--kv-eviction-prefill-interval",
            "remove the flag",
        ),
        (eviction(every=128), "--kv-eviction-every", "remove the flag"),
        (eviction(store_memory="1G"), "--kv-eviction-store-memory", "remove these flags"),
        (eviction(audit="1%"), "--kv-eviction-audit", "remove the flag"),
        (dict(speculative_config=NGRAM), "speculative decoding", "--speculative-config"),
        (dict(pipeline_parallel_size=2), "pipeline parallelism", "--pipeline-parallel-size"),
    ],
)
def test_beside_loads(build: Build, options: Any, what: str, advice: str) -> None:
    message = refusal(build, **transfer(), **options)
    assert_sentence(message)
    assert what in message.split(", because ")[0] and advice in message.split("; ")[-1]
    assert DUMMY in message


def test_layers_that_do_not_evict_are_refused(build: Build) -> None:
    message = refusal(build, "Gemma3ForCausalLM", **transfer())
    assert_sentence(message)
    assert "models with layers that do not evict" in message


def test_latent_caches_are_refused(build: Build) -> None:
    options = eviction(policy="snapkv")
    message = refusal(build, "DeepseekV2ForCausalLM", **transfer(), **options)
    assert_sentence(message)
    assert "MLA models" in message


def nixl(**given: Any) -> dict[str, Any]:
    return transfer(**dict(kv_connector="NixlConnector", kv_role="kv_consumer") | given)


@pytest.mark.parametrize("name", NIXL)
@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
def test_transfers_are_served_in_every_role(build: Build, name: str, role: str) -> None:
    config = build(**nixl(kv_connector=name, kv_role=role))
    assert config.scheduler_config.scheduler_cls.startswith("vllm_kvevict.engine.scheduler")


@pytest.mark.parametrize(
    ("options", "what", "advice"),
    [
        (
            nixl(kv_connector_extra_config=dict(bidirectional_kv_xfer=True)),
            "bidirectional_kv_xfer",
            "kv_connector_extra_config",
        ),
        (nixl(enable_permute_local_kv=True), "enable_permute_local_kv", "--kv-transfer-config"),
        (nixl() | eviction(policy="ada-pyramid"), "groups of layers", "set groups"),
        (nixl() | eviction(policy="h2o"), "h2o", "another policy"),
        (nixl() | dict(speculative_config=NGRAM), "speculative decoding", "--speculative-config"),
    ],
)
def test_beside_transfers(build: Build, options: Any, what: str, advice: str) -> None:
    message = refusal(build, **options)
    assert_sentence(message)
    assert what in message.split(", because ")[0] and advice in message.split("; ")[-1]
    assert "NixlConnector" in message


@pytest.mark.parametrize("name", SAVING)
def test_beside_saved_prompts(build: Build, name: str) -> None:
    assert build(**transfer(kv_connector=name)).kv_transfer_config is not None
    message = refusal(build, **transfer(kv_connector=name, kv_load_failure_policy="recompute"))
    assert_sentence(message)
    assert "set it to fail" in message
    message = refusal(build, **transfer(kv_connector=name), **eviction(policy="ada-pyramid"))
    assert "groups of layers" in message


def both(*names: str, **given: Any) -> dict[str, Any]:
    """A ``MultiConnector`` with these connectors; the settings are those of the first."""
    connectors: list[dict[str, Any]] = [dict(kv_connector=n, kv_role="kv_both") for n in names]
    connectors[0] |= given
    extra = dict(connectors=connectors)
    return transfer(kv_connector="MultiConnector", kv_connector_extra_config=extra)


def test_the_offload_beside_transfers(build: Build) -> None:
    config = build(**both("NixlConnector", OFFLOAD))
    assert connector_names(config.kv_transfer_config) == ("NixlConnector", OFFLOAD)
    (_, offload) = config.kv_transfer_config.kv_connector_extra_config["connectors"]
    assert offload["kv_connector_extra_config"] == OURS, "copies for a CPU"


@pytest.mark.parametrize(
    "names",
    [
        (OFFLOAD, "NixlConnector"),
        ("NixlConnector",),
        ("NixlConnector", DUMMY),
        ("NixlConnector", "NixlConnector"),
        ("NixlPullConnector", "NixlPushConnector"),
        ("NixlConnector", OFFLOAD, OFFLOAD),
        ("MooncakeConnector", OFFLOAD),
    ],
)
def test_other_combinations_are_refused(build: Build, names: tuple[str, ...]) -> None:
    message = refusal(build, **both(*names))
    assert_sentence(message)
    assert "these connectors in MultiConnector" in message
    assert "NixlPushConnector, followed by OffloadingConnector" in message


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (both("NixlConnector", OFFLOAD) | eviction(policy="h2o"), "h2o"),
        (both("NixlConnector", OFFLOAD) | eviction(policy="ada-pyramid"), "groups of layers"),
        (both("NixlConnector", OFFLOAD, enable_permute_local_kv=True), "enable_permute_local_kv"),
        (both("NixlConnector", OFFLOAD) | dict(enable_prefix_caching=False), "prefix caching"),
        (
            both("NixlConnector", OFFLOAD) | dict(scheduler_reserve_full_isl=False),
            "--no-scheduler-reserve-full-isl",
        ),
    ],
)
def test_each_connector_of_both_is_checked(build: Build, options: Any, what: str) -> None:
    message = refusal(build, **options)
    assert_sentence(message)
    assert what in message


def test_a_profile_has_one_group_beside_transfers(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str, vllm_config: Any) -> Profile:
        return Profile(model=MODEL, policy="ada-snapkv", budget="25%", layers=(1.5, 0.5))

    monkeypatch.setattr("vllm_kvevict.serving.activate.load", load)
    profiled = eviction(profile="some.json")
    config = build(**nixl(), **profiled)
    settings = config.additional_config["kv_eviction"]
    assert settings["options"] == {"groups": 1} and settings["profile"]["layers"] == [1.5, 0.5]
    assert "groups" not in build(**profiled).additional_config["kv_eviction"]["options"]
    two = eviction(profile="some.json", options=dict(groups=2))
    assert "set groups in --kv-eviction-options to 1" in refusal(build, **nixl(), **two)


def test_every_refusal_is_a_sentence() -> None:
    for one in (*BESIDE_TRANSFERS, *BESIDE_SAVED):
        for name in LOADING:
            assert_sentence(one.sentence(name))
