"""Loops compiled by numba, which vLLM requires, on torch's own threads.

A parallel region of OpenMP runs them: its threads are those of torch's operations, which vLLM
binds to the cores of the rank. Threads of our own would run on the cores of other ranks, or
compete with OpenMP's, which wait actively after each operation.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


def load_numba() -> Any:
    """Import numba, in a way that a second engine of the process can start.

    vLLM looks through the ``__dict__`` of everything that a module names when an engine starts, and
    llvmlite's library returns a function for that name.
    """
    import numba
    from llvmlite.binding import ffi

    ffi.lib._fntab.setdefault("__dict__", {})
    return numba


OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""GNU's interface to a parallel region, which the libraries of Intel and LLVM have as well."""


@lru_cache
def _has_openmp() -> bool:
    """Return True if the process has loaded OpenMP, after telling LLVM where it is."""
    load_numba()
    from llvmlite import binding

    process = ctypes.CDLL(None)
    for name in OPENMP:
        if not hasattr(process, name):
            return False
        binding.add_symbol(name, ctypes.cast(getattr(process, name), ctypes.c_void_p).value)
    return True


@lru_cache
def intrinsics() -> tuple[Any, Any]:
    """Return ``fork(body, arguments, threads)``, which calls ``body(*arguments, thread, threads)``
    in each thread of a parallel region, and ``call(body, arguments)``; both for compiled code.

    They return 0, or 1 if a call failed. What they call is compiled once, by itself: numba
    optimises everything again that a function calls otherwise.
    """
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    parallel = _has_openmp()
    word, integer, nothing = ir.IntType(64), ir.IntType(32), ir.VoidType()
    pointer = ir.IntType(8).as_pointer()

    def by_address(context: Any, builder: Any, body: Any, kinds: Any, values: Any) -> Any:
        """Call a compiled function, and return 1 if it failed."""
        compiled = body.dispatcher.get_compile_result(types.void(*kinds))
        name = compiled.fndesc.llvm_func_name
        kind = context.call_conv.get_function_type(types.void, kinds)
        address = context.add_dynamic_addr(
            builder, compiled.library.get_pointer_to_function(name), info=name
        )
        function = builder.bitcast(address, kind.as_pointer())
        status, _ = context.call_conv.call_function(builder, function, types.void, kinds, values)
        return builder.zext(status.is_error, word)

    def unpack(builder: Any, arguments: Any, value: Any) -> list[Any]:
        return [builder.extract_value(value, index) for index in range(len(arguments.types))]

    def call(typing: Any, body: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            each = unpack(builder, arguments, values[1])
            return by_address(context, builder, body, tuple(arguments.types), each)

        return types.int64(body, arguments), generate

    def fork(typing: Any, body: Any, arguments: Any, threads: Any) -> Any:
        kinds = (*arguments.types, types.int64, types.int64)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            module = builder.module

            def openmp(name: str, result: Any, *parameters: Any) -> Any:
                kind = ir.FunctionType(result, parameters)
                return cgutils.get_or_insert_function(module, kind, name)

            kept = types.Tuple((arguments, types.int64))
            both = context.make_tuple(builder, kept, [values[1], ir.Constant(word, 0)])
            shared = cgutils.alloca_once_value(builder, both)
            kind = ir.FunctionType(nothing, [pointer])
            region = ir.Function(module, kind, module.get_unique_name("parallel_region"))
            region.linkage = "internal"

            inner = ir.IRBuilder(region.append_basic_block("entry"))
            given = inner.bitcast(region.args[0], shared.type)
            held = inner.load(cgutils.gep_inbounds(inner, given, 0, 0))
            place = [ir.Constant(word, number) for number in (0, 1)]
            if parallel:
                found = [inner.call(openmp(name, integer), []) for name in OPENMP[1:]]
                place = [inner.zext(number, word) for number in found]
            each = [*unpack(inner, arguments, held), *place]
            failed = by_address(context, inner, body, kinds, each)
            with inner.if_then(inner.icmp_unsigned("!=", failed, ir.Constant(word, 0))):
                inner.store(failed, cgutils.gep_inbounds(inner, given, 0, 1))
            inner.ret_void()

            data = builder.bitcast(shared, pointer)
            if parallel:
                start = openmp(OPENMP[0], nothing, region.type, pointer, integer, integer)
                count = builder.trunc(values[2], integer)
                builder.call(start, [region, data, count, ir.Constant(integer, 0)])
            else:
                builder.call(region, [data])
            return builder.load(cgutils.gep_inbounds(builder, shared, 0, 1))

        return types.int64(body, arguments, threads), generate

    return intrinsic(fork), intrinsic(call)


@lru_cache
def _launcher(body: Callable[..., None], after: Callable[..., None] | None) -> Callable[..., None]:
    numba, (fork, call) = load_numba(), intrinsics()
    ends = after is not None

    @numba.njit(nogil=True)
    def launch(arguments: Any, threads: int) -> None:
        failed = fork(body, arguments, threads)
        if ends:
            failed |= call(after, arguments)
        if failed:
            raise MemoryError

    return launch


def run(
    body: Callable[..., None],
    *arguments: Any,
    threads: int,
    after: Callable[..., None] | None = None,
) -> None:
    """Run a compiled loop, divided between threads.

    Args:
        body: The loop, compiled. Its last two arguments are the index of a thread and the number of
            threads, which may be less than ``threads``.
        arguments: The arguments before these two.
        threads: Maximum number of threads; at most those of torch are used.
        after: Compiled, with the same arguments: called once, when all threads are done.

    Raises:
        MemoryError: An allocation of the loop failed.

    """
    _launcher(body, after)(arguments, min(threads, torch.get_num_threads()))
