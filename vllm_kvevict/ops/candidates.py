"""Input of scorers: the cached tokens of one request in one layer at an eviction.

A scorer that requires ``heads_alone`` or ``layers_alone`` may get the heads of several layers.

Shapes: H KV heads, G query heads per KV head, w observation window, D head size, N columns
of the candidate grid. A grid row holds one head's cached tokens in order, right-aligned, so
that heads with fewer cached tokens are padded on the left. There ``valid`` is False, and every
other input is 0: a sum over columns is that of the head's tokens, but a mean must divide by
``valid.sum(-1)``, not by the number of columns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_kvevict.ops.torch.buffers import Buffers


@dataclass(frozen=True)
class Candidates:
    """One layer of one request at an eviction.

    Args:
        keys: [H, N + w + r, D] in the cache's dtype, float32 for an FP8 cache: keys of all cached
            tokens as attention reads them, rotated by their position in the request, or [H, 0, D]
            for a policy that does not require keys. From the second eviction on, the keys of
            evicted tokens are missing. The last w columns are the observation window; the first
            ``num_candidates`` columns may be evicted; the r columns between them are kept and fill
            the last block before the window. If a policy protects fewer tokens than w, candidates
            extend into the window.
        valid: [H, N + w + r] bool: False on the padding at the left.
        queries: [H, G, w, D] float32: queries of the last w tokens, or None if the policy requires
            none, or if they are optional for the policy and were not recorded.
        window: w, number of queries in the observation window.
        num_candidates: Columns that may be evicted; a multiple of the block size.
        scale: Softmax scale of the model's attention.
        softcap: Logit soft cap of the model's attention, 0 for none.
        mean_of_ranks: Averages a tensor over the tensor-parallel ranks, which hold the other
            heads of the layer. All ranks get the same result.
        keep: Tokens that each head keeps of the candidates, if all heads keep the same number.
        seed: Numbers that identify this eviction, the same on every rank and in every run, for
            policies that draw random numbers.
        layer: Number that identifies the layer, the same on every rank, for policies that draw
            random numbers.
        layers: Numbers of the layers whose heads these are, layer by layer, each with H divided by
            the number of layers; for policies that require ``layers_alone``. Empty for one layer.
        num_tokens: Tokens of the request so far, evicted ones included. Those that were added since
            another eviction, at which it was smaller, are in the last columns of every head.
        state_row: :attr:`row`, or None for a policy that does not require ``keeps_state``.
        layer_name: Name of the layer on this rank.
        first_head: Index of this rank's first KV head in the layer.
        accumulated: [H, N + w + r] float32: softmax weight of each cached token, summed over all
            queries so far and averaged over the query heads of a group. None for a policy that does
            not require ``every_query``.
        values: [H, N + w + r, D] float32: values of all cached tokens, or None for a
            policy that does not require them.
        value_shares: [H, N + w + r] float32: each head's share of the norms that a token's values
            had in all heads of the layer (``ops/torch/value_shares.py``). None for a policy that
            does not require them.
        key_scores: [H, num_candidates, C] float32: scores of each token's key by the probes of the
            model's profile: from the key alone, and (C = 2) from the key and the head's share of
            the token's value norms. They are computed once for each token (``ops/torch/probe.py``).
            None for a policy that does not require them.
        window_weights: [H] float32: weight of the logarithm of the window's attention that is added
            to the second of the ``key_scores``; None without a second score.
        protected: Number of first tokens that are kept regardless of the scores.
        sinks: [H, G] float32: attention sinks of the query heads, None if the layer has none.
        padded: False if ``valid`` is known to be True everywhere. The host of a GPU would wait for
            the GPU to look.
        buffers: Memory for intermediate results.

    """

    keys: torch.Tensor
    valid: torch.Tensor
    queries: torch.Tensor | None
    window: int
    num_candidates: int
    scale: float
    softcap: float = 0.0
    mean_of_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    keep: int = 0
    seed: tuple[int, ...] = ()
    layer: int = 0
    layers: tuple[int, ...] = ()
    num_tokens: int = 0
    state_row: int | None = None
    layer_name: str = ""
    first_head: int = 0
    accumulated: torch.Tensor | None = None
    values: torch.Tensor | None = None
    value_shares: torch.Tensor | None = None
    key_scores: torch.Tensor | None = None
    window_weights: torch.Tensor | None = None
    protected: int = 0
    sinks: torch.Tensor | None = None
    padded: bool = True
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def row(self) -> int:
        """Number that identifies the request on this rank until :meth:`Scorer.clear_rows`.

        Raises:
            ValueError: The policy does not require ``keeps_state``.

        """
        if self.state_row is None:
            raise ValueError("a policy that reads the row of a request must require keeps_state")
        return self.state_row

    @property
    def num_heads(self) -> int:
        """H, of all layers together."""
        return self.valid.shape[0]

    @property
    def num_layers(self) -> int:
        """Number of layers whose heads these are."""
        return len(self.layers) or 1
