"""After the warm-up no step compiles: Triton's own keys of its kernels, for a GPU that is not here.

Nothing runs but the layout of steps and the launches, which are listed and left out.
"""

import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import triton
import vllm.triton_utils
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from tests.interpreted.fakes import WINDOW, Backend, common_of
from tests.nightly import nightly
from tests.ragged import Ragged, random_ragged
from vllm_kvevict.attention import unpacked
from vllm_kvevict.attention.extensions.base import AttentionExtension
from vllm_kvevict.attention.triton import EvictingTritonImpl
from vllm_kvevict.attention.warm_up import warm_up
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.ops.token_format import AS_CACHED, INT4, TokenFormat
from vllm_kvevict.ops.triton import every_query
from vllm_kvevict.ops.triton.residency import Residency
from vllm_kvevict.worker.gpu import interleaved

GROUP = 4


@pytest.fixture
def launched(monkeypatch):
    """What Triton would look up in its cache for each launch, as {(kernel, key)}."""
    target = make_backend(GPUTarget("cuda", 90, 32))
    keys: set[tuple[str, str]] = set()

    def run(kernel, *arguments, grid, warmup, **options):
        bind = create_function_from_signature(kernel.signature, kernel.params, target)
        _, specialization, others = bind(*arguments, **options)
        keys.add((kernel.__name__, f"{specialization} {others}"))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton_attn, "unified_attention", vllm_kernel(monkeypatch))
    # Where vLLM has none, on its CPU build: Backend puts one there.
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", None, raising=False)
    return keys


def vllm_kernel(monkeypatch):
    """vLLM's Triton attention, which finds no Triton on a CPU, over Triton."""
    for name, found in dict(triton=triton, tl=triton.language).items():
        monkeypatch.setattr(vllm.triton_utils, name, found)
    spec = importlib.util.find_spec("vllm.v1.attention.ops.triton_unified_attention")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.kernel_unified_attention, JITFunction)
    return module.unified_attention


def warm(
    kernel: str,
    heads: int,
    size: int,
    sinks: torch.Tensor | None = None,
    stored: TokenFormat = AS_CACHED,
    extensions: Sequence[AttentionExtension] = (),
):
    """A backend of ``size`` requests, warmed up."""
    batch = random_ragged(0, heads=heads, requests=size, layers=2)
    batch.stored, batch.centres = stored, torch.zeros(heads, batch.cache.shape[3] // 2)
    backend = Backend(kernel, batch, GROUP, size, sinks=sinks)
    # Some steps have fewer sequences than programs, and some have more.
    backend.builder.buffers.scratch.resident = Residency(8, 3, 5)
    # Kernels do not run, so lengths are anything.
    flash_attn.flash_attn_varlen_func = lambda **arguments: (None, torch.zeros(1, 1))
    if kernel == "triton":
        impl = EvictingTritonImpl.__new__(EvictingTritonImpl)
        vars(impl).update(vars(backend.impl), _kv_quant_mode=get_kv_quant_mode("auto"))
        backend.impl = impl
    scale = torch.ones(())
    layers = [
        SimpleNamespace(
            impl=backend.impl, kv_cache=batch.cache, layer_name=name, query_quant=None,
            _k_scale_float=1.0, _v_scale_float=1.0, _q_scale=scale, _k_scale=scale, _v_scale=scale,
        )
        for name in backend.state.layer_names
    ]  # fmt: skip
    backend.builder.binding.extensions = list(extensions)
    backend.builder.binding.cache = lambda name: LayerCache(
        batch.cache.flatten(0, 1).flatten(1), interleaved(16, 32), 0.3, 0.0, sinks=sinks,
        centres=batch.centres,
    )  # fmt: skip
    warm_up(layers, backend.builder.binding, backend.builder.buffers, batch.cache.dtype)
    return backend, batch


def serve(backend: Backend, batch: Ragged, seed: int, size: int) -> None:
    """A step of some of the batch's requests, evicted, with some query tokens each."""
    rand = torch.Generator().manual_seed(seed)
    requests = int(torch.randint(1, size + 1, (1,), generator=rand))
    counts = torch.randint(1, 2 + seed % 4, (requests,), generator=rand).tolist()
    live = Ragged(**vars(batch))
    live.rows, live.seq_lens = batch.rows[:requests], batch.seq_lens[:requests]
    # vLLM's table is as wide as its longest request.
    width = 17 + seed
    live.block_table = torch.zeros(size, width, dtype=torch.int32)[:requests]
    for row in live.rows.tolist():
        backend.state.evicted[row] = True
    slots = torch.full((requests,), -1)
    slots[int(torch.randint(requests, (1,), generator=rand))] = 1
    backend.step.update(rows=live.rows.long(), slots=slots)
    metadata = backend.builder.build(0, common_of(live, counts, 100 + 37 * seed))
    assert metadata.stock is None
    heads = batch.num_heads * GROUP
    query = torch.zeros(sum(counts), heads, batch.cache.shape[3] // 2)
    for layer in range(batch.num_layers):
        backend.forward(layer, query, batch.cache, metadata)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_nothing_compiles_after_the_warm_up(kernel, heads, sinks, launched):
    size = 20
    learned = torch.zeros(heads * GROUP) if sinks else None
    backend, batch = warm(kernel, heads, size, learned)
    known = set(launched)
    assert {name for name, _ in known} >= {
        "flash": {"_attend_kernel", "_plan_kernel", "_page_table_kernel", "_observe_kernel"},
        "triton": {"_attend_kernel", "_plan_kernel", "kernel_unified_attention"},
    }[kernel]
    for seed in range(24):
        serve(backend, batch, seed + 1, size)
        assert launched <= known, f"step {seed}: {launched - known}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "heads", "sinks"),
    [("flash", 2, False), ("triton", 1, True), nightly("triton", 8, False)],
)
@pytest.mark.parametrize("at_once", [1, 2**19])
def test_nothing_compiles_over_stores_in_few_bits(
    kernel, heads, sinks, at_once, launched, monkeypatch
):
    """Nor does it depend on which requests are unpacked together."""
    size = 20
    learned = torch.zeros(heads * GROUP) if sinks else None
    monkeypatch.setattr(unpacked, "DENSE_BYTES", at_once)
    backend, batch = warm(kernel, heads, size, learned, INT4)
    known = set(launched)
    assert "_unpack_kernel" in {name for name, _ in known}
    for seed in range(24):
        serve(backend, batch, seed + 1, size)
        assert launched <= known, f"step {seed}: {launched - known}"


class Both(AttentionExtension):
    """Launches the kernels of every extension."""

    build = forward = None

    def __init__(self):
        pass

    def forward_on_gpu(self, state, layer_name, batch, slots, output):
        floats = torch.zeros(8, batch.page_tokens, 2)
        every_query.add_column_sums(batch, floats)
        every_query.weighted_attention(batch, floats, output)
        return True


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_nothing_compiles_for_extensions_of_attention(heads, launched):
    size, extension = 20, Both()
    backend, batch = warm("triton", heads, size, extensions=[extension])
    binding = backend.builder.binding
    binding.extension_requests = lambda common: [
        (extension, backend.step["rows"], torch.arange(len(backend.step["rows"])))
    ]
    known = set(launched)
    assert {"_lse_kernel", "_sums_kernel", "_weighted_kernel"} <= {name for name, _ in known}
    for seed in range(24):
        serve(backend, batch, seed + 1, size)
        assert launched <= known, f"step {seed}: {launched - known}"


def test_nothing_of_the_warm_up_stays(launched):
    backend, _ = warm("triton", 2, 4)
    assert not backend.state.evicted.any() and not backend.state.tail_start.any()
    assert backend.rings.shape[1] > WINDOW
