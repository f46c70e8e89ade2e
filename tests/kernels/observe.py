"""observe against the reference's."""

import torch

from vllm_kvevict.ops.cuda.observe import observe
from vllm_kvevict.ops.reference import observe as reference


def check(device: str, dtype: torch.dtype, head_size: int, window: int, lengths: list[int]) -> None:
    """A batch of requests of these query lengths; every third holds no ring slot.

    The query is a slice of a wider tensor, as vLLM's projection of q, k and v gives it.
    """
    generator = torch.Generator().manual_seed(head_size + window)
    heads, slots = 3, len(lengths) + 2
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    cached = torch.randint(0, 300, (len(lengths),), generator=generator, dtype=torch.int32)
    seq_lens = cached + starts.diff()
    ring = torch.randperm(slots, generator=generator)[: len(lengths)].int()
    ring[2::3] = -1
    # Rows that pad a CUDA graph's batch: no tokens, no slot.
    starts = torch.cat([starts, starts[-1:].repeat(2)])
    seq_lens, ring = (
        torch.cat([t, t.new_tensor(padding)])
        for t, padding in ((seq_lens, [0, 0]), (ring, [-1, -1]))
    )
    wide = torch.randn(sum(lengths) + 5, heads + 2, head_size, generator=generator).to(dtype)
    rings = torch.full((slots * window, heads, head_size), float("nan"), dtype=dtype)
    expected = rings.clone()
    index = reference.observe_index(starts, seq_lens, ring, window)
    reference.observe(expected, wide[:, 1 : heads + 1], *index)

    on = [tensor.to(device) for tensor in (rings, wide, starts, seq_lens, ring)]
    assert not on[1][:, 1 : heads + 1].is_contiguous()
    observe(on[0], on[1][:, 1 : heads + 1], *on[2:], window, max(lengths))
    written = on[0].cpu()
    assert not written.isnan().all()
    torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


CASES = [
    (torch.float16, 64, 32, [1, 1, 1, 1]),
    (torch.bfloat16, 80, 32, [40, 1, 7, 32, 33, 3]),
    (torch.float32, 128, 5, [4, 5, 6, 1]),
    (torch.bfloat16, 256, 1, [1, 9]),
]
