"""allocate and select on scores in the reference's padded form, whose rows are laid out here."""

from types import SimpleNamespace

import torch

from vllm_kvevict.ops.cuda.allocate import batch_pages
from vllm_kvevict.ops.cuda.rows import Rows
from vllm_kvevict.ops.cuda.select import batch_columns


def laid_out(
    scores: torch.Tensor, caps: torch.Tensor, store_blocks: int, block_size: int
) -> tuple[SimpleNamespace, Rows]:
    """What the operations read of a batch, and its rows: one request with scores [L, H, N]."""
    layers, heads, columns = scores.shape
    kept, device = store_blocks * heads * block_size, scores.device
    batch = SimpleNamespace(
        due=[None], num_layers=layers, num_heads=heads, page_tokens=block_size,
        kept_columns=layers * kept,
    )  # fmt: skip
    rows = Rows(
        start=(torch.arange(layers * heads, device=device) * columns).view(layers, heads),
        length=torch.full((layers, heads), columns, dtype=torch.int32, device=device),
        caps=caps.int(),
        first_kept=torch.arange(layers, device=device) * kept,
        store_blocks=torch.full((layers,), store_blocks, dtype=torch.int32, device=device),
    )
    return batch, rows


def adaptive_pages(
    scores: torch.Tensor, caps: torch.Tensor, store_blocks: int, block_size: int, floor: float
) -> torch.Tensor:
    """The reference's ``adaptive_pages`` by the kernels."""
    batch, rows = laid_out(scores, caps, store_blocks, block_size)
    return batch_pages(batch, scores.contiguous().view(-1), rows, floor)[0].long()


def select_tokens(
    scores: torch.Tensor, pages: torch.Tensor, block_size: int, store_blocks: int
) -> torch.Tensor:
    """The reference's ``select_tokens`` by the kernel."""
    batch, rows = laid_out(scores, pages, store_blocks, block_size)
    columns = batch_columns(batch, scores.contiguous().view(-1), pages[None].int(), rows)
    return columns.view(len(scores), -1).long()
