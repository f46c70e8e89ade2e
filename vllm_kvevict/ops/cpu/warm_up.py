"""Every compiled operation once, so that no request waits for a compiler."""

import torch

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.cpu import pages, peaks, probe, select
from vllm_kvevict.ops.host import serves
from vllm_kvevict.ops.places import Places


def warm_up(dtype: torch.dtype) -> None:
    """Compile what evictions of a cache run, or load it from where Numba keeps it.

    All have two pieces of work, so that threads share it where there are several.

    Args:
        dtype: The cache's.

    """
    offsets = torch.arange(16).view(2, 8)
    places, cache = Places.of(offsets), torch.zeros(4, 16, dtype=dtype)
    index = torch.zeros(2, 1, dtype=torch.int64)
    # Tokens behind one another, also where they are no whole words; beside one another; anyhow.
    for lie in (offsets, offsets[:, :7], offsets.view(8, 2).T, offsets.flip(1)):
        source = torch.zeros(4).long(), torch.arange(4) % 2, torch.tensor([1, 2])
        pages.copy_tokens(cache, *source, Places.of(lie))
    if serves(cache):
        probe.key_scores(cache, index, places, None, torch.zeros(2, 1, 10))
        pages.read_floats(cache, index, places)
        pages.norms(cache, index, places)
    keys = torch.zeros(2, 4, 4)
    valid = torch.ones(2, 4, dtype=torch.bool)
    window = Candidates(keys, valid, torch.zeros(2, 1, 2, 4), window=2, num_candidates=2, scale=1.0)
    peaks.window_peaks(window, kernel=5, reach=3)
    select.select_tokens(torch.zeros(1, 2, 2), index.mT + 1, block_size=1)
