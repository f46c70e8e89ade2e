"""Every policy that is offered runs on GPUs as well."""

from pkgutil import resolve_name

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import LEARNED, POLICIES
from vllm_kvevict.policies.requirements import policy_requirements


def test_every_extension_of_attention_serves_gpus() -> None:
    named = {
        name: policy_requirements(EvictionConfig(policy=name))[name].attention
        for name in set(POLICIES) - LEARNED
    }
    extended = {name: resolve_name(attention) for name, attention in named.items() if attention}
    assert extended.keys() == {"h2o", "ada-h2o", "subgen-stream"}
    assert all(extension.serves_gpus for extension in extended.values())
