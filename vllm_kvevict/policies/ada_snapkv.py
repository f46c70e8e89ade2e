"""Ada-SnapKV: SnapKV's scores, and the heads of a layer share the budget (Ada-KV Algorithm 2)."""

from typing import TYPE_CHECKING

from vllm_kvevict.policies.allocators import Adaptive
from vllm_kvevict.policies.base import Allocator, Scorer
from vllm_kvevict.policies.snapkv import SnapKV

if TYPE_CHECKING:
    from vllm_kvevict.config import EvictionConfig


def build(config: "EvictionConfig") -> tuple[Scorer, Allocator]:
    """Scorer and allocator of the policy ``ada-snapkv``."""
    return SnapKV(config.pool_kernel, config.pool), Adaptive(config.floor)
