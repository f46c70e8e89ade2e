"""Comparison of the listed names with the source of a vLLM."""

import re
from typing import NamedTuple

from dev.hooks.listing import HOOKS
from dev.hooks.overrides import unmet
from dev.hooks.source import Source


class Hook(NamedTuple):
    """One name of vLLM's. ``user`` is the file of ours that needs it."""

    user: str
    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def applies(self, version: str) -> bool:
        """Return True if this vLLM needs the hook: a file of ``compat/`` serves one version."""
        shim = re.search(r"compat/vllm_(\d+)_(\d+)", self.user)
        return shim is None or version.startswith(f"{shim[1]}.{shim[2]}.")

    def __str__(self) -> str:
        takes = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.module}.{self.name}{takes}"


def hooks() -> list[Hook]:
    """Every hook, as :data:`~dev.hooks.listing.HOOKS` spells them."""
    return [
        Hook(user, module, name, tuple(filter(None, parameters.split(","))))
        for user, modules in HOOKS.items()
        for module, names in modules.items()
        # A list of parameters may go on in the next line.
        for word in re.sub(r",\s+", ",", names).split()
        for name, _, parameters in [word.rstrip(")").partition("(")]
    ]


def problem(source: Source, hook: Hook) -> str | None:
    """Return what is wrong with a hook in a vLLM, in a word or two, or None."""
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
