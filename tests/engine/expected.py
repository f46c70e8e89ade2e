"""What requests should do, from what they asked for: their points, stores and gains."""

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from benchmarks.bare_scheduler import MEASURED_AT
from tests.engine.asked import Asked, apportioned

if TYPE_CHECKING:
    from tests.engine.harness import Setup

REPLAYS = "-audit-"
"""In the id of one that computes the last tokens of a request again, behind that one's."""


def replays(request_id: str) -> bool:
    """Whether a request of the engine's own replays another one's last tokens."""
    return REPLAYS in request_id


def of_client(request_id: str) -> bool:
    """Whether a request is a client's, and none of the engine's own."""
    return not replays(request_id)


class Expected:
    """Arithmetic on lengths that does not ask the code under test.

    Args:
        setup: The server's settings.
        clients: The clients' requests so far, by id; grows.

    """

    def __init__(self, setup: "Setup", clients: dict[str, Any]) -> None:
        self._setup = setup
        self._clients = clients
        self._known: dict[tuple[Any, ...], int] = {}
        self.prefill_ends: dict[str, int] = {}
        """Tokens that each request had when it was admitted last: its prompt, or all to replay."""

    def asked(self, request: Any) -> Asked:
        """The eviction options that the request asked for."""
        setup = self._setup
        client = self._clients[request.request_id]
        return Asked(client, setup.policy, setup.when, setup.prefill_interval, setup.every)

    def _budget(self, group: int, asked: Asked) -> Any:
        second = group and self._setup.second_budget is not None
        return asked.budget or (self._setup.second_budget if second else self._setup.budget)

    def points(self, group: int, request: Any) -> list[int]:
        """Where a group's prefill may evict before it ends."""
        asked, budget = self.asked(request), self._budget(group, self.asked(request))
        if asked.every:
            return [point for point, _, _ in self.chain(group, request)]
        if not asked.prefill_interval:
            return [asked.at] if asked.at else []
        end = self.prefill_ends[request.request_id]
        setup = self._setup
        return asked.points(end, int(budget), setup.window, setup.block_size, setup.page)

    def chain(self, group: int, request: Any) -> list[tuple[int, int, int]]:
        """Where a group evicts, by the tokens so far alone, with the tail start and the blocks that
        it keeps."""
        asked, bs, window = self.asked(request), self._setup.block_size, self._setup.window
        budget, page = self._budget(group, asked), self._setup.page
        longest = min(request.num_prompt_tokens + request.max_tokens, self._setup.max_model_len)
        found, tail, store = [], 0, 0
        for point in asked.positions(longest - 2, budget, window, bs, page):
            if self.gain(group, request, point, tail * bs, store) > 0:
                store = self.store_blocks(group, request, point, tail * bs, store)
                tail = (point - window) // bs
                found.append((point, tail * bs, store))
        return found

    def gain(self, group: int, request: Any, n: int, tail: int = 0, store: int = 0) -> int:
        """Blocks that an eviction at ``n`` gives back after one that kept ``store`` blocks and the
        tokens from ``tail`` on, if nobody shares any; 0 or less if there is none."""
        bs, page = self._setup.block_size, self._setup.page
        start = (n - self._setup.window) // bs * bs
        wanted = self.store_blocks(group, request, n, tail, store)
        given = (start - tail) // bs + store - wanted
        evicted = start - tail - (wanted - store) * page
        if page == bs or not isinstance(self._budget(group, self.asked(request)), str):
            return min(given, evicted // bs)
        # A share is one of the memory, in which all tokens may fit. It fills whole pages.
        waits = store and wanted == store and self.store_blocks(group, request, n) > store
        waits = waits and not self.asked(request).pressure
        return 0 if evicted < 0 or waits else given

    def gives(self, group: int, request: Any, n: int, tail: int) -> bool:
        """Whether an eviction at ``n`` gives blocks back after one with this tail start."""
        bs, window = self._setup.block_size, self._setup.window
        return (n - window) // bs > tail // bs if tail else self.gain(group, request, n) > 0

    def store_blocks(self, group: int, request: Any, n: int, tail: int = 0, store: int = 0) -> int:
        """Blocks that an eviction at ``n`` keeps, never fewer than it keeps of the prompt, and than
        the ``store`` before it.

        The pages of protected tokens, which every head has, are added to the budget's. In the share
        of a memory that could hold more tokens, a store has only pages that tokens fill: those of
        the former one, and the tokens from ``tail`` on.
        """
        asked = self.asked(request)
        budget, bs, page = self._budget(group, asked), self._setup.block_size, self._setup.page
        first = asked.at or request.num_prompt_tokens
        lengths = [first, n] if isinstance(budget, str) else [first]
        if asked.every:
            lengths = [n]  # Not of the prompt: another turn has a longer one.
        found = {}
        for length in lengths:
            found[length] = protected = -(-asked.protect_first // page)
            blocks = self._blocks_of(budget, length, group, asked.policy)
            start = max(0, length - self._setup.window) // bs * bs
            if isinstance(budget, str) and page > bs:
                blocks = min(blocks, max(1, start // page - protected))
            found[length] += blocks
        if isinstance(budget, str) and page > bs and store:
            start = (n - self._setup.window) // bs * bs
            found[n] = min(found.get(n, 0), store + (start - tail) // page)
        return max(store, *found.values())

    def _blocks_of(self, *asked: Any) -> int:
        """Blocks of a budget at a length, in a group, under a policy; exact fractions are slow."""
        if asked not in self._known:
            self._known[asked] = self._count(*asked)
        return self._known[asked]

    def _count(self, budget: int | str, length: int, group: int, policy: str) -> int:
        constant = isinstance(budget, str)
        window, page = self._setup.window, self._setup.page
        if isinstance(budget, str):
            memory = length * (float(budget[:-1]) / 100)
            budget = int(memory)
            if page > self._setup.block_size and memory > window:
                more = (memory - window) * page / self._setup.block_size
                budget = min(length, int(round(window + more, 6)))
        beside, most = budget - window, length - window
        blocks = Fraction(beside) / page
        if self._setup.grouped(policy) and beside < most and most >= 2 * page:
            shares = self._setup.fractions(max(beside, 1), most)
            if constant and self._setup.shares and beside > most * MEASURED_AT:
                # The layer kept share * MEASURED_AT of its tokens, and now keeps a power of that.
                power = math.log(beside / most) / math.log(MEASURED_AT)
                parts = [min(1.0, float(share) * MEASURED_AT) ** power for share in shares]
                shares = [Fraction(part * len(parts) / sum(parts)) for part in parts]
            return apportioned(blocks, most // page, shares)[group]
        return max(1, int(blocks))

    def joins(self, group: int, request: Any) -> int | None:
        """Where a prompt too short to evict does so first, for budgets in tokens."""
        asked, bs = self.asked(request), self._setup.block_size
        stride = asked.decode_stride(self._setup.interval, bs, self._setup.page)
        if asked.pressure or asked.every or isinstance(self._budget(group, asked), str):
            return None
        if not stride:
            return None
        end = self.prefill_ends[request.request_id]
        last = min(request.num_prompt_tokens + request.max_tokens, self._setup.max_model_len)
        due = self._outgrown(group, request, end, stride)
        wanted = self.store_blocks(group, request, end) + stride // bs
        due = self._after_context(asked, due, stride, wanted)
        return due if due + 1 < last else None

    def _outgrown(self, group: int, request: Any, end: int, stride: int) -> int:
        """Where a request that was too short at ``end`` exceeds its budget by an interval.

        Tokens leave the tail in whole blocks. The tokens of a store need not be a whole number of
        blocks.
        """
        kept = self.store_blocks(group, request, end) * self._setup.page
        due, step = max(kept + self._setup.window + stride, end + 1), stride
        bs = self._setup.block_size
        while ((due - self._setup.window) // bs * bs - kept) // bs < stride // bs:
            due, step = due + step, 2 * step
        return due

    def _after_context(self, asked: Asked, due: int, stride: int, blocks: int) -> int:
        """Return the length from ``due`` on at which so many blocks after a context are freed.

        Others may hold the blocks before, which therefore do not count by default.
        """
        if asked.at and self._setup.shared == "keep":
            first = -(-asked.at // self._setup.block_size)
            while (due - self._setup.window) // self._setup.block_size - first < blocks:
                due += stride
        return due

    def max_blocks(self, group: int, request: Any, n: int) -> int:
        """Most blocks a group may hold up to ``n`` scheduled tokens if no eviction is postponed.

        An eviction holds both stores, and with a step in flight one block more. Exact for budgets
        in tokens; where the store grows with the sequence, or prompts evict as they stream in, a
        store beside all tokens. Which servers share stores is not asked here: the bound holds for
        both.
        """
        return max(self._max_blocks(group, request, n, shares) for shares in (False, True))

    def _max_blocks(self, group: int, request: Any, n: int, shares: bool) -> int:
        asked, bs, window = self.asked(request), self._setup.block_size, self._setup.window
        end = self.prefill_ends[request.request_id]
        store = self.store_blocks(group, request, n)
        if asked.every:
            return -(-n // bs) + max([store, *(kept for _, _, kept in self.chain(group, request))])
        if asked.pressure or asked.prefill_interval or isinstance(self._budget(group, asked), str):
            return -(-n // bs) + store + 1
        stride = asked.decode_stride(self._setup.interval, bs, self._setup.page)
        last = min(request.num_prompt_tokens + request.max_tokens, self._setup.max_model_len)
        goal, tail, kept, peak = asked.at or end, 0, 0, 0
        due = goal if self.gives(group, request, goal, 0) and goal + 1 < last else 0
        if not due and stride:
            due = self._outgrown(group, request, end, stride)
            if shares:
                due = self._after_context(asked, due, stride, store + stride // bs)
        while due and n >= due and due + 1 < last:
            peak = max(peak, -(-due // bs) - tail + kept + store + 1)
            tail, kept = (due - window) // bs, store
            again, due = due != goal, stride and max(due + stride, end)
            if due and not again and shares:
                due = self._after_context(asked, due, stride, store + 1)
        return max(peak, -(-n // bs) - tail + kept)

    def made_of(self, request: Any, point: int) -> tuple[Any, ...]:
        """Everything that the store of an eviction at a request's point depends on."""
        asked = self.asked(request)
        tokens = tuple(request.all_token_ids[:point])
        # What is kept every so many tokens also depends on where it was kept before.
        stride = asked.blocks_between(self._setup.block_size, self._setup.page)
        return tokens, request.cache_salt, asked.policy, asked.protect_first, stride
