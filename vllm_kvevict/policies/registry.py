"""Construction of the policies that a configuration names."""

from importlib import import_module
from importlib.metadata import EntryPoint

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import ADA, POLICIES
from vllm_kvevict.config.plugins import GROUP, PluginPolicy, plugin_policies
from vllm_kvevict.policies.allocators import Adaptive, Uniform
from vllm_kvevict.policies.base import Policy, Scorer


def build_policy(config: EvictionConfig) -> Policy:
    """Return the policy that ``config`` names, with its parameters.

    Raises:
        ValueError: The policy is of another package, and its module does not import, its builder
            returns no scorer, or its requirements are incomplete or not supported.

    """
    name = config.policy
    if name in POLICIES:
        module, summary = POLICIES[name]
        scorer = import_module(module).build(config)
    else:
        plugin = plugin_policies()[name]
        scorer, summary = _load(name, plugin, config), plugin.summary
    if name.startswith(ADA):
        return Policy(name, summary, scorer.per_head(), Adaptive(config.options.floor))
    return Policy(name, summary, scorer, Uniform())


def build_policies(config: EvictionConfig) -> dict[str, Policy]:
    """Return every policy that a request of this server may select, by name."""
    return {
        name: build_policy(config.model_copy(update={"policy": name})) for name in config.policies
    }


def _load(name: str, plugin: PluginPolicy, config: EvictionConfig) -> Scorer:
    where = f"KV eviction: the policy {name} of the package {plugin.package} ({plugin.value})"
    try:
        scorer = EntryPoint(name, plugin.value, GROUP).load()(config)
    except Exception as error:
        raise ValueError(f"{where} does not load: {error!r}") from error
    if not isinstance(scorer, Scorer):
        raise ValueError(f"{where} returns {scorer!r}, which is not a vllm_kvevict Scorer")
    if type(scorer).clear_rows is not Scorer.clear_rows and not scorer.requirements.keeps_state:
        raise ValueError(f"{where} defines clear_rows, so its requirements need keeps_state=True")
    if scorer.requirements.weighs:
        raise ValueError(f"{where} weighs tokens, which is supported for built-in policies only")
    return scorer
