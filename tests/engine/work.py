"""How much the package computes, in lines of Python: no clock, no name of the code under test."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

PACKAGE = "/vllm_kvevict/"


def lines_run(call: Callable[[], Any]) -> int:
    """Lines of the package that ``call`` runs, each pass of a loop or comprehension counted.

    Methods that ``dataclass`` wrote count, too: a key that is hashed anew is work.
    """
    lines = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return local

    def entered(frame: FrameType, *_: Any) -> Any:
        name = frame.f_code.co_filename
        return local if PACKAGE in name or name == "<string>" else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
