"""xformers' ops themselves, on the cases that plain PyTorch stands in for on a CPU."""

import pytest
import torch

from tests.gpu.test_backend import batch_of
from tests.interpreted.fakes import Backend, common_of
from tests.interpreted.test_backends import expected_at
from tests.ragged import Ragged, random_ragged
from vllm_kvevict.attention.xformers.kernel import GATHERED, PAGED_FROM

pytest.importorskip("xformers", reason="needs pip install xformers==0.0.35")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available()
        and not GATHERED[0] <= torch.cuda.get_device_capability() <= GATHERED[1],
        reason="xformers' CUTLASS op serves compute capabilities 5.0 to 9.0",
    ),
]
TOLERANCE = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
AMPERE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= PAGED_FROM
ampere = pytest.mark.skipif(not AMPERE, reason="needs compute capability 8.0")


def check(host: Ragged, counts: list[int], group: int, paged: bool) -> None:
    """Two layers, each twice: the second time nothing may wait for the GPU."""
    batch = host.to("cuda")
    backend = Backend("xformers", batch, group, len(counts))
    backend.builder.buffers.scratch.optional.paged = paged
    backend.step.update(rows=host.rows.long(), slots=None)
    shape = (sum(counts), host.num_heads * group, host.cache.shape[3] // 2)
    query = torch.randn(shape, dtype=host.cache.dtype, device="cuda")
    common = common_of(batch, counts)
    for layer in range(2):
        backend.forward(layer, query, batch.cache, backend.builder.build(0, common))
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = backend.forward(layer, query, batch.cache, backend.builder.build(0, common))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = expected_at(host, layer, query.cpu(), counts)
        tolerance = TOLERANCE[query.dtype]
        torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def questions(host: Ragged) -> list[int]:
    tails = (host.seq_lens - host.tail_start[host.rows.long()]).tolist()
    return [min(1 + 6 * (request % 3), tail) for request, tail in enumerate(tails)]


@ampere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (128, 4), (256, 40)])
def test_on_pages(dtype, block_size, dim, group):
    options = dict(requests=7, block_size=block_size, dim=dim, longest_tail=300, evicted_share=0.8)
    host = random_ragged(dim, dtype, **options)
    check(host, [1] * 7, group, paged=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(32, 1), (80, 4), (128, 8), (256, 2)])
def test_gathered(dtype, dim, group):
    if dtype is torch.bfloat16 and not AMPERE:
        pytest.skip("bfloat16 needs compute capability 8.0")
    # FlashAttention, which runs the others, has no float32 and needs 8.0.
    share = 0.8 if AMPERE and dtype is not torch.float32 else 1.0
    host = random_ragged(dim, dtype, requests=7, dim=dim, longest_tail=300, evicted_share=share)
    check(host, questions(host), group, paged=False)
    check(host, [1] * 7, group, paged=False)


@ampere
def test_questions_beside_decodes():
    host = batch_of(3, 6)
    check(host, questions(host), 4, paged=True)
