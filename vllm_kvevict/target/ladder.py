"""Budgets that a request may come to, and what trials of them have said."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from vllm.v1.request import Request

from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.schedule.timeline import Timeline
from vllm_kvevict.settings.names import NONE
from vllm_kvevict.settings.requests import RequestOptions
from vllm_kvevict.settings.target import RUNGS

WHOLE = "100%"
"""What a request comes to whose every rung loses too much."""

SHORT = "short"
"""What it comes to where trials could not run: the server's budget."""

WORST = 10
"""Times its target that a request may lose for want of blocks: an operator would notice more, and
it would no longer be cheap."""

Key = tuple[bytes, tuple[int, ...], int, bool, str, int, float, tuple[str, ...]]
"""What a verdict depends on: vLLM's hash of the blocks before the window, the tokens after them,
the eviction point, whether the prompt goes on there, policy, protected tokens, target and rungs."""


@dataclass(eq=False)
class Rung:
    """A budget: its share of the tokens so far, and the request's settings under it."""

    share: str
    options: RequestOptions


@dataclass(eq=False)
class Ladder:
    """A request with a target.

    Args:
        request: vLLM's request.
        options: Its settings under the server's budget.
        target: Nats that its answer may lose.
        end: N, its eviction point, in tokens.
        hold: Tokens up to which it is computed meanwhile, in whole blocks: what trials share.
        rungs: Budgets, the smallest first; at least one.
        whole: What it gets where every rung loses too much; :data:`SHORT` where budgets are capped.
        key: What the verdict depends on.
        nats: What answers are expected to lose by what trials said, by share; one for all requests
            that ask the same.

    """

    request: Request
    options: RequestOptions
    target: float
    end: int
    hold: int
    rungs: list[Rung]
    whole: str
    key: Key
    nats: dict[str, float] = field(default_factory=dict)
    state: RequestState = field(init=False)
    """From its arrival on."""
    waited: int = 0
    """Steps at ``hold`` without a trial."""
    lost: int = 0
    """Trials that said nothing."""
    rest: int = 0
    """Steps before the next trial, or step down."""
    kept: str = ""
    """What it has come to."""
    rung: str = ""
    """What it stands on: that, or a smaller budget for want of blocks."""
    before: str = ""
    """What it stood on before its last step down."""
    since: int = 0
    """Length at its last eviction before that."""
    gain: int = 0
    """Blocks that this step will give, until they are back; 0 for none."""

    @property
    def inside(self) -> bool:
        """Whether the prompt goes on behind the eviction, so that the window asks nothing."""
        return self.end + 1 < self.request.num_prompt_tokens

    @property
    def held(self) -> bool:
        """Whether the request is computed as far as it may be."""
        return self.state.holds_blocks and self.request.num_computed_tokens >= self.hold

    @property
    def passed(self) -> Rung | None:
        """The smallest rung so far that loses no more than the target."""
        return next((r for r in self.rungs if self.nats.get(r.share, inf) <= self.target), None)

    @property
    def open(self) -> list[Rung]:
        """Rungs that may still be chosen and have said nothing yet."""
        last = self.rungs.index(self.passed) if self.passed is not None else len(self.rungs)
        return [rung for rung in self.rungs[:last] if rung.share not in self.nats]

    @property
    def below(self) -> str | None:
        """The next smaller budget that was tried; None where it loses too much, or is not there."""
        shares = [*(rung.share for rung in self.rungs), WHOLE]
        smaller = shares[: shares.index(self.rung)] if self.rung in shares else []
        tried = [share for share in smaller if share in self.nats]
        return tried[-1] if tried and self.nats[tried[-1]] <= WORST * self.target else None

    def settings(self, share: str) -> RequestOptions:
        """Its settings where it keeps so much; one that was whole evicts only when called."""
        for rung in self.rungs:
            if rung.share == share:
                called = self.kept == WHOLE
                return replace(rung.options, when="pressure") if called else rung.options
        return RequestOptions(NONE) if share == WHOLE else replace(self.options, target=None)


def build(
    request: Request,
    options: RequestOptions,
    read: Callable[[str], RequestOptions],
    rules: Mapping[int, Timeline],
    longest: int,
    hashed: int,
    capped: bool,
) -> Ladder | None:
    """The ladder of a request that arrives; None where no rung would evict more than the window.

    Args:
        request: vLLM's request, whose blocks are hashed as far as they are full.
        options: Its settings, with a target.
        read: Its settings with a budget of its own; raises ValueError where it may not have it.
        rules: The server's timeline of every group.
        longest: Tokens at which it ends at the latest.
        hashed: Tokens that one of vLLM's hashes covers.
        capped: Whether the server caps budgets.

    """
    assert options.target is not None
    end = request.num_prompt_tokens if options.at is None else options.at
    mine = {group: options.timeline(rule) for group, rule in rules.items()}
    size = max(hashed, *(rule.block_size for rule in mine.values()))
    hold = min(min(rule.tail_start(end), end - rule.window) for rule in mine.values())
    hold = hold // size * size
    if hold < size or end + 1 >= longest or len(request.block_hashes) < hold // hashed:
        return None
    rungs = []
    for share in RUNGS:
        try:
            asked = read(share)
        except ValueError:
            continue
        timelines = [asked.timeline(rule) for rule in rules.values()]
        beside = timelines[0].budget(end) > timelines[0].protected
        if beside and any(rule.evictable(end) for rule in timelines):
            rungs.append(Rung(share, asked))
    if not rungs:
        return None
    key = (
        bytes(request.block_hashes[hold // hashed - 1]),
        tuple(request.all_token_ids[hold:end]),
        end,
        end + 1 < request.num_prompt_tokens,
        options.policy,
        options.protect_first,
        options.target,
        tuple(rung.share for rung in rungs),
    )
    whole = SHORT if capped else WHOLE
    return Ladder(request, options, options.target, end, hold, rungs, whole, key)
