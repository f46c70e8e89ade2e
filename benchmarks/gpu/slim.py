"""Removes machine code of other GPUs from a CUDA library, so that an archive of it is small.

``python -m benchmarks.gpu.slim LIBRARY ARCH OUTPUT``. The library keeps its size and its tables: in
each fat binary that has machine code for ARCH (``90``), all other entries are filled with zeros.
"""

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
ELF = 2
"""Kind of an entry with machine code; PTX is 1."""


def section(path: Path) -> tuple[int, int]:
    """Offset and bytes of the fat binaries."""
    said = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True)
    for line in said.stdout.splitlines():
        parts = line.replace("[ ", "[").split()
        if ".nv_fatbin" in parts:
            at = parts.index(".nv_fatbin")
            return int(parts[at + 3], 16), int(parts[at + 4], 16)
    raise ValueError(f"{path} has no fat binaries")


def binaries(data: bytes, begin: int, size: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Entries of each fat binary: kind, architecture, offset and bytes of the payload."""
    at, end = begin, begin + size
    while at < end - 16:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        entry, last, found = at + header, at + header + length, []
        while entry < last:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 0x1C)
            found.append((kind, arch, entry + head, payload))
            entry += head + payload
        yield found
        at = last


def slim(path: Path, arch: int) -> bytes:
    """The library without machine code that the GPU of this architecture does not need."""
    data = bytearray(path.read_bytes())
    for entries in binaries(bytes(data), *section(path)):
        mine = (ELF, arch) in [entry[:2] for entry in entries]
        for kind, target, at, size in entries:
            # Where no machine code fits, the driver compiles PTX.
            if (kind, target) != (ELF, arch) and (mine or kind == ELF):
                data[at : at + size] = bytes(size)
    return bytes(data)


def main() -> None:
    library, arch, output = sys.argv[1:]
    Path(output).write_bytes(slim(Path(library), int(arch)))


if __name__ == "__main__":
    main()
