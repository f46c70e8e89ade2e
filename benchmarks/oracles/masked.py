"""The token oracle: transformers with each head's kept positions as an attention mask.

It shares no code with the package: it only reads which positions an eviction kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Kept:
    """An eviction at length ``n``: from then on head h of layer l sees ``positions[l][h]``
    and everything from ``tail_start`` on. ``weights[l][h]`` are the log-weights of these
    positions in the numerator and the denominator, None where each counts for itself. None for a
    layer that this eviction left alone."""

    n: int
    tail_start: int
    positions: list[list[list[int]] | None]
    weights: list[list[list[list[float]]]] | None = None


@dataclass
class Life:
    """A request from one admission to its finish or preemption.

    ``prefill_end`` tokens were prefilled, those before the first eviction with full attention;
    later ones were decoded.
    """

    prefill_end: int
    evictions: list[Kept] = field(default_factory=list)

    @property
    def full(self) -> int:
        """Tokens that saw everything before them."""
        return min([self.prefill_end, *(eviction.n for eviction in self.evictions)])


def two_biases(module, query, key, value, attention_mask, scaling, **kwargs):
    """transformers' eager attention with a bias [1, heads, q, n] on the products, or with two,
    [2, heads, q, n]: of the sum of values, and of the sum of weights that divides it.

    If ``module.in_store`` [q, n] is not None, it is True where a query sees a token as
    ``module.stored`` gives it back.
    """
    group, in_store = module.num_key_value_groups, getattr(module, "in_store", None)
    one_bias = attention_mask is None or len(attention_mask) == 1
    if in_store is not None:
        stored = [one.repeat_interleave(group, dim=1) for one in module.stored(key, value)]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if in_store is None and one_bias:
        result = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return result.transpose(1, 2).contiguous(), None
    products = query @ key.mT * scaling
    if in_store is not None:
        products = torch.where(in_store, query @ stored[0].mT * scaling, products)

    def sum_of_values(weights):
        if in_store is None:
            return weights @ value.to(weights.dtype)
        old = stored[1].to(weights.dtype)
        return weights * in_store @ old + weights * ~in_store @ value.to(weights.dtype)

    if one_bias:
        bias = 0.0 if attention_mask is None else attention_mask
        result = sum_of_values((products + bias).softmax(-1))
    else:
        products = products.double() - products.double().amax(-1, keepdim=True)
        above, below = (products + bias.double() for bias in attention_mask[:, None])
        result = sum_of_values(above.exp()) / below.exp().sum(-1, keepdim=True)
    return result.to(query.dtype).transpose(1, 2).contiguous(), None


def cut_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Numbers of float8_e4m3fn next to ``x`` towards zero: vLLM's CPU kernel does not round."""
    near = x.to(torch.float8_e4m3fn)
    above = near.float().abs() > x.abs()
    return (near.view(torch.uint8) - above.to(torch.uint8)).view(torch.float8_e4m3fn).to(x.dtype)


def two_biases_fp8(module, query, key, value, attention_mask, scaling, **kwargs):
    """:func:`two_biases` over keys and values as an FP8 cache with scales of 1 holds them."""
    key, value = cut_to_fp8(key), cut_to_fp8(value)
    return two_biases(module, query, key, value, attention_mask, scaling, **kwargs)


class MaskedModel:
    """Teacher-forced greedy decoding of a Llama checkpoint under per-head masks.

    ``attention`` is :func:`two_biases` or :func:`two_biases_fp8`. ``stored`` gives keys and values
    [1, heads, n, D] as they are after an eviction kept them; None if they stay as they are.
    """

    stored: Callable | None = None

    def __init__(
        self, path: Path, attention: Callable = two_biases, stored: Callable | None = None
    ) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
        from transformers.masking_utils import eager_mask

        name = attention.__name__
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, eager_mask)
        self.model = LlamaForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=name
        ).eval()
        self.heads = self.model.config.num_attention_heads
        self.group = self.heads // self.model.config.num_key_value_heads
        self._masks: list[torch.Tensor] = []
        self.stored, self._in_store = stored, []
        for index, layer in enumerate(self.model.model.layers):
            layer.self_attn.in_store, layer.self_attn.stored = None, stored
            layer.self_attn.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def _hook(self, index: int):
        def hook(module, args, kwargs):
            if self._masks:
                kwargs["attention_mask"] = self._masks[index]
            if self.stored is not None:
                module.in_store = self._in_store[index] if self._masks else None
            return args, kwargs

        return hook

    @torch.inference_mode()
    def predictions(self, tokens: list[int], life: Life) -> torch.Tensor:
        """Logits [len(tokens) - prefill_end + 1, vocab] that chose token ``prefill_end`` on."""
        n, start = len(tokens), life.full
        ids = torch.tensor([tokens])
        self._masks = []
        first = self.model(ids[:, :start], use_cache=True, logits_to_keep=1)
        logits = [first.logits[0]]
        if n > start:
            self._masks = [self._mask(index, start, n, life) for index in range(self._layers)]
            if self.stored is not None:
                self._in_store = [self._stored(i, start, n, life) for i in range(self._layers)]
            rest = self.model(ids[:, start:], past_key_values=first.past_key_values)
            logits.append(rest.logits[0])
            self._masks = []
        return torch.cat(logits)[life.prefill_end - start :]

    @property
    def _layers(self) -> int:
        return len(self.model.model.layers)

    def _mask(self, layer: int, start: int, n: int, life: Life) -> torch.Tensor:
        seen = torch.ones(self.heads // self.group, n - start, n, dtype=torch.bool)
        seen &= torch.arange(n) <= torch.arange(start, n)[:, None]
        for eviction in life.evictions:
            row = eviction.n - start
            for head, positions in enumerate(eviction.positions[layer] or ()):
                keep = torch.zeros(n, dtype=torch.bool)
                keep[positions] = True
                keep[eviction.tail_start :] = True
                causal = torch.arange(n) <= torch.arange(start + row, n)[:, None]
                seen[head, row:] = causal & keep
        seen = seen.repeat_interleave(self.group, dim=0)
        if any(eviction.weights is not None for eviction in life.evictions):
            biases = self._weights(layer, start, n, life).repeat_interleave(self.group, dim=1)
            return biases.masked_fill(~seen, float("-inf"))
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None]

    def _stored(self, layer: int, start: int, n: int, life: Life) -> torch.Tensor:
        """[n - start, n] bool: True where a row sees what the last eviction before it stored."""
        in_store = torch.zeros(n - start, n, dtype=torch.bool)
        for eviction in life.evictions:
            if eviction.positions[layer] is not None:
                in_store[eviction.n - start :, : eviction.tail_start] = True
        return in_store

    def _weights(self, layer: int, start: int, n: int, life: Life) -> torch.Tensor:
        """[2, KV heads, n - start, n] log-weights as the last eviction before each row has them."""
        biases = torch.zeros(2, self.heads // self.group, n - start, n)
        for eviction in life.evictions:
            if eviction.positions[layer] is None:
                continue
            assert eviction.weights is not None
            biases[:, :, eviction.n - start :] = 0.0
            for head, positions in enumerate(eviction.positions[layer]):
                mine = torch.tensor(eviction.weights[layer][head]).T[:, None]
                biases[:, head, eviction.n - start :, positions] = mine
        return biases


def check_tokens(
    model: MaskedModel,
    prompt: list[int],
    output: list[int],
    lives: list[Life],
    near: float = 0.0,
) -> tuple[int, int]:
    """Compare greedy tokens with the oracle's.

    A token also agrees if its logit is within ``near`` of the highest logit of the oracle.

    Returns:
        How many agree, of how many.

    """
    tokens = [*prompt, *output]
    agreed = total = 0
    for life, following in zip(lives, [*lives[1:], None], strict=True):
        stop = following.prefill_end if following is not None else len(tokens)
        if stop <= life.prefill_end:
            continue
        logits = model.predictions(tokens[: stop - 1], life)
        actual = tokens[life.prefill_end : stop]
        assert len(logits) == len(actual)
        chosen = logits.gather(-1, torch.tensor(actual)[:, None])[:, 0]
        agreed += int((logits.amax(-1) - chosen <= near).sum())
        total += len(actual)
    return agreed, total
