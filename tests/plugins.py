"""Policies of other packages: the one of docs/own-policy.md, and modules of a test."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_kvevict.config.plugins import GROUP, plugin_policies

PAGE = Path(__file__).parents[1] / "docs" / "own-policy.md"


def documented(name: str) -> str:
    """The text of a file that the page shows."""
    pattern = rf"file\s`{re.escape(name)}`[^`]*:\n\n```\w+\n(.*?)```"
    (text,) = re.findall(pattern, PAGE.read_text(), flags=re.DOTALL)
    return text


def write_package(folder: Path, name: str, modules: dict[str, str], entries: list[str]) -> None:
    """Write an installed package into a folder to import from.

    Args:
        folder: The folder.
        name: Name of the package.
        modules: Source of each module.
        entries: Lines of the entry-point group of policies.

    """
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *entries, ""]))


def install_documented(folder: Path) -> Path:
    """Write the page's first two files and install them.

    Returns:
        The folder to import from.

    """
    source, target = folder / "my-policy", folder / "site"
    source.mkdir()
    for name in ("key_norm.py", "pyproject.toml"):
        (source / name).write_text(documented(name))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return target


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Packages in ``folder`` are installed, for this process."""
    modules = [path.stem for path in folder.glob("*.py")]
    sys.path.insert(0, str(folder))
    plugin_policies.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in modules:
            sys.modules.pop(module, None)
        plugin_policies.cache_clear()
