"""Observation: write the queries of a step's last tokens to the observation rings. Reference."""

import torch


def observe_index(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    ring: torch.Tensor,
    window: int,
    beyond: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a batch to record and their ring entries.

    A request with a ring slot records its last ``min(window, query length)`` queries; the
    query of position p is written to entry ``p % window`` of its slot.

    Args:
        query_start_loc: [R + 1] int first token of each request in the batch.
        seq_lens: [R] int length of each request, this step's tokens included.
        ring: [R] int ring slot of each request, -1 for none.
        window: Queries in a slot.
        beyond: Number of tokens at the end of each request in the batch that are not recorded.

    Returns:
        Token indices [K] and ring entries ``slot * window + p % window`` [K], both int64.

    """
    holders = (ring >= 0).nonzero().flatten()
    ends = query_start_loc[1:][holders].long() - beyond
    counts = (ends - query_start_loc[:-1][holders].long()).clamp(max=window)
    back = counts.repeat_interleave(counts) - _ranges(counts)
    tokens = ends.repeat_interleave(counts) - back
    positions = (seq_lens[holders].long() - beyond).repeat_interleave(counts) - back
    slots = ring[holders].long().repeat_interleave(counts)
    return tokens, slots * window + positions % window


def observe(
    rings: torch.Tensor, query: torch.Tensor, tokens: torch.Tensor, entries: torch.Tensor
) -> None:
    """Copy ``query[tokens]`` to ``rings[entries]``.

    Args:
        rings: [slots * window, query heads, D], written in place.
        query: [T, query heads, D], rotated as in attention.
        tokens: [K] int64.
        entries: [K] int64, without duplicates.

    """
    rings.index_copy_(0, entries, query.index_select(0, tokens))


def window_queries(rings: torch.Tensor, slot: int, num_tokens: int, window: int) -> torch.Tensor:
    """Return the last ``window`` queries of a request of ``num_tokens`` tokens, oldest first.

    Returns:
        [window, query heads, D], a copy.

    """
    return rings[window_entries(slot, num_tokens, window, rings.device)]


def window_entries(slot: int, num_tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the ring entries [window] int64 of the queries that :func:`window_queries` returns."""
    positions = torch.arange(num_tokens - window, num_tokens, device=device)
    return slot * window + positions % window


def _ranges(counts: torch.Tensor) -> torch.Tensor:
    """Return 0 .. c - 1 for each c of ``counts``, concatenated."""
    starts = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum()), device=counts.device) - starts.repeat_interleave(counts)
