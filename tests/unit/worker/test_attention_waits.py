"""The host never waits for a CUDA device in attention: the layout of a step, and its layers.

The device is pretended and its kernels are not run.
"""

from itertools import product

import pytest
import torch
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from tests.interpreted.fakes import Backend, common_of
from tests.nightly import covering
from tests.pretend_gpu import pretended
from tests.pretend_launches import stub_launches
from tests.ragged import random_ragged
from vllm_kvevict.attention.triton import EvictingTritonImpl, EvictingTritonMetadataBuilder
from vllm_kvevict.ops.token_format import INT4

GROUP, SCALES = 2, (0.5, 0.25, 4.0)
STEPS = {
    "decode": [1] * 6,
    "mixed": [1, 4, 1, 4, 1, 4],
    "several tokens": [4] * 6,
}


class OverTriton(Backend):
    """Over vLLM's Triton attention in the place of FlashAttention."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        flash, builder = vars(self.impl), vars(self.builder)
        self.impl = EvictingTritonImpl.__new__(EvictingTritonImpl)
        self.builder = EvictingTritonMetadataBuilder.__new__(EvictingTritonMetadataBuilder)
        fp8 = self.scales != (1.0, 1.0, 1.0)
        vars(self.impl).update(
            flash,
            _kv_quant_mode=get_kv_quant_mode("fp8" if fp8 else "auto"),
            _is_per_token_head_quant=False,
            fp8_dtype=torch.float8_e4m3fn,
            use_alibi_sqrt=False,
            chunk_lookback=-1,
            use_td=False,
        )
        empty = torch.empty(0, device="cuda")
        vars(self.builder).update(
            builder, seq_threshold_3D=8, num_par_softmax_segments=16, max_seqs_64_segments=0,
            softmax_segm_output=empty, softmax_segm_max=empty, softmax_segm_expsum=empty,
        )  # fmt: skip


MADE = {
    "flash": (Backend, "flash"),
    "our kernel": (Backend, "triton"),
    "triton": (OverTriton, "triton"),
    "xformers": (Backend, "xformers"),
}
CASES = [
    pytest.param(*case)
    for case in (
        *product(["flash", "our kernel", "triton"], ["", "sinks", "fp8", "int4"]),
        *product(["xformers"], ["gathered", "paged"]),
    )
]


@pytest.fixture
def launched(monkeypatch):
    return stub_launches(monkeypatch)


def test_launches_take_no_tensor_of_the_host(launched, monkeypatch):
    from vllm_kvevict.ops.triton.slices import _lengths_kernel

    with pretended(monkeypatch):
        _lengths_kernel[(1,)](torch.zeros(1, device="cuda"))
        with pytest.raises(RuntimeError, match="host"):
            _lengths_kernel[(1,)](torch.zeros(1))
    assert launched == ["_lengths_kernel"]


@pytest.mark.parametrize(
    ("kernel", "options", "counts", "share"),
    covering(
        CASES,
        [pytest.param(counts, id=name) for name, counts in STEPS.items()],
        [
            pytest.param(0.6, id="some"),
            pytest.param(1.0, id="all"),
            pytest.param(0.0, id="none evicted"),
        ],
    ),
)
def test_a_step_waits_for_nothing(kernel, counts, options, share, launched, monkeypatch):
    host = random_ragged(3, requests=6, longest_tail=60, evicted_share=share)
    if options == "int4":
        host.stored, host.centres = INT4, torch.zeros(host.num_heads, 32)
    evicted, single = host.tail_start[host.rows.long()] > 0, torch.tensor(counts) == 1
    made, kind = MADE[kernel]
    with pretended(monkeypatch) as watch:
        scales = SCALES if options == "fp8" else None
        batch = (host.quantised(*scales[1:])[0] if scales else host).to("cuda")
        sinks = torch.zeros(4, device="cuda") if options == "sinks" else None
        backend = made(kind, batch, GROUP, 6, torch.float32, scales=scales, sinks=sinks)
        if kernel == "xformers":
            backend.builder.buffers.scratch.optional.paged = options == "paged"
        backend.step.update(rows=host.rows.long(), slots=torch.tensor([-1, 1, -1, 0, 2, -1]))
        common = common_of(batch, counts)
        query = torch.zeros(sum(counts), 4, 32, device="cuda")
        query = query.to(torch.float8_e4m3fn) if scales else query
        watch.waits.clear()
        launched.clear()
        metadata = backend.builder.build(0, common)
        for layer in range(2):
            backend.forward(layer, query, batch.cache, metadata)
        assert not watch.waits and len(launched) > 2
        assert any("FwOp" in name for name in launched) == (kernel == "xformers" and share > 0)
    alone = bool(single.all()) and kernel != "xformers"
    some = metadata.single if kernel == "xformers" else metadata.decode
    assert (some is not None) == (alone or bool((evicted & single).any()))
    assert (metadata.extend is not None) == bool((evicted & ~single).any())
    assert (metadata.stock is not None) == (not alone and not evicted.all())
    assert metadata.recording is not None
