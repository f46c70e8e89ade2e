"""Where a result comes from: machine, versions, command, date."""

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

UNKNOWN = "unknown"


def provenance() -> dict:
    """Fields that every result file carries."""
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
    }


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
