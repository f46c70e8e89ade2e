"""Compiled without a GPU: xformers' paged kernel by this Triton, and what 7.5 needs of ours."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.unit.ops.test_triton_compiles import FLOATS, KERNELS, NUMBERS
from vllm_kvevict.ops.triton import gather, page_table, slices

pytestmark = pytest.mark.slow

ABSENT = (
    "Seq_starts_k Seq_starts_q Seq_starts_q_multiplier additive_bias K_fp8_scale_shift "
    "V_fp8_scale_shift stride_k_fp8_scale_shift_z stride_k_fp8_scale_shift_n "
    "stride_k_fp8_scale_shift_g stride_k_fp8_scale_shift_h stride_v_fp8_scale_shift_z "
    "stride_v_fp8_scale_shift_n stride_v_fp8_scale_shift_g stride_v_fp8_scale_shift_h "
    "stride_bias_b stride_bias_g stride_bias_h stride_bias_qm stride_bias_km"
).split()
CONSTANTS = dict(
    dict.fromkeys(ABSENT), kv_cache_blocks_per_row=64, Z=8, N_CTX_Q=4, N_CTX_K=1024,
    BLOCK_N_PER_SPLIT=256, H=1, G=1, BLOCK_DMODEL=128, USE_SEQ_LEN=True, PACKED_PER_VAL=1,
    N_GROUPS=1, BOUNDS_CHECKS_N=True, BLOCK_M=16, BLOCK_N=16, IS_SPLITK=True,
    SPLIT_K_EARLY_EXIT=False, IS_CAUSAL=False, IS_LOCAL=False, NUM_QUERIES_CAUSAL=1,
    USE_PAGED_ATTENTION=True, PAGE_SIZE=16, WINDOW_LEFT=-1, WINDOW_RIGHT=-1, WRITE_LSE=True,
    HAS_ADDITIVE_BIAS=False, NUM_PROGRAMS_DIM2_CONST=4, IS_HIP=False,
)  # fmt: skip
TYPES = dict(Q="*bf16", K="*bf16", V="*bf16", sm_scale="fp32", Out_splitK="*fp32")
TYPES |= dict(LSE_splitk="*fp64", block_tables="*i32", Seq_len="*i32")


def test_the_paged_kernel():
    from xformers.ops.fmha._triton.splitk_kernels import _get_splitk_kernel

    kernel = _get_splitk_kernel(1).fn
    signature = {
        name: "constexpr" if name in CONSTANTS else TYPES.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=CONSTANTS, attrs={})
    options = dict(num_warps=2, num_stages=1)
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    assert compiled.asm["cubin"] and "mma.sync" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    "kernel", [gather._gather_kernel, page_table._page_table_kernel, slices._lengths_kernel]
)
def test_our_kernels_for_turing(kernel):
    constants = next(constants for other, constants, _ in KERNELS if other is kernel)
    floats = {name: kind.replace("bf16", "fp16") for name, kind in FLOATS.items()}
    signature = {
        name: "constexpr"
        if name in constants
        else floats.get(name, "i32" if name in NUMBERS else "*i32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    assert triton.compile(source, target=GPUTarget("cuda", 75, 32)).asm["cubin"]
