"""The policy package that docs/policies.md writes down, installed as a user would."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_kvevict.config.plugins import plugin_policies

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"


def install_documented(folder: Path) -> Path:
    """Write the page's two files and install them.

    Returns:
        The folder to import from.

    """
    source, target = folder / "my-policy", folder / "site"
    source.mkdir()
    for language, name in (("python", "key_norm.py"), ("toml", "pyproject.toml")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
        (source / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return target


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Packages in ``folder`` are installed, for this process."""
    sys.path.insert(0, str(folder))
    plugin_policies.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("key_norm", None)
        plugin_policies.cache_clear()
