"""Policies by name. A new policy is one file beside this one and one line here.

The table holds strings, so that reading the valid names imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvevict.config import EvictionConfig
    from vllm_kvevict.policies.base import Policy

POLICIES: dict[str, tuple[str, str]] = {
    # name: (module whose build(config) makes it, one line for --help)
    "ada-snapkv": ("ada_snapkv", "SnapKV scores; the heads of a layer share the budget (Ada-KV)"),
    "snapkv": ("snapkv", "attention of the last queries, the same budget for every head"),
    "streaming-llm": ("streaming_llm", "the first tokens and the most recent ones"),
}
POLICY_NAMES = tuple(POLICIES)


def build_policy(config: "EvictionConfig") -> "Policy":
    """The policy that ``config`` names, with its parameters filled in."""
    module, summary = POLICIES[config.policy]
    scorer, allocator = import_module(f"vllm_kvevict.policies.{module}").build(config)
    from vllm_kvevict.policies.base import Policy

    return Policy(config.policy, summary, scorer, allocator)


def build_policies(config: "EvictionConfig") -> dict[str, "Policy"]:
    """Every policy that a request of this server may run under, by name."""
    return {
        name: build_policy(config.model_copy(update={"policy": name})) for name in config.policies
    }
