"""One request from its arrival to its first eviction, through the files that the page names."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.engine.cases import SYNC, engine, evictions, tokens
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.request import RequestState

PACKAGE = Path(sys.modules["vllm_kvevict"].__file__ or "").parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def listed() -> list[str]:
    """The files of the page's list, in its order."""
    (section,) = re.findall(r"^## From arrival .*?(?=^## )", PAGE.read_text(), re.M | re.S)
    return re.findall(r"^\d\. `([\w/]+\.py)`", section, re.MULTILINE)


def test_arrival_and_eviction_pass_through_the_listed_files(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            stack = [str(Path(original.__code__.co_filename).relative_to(PACKAGE))]
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if path.is_relative_to(PACKAGE):
                    stack.append(str(path.relative_to(PACKAGE)))
                frame = frame.f_back
            seen.extend(dict.fromkeys(reversed(stack)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(RequestState, "__post_init__")
    watch(EvictionCore, "evict")
    core = engine(SYNC)
    core.add(tokens(100), 8)
    assert any(evictions(core.step()) for _ in range(3))
    files = listed()
    assert list(dict.fromkeys(seen)) == [name for name in files if name.startswith("engine/")]
    assert len(files) <= 7 and all((PACKAGE / name).exists() for name in files)
