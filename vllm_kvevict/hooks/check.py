"""The self-check at start-up: names the hook that this vLLM does not have."""

import re
from pathlib import Path
from typing import NamedTuple

from vllm_kvevict import __version__
from vllm_kvevict.hooks.listing import HOOKS
from vllm_kvevict.hooks.overrides import unmet
from vllm_kvevict.hooks.source import Source
from vllm_kvevict.hooks.versions import SUPPORTED_VLLM

TOOLS = {"sizing": "sizing", "inspect": "inspect", "hooks": "sizing"}
"""The command that alone needs a folder's hooks. ``hooks/shims`` serves ``plan``."""


class Hook(NamedTuple):
    """One name of vLLM's. ``user`` is the file of ours that needs it."""

    user: str
    module: str
    name: str
    parameters: tuple[str, ...] = ()

    @property
    def tool(self) -> str | None:
        """The command that alone needs it, or None where every server does."""
        return TOOLS.get(self.user.split("/")[0])

    def applies(self, version: str) -> bool:
        """Whether this vLLM needs it: a shim is one version's."""
        shim = re.search(r"shims/vllm_(\d+)_(\d+)", self.user)
        return shim is None or version.startswith(f"{shim[1]}.{shim[2]}.")

    def __str__(self) -> str:
        takes = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.module}.{self.name}{takes}"


def hooks() -> list[Hook]:
    """Every hook, as :data:`~vllm_kvevict.hooks.listing.HOOKS` spells them."""
    return [
        Hook(user, module, name, tuple(filter(None, parameters.split(","))))
        for user, modules in HOOKS.items()
        for module, names in modules.items()
        # A list of parameters may go on in the next line.
        for word in re.sub(r",\s+", ",", names).split()
        for name, _, parameters in [word.rstrip(")").partition("(")]
    ]


def problem(source: Source, hook: Hook) -> str | None:
    """What is wrong with a hook in a vLLM, in a word or two; None for nothing."""
    if not source.has(hook.module, hook.name):
        return "missing"
    if not source.has(hook.module, hook.name, hook.parameters):
        return "takes other parameters"
    lacking = unmet(source, hook.user, hook.module, hook.name)
    return f"ours lacks {', '.join(lacking)}" if lacking else None


def missing(source: Source) -> list[Hook]:
    """The hooks that do not fit a vLLM."""
    version = source.version
    return [hook for hook in hooks() if hook.applies(version) and problem(source, hook)]


def check_hooks(version: str, root: Path, tool: str | None = None) -> None:
    """Refuse a vLLM without a name that a server with eviction hooks into.

    Args:
        version: What ``vllm.__version__`` says.
        root: The folder of the package ``vllm``.
        tool: ``sizing`` or ``inspect``: check what this command needs instead.

    Raises:
        ValueError: In one sentence: the hook, this version, and the supported ones.

    """
    source = Source(root)
    for hook in missing(source):
        if hook.tool == tool:
            lacking = unmet(source, hook.user, hook.module, hook.name)
            what = f"changed ({', '.join(lacking)} is new)" if lacking else "does not have"
            raise ValueError(
                f"KV eviction (vllm-kvevict {__version__}, {hook.user}) hooks into {hook}, which "
                f"this vLLM {version} {what}; it supports vLLM {SUPPORTED_VLLM} as released."
            )
