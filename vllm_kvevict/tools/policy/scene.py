"""Random inputs of a scorer, and the same inputs with something about them changed."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.nn.functional import pad

from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

HEADS, GROUP, WINDOW, SIZE, COLUMNS, REST = 4, 2, 8, 16, 32, 3
"""H, G, w, D, candidates, and the columns between candidates and window."""

PADDING = (0, 4, 8, 0)
"""Padded columns of each head."""

OF_HEADS = (
    "keys", "valid", "queries", "accumulated", "values", "value_shares", "key_scores",
    "window_weights", "sinks",
)  # fmt: skip
"""Inputs whose first dimension is the heads."""


def scene(
    requirements: Requirements,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    padding: Sequence[int] = PADDING,
    row: int = 0,
) -> Candidates:
    """Return random candidates that carry what a scorer requires, and nothing else."""
    heads, all_columns = len(padding), COLUMNS + REST + WINDOW
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(heads, *shape, generator=generator)

    valid = torch.arange(all_columns) >= torch.tensor(padding)[:, None]
    keys, values = 2 * random(all_columns, SIZE), random(all_columns, SIZE)
    queries, shares = random(GROUP, WINDOW, SIZE), random(all_columns).abs()
    accumulated, key_scores = random(all_columns).abs(), random(COLUMNS, 2)
    weights = random().abs()
    reads_window = requirements.window != "none"
    reads_keys = requirements.keys or reads_window
    mask, first = valid[..., None], valid[:, :COLUMNS, None]
    return Candidates(
        keys=(keys * mask).to(dtype) if reads_keys else torch.zeros(heads, 0, SIZE, dtype=dtype),
        valid=valid,
        queries=queries if reads_window else None,
        window=WINDOW,
        num_candidates=COLUMNS,
        scale=SIZE**-0.5,
        keep=COLUMNS // 2,
        seed=(1, 7),
        num_tokens=all_columns,
        state_row=row if requirements.keeps_state else None,
        layer_name="layer.0",
        accumulated=accumulated * valid if requirements.every_query else None,
        values=values * mask if requirements.values or requirements.weighs else None,
        value_shares=shares * valid if requirements.value_shares else None,
        key_scores=key_scores * first if requirements.key_scores else None,
        window_weights=weights if requirements.key_scores else None,
    )


def padded(candidates: Candidates, columns: int) -> Candidates:
    """Return the same heads with further columns of padding at the left."""
    changed = {}
    for name in ("keys", "valid", "accumulated", "values", "value_shares", "key_scores"):
        value = getattr(candidates, name)
        if value is not None and (name != "keys" or value.shape[1]):
            left = (columns, 0) if value.dim() == 2 else (0, 0, columns, 0)
            changed[name] = pad(value, left)
    return replace(candidates, num_candidates=candidates.num_candidates + columns, **changed)


def heads(candidates: Candidates, chosen: slice) -> Candidates:
    """Return some heads of a layer, as a tensor-parallel rank has them."""
    changed = {
        name: getattr(candidates, name)[chosen]
        for name in OF_HEADS
        if getattr(candidates, name) is not None
    }
    return replace(candidates, first_head=chosen.start or 0, **changed)


def on_two_ranks(
    scorers: Sequence[Scorer], candidates: Candidates
) -> tuple[list[torch.Tensor], int]:
    """Score the halves of the heads, as two ranks do.

    One computes at a time, until it waits for the other one: ranks are processes, and operations of
    two threads of one process may disturb each other.

    Returns:
        The scores of both halves, and how often a rank called ``mean_of_ranks``.

    """
    half = candidates.num_heads // 2
    parts = [heads(candidates, slice(0, half)), heads(candidates, slice(half, None))]
    barrier, given, calls = threading.Barrier(2), [torch.empty(0)] * 2, [0, 0]
    computing = threading.Lock()

    def wait() -> None:
        computing.release()
        try:
            barrier.wait(10)
        finally:
            computing.acquire()

    def mean(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(tensor: torch.Tensor) -> torch.Tensor:
            calls[rank] += 1
            given[rank] = tensor
            wait()
            found = (given[0] + given[1]) / 2
            wait()
            return found

        return of

    def score(rank: int) -> torch.Tensor:
        with computing:
            try:
                return scorers[rank].scores(replace(parts[rank], mean_of_ranks=mean(rank)))
            except Exception:
                barrier.abort()
                raise

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(score, (0, 1))), max(calls)
