"""Policies of other installed packages: the entry-point group ``vllm_kvevict.policies``.

Only names are read here. A package is imported when its policy is selected, so a broken package
does not affect other users.
"""

import re
from collections import defaultdict
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from vllm_kvevict.config.names import ADA, POLICY_NAMES

GROUP = "vllm_kvevict.policies"

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

RESERVED = ("none", "off")
"""Names for no eviction."""


class PluginPolicy(NamedTuple):
    """A policy of an installed package, or the reason why it cannot be used.

    Args:
        value: ``module:function``; the function makes the scorer of a configuration.
        package: Name and version of the package.
        summary: One line for ``--help``.
        problem: Text after the policy's name that describes the problem; empty if the policy may be
            chosen.

    """

    value: str
    package: str
    summary: str = ""
    problem: str = ""


@cache
def plugin_policies() -> dict[str, PluginPolicy]:
    """Return the policies of installed packages by name. Imports none of them, and never raises."""
    offers: dict[str, set[tuple[str, str]]] = defaultdict(set)
    try:
        for entry in entry_points(group=GROUP):
            # A package may be found twice, through a path and through a link to it.
            offers[entry.name].add((entry.value, _package(entry)))
    except Exception:  # Metadata of any installed package, read in every `vllm serve`.
        return {}
    return {name: _judge(name, offers) for name in sorted(offers)}


def policy_names() -> tuple[str, ...]:
    """Return all valid names for ``--kv-eviction``."""
    usable = (name for name, policy in plugin_policies().items() if not policy.problem)
    return (*POLICY_NAMES, *usable)


def unknown(name: object, known: tuple[str, ...]) -> str:
    """Return a sentence that explains why a name is not a policy."""
    plugin = plugin_policies().get(name) if isinstance(name, str) else None
    if plugin is not None and plugin.problem:
        return f"the policy {name!r} of the package {plugin.package} {plugin.problem}"
    return f"unknown policy {name!r}; choose from {', '.join(known)}"


def _package(entry: EntryPoint) -> str:
    distribution = entry.dist
    return f"{distribution.name} {distribution.version}" if distribution is not None else "?"


def _judge(name: str, offers: dict[str, set[tuple[str, str]]]) -> PluginPolicy:
    (value, package), *others = sorted(offers[name])
    summary = f"of the package {package}"
    plain = name.removeprefix(ADA)
    problem = ""
    if name in POLICY_NAMES or plain in POLICY_NAMES:
        problem = "is not used because a built-in policy has the same name"
    elif name in RESERVED or not NAME.fullmatch(name):
        problem = "needs another name: lower-case letters, digits and single dashes"
    elif others:
        also = ", ".join(package for _, package in others)
        problem = f"is offered by {also} too; uninstall one of them"
    elif plain != name and (value, package) not in offers.get(plain, ()):
        problem = f"needs {plain!r} with the same value in the same package"
    elif plain != name:
        summary = f"scores of {plain}; the heads of a layer share the budget (Ada-KV)"
    return PluginPolicy(value, package, summary, problem)
