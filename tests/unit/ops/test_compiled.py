"""Compiled functions where nothing can be kept on disk."""

from errno import ENOSPC
from typing import Any

import pytest
from numba.core import caching

from vllm_kvevict.ops.cpu import compiled


def test_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compiled.logger, "warning_once", said.append)
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled.exact(lambda x: x + 1)(1) == 2
    assert len(said) == 1 and "NUMBA_CACHE_DIR" in said[0]


def test_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def save(self: Any, key: Any, data: Any) -> None:
        tried.append(key)
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "load", lambda self, key: None)
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    assert compiled.fast(lambda x: x + 1)(1) == 2
    assert tried, "what was compiled is to be kept"
