"""Head pages of evicted requests. Reference.

Page ``b * H + i`` is the i-th head page of block b. A store of S blocks is a flat list of
S * H pages; head h of a layer owns flat pages ``head_indptr[h] .. head_indptr[h + 1] - 1``.
After its store pages, a head has one page of every tail block.
"""

import torch


def store_page(flat: torch.Tensor, store: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the physical pages of flat store pages.

    Args:
        flat: [..., K] int64 flat pages.
        store: [..., S] block ids, leading dimensions broadcastable to those of ``flat``.
        num_heads: H.

    Returns:
        [..., K] int64.

    """
    blocks = store.long().expand(*flat.shape[:-1], store.shape[-1])
    return blocks.gather(-1, flat // num_heads) * num_heads + flat % num_heads


def head_page_table(
    head_indptr: torch.Tensor,
    store: torch.Tensor,
    tail_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    page_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page table of attention, with one sequence per (request, KV head).

    Args:
        head_indptr: [L, R, H + 1] int.
        store: [R, S] int block ids of each request's store.
        tail_start: [R] int, a multiple of ``block_size``.
        seq_lens: [R] int logical lengths.
        block_table: [R, W] int: vLLM's positional block table.
        block_size: Tokens in a page of the tail.
        page_tokens: Tokens in a page of the store; None for ``block_size``.

    Returns:
        Pages [L, R * H, V] int32, unused entries 0, and cached tokens [L, R * H] int32 of
        each (request, head), in request-major order.

    """
    num_layers, num_requests, num_heads = head_indptr.shape
    num_heads -= 1
    device = head_indptr.device
    first, pages = head_indptr[..., :-1].long(), head_indptr.diff(dim=-1).long()
    tail_tokens = (seq_lens - tail_start).long()
    tail_blocks = (tail_tokens + block_size - 1) // block_size
    width = int((pages + tail_blocks[None, :, None]).max())

    column = torch.arange(width, device=device)
    in_store = column < pages[..., None]
    flat = torch.where(in_store, first[..., None] + column, 0).flatten(2)
    from_store = store_page(flat, store, num_heads).view(*in_store.shape)

    tail_column = column - pages[..., None]
    in_tail = (tail_column >= 0) & (tail_column < tail_blocks[None, :, None, None])
    tail_block = (tail_start.long() // block_size)[None, :, None, None] + tail_column
    tail_block = torch.where(in_tail, tail_block, 0).flatten(2)
    rows = block_table.long().expand(num_layers, *block_table.shape)
    head = torch.arange(num_heads, device=device)[None, None, :, None]
    from_tail = rows.gather(2, tail_block).view(*in_tail.shape) * num_heads + head

    table = torch.where(in_store, from_store, torch.where(in_tail, from_tail, 0))
    lengths = pages * (page_tokens or block_size) + tail_tokens[None, :, None]
    shape = (num_layers, num_requests * num_heads)
    return table.view(*shape, width).int(), lengths.view(*shape).int()


def candidate_grid(
    head_indptr: torch.Tensor, store: torch.Tensor, positional: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of one request in order, right-aligned so that positional blocks line up.

    Args:
        head_indptr: [L, H + 1] int; all zero for a request without a store.
        store: [S] int block ids of the store, empty for none.
        positional: [P] int block ids from the tail start on.

    Returns:
        Pages [L, H, M + P] int64, with M the maximum number of store pages of any head, and the
        number of padding pages [L, H] int64 at the left of each row (their entries are 0).

    """
    num_layers, num_heads = head_indptr.shape[0], head_indptr.shape[1] - 1
    device = head_indptr.device
    pages = head_indptr.diff(dim=-1).long()
    max_pages = int(pages.max()) if store.numel() else 0
    padding = max_pages - pages
    column = torch.arange(max_pages, device=device)
    used = column >= padding[..., None]
    flat = torch.where(used, head_indptr[..., 1:, None].long() - max_pages + column, 0)
    if max_pages:
        from_store = store_page(flat.flatten(1), store, num_heads).view(*flat.shape)
        from_store = torch.where(used, from_store, 0)
    else:
        from_store = flat
    head = torch.arange(num_heads, device=device)[None, :, None]
    from_tail = positional.long()[None, None] * num_heads + head
    grid = torch.cat([from_store, from_tail.expand(num_layers, -1, -1)], dim=-1)
    return grid, padding


def compact_index(
    grid: torch.Tensor,
    columns: torch.Tensor,
    pages: torch.Tensor,
    store: torch.Tensor,
    block_size: int,
    page_tokens: int | None = None,
    store_pages: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the source and target slots of the survivors of an eviction.

    Args:
        grid: [L, H, P] int64 pages of the candidates.
        columns: [L, S * H * page_tokens] int64 kept columns, heads concatenated.
        pages: [L, H] int64 pages that each head keeps.
        store: [S] int block ids of the new store.
        block_size: Tokens in a page outside stores.
        page_tokens: Tokens in a page of a store; None for ``block_size``.
        store_pages: Pages of the former store at the left of each row, padding included.

    Returns:
        Source pages [L, K] and source slots [L, K] of the K = S * H * page_tokens survivors,
        and target pages [S * H], which they fill in order; all int64.

    """
    size = page_tokens or block_size
    num_layers, num_heads, _ = grid.shape
    heads = torch.arange(num_heads, device=grid.device).expand(num_layers, -1)
    # Without output_size, repeat_interleave reads the size from the device and waits for it.
    owner = heads.flatten().repeat_interleave((pages * size).flatten(), output_size=columns.numel())
    owner = owner.view_as(columns)
    width = grid.shape[-1]
    place, slot = columns // size, columns % size
    if size != block_size:
        new = columns - store_pages * size
        place = torch.where(new < 0, place, store_pages + new // block_size)
        slot = torch.where(new < 0, slot, new % block_size)
    source = grid.flatten(1).gather(1, owner * width + place)
    flat = torch.arange(store.shape[0] * num_heads, device=grid.device)
    return source, slot, store_page(flat, store, num_heads)
