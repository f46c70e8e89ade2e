"""select_tokens, compiled: the least kept score of each head, then its columns in order."""

from typing import Any

import numba
import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import exact, shared
from vllm_kvevict.ops.cpu.team import share


def select_tokens(scores: torch.Tensor, pages: torch.Tensor, block_size: int) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.reference.select.select_tokens`."""
    kept = pages * block_size
    totals = kept.sum(-1)
    if bool((totals != totals[0]).any()):
        raise ValueError(f"layers keep different numbers of pages: {pages.sum(-1).tolist()}")
    columns = torch.empty(len(scores), int(totals[0]), dtype=torch.int64, device="cpu")
    had = np.empty(pages.numel(), np.bool_)
    begin = (kept.cumsum(-1) - kept).flatten().numpy()
    wanted, rows = kept.flatten().numpy(), scores.flatten(0, 1).contiguous().numpy()
    of_heads = rows, wanted, begin, len(pages), columns.numpy(), had
    share(_select_all, _select, len(had), *of_heads)
    if not had.all():
        raise ValueError("a head has fewer tokens than its pages hold")
    return columns


@exact
def _ordered(scores: np.ndarray, found: np.ndarray) -> int:
    """Write scores [N] as uint32 [N] of the same order; how many are not -inf.

    NaN ranks first, as in a sort, and -0 with 0.
    """
    bits, real = found.view(np.int32), 0
    as_floats = found.view(np.float32)
    infinity = np.float32(np.inf)
    for i in range(len(scores)):
        score = scores[i]
        real += score != -infinity
        as_floats[i] = infinity if np.isnan(score) else score + np.float32(0)
    for i in range(len(scores)):
        bits[i] ^= (bits[i] >> np.int32(31)) | np.int32(-(2**31))
    return real


@exact
def _least(numbers: np.ndarray, wanted: int, counts: np.ndarray, same: np.ndarray) -> np.uint32:
    """The least of the ``wanted`` largest: digit by digit, of those that have the digits so far.

    Args:
        numbers: [N] uint32.
        wanted: 1 to N.
        counts: [2048] int32, to count digits of 11 bits in.
        same: [N + 1] uint32, for numbers that begin alike.

    """
    some = numbers
    for drop in (21, 10, 0):
        counts[:] = 0
        for i in range(len(some)):
            counts[(some[i] >> np.uint32(drop)) & np.uint32(2047)] += 1
        digit = 2047
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        count = 0
        for i in range(len(some)):
            number = some[i]
            # Written without asking first, so that there is nothing to guess: one more than is had.
            same[count] = number
            count += ((number >> np.uint32(drop)) & np.uint32(2047)) == digit
        some = same[:count]
    return some[0]


@exact
def _select(
    first_head: int,
    end_head: int,
    scores: np.ndarray,
    wanted: np.ndarray,
    begin: np.ndarray,
    layers: int,
    columns: np.ndarray,
    had: np.ndarray,
) -> None:
    """Columns [L, tokens] of some of the heads of all layers, in order.

    Args:
        first_head: The first of them.
        end_head: The first that is not.
        scores: [L * H, N].
        wanted: [L * H] tokens that a head keeps.
        begin: [L * H] where its columns begin.
        layers: L.
        columns: Written.
        had: [L * H] written: whether a head has as many tokens as it is to keep.

    """
    heads, count = scores.shape
    counts = np.empty(2048, np.int32)
    numbers, same = np.empty(count, np.uint32), np.empty(count + 1, np.uint32)
    mine = np.empty(count + 1, np.int64)
    for head in range(first_head, end_head):
        keep = wanted[head]
        had[head] = keep <= _ordered(scores[head], numbers)
        if keep == 0 or not had[head]:
            continue
        least = _least(numbers, keep, counts, same)
        room = keep
        for i in range(count):
            room -= numbers[i] > least
        place = 0
        for i in range(count):
            tied = numbers[i] == least and room > 0
            room -= tied
            mine[place] = i
            place += tied or numbers[i] > least
        columns[head * layers // heads, begin[head] : begin[head] + keep] = mine[:keep]


@shared
def _select_all(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _select(part * pieces // parts, (part + 1) * pieces // parts, *args)
