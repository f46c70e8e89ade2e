"""What tests look at inside the engine, in one place."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm_kvevict.engine.replays import Replays


def admitted(scheduler: Any) -> dict[str, Any]:
    """The states of requests that hold blocks, by id."""
    return {r: state for r, state in scheduler._table.states.items() if state.holds_blocks}


def holdings(manager: Any) -> dict[str, Any]:
    """What requests hold in a group beside their positional blocks, by request id."""
    core, group = getattr(manager, "core", None), manager.kv_cache_group_id
    states = core.table.states if core is not None else {}
    return {r: state.holdings[group] for r, state in states.items() if group in state.holdings}


def replays_of(scheduler: Any) -> Any:
    """The part of the scheduler that replays audited evictions, or None."""
    parts = getattr(scheduler, "_parts", ())
    return next((part for part in parts if isinstance(part, Replays)), None)


def owned(managers: Sequence[Any]) -> list[dict[str, set[int]]]:
    """Blocks of every request in each group, positional and others, by request id."""
    found: list[dict[str, set[int]]] = []
    for manager in managers:
        table = {r: {b.block_id for b in bs} for r, bs in manager.req_to_blocks.items()}
        for request_id, holding in holdings(manager).items():
            table.setdefault(request_id, set()).update(b.block_id for b in holding.blocks)
        found.append(table)
    return found


def held_once(managers: Sequence[Any], blocks: set[int]) -> set[int]:
    """Those of ``blocks`` with one owner."""
    owners = Counter(b for group in owned(managers) for mine in group.values() for b in mine)
    return {block for block in blocks if owners[block] == 1}
