"""Samples of a model's weights on disk, by which models of one shape are told apart."""

import base64
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import torch

TENSORS, VALUES = 128, 8
"""Number of tensors in a sample, and of values of each."""

SIMILAR = 0.5
"""Median correlation of the tensors of two related models. Fine-tuned and quantised weights
correlate by more than 0.9 with those that they were made from, and independently trained weights by
about 0."""

SMALLEST = 2.0**-24
"""Difference that a conversion to float16 may cause, which has no smaller values."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Sample = Mapping[str, str]
"""Values of single tensors, by name: base64 of :data:`VALUES` little-endian bfloat16."""


def sample(files: Iterable[Path]) -> dict[str, str]:
    """Return a sample of a model's matrices.

    Values are rounded to bfloat16, so that conversions of the weights to another floating-point
    type have the same sample. The choice of tensors depends on their names alone, and the choice of
    values on their shapes. Output embeddings are left out, because files of models that tie them
    may contain them or not.

    Args:
        files: safetensors files or PyTorch checkpoints.

    Returns:
        The sample; empty if the files contain no matrix of floating-point numbers.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or of another format.

    """
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return dict(_sampled(tuple(state)))


def is_same(one: Sample, other: Sample) -> bool:
    """Return True if two samples have the same tensors with the same values."""
    if one.keys() != other.keys():
        return False
    return all(_differ(one[name], other[name]) <= SMALLEST for name in one)


def correlation(one: Sample, other: Sample) -> float | None:
    """Return the median correlation over tensors of both samples; None if there is none."""
    found = [_correlation(one[name], other[name]) for name in one.keys() & other.keys()]
    return median(found) if found else None


def digest(weights: Sample) -> str:
    """Return a digest of a sample."""
    return sha256(json.dumps(dict(weights), sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=8)
def _sampled(state: tuple[tuple[str, int, int], ...]) -> tuple[tuple[str, str], ...]:
    tensors: dict[str, tuple[Path, Sequence[int]]] = {}
    for file, _, _ in state:
        for name, shape in _shapes(Path(file)).items():
            if len(shape) > 1 and min(shape) > 1 and not name.endswith("lm_head.weight"):
                tensors[name] = (Path(file), shape)
    chosen = sorted(tensors, key=lambda name: sha256(name.encode()).digest())[:TENSORS]
    by_file: dict[Path, list[str]] = {}
    for name in sorted(chosen):
        by_file.setdefault(tensors[name][0], []).append(name)
    found = {}
    for path, names in by_file.items():
        for name, values in _values(path, names).items():
            found[name] = _encode(values)
    return tuple(sorted(found.items()))


def _shapes(file: Path) -> dict[str, Sequence[int]]:
    """Return the shapes of a file's tensors of floating-point numbers, by name."""
    if file.suffix == ".safetensors":
        header, _ = _header(file)
        return {name: row["shape"] for name, row in header.items() if row["dtype"] in DTYPES}
    return {
        name: tensor.shape
        for name, tensor in _checkpoint(file).items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    }


def _values(file: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return [VALUES] values of each of a file's tensors, as bfloat16."""
    if file.suffix != ".safetensors":
        tensors = _checkpoint(file)
        return {
            name: tensors[name].reshape(-1)[_positions(tensors[name].numel())].bfloat16()
            for name in names
        }
    header, start = _header(file)
    found = {}
    with file.open("rb") as opened:
        for name in names:
            row = header[name]
            dtype = DTYPES[row["dtype"]]
            begin, end = row["data_offsets"]
            data = bytearray()
            for position in _positions((end - begin) // dtype.itemsize).tolist():
                opened.seek(start + begin + position * dtype.itemsize)
                data += opened.read(dtype.itemsize)
            if len(data) != VALUES * dtype.itemsize:
                raise ValueError(f"{file} ends inside {name}")
            found[name] = torch.frombuffer(data, dtype=dtype).float().bfloat16()
    return found


def _positions(count: int) -> torch.Tensor:
    """Return [VALUES] int64 indices, at equal distances."""
    return (2 * torch.arange(VALUES) + 1) * count // (2 * VALUES)


def _header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the header of a safetensors file, and the offset of its data."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _checkpoint(file: Path) -> dict[str, torch.Tensor]:
    try:
        value = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} is not a PyTorch checkpoint: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} contains no tensors by name")
    return value


def _encode(values: torch.Tensor) -> str:
    data = values.view(torch.int16).numpy().astype("<i2").tobytes()
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    data = bytearray(base64.b64decode(text))
    return torch.frombuffer(data, dtype=torch.bfloat16).double()


def _differ(one: str, other: str) -> float:
    if one == other:
        return 0.0
    a, b = _decode(one), _decode(other)
    # NaN is no difference that a conversion causes.
    return float((a - b).abs().nan_to_num(torch.inf).max()) if len(a) == len(b) else torch.inf


def _correlation(one: str, other: str) -> float:
    a, b = _decode(one), _decode(other)
    if len(a) != len(b):
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    found = float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30))
    return 0.0 if found != found else found
