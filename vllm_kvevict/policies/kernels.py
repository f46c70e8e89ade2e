"""Policies that the CUDA kernels compute."""

from collections.abc import Mapping

from vllm_kvevict.policies.base import Policy, Scorer
from vllm_kvevict.policies.defensive import Defensive
from vllm_kvevict.policies.probe import Probe
from vllm_kvevict.policies.snapkv import SnapKV

FLAG = "--kv-eviction-kernels"


def has_kernels(scorer: Scorer) -> bool:
    """Return True if there are CUDA kernels for the scores of a scorer."""
    return isinstance(scorer, SnapKV | Defensive | Probe)


def check_kernels(policies: Mapping[str, Policy], problem: str) -> None:
    """Refuse policies that have CUDA kernels, because the kernels do not run here.

    Args:
        policies: The policies of the server, by name.
        problem: The reason why the kernels do not run.

    Raises:
        ValueError: A policy has kernels; the message says how to build them in one sentence.

    """
    names = [name for name, policy in policies.items() if has_kernels(policy.scorer)]
    if names:
        raise ValueError(
            f"KV eviction does not support {', '.join(names)} without CUDA kernels on this GPU, "
            f"because PyTorch operations take longer: {problem}; set {FLAG} to optional to run "
            "PyTorch operations."
        )
