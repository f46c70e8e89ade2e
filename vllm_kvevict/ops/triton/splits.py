"""Lengths of (request, KV head) sequences, and the splits of decode attention. Triton.

A launch of decode attention has as many programs as the GPU runs at once, and heads differ in
length. Therefore all keys of a layer are cut into splits of one size, the smallest for which
they fit into the buffers, and programs take them from a queue, the longest first. The plans of all
layers are computed once per step, on the device, at fixed addresses.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 64
"""Keys that one program reads at a time."""

STEP = 16
"""Keys of the smallest page. The size of a split is a multiple of it."""

CLASSES = 64
"""Number of length classes by which the queue is ordered."""

_BLOCK = 256
_WIDE_BLOCK = 1024
_QUEUE_BLOCK = 64


@dataclass(frozen=True)
class Splits:
    """The splits of L layers, with at most N sequences and M splits each; all int32.

    Sequence s of layer l has splits ``starts[l, s] .. starts[l, s + 1] - 1``, at least one. Each
    has ``size[l]`` keys, except the last split of a sequence, which has the remaining keys.

    Args:
        size: [L] keys in a split.
        starts: [L, N + 1] index of the first split of each sequence, then the number of splits.
        queue: [L, M, 2] sequence and index of the split in it, in the order in which they are
            taken.
        classes: [L, CLASSES] offset in the queue of the last splits of each length class; scratch.

    """

    size: torch.Tensor
    starts: torch.Tensor
    queue: torch.Tensor
    classes: torch.Tensor

    @classmethod
    def room(cls, layers: int, sequences: int, splits: int, device: torch.device) -> "Splits":
        """Allocate buffers for at most the given numbers of sequences and splits per layer."""

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(layers, *shape, dtype=torch.int32, device=device)

        return cls(numbers(), numbers(sequences + 1), numbers(splits, 2), numbers(CLASSES))

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in vars(self).values())


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["rows", "places", "seq_lens", "lengths"],
)
def _lengths_kernel(
    rows,
    places,
    seq_lens,
    tail_start,
    head_indptr,
    lengths,
    num_sequences,
    page_tokens,
    indptr_layer,
    lengths_layer,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0)
    sequence = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = sequence < num_sequences
    request = sequence // HEADS
    head = sequence % HEADS
    row = tl.load(rows + request, mask=used, other=-1)
    place = tl.load(places + request, mask=used, other=0)
    length = tl.load(seq_lens + place, mask=used, other=0)
    tail = tl.load(tail_start + row, mask=row >= 0, other=0)
    split = head_indptr + layer * indptr_layer + row.to(tl.int64) * (HEADS + 1) + head
    first = tl.load(split, mask=tail > 0, other=0)
    last = tl.load(split + 1, mask=tail > 0, other=0)
    length = length - tail + (last - first) * page_tokens
    tl.store(lengths + layer * lengths_layer + sequence, tl.maximum(length, 0), mask=used)


@triton.jit
def _last_split(length, split, CLASSES: tl.constexpr):
    """Return the splits of a sequence, and the length class of its last split, 0 the longest."""
    count = tl.maximum((length + split - 1) // split, 1)
    rest = length - (count - 1) * split
    return count, CLASSES - 1 - rest * (CLASSES - 1) // split


@triton.jit(
    do_not_specialize=["num_sequences", "target"],
    do_not_specialize_on_alignment=["lengths", "size", "starts", "classes"],
)
def _starts_kernel(
    lengths,
    size,
    starts,
    classes,
    num_sequences,
    lengths_layer,
    starts_layer,
    target,
    SMALLEST: tl.constexpr,
    STEP: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(0, num_sequences, BLOCK):
        sequence = base + offset
        mask = sequence < num_sequences
        total += tl.load(lengths + layer * lengths_layer + sequence, mask=mask, other=0)
    keys = tl.sum(total, 0)
    split = (keys + target - 1) // target
    split = tl.maximum((split + STEP - 1) // STEP * STEP, SMALLEST).to(tl.int32)
    tl.store(size + layer, split)
    before = keys.to(tl.int32) * 0
    tl.store(starts + layer * starts_layer, before)
    of_class = tl.zeros([CLASSES], tl.int32)
    for base in range(0, num_sequences, BLOCK):
        sequence = base + offset
        mask = sequence < num_sequences
        length = tl.load(lengths + layer * lengths_layer + sequence, mask=mask, other=0)
        count, place = _last_split(length, split, CLASSES)
        count = tl.where(mask, count, 0)
        end = before + tl.cumsum(count, 0)
        tl.store(starts + layer * starts_layer + sequence + 1, end, mask=mask)
        before += tl.sum(count, 0)
        of_class += tl.histogram(place, CLASSES, mask=mask)
    # The last splits of sequences follow all other splits, which are the longest.
    first = before - num_sequences + tl.cumsum(of_class, 0) - of_class
    tl.store(classes + layer * CLASSES + tl.arange(0, CLASSES), first)


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["lengths", "size", "starts", "classes", "queue"],
)
def _queue_kernel(
    lengths,
    size,
    starts,
    classes,
    queue,
    num_sequences,
    lengths_layer,
    starts_layer,
    queue_layer,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0)
    sequence = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = sequence < num_sequences
    length = tl.load(lengths + layer * lengths_layer + sequence, mask=mask, other=0)
    count, place = _last_split(length, tl.load(size + layer), CLASSES)
    count = tl.where(mask, count, 1)
    entries = queue + layer * queue_layer
    at = tl.atomic_add(classes + layer * CLASSES + place, 1, mask=mask, sem="relaxed")
    tl.store(entries + at * 2, sequence, mask=mask)
    tl.store(entries + at * 2 + 1, count - 1, mask=mask)
    first = tl.load(starts + layer * starts_layer + sequence, mask=mask, other=0) - sequence
    for split in range(tl.max(count, 0) - 1):
        used = mask & (split < count - 1)
        tl.store(entries + (first + split) * 2, sequence, mask=used)
        tl.store(entries + (first + split) * 2 + 1, split, mask=used)


def head_lengths(
    rows: torch.Tensor,
    places: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_start: torch.Tensor,
    head_indptr: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
) -> None:
    """Compute the cached tokens of every (request, KV head), for all layers in one launch.

    Args:
        rows: [R] int32 state row of each request, -1 for requests without one (never evicted).
        places: [R] int32 batch index of each request.
        seq_lens: [batch] int32 logical lengths; 0 for padding.
        tail_start: [rows] int32; 0 for a request that is not evicted.
        head_indptr: [L, rows, H + 1] int32, read only if the tail start is above 0.
        lengths: [L, >= R * H] int32, written.
        page_tokens: Tokens in a page of a store.

    """
    num_layers, _, heads = head_indptr.shape
    num_sequences = rows.shape[0] * (heads - 1)
    _lengths_kernel[(num_layers, triton.cdiv(num_sequences, _BLOCK))](
        rows,
        places,
        seq_lens,
        tail_start,
        head_indptr,
        lengths,
        num_sequences,
        page_tokens,
        head_indptr.stride(0),
        lengths.stride(0),
        HEADS=heads - 1,
        BLOCK=_BLOCK,
    )


def plan_splits(
    lengths: torch.Tensor, num_sequences: int, target: int, smallest: int, splits: Splits
) -> None:
    """Cut the keys of every layer into splits of one size and queue them, in two launches.

    There are at most ``target + num_sequences`` splits in a layer. Splits that are not the last of
    their sequence come first. The last splits follow in descending order of length, in
    :data:`CLASSES` classes; the order within a class is undefined.

    Args:
        lengths: [L, >= num_sequences] int32.
        num_sequences: R * H.
        target: Number of splits that fill the GPU.
        smallest: Minimum number of keys in a split, a multiple of :data:`STEP`.
        splits: Plan to write.

    Raises:
        ValueError: ``smallest`` is not a multiple of :data:`STEP`, or the queue is too short.

    """
    if smallest % STEP:
        raise ValueError(f"the smallest split must be a multiple of {STEP} keys, not {smallest}")
    if splits.queue.shape[1] < target + num_sequences:
        raise ValueError(
            f"a queue of {splits.queue.shape[1]} cannot hold {target} splits of {num_sequences} "
            "sequences"
        )
    layers, strides = lengths.shape[0], (lengths.stride(0), splits.starts.stride(0))
    plan = (splits.size, splits.starts, splits.classes)
    _starts_kernel[(layers,)](
        lengths,
        *plan,
        num_sequences,
        *strides,
        target,
        SMALLEST=smallest,
        STEP=STEP,
        CLASSES=CLASSES,
        BLOCK=_WIDE_BLOCK,
    )
    _queue_kernel[(layers, triton.cdiv(num_sequences, _QUEUE_BLOCK))](
        lengths,
        *plan,
        splits.queue,
        num_sequences,
        *strides,
        splits.queue.stride(0),
        CLASSES=CLASSES,
        BLOCK=_QUEUE_BLOCK,
        num_warps=2,
    )
