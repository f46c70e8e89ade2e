"""Compaction against the reference's."""

from dataclasses import replace

import torch

from tests.kernels.scene import Lengths, Scene, Shape
from vllm_kvevict.ops.cuda.pages import compact
from vllm_kvevict.ops.torch import pages as reference

# Never evicted, one block over; evicted; heads of one page; a tail that ends with a block.
REQUESTS = (
    Lengths(old_store=0, old_tail=0, tail=3, num_tokens=3 * 128 + 5, store=2),
    Lengths(old_store=2, old_tail=6, tail=8, num_tokens=8 * 128 + 40, store=3),
    Lengths(old_store=1, old_tail=4, tail=4, num_tokens=5 * 128, store=1),
)


def scaled(requests: tuple[Lengths, ...], block_size: int) -> tuple[Lengths, ...]:
    """The same blocks with another block size; the last block of each as full as before."""
    return tuple(
        Lengths(r.old_store, r.old_tail, r.tail, -(-r.num_tokens * block_size // 128), r.store)
        for r in requests
    )


def drawn(
    scene: Scene, in_place: bool = False
) -> tuple[list[list[list[list[int]]]], list[list[list[int]]]]:
    """Random survivors of every request, layer and head, and the pages of each.

    ``in_place`` gives the requests but the first blocks of their own to fill.
    """
    shape = scene.shape
    for index, one in enumerate(scene.due[1:] if in_place else [], 1):
        tail = one.positional[: (one.tail_start - one.old_tail_start) // shape.block_size]
        own = scene.random.sample([*scene.store(one).tolist(), *tail], len(one.store))
        scene.due[index] = replace(one, store=own, in_place=True)
    scene.batch = scene.batch_of(scene.due)
    kept, pages = [], []
    for due in scene.due:
        split = [scene.split(len(due.store) * shape.heads, row) for row in scene.caps(due).tolist()]
        kept.append(
            [
                [
                    sorted(scene.random.sample(range(count), share * shape.page_tokens))
                    for count, share in zip(counts, row, strict=True)
                ]
                for counts, row in zip(scene.columns(due).tolist(), split, strict=True)
            ]
        )
        pages.append(split)
    return kept, pages


def check_compact(device: str, shape: Shape, in_place: bool = False) -> None:
    """Random survivors of every head; the whole cache is compared, byte by byte.

    ``in_place`` fills blocks of the requests themselves, but for the first request's.
    """
    scene = Scene(shape, device, shape.head_size)
    heads, bs = shape.heads, shape.block_size
    survivors, shares = drawn(scene, in_place)
    bytes_of = [cache.view(torch.uint8) for cache in scene.caches]
    expected = [cache.cpu().clone() for cache in bytes_of]
    columns, pages = [], []
    for due, kept, split in zip(scene.due, survivors, shares, strict=True):
        grid, padding = reference.candidate_grid(
            scene.indptr(due), scene.store(due), torch.tensor(due.positional)
        )
        right_aligned = [
            [
                column + bs * int(padding[layer, head])
                for head in range(heads)
                for column in row[head]
            ]
            for layer, row in enumerate(kept)
        ]
        source, slot, target = reference.compact_index(
            grid, torch.tensor(right_aligned), torch.tensor(split), torch.tensor(due.store), bs
        )
        for layer, cache in enumerate(expected):
            flat = cache.flatten(0, 1)
            flat[target] = flat[source[layer], slot[layer]].view(-1, *flat.shape[1:])
        columns += [column for row in kept for head in row for column in head]
        pages.append(split)
    assert len(columns) == scene.batch.kept_columns
    compact(
        scene.caches,
        torch.tensor(columns, dtype=torch.int32, device=device),
        torch.tensor(pages, dtype=torch.int32, device=device),
        scene.batch,
        scene.head_indptr,
        scene.stores,
    )
    for cache, wanted in zip(bytes_of, expected, strict=True):
        assert torch.equal(cache.cpu(), wanted)


COMPACT_CASES = [
    Shape(2, 2, 16, 64, 1, scaled(REQUESTS, 16), torch.float16),
    Shape(1, 3, 32, 80, 1, scaled(REQUESTS, 32), torch.bfloat16),
    Shape(2, 1, 16, 96, 1, scaled(REQUESTS, 16), torch.float32),
    Shape(1, 2, 64, 128, 1, scaled(REQUESTS, 64), torch.float8_e4m3fn),
    Shape(1, 4, 128, 256, 1, scaled(REQUESTS[:2], 128), torch.bfloat16),
    # FP8 with a float32 scale for key and value behind them: 8-byte copies, then 4-byte copies.
    Shape(1, 2, 16, 128, 1, scaled(REQUESTS, 16), torch.uint8, slot=2 * 128 + 8),
    Shape(1, 2, 16, 64, 1, scaled(REQUESTS, 16), torch.uint8, slot=2 * 64 + 4),
]
