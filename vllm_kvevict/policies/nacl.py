"""NACL: the best tokens by the attention of proxy tokens, and a random sample of the others."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvevict.ops.torch.sample import digest, gumbel
from vllm_kvevict.ops.torch.score import window_attention
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig

CHOSEN = 1e6
"""Score above all perturbed scores: Gumbel draws are below 40, sums of weights below the window."""


@dataclass(frozen=True)
class NACL(Scorer):
    """NACL (arXiv:2408.03675), Algorithm 1, lines 7 to 11.

    Proxy tokens are the tokens of the observation window, all of which are protected. The F_score
    of a token is the sum of its softmax weights over the proxies, averaged over the query heads of
    a KV head (the paper has one query head per KV head). Of the K tokens that a head keeps, the
    best ``K - round(random_share * K)`` are u_score. The others, u_random, are drawn without
    replacement from Softmax(F_score) over the tokens outside u_score, independently for every
    head, so the two sets never overlap and the budget is used in full.

    Args:
        random_share: C_r / (C_p + C_r), in [0, 1]. Table 4 has 7/9, 12/18 and 18/28.5 at
            budgets of 10, 20 and 30 % of the prompt.
        seed: Seed of the draws, together with :attr:`Candidates.seed`, layer and head.

    """

    requirements: ClassVar[Requirements] = Requirements(random=True, layers_alone=True)

    random_share: float = 0.67
    seed: int = 0

    def scores(self, candidates: Candidates) -> torch.Tensor:
        columns = candidates.num_candidates
        valid = candidates.valid[:, :columns]
        f_score = window_attention(candidates)[:, :columns] * candidates.window
        f_score = f_score.masked_fill(~valid, float("-inf"))
        scores = f_score + self._noise(candidates, valid)
        best = candidates.keep - round(self.random_share * candidates.keep)
        u_score = f_score.argsort(dim=-1, descending=True, stable=True)[:, :best]
        rank = torch.arange(best, 0, -1, dtype=scores.dtype, device=scores.device)
        scores = scores.scatter(-1, u_score, (CHOSEN + rank).expand(len(scores), -1))
        return scores.masked_fill(~valid, float("-inf"))

    def _noise(self, candidates: Candidates, valid: torch.Tensor) -> torch.Tensor:
        """Return draws [H, num_candidates] float32; draw i of a head belongs to its token i."""
        heads, columns = valid.shape
        layers = candidates.layers or (candidates.layer,)
        noise = torch.empty(heads, columns, dtype=torch.float32, device="cpu")
        own = heads // len(layers)
        for index in range(heads):
            layer, head = layers[index // own], candidates.first_head + index % own
            noise[index] = gumbel(digest((self.seed, *candidates.seed, layer, head)), columns)
        noise = async_tensor_h2d(noise, device=valid.device)
        if not candidates.padded:
            return noise
        # The host does not know how many columns are padding, and would wait for the number.
        padding = columns - valid.sum(-1, keepdim=True)
        token = torch.arange(columns, device=valid.device) - padding
        return noise.gather(-1, token.clamp_(min=0))


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policy ``nacl``."""
    return NACL(config.options.random_share, config.options.seed)
