"""Where a result comes from: machine, versions, command, date, models and profiles."""

import datetime
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"

PROFILE_LINE = re.compile(r"KV eviction: the profile is (.+) \(SHA-256 ([0-9a-f]{64})\)")
"""Line of a server's log that names the profile in use."""

_models: dict[str, str | None] = {}
_profiles: dict[str, str] = {}
_servers: dict[str, None] = {}


def provenance() -> dict:
    """Return the fields that every result file carries.

    Models and profiles are those that were used until now: see :func:`used`.
    """
    versions = {}
    for name in ("vllm", "torch", "transformers", "vllm-kvevict"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, {_gpus()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **used(),
    }


def used() -> dict[str, Any]:
    """Return what this process has served or loaded so far.

    ``models`` and ``profiles`` map paths to SHA-256 digests, ``servers`` lists the arguments of
    ``vllm serve``. The digest of a model without weights in safetensors is None.
    """
    return {"models": dict(_models), "profiles": dict(_profiles), "servers": list(_servers)}


def add_model(model: str | Path) -> None:
    """Record a model that is measured."""
    path = _relative(str(model))
    if path not in _models:
        _models[path] = weights_sha256(Path(model))


def add_profile(path: str, sha256: str) -> None:
    """Record a profile that is measured."""
    _profiles[_relative(path)] = sha256


def add_server(model: str, args: Sequence[str], log: str) -> None:
    """Record a server that is ready.

    Args:
        model: Its model.
        args: Its other arguments.
        log: Its log so far, which names the profile.

    """
    add_model(model)
    _servers[" ".join([_relative(model), *args])] = None
    for path, sha256 in PROFILE_LINE.findall(log):
        add_profile(path, sha256)


def sentence(result: dict[str, Any], about: str = "") -> str:
    """Return the paragraph that begins the Markdown file of a result.

    Args:
        result: Has the fields of :func:`provenance`.
        about: What was measured, without a full stop.

    """
    text = f"`{result['command']}`, {result['date']}, commit {result['commit']}"
    parts = [f"{text}; {about}" if about else text]
    for title, name in (("Model", "models"), ("Profile", "profiles")):
        parts += [
            f"{title} {path} (SHA-256 {digest or UNKNOWN})"
            for path, digest in result.get(name, {}).items()
        ]
    parts.append(result["machine"])
    if versions := result.get("versions"):
        parts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return ". ".join(parts) + "."


def weights_sha256(model: Path) -> str | None:
    """Return the digest of a model's weights, or None if the folder has no safetensors."""
    found = sorted(model.glob("*.safetensors"))
    if not found:
        return None
    digest = hashlib.sha256()
    for path in found:
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _relative(path: str) -> str:
    """Return a path without the folder of this checkout."""
    root = f"{Path(__file__).parents[1]}/"
    return path.removeprefix(root)


def commit() -> str:
    """Of this checkout; ``KVEVICT_COMMIT`` where neither git nor its history is; else "unknown"."""
    if given := os.environ.get("KVEVICT_COMMIT"):
        return given
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True, text=True, cwd=Path(__file__).parent,
        ).stdout.strip()  # fmt: skip
    except FileNotFoundError:
        described = ""
    return described or UNKNOWN


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else sys.argv[0]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU used"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return " + ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
