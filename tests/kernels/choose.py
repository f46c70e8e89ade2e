"""allocate and select against the reference's."""

import math

import torch

from tests.kernels.padded import adaptive_pages, select_tokens
from tests.kernels.scene import Lengths, Scene, Shape
from vllm_kvevict.ops.cuda.allocate import batch_pages, batch_shared_pages
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.select import batch_columns
from vllm_kvevict.ops.token_format import INT4
from vllm_kvevict.ops.torch import allocate as reference_allocate
from vllm_kvevict.ops.torch import select as reference_select

INFINITY = math.inf


def padded(
    layers: int, heads: int, caps: list[list[int]], block_size: int, kind: str, seed: int
) -> torch.Tensor:
    """[L, H, N] scores, -inf on the padding at the left.

    Sums of a page's scores are exact in float64 for every kind, so ties are ties in any order of
    summation: "ties" are few small integers, "attention" spans 2**16, "odd" has NaN, infinities,
    both zeros and negative numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = max(map(max, caps)) * block_size
    sizes = (layers, heads, columns)
    if kind == "ties":
        scores = torch.randint(-2, 3, sizes, generator=generator).float()
    elif kind == "attention":
        scores = torch.rand(sizes, generator=generator) * 2.0 ** torch.randint(
            -16, 1, sizes, generator=generator
        )
    else:
        scores = torch.randn(sizes, generator=generator)
        special = torch.tensor([math.nan, INFINITY, 0.0, -0.0, 1e30, -1e30])
        where = torch.rand(sizes, generator=generator) < 0.02
        drawn = special[torch.randint(0, len(special), sizes, generator=generator)]
        scores = torch.where(where, drawn, scores)
    padding = columns - torch.tensor(caps)[..., None] * block_size
    return scores.masked_fill(torch.arange(columns) < padding, -INFINITY)


def check_padded(
    device: str,
    heads: int,
    pages: int,
    block_size: int,
    store: int,
    floor: float,
    kind: str,
    seed: int = 0,
) -> None:
    """Two layers with heads of different length, in the reference's own layout."""
    generator = torch.Generator().manual_seed(seed)
    caps = torch.randint(1, pages + 1, (2, heads), generator=generator)
    caps[:, 0] = pages
    store = min(store, int(caps.sum(-1).min()) // heads)
    scores = padded(2, heads, caps.tolist(), block_size, kind, seed)
    expected = reference_allocate.adaptive_pages(scores, caps, store, block_size, floor)
    shared = adaptive_pages(scores.to(device), caps.to(device), store, block_size, floor)
    assert shared.dtype == torch.int64 and torch.equal(shared.cpu(), expected)

    columns = select_tokens(scores.to(device), shared, block_size, store)
    wanted = reference_select.select_tokens(scores, expected, block_size)
    assert columns.dtype == torch.int64 and torch.equal(columns.cpu(), wanted)


def check_batch(device: str, shape: Shape, floor: float) -> None:
    """Requests of different lengths and stores in one launch, in the flat layout."""
    scene = Scene(shape, device, shape.heads)
    batch, size = scene.batch, shape.page_tokens
    scores = torch.rand(batch.columns, generator=scene.generator)
    on_device = scores.to(device)
    where = candidate_rows(batch, scene.head_indptr)
    pages = batch_pages(batch, on_device, where, floor)
    columns = batch_columns(batch, on_device, pages, where).cpu()
    wanted, first, kept_before = [], 0, 0
    found = (part.cpu() for part in vars(where).values())
    starts, lengths, caps_found, first_kept, stores = (part.flatten().tolist() for part in found)
    for index, due in enumerate(scene.due):
        caps, counts = scene.caps(due), scene.columns(due)
        rows = torch.full((shape.layers, shape.heads, int(counts.max())), -INFINITY)
        for layer in range(shape.layers):
            group = index * shape.layers + layer
            assert (first_kept[group], stores[group]) == (kept_before, len(due.store))
            kept_before += len(due.store) * shape.heads * size
            for head, count in enumerate(counts[layer].tolist()):
                at = group * shape.heads + head
                assert (starts[at], lengths[at], caps_found[at]) == (first, count, count // size)
                rows[layer, head, rows.shape[-1] - count :] = scores[first : first + count]
                first += count
        expected = reference_allocate.adaptive_pages(rows, caps, len(due.store), size, floor)
        assert torch.equal(pages[index].cpu().long(), expected)
        kept = reference_select.select_tokens(rows, expected, size)
        padding = rows.shape[-1] - counts
        wanted += (
            (kept - padding.flatten().repeat_interleave((expected * size).flatten()).view_as(kept))
            .flatten()
            .tolist()
        )
    assert first == batch.columns
    assert columns.tolist() == wanted


def shares_of(layers: int, heads: int, kind: str, seed: int) -> torch.Tensor:
    """[L, H] float64 shares of mean 1 in a layer; "few" values tie, "steep" ones lie far apart."""
    drawn = torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed))
    shares = (drawn.mul(3).ceil() if kind == "few" else 10 ** (6 * drawn)).double()
    return shares / shares.mean(-1, keepdim=True)


def check_shares(device: str, shape: Shape, kind: str, seed: int = 0) -> None:
    """Requests of different lengths and stores in one launch: the reference's pages, each."""
    scene = Scene(shape, device, seed)
    shares = shares_of(shape.layers, shape.heads, kind, seed)
    rows = candidate_rows(scene.batch, scene.head_indptr)
    pages = batch_shared_pages(scene.batch, shares.to(device), rows).cpu()
    for due, found in zip(scene.due, pages, strict=True):
        first = -(-due.protect_first // shape.page_tokens)
        caps, blocks = scene.caps(due) - first, len(due.store) - first
        expected = first + reference_allocate.shared_pages(shares, caps, blocks)
        assert torch.equal(found.long(), expected)


CASES = [
    # heads, pages, block size, store, floor, kind
    (1, 1, 16, 1, 0.2, "attention"),
    (3, 9, 16, 4, 0.0, "ties"),
    (4, 12, 32, 5, 0.2, "odd"),
    (2, 5, 128, 3, 1.0, "ties"),
    (8, 40, 16, 12, 0.2, "attention"),
    (5, 7, 64, 2, 0.8, "odd"),
]

BATCH = Shape(
    2,
    3,
    16,
    16,
    4,
    (Lengths(0, 0, 9, 9 * 16 + 11, 4), Lengths(4, 9, 12, 12 * 16 + 4, 5), Lengths(1, 3, 3, 55, 1)),
)

STORED = Shape(
    2,
    3,
    16,
    64,
    4,
    (
        Lengths(0, 0, 9, 9 * 16 + 11, 2),
        Lengths(4, 30, 38, 38 * 16 + 4, 5, protect_first=3),
        Lengths(1, 5, 9, 9 * 16 + 6, 2),
    ),
    stored=INT4,
)
"""Stores whose pages hold 60 tokens, beside tails that fill no whole page."""

LONG = Shape(2, 32, 16, 16, 4, (Lengths(0, 0, 40, 40 * 16 + 8, 30), Lengths(9, 70, 80, 1300, 9)))
"""Heads that are full while others have room, and shares of more pages than one pass takes."""
