"""Latent attention over entries is that over the keys and values made of them."""

from types import SimpleNamespace

import torch
from torch.nn import functional
from vllm.model_executor.layers.attention import MLAAttention

from vllm_kvevict.calibrate.layers import Layers, Pass

HEADS, NOPE, ROPE, RANK, VALUE = 3, 8, 4, 16, 5


def layer() -> MLAAttention:
    made = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(made)
    made.num_heads, made.kv_lora_rank, made.num_kv_heads = HEADS, RANK, 1
    made.qk_nope_head_dim, made.qk_rope_head_dim = NOPE, ROPE
    made.impl = SimpleNamespace(scale=0.3)
    made.W_UK_T, made.W_UV = torch.randn(HEADS, NOPE, RANK), torch.randn(HEADS, RANK, VALUE)
    return made


def test_a_context_and_two_rows_behind_it():
    one = layer()
    layers = Layers({"a": one}, ["a"], window=4)
    q, latent, pe = (torch.randn(11, *n) for n in ((HEADS, NOPE + ROPE), (RANK,), (1, ROPE)))
    context, rows = slice(0, 7), [0, 1, 2, 3, 4, 5, 6, 7, 8]
    found = one.forward(q[context], latent[context], pe[context], output_shape=(7, HEADS * VALUE))
    # Two rows of two tokens each, behind the same context.
    with layers.doing(Pass(rows=2, most={})) as done:
        behind = one.forward(q[7:], latent[7:], pe[7:])
    keys = torch.cat(
        [
            torch.einsum("hnr,tr->htn", one.W_UK_T, latent),
            pe.transpose(0, 1).expand(HEADS, -1, -1),
        ],
        dim=-1,
    )
    values = torch.einsum("tr,hrv->htv", latent, one.W_UV)
    for tokens, outputs in (
        (rows[:7], found),
        (rows, behind[:2]),
        ([*rows[:7], 9, 10], behind[2:]),
    ):
        expected = functional.scaled_dot_product_attention(
            q[tokens].transpose(0, 1), keys[:, tokens], values[:, tokens], is_causal=True, scale=0.3
        )
        expected = expected.transpose(0, 1).flatten(1)[-len(outputs) :]
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    held = layers.context["a"]
    assert held.keys.shape == (1, 7, RANK + ROPE) and held.values.shape == (1, 7, RANK)
    assert held.queries.shape == (1, HEADS, 4, RANK + ROPE) and done.most["a"].shape == (1, 7)
