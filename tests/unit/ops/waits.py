"""How often a compiled Triton kernel waits for loads before its first access of a buffer."""

import re

_NAME = r"%[\w.]+(?:#\d+)?"
_LOADS = ("tt.load", "ttg.async_copy_global_to_local", "tt.atomic_rmw")
_ADDRESSES = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims")
# They pass a value on without using it.
_PASSING = ("ttg.async_commit_group",)


def waits_before(ttgir: str, buffer: str) -> int:
    """Return the number of waits before the first load from an address that ``buffer`` begins.

    An instruction waits until the loads that it uses have ended, and so do all behind it; loads
    that are issued between two waits run together. Loops run once, as at their beginning. The text
    is the last that Triton's own compiler makes, after it has arranged the loads of loops.

    Raises:
        ValueError: There is no such load.

    """
    ready: dict[str, int] = {}
    rooted = {f"%{buffer}"}
    passed: list[str] = []
    now = 0
    for line in ttgir.splitlines():
        text = re.sub(r" loc\(.*", "", line).strip()
        if text.startswith("^bb0") and passed:
            for name, given in zip(re.findall(_NAME, text), passed, strict=False):
                ready[name] = ready.get(given, 0)
                rooted |= {name} if given in rooted else set()
            passed = []
            continue
        made, _, rest = text.partition(" = ") if text.startswith("%") else ("", "", text)
        operation = rest.split(" ", 1)[0].split("(")[0]
        if not re.match(r"(tt|ttg|arith|scf|math|ub)\.", operation):
            continue
        name = re.match(_NAME, made)
        key = name.group().split(":")[0] if name else ""
        if operation in ("scf.while", "scf.for"):
            given = dict(re.findall(rf"({_NAME}) = ({_NAME})", rest))
            for inner, outer in given.items():
                ready[inner] = ready.get(outer.split("#")[0], 0)
                rooted |= {inner} if outer in rooted else set()
            # The bounds decide whether the body runs.
            for bound in (
                re.findall(_NAME, rest.split("iter_args")[0]) if "for" in operation else ()
            ):
                now = max(now, ready.get(bound, 0))
            continue
        operands = re.findall(_NAME, rest)
        if operation == "scf.condition":
            now = max(now, ready.get(operands[0], 0))
            passed = operands[1:]
            continue
        if operation == "scf.yield":
            continue
        if operation in _PASSING:
            ready[key] = max((ready.get(one.split("#")[0], 0) for one in operands), default=0)
            continue
        now = max([now, *(ready.get(one.split("#")[0], 0) for one in operands)])
        if operation in _LOADS:
            if operands[0] in rooted:
                return now
            ready[key] = now + 1
        elif operation in _ADDRESSES and any(one in rooted for one in operands):
            rooted.add(key)
    raise ValueError(f"nothing is loaded from {buffer}")
