"""The kernels that count every query or weigh tokens fit the GPUs that they are compiled for."""

import pytest
from triton.backends.compiler import GPUTarget

from tests.nightly import covering
from tests.unit.ops.test_triton_compiles import SHARED, compiled
from vllm_kvevict.ops.triton import every_query

pytestmark = pytest.mark.slow


KERNELS = {
    every_query._lse_kernel: ("HEADS", "SINKS", "LEAST"),
    every_query._sums_kernel: ("STORED",),
    every_query._weighted_kernel: ("HEADS", "STORED", "SINKS", "LEAST"),
}
NUMBERS = ("table_row", "float_row", "float_token")
POINTERS = dict(lse="*fp32", floats="*fp32", sinks="*fp32")
FLOATS = dict(scale="fp32", softcap="fp32", value_scale="fp32")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "capability"),
    covering([64, 128, 256], ["*bf16", "*fp32"], [16, 64], [80, 90, 100]),
)
def test_compiles_and_fits(kernel, dim, dtype, rows, capability):
    wide = dim > 128 or dtype == "*fp32"
    constants = dict(
        HEADS=8, GROUP=4, DIM=dim, DIM_PAD=dim, PAGE=16, STORED=16, SOFTCAP=True, SINKS=True,
        LOG2E=1.44, LEAST=-1e30, ROWS=min(rows, 32 if wide else 64), TILE=32 if wide else 64,
    )  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = POINTERS | FLOATS | dict.fromkeys(NUMBERS, "i32")
    types |= dict(query=dtype, pages=dtype, out=dtype)
    made = compiled(kernel, constants, {}, GPUTarget("cuda", capability, 32), **types)
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED.get(capability, SHARED[90])
