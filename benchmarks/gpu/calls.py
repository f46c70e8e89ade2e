"""What our decode kernel is compared with: calls of FlashAttention and xformers on a step."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.heads import Step
from vllm_kvevict.attention.gpu_backend import head_pages
from vllm_kvevict.attention.scratch import MAX_SPLITS, Scratch
from vllm_kvevict.attention.sequences import Extend


def _common(step: Step) -> dict[str, Any]:
    """As in a server's graphs, which are captured for its longest request and bound the splits."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version()
    return dict(
        max_seqlen_q=1, softmax_scale=step.scale, causal=True, window_size=[-1, -1],
        fa_version=version, num_splits=MAX_SPLITS if version == 3 else 0,
        max_seqlen_k=step.shape.max_model_len,
    )  # fmt: skip


def flash_per_head(step: Step, longest_first: bool = False) -> Callable[[], None]:
    """A step of one sequence per head: lengths, and in each layer page table with ring, attention.

    With ``longest_first`` sequences are in descending order of length. The order changes only at
    evictions, so it is made before; a step gathers the queries and scatters the results. The page
    tables are also made before. A step still writes a table, so that its time counts.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    sequences, size = step.requests * step.shape.num_heads, step.shape.head_size
    query, out = (x.view(sequences, -1, size) for x in (step.query, step.out))
    common = _common(step) | dict(
        cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32, device=step.device),
    )  # fmt: skip
    orders, tables, lengths = [], [], []
    if longest_first:
        step.measure()
        mine, done = torch.empty_like(query), torch.empty_like(out)
        for layer in range(step.layers):
            order = step.lengths[layer, :sequences].argsort(descending=True)
            orders.append(order)
            lengths.append(step.lengths[layer, order].contiguous())
            tables.append(step.write_table(layer)[order].contiguous())

    def run() -> None:
        step.measure()
        for layer in range(step.layers):
            table = step.write_table(layer, record=True)
            keys, values = head_pages(step.cache(layer))
            if not longest_first:
                flash_attn_varlen_func(
                    q=query, out=out, block_table=table, k=keys, v=values,
                    seqused_k=step.lengths[layer], **common,
                )  # fmt: skip
                continue
            torch.index_select(query, 0, orders[layer], out=mine)
            flash_attn_varlen_func(
                q=mine, out=done, block_table=tables[layer], k=keys, v=values,
                seqused_k=lengths[layer], **common,
            )  # fmt: skip
            out.index_copy_(0, orders[layer], done)

    return run


def flash_equal(step: Step) -> Callable[[], None]:
    """A step of vLLM's own attention over as many tokens, the same for every head of a request."""
    from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    lengths = torch.full_like(step.seq_lens, step.budget + step.tail)
    starts = torch.arange(step.requests + 1, dtype=torch.int32, device=step.device)
    common = _common(step) | dict(
        q=step.query, out=step.out, block_table=step.equal_table, cu_seqlens_q=starts,
        seqused_k=lengths,
    )  # fmt: skip

    def schedule() -> torch.Tensor | None:
        if common["fa_version"] != 3:
            return None
        return get_scheduler_metadata(
            batch_size=step.requests, max_seqlen_q=1, max_seqlen_k=common["max_seqlen_k"],
            num_heads_q=step.query.shape[1], num_heads_kv=step.shape.num_heads,
            headdim=step.shape.head_size, cache_seqlens=lengths, qkv_dtype=step.dtype,
            cu_seqlens_q=starts, page_size=step.shape.block_size, causal=True,
            window_size=(-1, -1), num_splits=common["num_splits"],
        )  # fmt: skip

    def run() -> None:
        made = schedule()
        for layer in range(step.layers):
            cache = step.cache(layer).transpose(1, 2)
            keys, values = cache.split(step.shape.head_size, dim=-1)
            flash_attn_varlen_func(k=keys, v=values, scheduler_metadata=made, **common)

    return run


def memory_efficient(step: Step, paged: bool) -> Callable[[], None]:
    """xformers' attention, a layer after another, on its pages or over gathered ones."""
    scratch = Scratch("xformers", step.shape, step.device)
    kernel = scratch.optional
    kernel.load()
    kernel.paged = paged
    step.measure()
    sequences, size = step.requests * step.shape.num_heads, step.shape.head_size
    table = scratch.pages(sequences, int(step.lengths.max()))
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=step.device)
    plan = Extend(
        rows=step.rows, places=step.rows, order=starts, block_table=step.block_table,
        lengths=step.lengths, query_start_loc=starts, table=table, max_query_len=1,
        max_seq_len=step.shape.max_model_len,
        parts=kernel.plan(starts.tolist(), starts, table.shape[1]),
    )  # fmt: skip
    query, out = step.query.view(sequences, -1, size), step.out.view(sequences, -1, size)

    def run() -> None:
        for layer in range(step.layers):
            step.observe(layer)
            step.write_table(layer, table)
            lengths = step.lengths[layer]
            cache = step.cache(layer)
            kernel.attend(query, cache, out, plan, lengths, step.scale, scratch.table)

    return run
