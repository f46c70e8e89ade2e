"""Per-head attention through vLLM's CPU kernel, against plain softmax attention in float64."""

from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops

from tests.hardware import FP8_CACHE
from vllm_kvevict.attention.cpu_backend import EvictingCPUImpl
from vllm_kvevict.attention.per_head import PerHeadBatch

BLOCK, HEADS, GROUP, SIZE = 32, 3, 4, 64


def reference(query, keys, values, scale, softcap, sinks):
    """query [q, G, D] at the end of keys [n, D]: causal softmax attention, one query at a time."""
    out = torch.empty_like(query, dtype=torch.float64)
    count, n = query.shape[0], keys.shape[0]
    for token in range(count):
        seen = n - count + token + 1
        logits = query[token].double() @ keys[:seen].double().T * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.exp()
        whole = weights.sum(-1, keepdim=True)
        if sinks is not None:
            whole += sinks.double().exp()[:, None]
        out[token] = weights / whole @ values[:seen].double()
    return out


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # bfloat16 rounds queries' products to 8 bits; the kernel accumulates in float32. Relative to
    # values, whose scale is 4 in FP8.
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 5, 3], [40]])
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=FP8_CACHE)], ids=["", "fp8"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_uneven_heads(dtype, tolerance, softcap, counts, fp8, sinks):
    torch.manual_seed(0)
    num_blocks = 64
    keys = torch.randn(num_blocks, HEADS, BLOCK, SIZE, dtype=dtype)
    values = torch.randn(num_blocks, HEADS, BLOCK, SIZE, dtype=dtype)
    cache = torch.zeros(num_blocks, HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    quantisation = dict(kv_cache_dtype="auto")
    if fp8:
        # Numbers that FP8 holds times the scale: nothing is lost on the way into the cache.
        quantisation = dict(kv_cache_dtype="fp8", k_scale=0.25, v_scale=4.0)
        cache = torch.zeros(cache.shape, dtype=torch.uint8)
        keys = keys.to(torch.float8_e4m3fn).to(dtype) * 0.25
        values = values.to(torch.float8_e4m3fn).to(dtype) * 4
    halves = cache.view(num_blocks, HEADS, 2 * BLOCK, SIZE).chunk(2, dim=2)
    flat = [x.transpose(1, 2).reshape(-1, HEADS, SIZE).contiguous() for x in (keys, values)]
    slots = torch.arange(num_blocks * BLOCK)
    ops.cpu_attn_reshape_and_cache(*flat, *halves, slots, "vec", **quantisation)

    pages = torch.randperm(num_blocks * HEADS, dtype=torch.int32)
    lengths = torch.randint(max(counts), 5 * BLOCK, (len(counts) * HEADS,), dtype=torch.int32)
    table = pages[: len(lengths) * 5].view(len(lengths), 5)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    per_sequence = torch.tensor(counts).repeat_interleave(HEADS)
    order = torch.tensor(
        [
            token * HEADS + head
            for request in range(len(counts))
            for head in range(HEADS)
            for token in range(starts[request], starts[request + 1])
        ]
    )
    heads = PerHeadBatch(
        HEADS,
        sum(counts),
        table[None],
        lengths[None],
        torch.tensor([0, *per_sequence.cumsum(0).tolist()], dtype=torch.int32),
        torch.zeros_like(lengths[None]),
        order,
    )
    impl = EvictingCPUImpl.__new__(EvictingCPUImpl)
    impl.head_size, impl.num_queries_per_kv = SIZE, GROUP
    impl.scale, impl.logits_soft_cap = SIZE**-0.5, softcap
    impl.kv_cache_dtype = quantisation["kv_cache_dtype"]
    sinks = torch.linspace(-2, 6, HEADS * GROUP).to(dtype) if sinks else None
    impl.sinks = sinks
    layer = SimpleNamespace(
        isa="vec",
        _k_scale_float=quantisation.get("k_scale", 1.0),
        _v_scale_float=quantisation.get("v_scale", 1.0),
    )
    query = torch.randn(sum(counts), HEADS * GROUP, SIZE, dtype=dtype)
    output = torch.full_like(query, float("nan"))
    impl._per_head(layer, query, cache, heads, 0, output)

    page_keys, token_stats = (x.view(-1, BLOCK, SIZE) for x in (keys, values))
    for request, count in enumerate(counts):
        for head in range(HEADS):
            row = request * HEADS + head
            own = table[row].long()
            mine = slice(head * GROUP, (head + 1) * GROUP)
            expected = reference(
                query[starts[request] : starts[request] + count, mine],
                page_keys[own].flatten(0, 1)[: lengths[row]],
                token_stats[own].flatten(0, 1)[: lengths[row]],
                impl.scale,
                softcap,
                None if sinks is None else sinks[mine],
            )
            actual = output[starts[request] : starts[request] + count, mine].double()
            loose = tolerance * quantisation.get("v_scale", 1.0)
            torch.testing.assert_close(actual, expected, atol=loose, rtol=tolerance)
