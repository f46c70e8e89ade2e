"""Triton's kernels compile for a GPU, where there is none: to machine code for a named target."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tests.nightly import nightly
from tests.unit.ops.waits import waits_before
from vllm_kvevict.ops.token_format import INT4, INT8
from vllm_kvevict.ops.triton import centers, decode, gather, observe, page_table, slices, unpack
from vllm_kvevict.ops.triton.packed import NOT_PACKED, PackedStores
from vllm_kvevict.ops.triton.residency import AHEAD, RESERVED, Residency, resident

pytestmark = pytest.mark.slow

ATTEND = dict(
    HEADS=8, GROUP=4, GROUP_PAD=16, DIM=128, DIM_PAD=128, MERGE_ROWS=4, MERGE_AT_ONCE=8, PAGE=16,
    TILE=slices.TILE, WORDS=slices.WORDS, SOFTCAP=False, SINKS=True, RECORD=True, LOG2E=1.44,
    FP8=False, STORE_BYTES=8192, **NOT_PACKED,
)  # fmt: skip
FOUR_BITS, EIGHT_BITS = (
    PackedStores.of(stored, 128, 16, torch.device("cpu")).constants(128) for stored in (INT4, INT8)
)
UNPACK = dict(HEADS=8, PAGE=16, DIM=128, DIM_PAD=128, TILE=slices.TILE, STORE_BYTES=8192)
TABLE = dict(HEADS=8, PAGE=16, STORED=16, BLOCK=128, GROUP=5, DIM=80, QUERY=512, RECORD=True)
PLAN = dict(
    HEADS=8, PAGE=16, WORDS=slices.WORDS, SMALLEST=64, BEFORE=96, STEP=16, BLOCK=256, WIDE=1024
)
FLOATS = dict(query="*bf16", cache="*bf16", out="*bf16", rings="*bf16", partial="*fp32")
FLOATS |= dict(dense="*bf16")
FLOATS |= dict(weights="*fp32", sinks="*fp32", scale="fp32", softcap="fp32", value_scale="fp32")
FLOATS |= dict(rotation_scale="fp32", factor="fp32")
FLOATS |= dict(keys="*bf16", away="*fp32", centers="*i64", centres="*fp32")
NUMBERS = (
    "num_sequences columns count head_tokens page_tokens indptr_layer lengths_layer pieces_layer "
    "programs query_token query_head out_token out_head stores_row table_row block_row window "
    "dense_row one"
).split()
KERNELS = [
    (decode._attend_kernel, ATTEND, dict(num_warps=4, num_stages=3)),
    (decode._attend_kernel, ATTEND | FOUR_BITS, dict(num_warps=4, num_stages=3)),
    (decode._attend_kernel, ATTEND | EIGHT_BITS, dict(num_warps=4, num_stages=3)),
    (unpack._unpack_kernel, UNPACK | FOUR_BITS, {}),
    (slices._lengths_kernel, dict(HEADS=8, BLOCK=256), {}),
    (slices._plan_kernel, PLAN, {}),
    (page_table._page_table_kernel, TABLE, {}),
    (gather._gather_kernel, dict(PAGE=16, CONTENT=4096, PROGRAMS=64, BLOCK=1024), {}),
    (observe._observe_kernel, dict(HEADS=32, DIM=128, BLOCK=1024), {}),
    (centers._centers_kernel, dict(DIM=128, DIM_PAD=128, BLOCK=256), dict(num_warps=16)),
]


FP8 = dict(query="*fp8e4nv", cache="*fp8e4nv")


def compiled(kernel, constants, options, target: GPUTarget, **types: str):
    """What the compiler makes of a kernel: by stage in ``asm``."""
    names = kernel.arg_names
    floats = FLOATS | types
    signature = {
        name: "constexpr"
        if name in constants
        else floats.get(name, "i32" if name in NUMBERS else "*i32")
        for name in names
    }
    # As at run time: addresses and strides are multiples of 16, but for slices of tables.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name] not in ("constexpr", "fp32")
        and not kernel.params[index].do_not_specialize
        and not kernel.params[index].do_not_specialize_on_alignment
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=target, options=options)


def test_waits_are_counted():
    """Two loads wait for one number, a third one for both; all of them stand in one pipeline."""
    text = """
    %a = tt.addptr %table, %program : !tt.ptr<i32>, i32
    %b = tt.load %a : !tt.ptr<i32>
    %c:2 = scf.while (%d = %b, %e = %more) : (i32, i1) -> (i32, i1) {
      scf.condition(%e) %d, %e : i32, i1
    } do {
    ^bb0(%f: i32, %g: i1):
      %h = tt.addptr %keys, %program : !tt.ptr<i32>, i32
      %i = tt.splat %h : !tt.ptr<i32> -> tensor<4x!tt.ptr<i32>>
      %j = tt.addptr %table, %f : !tt.ptr<i32>, i32
      %k = ttg.async_copy_global_to_local %j, %view : !tt.ptr<i32>
      %l = ttg.async_commit_group tokens %k
      %m = tt.load %j : !tt.ptr<i32>
      %n = ttg.async_wait %l {num = 0 : i32}
      %o = tt.load %i, %m : !tt.ptr<i32>
    """
    assert waits_before(text, "table") == 0 and waits_before(text, "keys") == 2
    with pytest.raises(ValueError, match="other"):
        waits_before(text, "other")


def by_name(part: object) -> str:
    return getattr(part, "__name__", "")


@pytest.mark.parametrize(("kernel", "constants", "options"), KERNELS, ids=by_name)
def test_compiles(kernel, constants, options):
    made = compiled(kernel, constants, options, GPUTarget("cuda", 90, 32)).asm
    assert made["cubin"]
    if constants.get("KEY_BITS"):
        assert re.search("mma.sync|wgmma.mma_async", made["ptx"])
    elif kernel is decode._attend_kernel:
        # Keys and values of later tiles are on their way while a tile is multiplied.
        assert made["ptx"].count("cp.async") > 16
        assert "mma.sync" in made["ptx"]
        # Partial sums are written by all threads before one of them releases them, and read by
        # all after it has acquired those of others, not from the first cache.
        touches = r"bar\.sync|st\.global|atom\.global\.gpu\.\w+|ld\.global\.cg"
        order = re.findall(touches, made["ptx"])
        arrived = order.index("atom.global.gpu.acq_rel")
        assert order[arrived - 1] == order[arrived + 1] == "bar.sync"
        assert "ld.global.cg" in order[arrived:] and "ld.global.cg" not in order[:arrived]
        # The only one, of a sequence with several pieces.
        assert made["ptx"].count("atom.global") == 1
        # For the descriptor, for the query and the small numbers beside it, and for the pages.
        assert waits_before(made["ttgir"], "query") == 1
        assert waits_before(made["ttgir"], "cache") == 3
    if kernel is slices._plan_kernel:
        assert "atom.global" not in made["ptx"]
    if kernel is centers._centers_kernel:
        # The order of equal distances depends on the rounding of the root.
        assert "sqrt.rn.f32" in made["ptx"] and "sqrt.approx" not in made["ptx"]
        assert made["ptx"].count("ld.global.v4") >= 8, "eight keys at a time"
        # All threads have written their distances before one reads those of others.
        inner = made["ttgir"].rindex("tt.store")
        after = r"scf\.yield[^\n]*\n\s*} loc[^\n]*\n\s*ttg\.barrier all"
        assert re.search(after, made["ttgir"][inner:])


SLICES = ("rows places tokens back slots seq_lens lengths table").split()
SIZES = ("num_sequences", "columns", "count", "head_tokens")


@pytest.mark.parametrize("kernel", [kernel for kernel, _, _ in KERNELS], ids=by_name)
def test_one_kernel_for_slices_at_any_address(kernel):
    """What a step makes by slicing, and how much of it, chooses no other kernel."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = next(constants for one, constants, _ in KERNELS if one is kernel)
    table, made = torch.zeros(64, dtype=torch.int32), []
    for offset, number in ((0, 16), (1, 17), (3, 1)):
        values = {
            name: number
            if name in SIZES
            else table[offset:]
            if name in SLICES
            else 32
            if name in NUMBERS or name in FLOATS
            else table
            for name in kernel.arg_names
            if name not in options
        }
        made.append(bind(**values, **options)[1])
    assert made[0] == made[1] == made[2]


KIB = 1024
SHARED = {80: 164 * KIB, 89: 100 * KIB, 90: 228 * KIB}
"""Of a multiprocessor; that of compute capability 10.x is as large as that of 9.0."""
REGISTERS, THREADS = 65536, 128


@pytest.mark.parametrize(
    ("capability", "size", "fp8"),
    [(80, 128, False), (89, 128, True), (90, 64, False), (90, 128, False), (90, 128, True)],
)
def test_programs_fit_a_multiprocessor(capability, size, fp8, tmp_path):
    """All programs of a launch run at once, without spills, and where there is room read ahead."""
    found = resident(size, 2, fp8, SHARED[capability])
    programs, stages = found.programs, found.many
    constants = ATTEND | dict(DIM=size, DIM_PAD=size, FP8=fp8, SINKS=False)
    options, target = dict(num_warps=4, num_stages=stages), GPUTarget("cuda", capability, 32)
    made = compiled(decode._attend_kernel, constants, options, target, **(FP8 if fp8 else {}))
    used = resources(made.asm["cubin"], tmp_path)
    # Registers are given out in steps of 256 a warp.
    registers = -(-used["REG"] // 8) * 8 * THREADS
    assert programs * registers <= REGISTERS and used["STACK"] <= 16
    assert programs * (made.metadata.shared + RESERVED) <= SHARED[capability]
    tiles = re.findall(rf"local_alloc.*memdesc<(\d+)x{slices.TILE}x{size}x", made.asm["ttgir"])
    waits = set(re.findall(r"async_wait.*num = (\d+)", made.asm["ttgir"]))
    assert "mma.sync" in made.asm["ptx"]
    assert stages == AHEAD
    assert tiles == ["2"] * 2 and max(waits) > "0"


WAITS = [
    (128, False, 5, False), (128, True, 5, False), (64, False, 5, False), (256, False, 2, False),
    *(nightly(*one) for one in [
        (128, False, 3, False), (128, False, 5, True), (128, True, 3, True), (64, True, 5, True),
        (64, False, 3, True), (256, False, 2, True), (256, True, 2, False), (256, True, 5, True),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("size", "fp8", "stages", "sinks"), WAITS)
def test_waits_before_the_first_key(size, fp8, stages, sinks):
    """For the descriptor, for the query and the small numbers beside it, and for the pages."""
    found = resident(size, 2, fp8, SHARED[90])
    assert stages in (found.few, found.many)
    constants = ATTEND | dict(DIM=size, DIM_PAD=size, FP8=fp8, SINKS=sinks)
    options, target = dict(num_warps=4, num_stages=stages), GPUTarget("cuda", 90, 32)
    made = compiled(decode._attend_kernel, constants, options, target, **(FP8 if fp8 else {}))
    assert waits_before(made.asm["ttgir"], "query") == 1
    assert waits_before(made.asm["ttgir"], "cache") == 3


def test_stores_in_few_bits_compile_in_float32():
    constants = UNPACK | FOUR_BITS | dict(STORE_BYTES=16384)
    types = dict(cache="*fp32", dense="*fp32")
    made = compiled(unpack._unpack_kernel, constants, {}, GPUTarget("cuda", 90, 32), **types)
    assert made.asm["cubin"]


WAITS_PACKED = [(64, "int8", True, False), (128, "int4", False, True), *(nightly(*one) for one in [
    (64, "int4", True, True), (64, "int4", False, False), (64, "int8", False, False),
    (128, "int4", True, False), (128, "int8", True, True), (128, "int8", False, False),
    (256, "int4", True, True), (256, "int8", True, False),
])]  # fmt: skip


@pytest.mark.parametrize(("size", "stored", "few", "sinks"), WAITS_PACKED)
def test_waits_before_the_first_key_in_few_bits(size, stored, few, sinks):
    """No more than over 16 bits: the query is rotated by what is computed."""
    found = resident(size, 2, False, SHARED[90], packed=True)
    packed = PackedStores.of(FORMATS[stored], size, 16, torch.device("cpu")).constants(size)
    constants = ATTEND | packed | dict(DIM=size, DIM_PAD=size, SINKS=sinks)
    constants |= dict(STORE_BYTES=16 * 2 * size * 2)
    options = dict(num_warps=4, num_stages=found.few if few else found.many)
    made = compiled(decode._attend_kernel, constants, options, GPUTarget("cuda", 90, 32))
    assert waits_before(made.asm["ttgir"], "query") == 1
    assert waits_before(made.asm["ttgir"], "words") == 3


def dumped(binary: bytes, folder: Path, option: str) -> str:
    (folder / "kernel.cubin").write_bytes(binary)
    command = [knobs.nvidia.cuobjdump.path, option, str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(binary: bytes, folder: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack."""
    said = dumped(binary, folder, "-res-usage")
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said)}


def loops(binary: bytes, folder: Path) -> list[list[str]]:
    """Instructions of the loops with products of tensor cores, by their beginnings."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", dumped(binary, folder, "-sass"))
    code = {int(at, 16): text for at, text in found}
    jumps = {at: re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text) for at, text in code.items()}
    back = [(int(jump[1], 16), at) for at, jump in jumps.items() if jump]
    spans = sorted((begin, end) for begin, end in back if begin <= end)
    parts = [[text for at, text in code.items() if begin <= at <= end] for begin, end in spans]
    return [part for part in parts if any("HMMA" in text for text in part)]


FORMATS = {"int4": INT4, "int8": INT8}
FIT = [(90, "int4", 128, "bf16"), *(nightly(*one) for one in [
    (80, "int4", 128, "bf16"), (89, "int4", 128, "bf16"), (90, "int4", 128, "fp16"),
    (90, "int4", 64, "bf16"), (90, "int8", 128, "bf16"), (90, "int8", 128, "fp16"),
    (100, "int4", 128, "bf16"),
])]  # fmt: skip
# Bytes of a store for each instruction of a warp. At half of an H100's bandwidth, its four
# schedulers have one instruction of a warp each for 7.3 bytes.
BYTES = {"int4": 11, "int8": 11}


@pytest.mark.parametrize(("capability", "stored", "size", "dtype"), FIT)
def test_programs_over_stores_in_few_bits(capability, stored, size, dtype, tmp_path):
    """All programs of a launch run at once, and the loop over the store has few instructions."""
    shared = SHARED.get(capability, SHARED[90])
    found = resident(size, 2, False, shared, packed=True)
    packed = PackedStores.of(FORMATS[stored], size, 16, torch.device("cpu")).constants(size)
    constants = ATTEND | packed
    constants |= dict(DIM=size, DIM_PAD=size, SINKS=False, STORE_BYTES=16 * 2 * size * 2)
    types = dict.fromkeys(("query", "cache", "out", "rings"), f"*{dtype}")
    for stages in {found.few, found.many}:
        options, target = dict(num_warps=4, num_stages=stages), GPUTarget("cuda", capability, 32)
        made = compiled(decode._attend_kernel, constants, options, target, **types)
        used = resources(made.asm["cubin"], tmp_path)
        registers = -(-used["REG"] // 8) * 8 * THREADS
        assert found.programs * registers <= REGISTERS and used["STACK"] <= 64
        assert found.programs * (made.metadata.shared + RESERVED) <= shared
        loop = min((part for part in loops(made.asm["cubin"], tmp_path) if masks(part)), key=len)
        assert waits_before(made.asm["ttgir"], "query") == 1
        assert waits_before(made.asm["ttgir"], "words") == 3
        size_of_tile = packed["STORE_PAGE"] * sum(FORMATS[stored].planes(size))
        assert len(loop) * BYTES[stored] <= size_of_tile


def masks(instructions: list[str]) -> bool:
    """True if many of them combine bits."""
    return sum("LOP3" in text for text in instructions) > 24


@pytest.mark.parametrize(
    ("size", "itemsize", "fp8", "shared", "expected"),
    [
        (128, 2, False, 100, (2, 3, 3)),
        (64, 2, False, 100, (4, 3, 3)),
        (80, 2, False, 228, (2, 3, 5)),
        (256, 2, False, 228, (2, 2, 2)),
        (256, 2, False, 100, (1, 2, 2)),
        (256, 4, False, 100, (1, 1, 1)),
    ],
)
def test_programs_by_size(size, itemsize, fp8, shared, expected):
    assert resident(size, itemsize, fp8, shared * KIB) == Residency(*expected)


@pytest.mark.parametrize("kernel, constants, options", KERNELS, ids=by_name)
def test_compiles_for_amd(kernel, constants, options):
    made = compiled(kernel, constants, options, GPUTarget("hip", "gfx942", 64)).asm
    assert made["hsaco"]
    if kernel is decode._attend_kernel:
        assert "v_mfma" in made["amdgcn"]
