"""What evictions that are put off would have given back, when that is decided."""

from typing import TYPE_CHECKING, Any

from tests.engine.views import held_once, holdings

if TYPE_CHECKING:
    from benchmarks.bare_scheduler import Setup


class PutOff:
    """Judges every eviction that the engine puts off, in the moment in which it does.

    A request may be looked at in a step that has no tokens left for it. Until the step that has
    some, and that tests look at, those it shares blocks with may be preempted.
    """

    def __init__(self, setup: "Setup", scheduler: Any) -> None:
        self._setup = setup
        self._scheduler = scheduler
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._managers = {manager.kv_cache_group_id: manager for manager in managers}
        self._judged: dict[tuple[str, int, int], bool] = {}
        add = scheduler._table.add

        def added(*args: Any) -> Any:
            state = add(*args)
            defer = state.defer

            def deferred(group: int, end: int) -> None:
                due = max(end, state.progress[group].next_eviction or 0)
                key = self._key(state, group)
                self._judged[key] = self.worth(state, group, due) or self._judged.get(key, False)
                defer(group, end)

            state.defer = deferred
            return state

        scheduler._table.add = added

    def _key(self, state: Any, group: int) -> tuple[str, int, int]:
        """Of a group of a request in its present life."""
        return state.request_id, state.request.num_preemptions, group

    def asked(self, state: Any, group: int) -> bool:
        """Whether an eviction was put off since the last call of :meth:`wrongly`."""
        return self._key(state, group) in self._judged

    def wrongly(self, state: Any, group: int, due: int) -> bool:
        """Whether evictions that were put off since the last call gave blocks back."""
        judged = self._judged.pop(self._key(state, group), None)
        return self.worth(state, group, due) if judged is None else judged

    def worth(self, state: Any, group: int, due: int) -> bool:
        """Whether an eviction at ``due`` gives blocks back now."""
        bs, manager = self._setup.block_size, self._managers[group]
        progress = state.progress[group]
        last, first = (due - self._setup.window) // bs, progress.tail_start // bs
        at = state.options.at
        context = at is not None and due > at and state.evicted_at in (0, at)
        if context:
            # Others may share it, so neither its store nor its blocks count.
            first = max(first, -(-at // bs))
        table = manager.req_to_blocks[state.request_id][first:last]
        shared = len(table) - len(self.held_once({block.block_id for block in table}))
        holding = holdings(manager).get(state.request_id)
        store = {b.block_id for b in holding.store} if progress.evicted and not context else set()
        own = len(self.held_once(store)) + last - first - shared
        return bool(own > progress.wanted(due))

    def held_once(self, blocks: set[int]) -> set[int]:
        """Those with one owner; vLLM may still hold what a request had that is over."""
        over = {b.block_id for _, mine in self._scheduler.deferred_frees for b in mine}
        return held_once(list(self._managers.values()), blocks) - over
