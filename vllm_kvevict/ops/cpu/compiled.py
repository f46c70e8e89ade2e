"""How functions are compiled: without the interpreter's lock, and kept on disk, if possible."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
from llvmlite.binding import ffi
from vllm.logger import init_logger

logger = init_logger("vllm.kv_eviction.compiled")

_symbol = ffi._lib_wrapper.__getattr__


def _no_symbol_is_special(library: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _symbol(library, name)


# llvmlite answers for every name with a function. vLLM looks for __dict__ in all that modules hold
# when another engine starts in this process (triton_utils/dispatcher.py), and would end with it.
ffi._lib_wrapper.__getattr__ = _no_symbol_is_special

SUMS = {"contract", "arcp", "nsz", "reassoc"}
"""Freedom to add in another order, which vector instructions need."""


def _kept(fastmath: Any, **more: bool) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles, and keeps what it made where a folder can be written."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath, **more)(function)
        try:
            made.enable_caching()
        except RuntimeError:
            logger.warning_once(
                "KV eviction: Numba finds no folder that it can write, so each start compiles the "
                "CPU's operations anew, which takes some seconds; set NUMBA_CACHE_DIR to one."
            )
            return made
        cache, save = made._cache, made._cache.save_overload

        def save_if_possible(*args: Any) -> None:
            # A full disk costs the next start some seconds, not this one its life.
            with suppress(OSError):
                save(*args)

        cache.save_overload = save_if_possible
        return made

    return decorate


exact = _kept(fastmath=False)
fast = _kept(fastmath=SUMS)
finite = _kept(fastmath=SUMS | {"nnan"})
"""For functions that see no NaN."""
shared = _kept(fastmath=False, parallel=True)
"""For functions that :func:`~vllm_kvevict.ops.cpu.team.share` runs on all threads. Each operation
has one of its own beside it: Numba keeps what it compiled by the file that it stands in."""
