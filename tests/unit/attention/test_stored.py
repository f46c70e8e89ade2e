"""Attention over stores in a format of their own, against a softmax over all tokens at once."""

import pytest
import torch

from tests.token_formats import BYTES
from vllm_kvevict.attention.per_head import PerHeadBatch
from vllm_kvevict.attention.stored import StoredBatch, warm_up
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.cpu.compiled import load_numba
from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.ops.token_format import INT4, INT4_FP8, INT8
from vllm_kvevict.worker.cpu import measure_layout

BLOCK, HEADS, GROUP = 16, 2, 3


def some_layout(dtype, size, isa):
    """A layout of one of vLLM's kernels, or one without strides."""
    if isa is None:
        return PageLayout(*torch.randperm(2 * BLOCK * size).view(2, BLOCK, size))
    if dtype == FP8:
        return measure_layout(BLOCK, size, torch.float32, torch.uint8, isa, "fp8")
    return measure_layout(BLOCK, size, dtype, dtype, isa)


def some_cache(token_format, dtype, size, softcap, sinks, isa=None):
    layout = some_layout(dtype, size, isa)
    pages = torch.randn(40 * HEADS, 2 * BLOCK * size).to(dtype)
    pages, scales = (pages.view(torch.uint8), (0.5, 3.0)) if dtype == FP8 else (pages, (1.0, 1.0))
    if token_format is BYTES:
        pages = pages.mul_(2).abs_().floor_()
    found = torch.randn(HEADS, GROUP) if sinks else None
    centres = None if token_format is BYTES else torch.randn(HEADS, size)
    cache = LayerCache(
        pages, layout, 0.2, softcap, 1.0, *scales, sinks=found, token_format=token_format,
        centres=centres,
    )  # fmt: skip
    count = 24 * cache.page_tokens
    page, slot = torch.randint(40, 80, (count,)), torch.randint(0, BLOCK, (count,))
    cache.move(page, slot, torch.randperm(24))
    return cache


@pytest.mark.parametrize(
    ("token_format", "dtype", "size", "isa"),
    [
        (INT4, torch.float32, 64, None),
        (INT4, torch.bfloat16, 128, "vec"),
        (INT4, torch.float16, 64, "vec"),
        (INT4_FP8, FP8, 64, "amx"),
        (INT4_FP8, FP8, 64, None),
        (INT8, torch.float32, 80, "vec16"),
        (BYTES, torch.float32, 8, None),
    ],
    ids=["int4-64", "int4-128-bf16", "int4-64-fp16", "int4-64-fp8-pairs", "int4-64-fp8", "int8-80",
         "bytes-8"],
)  # fmt: skip
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (5.0, True)])
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 3, 3]], ids=str)
@pytest.mark.parametrize("threads", [1, 5])
def test_every_query_sees_its_tokens(
    token_format, dtype, size, isa, softcap, sinks, counts, threads, monkeypatch
):
    """Tokens of one sequence are divided between threads."""
    if threads > 1 and counts != [1, 1, 1]:
        pytest.skip("PyTorch's operations run all other steps")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(2)
    cache = some_cache(token_format, dtype, size, softcap, sinks, isa)
    count = cache.page_tokens
    # Head h of request r has so many pages of its store, and so many tokens in its tail.
    split = torch.tensor([[1, 3], [2, 2], [1, 1]])
    tails = [5, 40, 33]
    rows, width = len(counts) * HEADS, 8
    table = torch.zeros(1, rows, width, dtype=torch.int32)
    lengths = torch.zeros(1, rows, dtype=torch.int32)
    stored = torch.randperm(24)
    for r, tail in enumerate(tails):
        for h in range(HEADS):
            row, pages = r * HEADS + h, int(split[r, h])
            table[0, row, :pages] = stored[4 * row : 4 * row + pages]
            blocks = -(-tail // BLOCK)
            table[0, row, pages : pages + blocks] = torch.arange(
                40 + 6 * row, 40 + 6 * row + blocks
            )
            lengths[0, row] = pages * count + tail
    # A slot after the last token may hold anything.
    last = int(table[0, 0, int(split[0, 0])])
    nan = torch.full((1,), float("nan")).to(dtype).view(cache.pages.dtype)
    cache.pages[last, cache.layout.values[tails[0], 0]] = nan[0]
    num_tokens = sum(counts)
    starts = torch.tensor([0, *counts]).cumsum(0)
    order = [
        token * HEADS + h
        for r in range(len(counts))
        for h in range(HEADS)
        for token in range(starts[r], starts[r + 1])
    ]
    per_row = torch.tensor(counts).repeat_interleave(HEADS)
    query_start_loc = torch.zeros(rows + 1, dtype=torch.int32)
    query_start_loc[1:] = per_row.cumsum(0)
    heads = PerHeadBatch(
        HEADS,
        num_tokens,
        table,
        lengths,
        query_start_loc,
        split.flatten()[None],
        torch.tensor(order),
    )
    query = torch.randn(num_tokens, HEADS * GROUP, size)
    query = query if dtype == FP8 else query.to(dtype)
    output = torch.zeros_like(query)
    StoredBatch(heads, counts, tails).attend(cache, query, 0, output)

    for r, queries in enumerate(counts):
        for h in range(HEADS):
            row, pages, tail = r * HEADS + h, int(split[r, h]), tails[r]
            keys, values = (
                found.flatten(0, 1).double()
                for found in cache.stored_tokens(table[0, row, :pages].long())
            )
            if cache.centres is not None:
                keys += cache.centres[h]
            blocks = table[0, row, pages : pages + -(-tail // BLOCK)].long()
            keys = torch.cat([keys, cache.keys(blocks).flatten(0, 1)[:tail].double()])
            values = torch.cat([values, cache.values(blocks).flatten(0, 1)[:tail].double()])
            for index in range(queries):
                token, seen = int(starts[r]) + index, len(keys) - queries + 1 + index
                mine = query[token, h * GROUP : (h + 1) * GROUP].double()
                logits = mine @ keys[:seen].T * cache.scale
                if softcap:
                    logits = torch.tanh(logits / softcap) * softcap
                if cache.sinks is not None:
                    logits = torch.cat([logits, cache.sinks[h, :, None].double()], 1)
                expected = logits.softmax(-1)[:, :seen] @ values[:seen]
                found = output[token, h * GROUP : (h + 1) * GROUP].double()
                tolerance = 2e-5 if query.dtype == torch.float32 else 2e-2
                assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("token_format", [INT4, INT8], ids=["int4", "int8"])
def test_start_up_compiles_and_writes_nothing(token_format, monkeypatch):
    """Also over pages that hold anything."""
    cache = some_cache(token_format, torch.float32, 64, 0.0, sinks=False)
    before = cache.pages.view(torch.uint8).clone()
    warm_up(cache)
    assert torch.equal(cache.pages.view(torch.uint8), before)
    # A step runs what was compiled.
    load_numba()
    from numba.core import event

    with event.install_recorder("numba:compile") as recorder:
        test_every_query_sees_its_tokens(
            token_format, torch.float32, 64, None, 0.0, False, [1, 1, 1], 2, monkeypatch
        )
    assert recorder.buffer == []
