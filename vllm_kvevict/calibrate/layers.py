"""The layers of a model in a worker, with calibrate's attention instead of vLLM's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention

from vllm_kvevict.calibrate.attend import Kind, apply, of_prompt, weights_behind
from vllm_kvevict.calibrate.regression import KERNEL
from vllm_kvevict.ops.torch.buffers import Buffers
from vllm_kvevict.ops.torch.defensive import highest_sums


@dataclass
class Context:
    """The context in one layer: keys [H, n, D], values [H, n, V], and its last queries.

    Queries are [H, G, w, D]. Entries of a latent cache are keys of one head, their latents its
    values; queries are as they meet them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor


@dataclass
class Pass:
    """The work of attention in one forward pass.

    Args:
        rows: Rows of text after the context; 0 for the context itself, which is recorded.
        lengths: Lengths of the texts in each row, each of which follows the context alone; None for
            one text.
        keep: [R, H, n] bool of single layers, by name: what the rows see of the context.
        most: By name, [H, n]: the highest attention that a query gave each token, averaged over
            neighbours; filled if it is not None.
        single: The same, not averaged; filled with it.

    """

    rows: int = 0
    lengths: Sequence[int] | None = None
    keep: dict[str, torch.Tensor] = field(default_factory=dict)
    most: dict[str, torch.Tensor] | None = None
    single: dict[str, torch.Tensor] = field(default_factory=dict)


class Layers:
    """Attention layers that calibrate computes.

    Args:
        attentions: vLLM's attention layers, by name, in the order in which they run.
        evictable: Names of those that evict.
        window: Last queries of a context that are held.

    """

    def __init__(self, attentions: dict[str, Any], evictable: list[str], window: int) -> None:
        self.attentions = attentions
        self.evictable = evictable
        self.window = window
        self.context: dict[str, Context] = {}
        self.rotated: dict[str, bool] = {}
        self._pass = Pass()
        self._turned = False
        self._own: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, layer in attentions.items():
            latent = isinstance(layer, MLAAttention)
            layer.forward = self._latent(name, layer) if latent else self._forward(name, layer)

    def watch(self, rotary: Any) -> None:
        """Note when a rotary module has run: the next attention gets rotated keys."""
        rotary.register_forward_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._turned = True

    @contextmanager
    def doing(self, what: Pass) -> Iterator[Pass]:
        """Forward passes inside do ``what``."""
        self._pass = what
        try:
            yield what
        finally:
            self._pass = Pass()

    @property
    def lengths(self) -> Sequence[int] | None:
        """Lengths of the texts in a row of the pass; None for one text."""
        return self._pass.lengths

    def kind(self, name: str) -> Kind:
        """Return scale, soft cap, window and sinks of a layer's attention."""
        layer = self.attentions[name]
        sinks = getattr(layer.impl, "sinks", None)
        return Kind(
            float(layer.impl.scale),
            float(getattr(layer.impl, "logits_soft_cap", None) or 0.0),
            getattr(layer, "sliding_window", None),
            None if sinks is None else sinks.detach().float().view(layer.num_kv_heads, -1),
        )

    def _forward(self, name: str, layer: Any) -> Any:
        heads, size = layer.num_kv_heads, layer.head_size
        group = layer.num_heads // heads
        kind = self.kind(name)
        shared = getattr(layer, "kv_sharing_target_layer_name", None)

        def forward(
            query: torch.Tensor, key: Any, value: Any, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            self.rotated[name], self._turned = self._turned, False
            rows = max(self._pass.rows, 1)
            q = query.view(rows, -1, heads, group, size).permute(0, 2, 3, 1, 4)
            if shared is None:
                k, v = (x.view(rows, -1, heads, size).transpose(1, 2) for x in (key, value))
                self._own[name] = k, v
            else:
                k, v = self._own[shared]
            out = self._attend(name, kind, q, k, v)
            return out.permute(0, 3, 1, 2, 4).reshape(len(query), -1).to(query.dtype)

        return forward

    def _latent(self, name: str, layer: Any) -> Any:
        heads, rank, pe = layer.num_heads, layer.kv_lora_rank, layer.qk_rope_head_dim
        kind = self.kind(name)

        def forward(
            q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, *args: Any, **more: Any
        ) -> torch.Tensor:
            self.rotated[name], self._turned = self._turned, False
            rows = max(self._pass.rows, 1)
            k = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=-1).view(rows, 1, -1, rank + pe)
            nope, turned = q.split([layer.qk_nope_head_dim, pe], dim=-1)
            met = torch.bmm(nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
            met = torch.cat([met, turned], dim=-1).view(rows, 1, -1, heads, rank + pe)
            out = self._attend(name, kind, met.transpose(2, 3), k, k[..., :rank])
            out = out.permute(0, 3, 1, 2, 4).reshape(len(q), heads, rank).to(q.dtype)
            return torch.bmm(out.transpose(0, 1), layer.W_UV).transpose(0, 1).flatten(1)

        return forward

    def _attend(
        self, name: str, kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if not self._pass.rows:
            queries = q[0, :, :, -self.window :].float()
            self.context[name] = Context(k[0].float(), v[0].float(), queries)
            return of_prompt(q[0], k[0], v[0], kind)[None]
        context = self.context[name]
        keep = self._pass.keep.get(name)
        weights = weights_behind(q, context.keys, k, kind, keep, self._pass.lengths)
        if self._pass.most is not None and name in self.evictable:
            given = weights[0, ..., : context.keys.shape[1]].flatten(1, 2)
            self._pass.single[name] = given.amax(1)
            self._pass.most[name] = highest_sums(given, KERNEL, Buffers()) / KERNEL
        return apply(weights, context.values, v)
