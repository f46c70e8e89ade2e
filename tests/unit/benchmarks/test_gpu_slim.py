"""A fat binary without other GPUs' code."""

import struct
from pathlib import Path

import pytest

from benchmarks.gpu import slim


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    head = 64
    fixed = struct.pack("<HHIQ", kind, 0, head, len(payload))
    return fixed.ljust(0x1C, b"\1") + struct.pack("<I", arch).ljust(head - 0x1C, b"\1") + payload


def fat(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", slim.MAGIC, 1, 16, len(content)) + content


def test_other_code_becomes_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine, other, ptx = b"m" * 8, b"o" * 16, b"p" * 24
    both = fat(entry(2, 80, other), entry(2, 90, mine), entry(1, 80, ptx))
    without = fat(entry(2, 80, other), entry(1, 80, ptx))
    library = tmp_path / "library.so"
    library.write_bytes(b"ELFELFEL" + both + bytes(8) + without + b"rest")
    found = (8, len(both) + 8 + len(without))
    monkeypatch.setattr(slim, "section", lambda path: found)
    expected = [
        fat(entry(2, 80, bytes(16)), entry(2, 90, mine), entry(1, 80, bytes(24))),
        fat(entry(2, 80, bytes(16)), entry(1, 80, ptx)),
    ]
    assert slim.slim(library, 90) == b"ELFELFEL" + expected[0] + bytes(8) + expected[1] + b"rest"
