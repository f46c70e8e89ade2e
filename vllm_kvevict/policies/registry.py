"""Policies built from a configuration, which names them."""

from importlib import import_module

from vllm_kvevict.policies.allocators import Adaptive, Uniform
from vllm_kvevict.policies.base import Policy
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.names import ADA, POLICIES


def build_policy(config: EvictionConfig) -> Policy:
    """The policy that ``config`` names, with its parameters filled in."""
    module, summary = POLICIES[config.policy]
    scorer = import_module(f"vllm_kvevict.policies.{module}").build(config)
    if config.policy.startswith(ADA):
        return Policy(config.policy, summary, scorer.per_head(), Adaptive(config.floor))
    return Policy(config.policy, summary, scorer, Uniform())


def build_policies(config: EvictionConfig) -> dict[str, Policy]:
    """Every policy that a request of this server may run under, by name."""
    return {
        name: build_policy(config.model_copy(update={"policy": name})) for name in config.policies
    }
