"""What is kept where a policy of another package fails: protected tokens, then the most recent.

Nothing can be skipped by then. The scheduler has planned the step, and it frees the blocks that the
eviction replaces whatever the worker does; the next step is already scheduled over the store. So
the store is filled all the same, with what needs no scores. How many blocks it has depends on
lengths alone, and each rank chooses for its own heads, so ranks need not agree on a failure. The
one exception is a scorer that averages over ranks: a rank that fails leaves the others waiting
inside the collective, and the engine ends, as before.
"""

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.reference.select import select_tokens
from vllm_kvevict.policies.allocators import Adaptive
from vllm_kvevict.policies.base import Policy, Scorer, WeightedScorer, protect
from vllm_kvevict.worker.ranks import mean_of_ranks

logger = init_logger("vllm.kv_eviction.worker")

OURS = "vllm_kvevict"


def replaceable(scorer: Scorer) -> bool:
    """Whether an eviction goes on where this scorer fails."""
    foreign = type(scorer).__module__.partition(".")[0] != OURS
    alone = get_tensor_model_parallel_world_size() == 1 or not scorer.crosses_ranks
    # Attention would read weights that nobody has computed.
    return foreign and alone and not isinstance(scorer, WeightedScorer)


def checked(scores: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Scores of their shape.

    Raises:
        ValueError: They are of another.

    """
    shape = candidates.num_heads, candidates.num_candidates
    if scores.shape != shape:
        raise ValueError(f"scores must be of shape {shape}, not {tuple(scores.shape)}")
    return scores


def mean_for(scorer: Scorer, tensor: torch.Tensor) -> torch.Tensor:
    """:func:`mean_of_ranks` as a scorer may call it.

    Raises:
        RuntimeError: There are several ranks, and the scorer has not said that it crosses them.

    """
    if not scorer.crosses_ranks and get_tensor_model_parallel_world_size() > 1:
        raise RuntimeError("a scorer that calls mean_of_ranks must set crosses_ranks = True")
    return mean_of_ranks(tensor)


def recent(
    padding: torch.Tensor,
    candidate_pages: int,
    store_blocks: int,
    block_size: int,
    protect_first: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the protected and the most recent tokens, as many of each head where it has as many.

    Args:
        padding: [L, H] int64 pages of padding before each head's candidates.
        candidate_pages: Pages of candidates, padding included.
        store_blocks: S.
        block_size: Tokens in a page.
        protect_first: Tokens at the start that stay.

    Returns:
        Scores [L, H, N] float32, pages [L, H] int64 and columns [L, S * H * block_size] int64, as
        allocators and :func:`~vllm_kvevict.ops.reference.select.select_tokens` have them.

    """
    place = torch.arange(candidate_pages * block_size, device=padding.device)
    valid = place >= (padding * block_size)[..., None]
    scores = place.float().expand(valid.shape).masked_fill(~valid, -torch.inf)
    scores = protect(scores, valid, protect_first)
    pages = Adaptive().pages(scores, candidate_pages - padding, store_blocks, block_size)
    return scores, pages, select_tokens(scores, pages, block_size)


class Failures:
    """Failures of policies: each is counted, and the first of each policy logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, policy: Policy, error: Exception) -> None:
        """Log a failure, where it is the first of its policy in this process."""
        if policy.name not in self._logged:
            self._logged.add(policy.name)
            logger.error(
                "KV eviction: policy %s failed; its evictions keep the most recent tokens where it "
                "fails, and this is logged once",
                policy.name,
                exc_info=error,
            )
