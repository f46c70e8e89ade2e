"""Stores in few bits: compaction and scores against the PyTorch reference."""

from dataclasses import replace

import torch

from tests.kernels.pages import drawn
from tests.kernels.scene import Lengths, Scene, Shape
from tests.kernels.score import Case
from vllm_kvevict.ops.cuda.pages import compact
from vllm_kvevict.ops.token_format import INT4, INT8, PackedFormat
from vllm_kvevict.ops.torch.pages import candidate_grid, compact_index

FORMATS = {"int4": INT4, "int8": INT8, "5 and 3 bits": PackedFormat(5, 3, 60)}


def requests(bs: int, window: int = 32) -> tuple[Lengths, ...]:
    """Fresh; evicted before, with a tail that fills no page of a store; heads of one page."""
    return (
        Lengths(0, 0, 9, 9 * bs + window + 5, 2),
        Lengths(2, 13, 18, 18 * bs + window, 3, protect_first=3),
        Lengths(1, 5, 9, 10 * bs + window, 1),
    )


def shape(
    head_size: int,
    heads: int,
    bs: int,
    dtype: torch.dtype,
    stored: str = "int4",
    window: int = 32,
) -> Shape:
    sizes = (2, heads, bs, head_size, window, requests(bs, window))
    return Shape(*sizes, dtype, stored=FORMATS[stored])


def check_compact(device: str, shape: Shape, in_place: bool = False) -> None:
    """Tokens of stores move byte by byte, and others are quantised as well as by the reference.

    Sums in another order may take a level to its neighbour where an element lies between both, and
    a scale to another one that is equally good: rarely, and at no cost in accuracy.
    """
    scene = Scene(shape, device, shape.head_size)
    size, stored, heads = shape.page_tokens, shape.stored, shape.heads
    kept, pages = drawn(scene, in_place)
    before = [cache.cpu().clone() for cache in scene.caches]
    expected = [cache.clone() for cache in before]
    compact(
        scene.caches,
        torch.tensor([c for due in kept for row in due for head in row for c in head])
        .int()
        .to(device),
        torch.tensor(pages, dtype=torch.int32, device=device),
        scene.batch,
        scene.head_indptr,
        scene.stores,
        stored,
        centres=scene.centres,
    )
    off, codes = 0, 0
    for due, of_due, split in zip(scene.due, kept, pages, strict=True):
        grid, padding = candidate_grid(
            scene.indptr(due), scene.store(due), torch.tensor(due.positional)
        )
        width = grid.shape[-1] - len(due.positional)
        columns = torch.tensor(
            [
                [
                    column + size * int(padding[layer, head])
                    for head in range(heads)
                    for column in row[head]
                ]
                for layer, row in enumerate(of_due)
            ]
        )
        moved = compact_index(
            grid,
            columns,
            torch.tensor(split),
            torch.tensor(due.store),
            shape.block_size,
            size,
            width,
        )
        target = moved[2]
        for layer in range(shape.layers):
            page, slot = moved[0][layer], moved[1][layer]
            old = columns[layer] < width * size
            was = scene.layer_cache(layer, before[layer])
            head = torch.arange(heads).repeat_interleave(torch.tensor(split[layer]) * size)
            tokens = list(was.tokens(page, slot, old, head))
            tokens[0] -= scene.centres[layer].cpu()[head]
            right = scene.layer_cache(layer, expected[layer])
            right.move(page, slot, target, old)
            expected[layer] = right.pages.view(expected[layer].shape)
            mine = scene.layer_cache(layer)
            found = [plane.flatten(0, 1) for plane in mine.stored_planes(target)]
            wanted = [plane.flatten(0, 1) for plane in right.stored_planes(target)]
            for ours, theirs in zip(found, wanted, strict=True):
                assert torch.equal(ours[old], theirs[old])
                off += int((ours != theirs).sum())
                codes += ours.numel()
            for true, ours, theirs in zip(
                tokens, stored.decode(found), stored.decode(wanted), strict=True
            ):
                error = (ours - true).square().sum(-1)
                least = (theirs - true).square().sum(-1)
                close = torch.isclose(error, least, rtol=1e-4, atol=1e-9)
                assert bool((close | (error < least))[~old].all())
    assert off <= 2e-3 * codes, (off, codes)
    # Nothing but the stores is touched, and of their pages nothing beyond the tokens.
    used = shape.page_tokens * sum(stored.planes(shape.head_size))
    targets = {block for due in scene.due for block in due.store}
    for cache, was in zip(scene.caches, before, strict=True):
        ours = cache.cpu().view(torch.uint8).flatten(2)
        theirs = was.view(torch.uint8).flatten(2)
        others = [block for block in range(len(ours)) if block not in targets]
        assert torch.equal(ours[others], theirs[others])
        assert torch.equal(ours[..., used:], theirs[..., used:])


COMPACT_CASES = [
    shape(64, 2, 16, torch.float16),
    shape(80, 2, 32, torch.bfloat16),
    shape(96, 2, 16, torch.float32),
    shape(128, 2, 16, torch.bfloat16, "5 and 3 bits"),
    shape(128, 2, 16, torch.bfloat16, "int8"),
    shape(256, 1, 16, torch.bfloat16),
]


def check_odd_elements(device: str) -> None:
    """A NaN or infinite element makes its own token NaN, and no other; zeros come back as zeros."""
    scene = Scene(replace(COMPACT_CASES[0], layers=1), device)
    due, shape = scene.due[0], scene.shape
    cache = scene.caches[0]
    cache[due.positional[0], 0, 1, 5] = float("nan")
    cache[due.positional[0], 0, 2, shape.head_size + 9] = float("inf")
    cache[due.positional[0], 0, 3] = 0.0
    scene.batch = scene.batch_of([due])
    size, blocks = shape.page_tokens, len(due.store)
    columns = torch.arange(blocks * size).repeat(shape.heads).int().to(device)
    pages = torch.full((1, 1, shape.heads), blocks).int().to(device)
    compact(
        scene.caches, columns, pages, scene.batch, scene.head_indptr, scene.stores, shape.stored,
        centres=torch.zeros_like(scene.centres),
    )  # fmt: skip
    first = torch.tensor([due.store[0] * shape.heads])
    keys, values = scene.layer_cache(0).stored_tokens(first)
    assert keys[0].isnan().any(-1).nonzero().flatten().tolist() == [1]
    assert (~values[0].isfinite()).any(-1).nonzero().flatten().tolist() == [2]
    assert float(keys[0, 3].abs().max()) < 1e-5 and float(values[0, 3].abs().max()) < 1e-5


def _case(*sizes: object, window: int = 32, **options: object) -> Case:
    made = shape(*sizes, window=window)  # type: ignore[arg-type]
    return Case(made, queries=made.dtype, **options)  # type: ignore[arg-type]


KEPT = Case(
    replace(
        COMPACT_CASES[0],
        requests=tuple(replace(one, store=1) for one in requests(16)),
    )
)
"""Requests in which every head can fill as many pages as the store has blocks."""

CASES = [
    _case(64, 2, 16, torch.float16, group=4),
    _case(80, 1, 32, torch.bfloat16, group=3, kind="avg", kernel=5),
    _case(96, 2, 16, torch.float32, group=1, softcap=2.0),
    _case(128, 2, 16, torch.bfloat16, "5 and 3 bits", group=2),
    _case(128, 1, 16, torch.float32, "int8", group=2),
    _case(256, 1, 16, torch.bfloat16, group=2, kernel=1),
]
