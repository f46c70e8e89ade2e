"""Budgets as an operator or a request writes them: tokens, or a share of the tokens so far.

An operator's share may have a least number of tokens: ``"25%,min=256"``. An operator may also give
what answers may lose, ``"loss=0.05"``, for which the front end puts a share from the profile.
"""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm_kvevict.settings.sentences import shown

LEAST = ",min="
LOSS = "loss="


def parse_budget(value: Any) -> int | str:
    """Read a budget.

    Returns:
        Tokens, or a share written as ``"25%"``.

    Raises:
        ValueError: The value is neither; the message names no flag.

    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError("must be at least 1 token")
        if value < 10**18:
            return value
    if isinstance(value, str):
        text = value.strip()
        if text.isascii() and text.isdigit() and len(text) <= 18:
            return parse_budget(int(text))
        if text.endswith("%"):
            try:
                share = float(text[:-1])
            except ValueError:
                share = -1.0
            if 0 < share <= 100:
                return f"{share:g}%"
    raise ValueError(f"give tokens (1024) or a share (25%), not {shown(value)}")


def parse_server_budget(value: Any) -> int | str:
    """Read a budget that may be a share of some tokens at least, or a loss.

    Returns:
        Tokens, a share written as ``"25%"`` or ``"25%,min=256"``, or ``"loss=0.05"``.

    Raises:
        ValueError: The value is none of these; the message names no flag.

    """
    if isinstance(value, str) and value.strip().startswith(LOSS):
        try:
            loss = float(value.strip().removeprefix(LOSS))
        except ValueError:
            loss = 0.0
        if not 0 < loss < math.inf:
            raise ValueError(
                f"give what answers may lose in nats per token (loss=0.05), not {shown(value)}"
            )
        return f"{LOSS}{loss:g}"
    share, least, tokens = value.partition(LEAST) if isinstance(value, str) else (value, "", "")
    tokens = tokens.strip()
    if least and not (share.strip().endswith("%") and tokens.isascii() and tokens.isdigit()):
        raise ValueError(f"give tokens (1024) or a share (25% or 25%,min=256), not {shown(value)}")
    budget = parse_budget(share)
    return f"{budget}{LEAST}{parse_budget(tokens)}" if least else budget


Budget = Annotated[int | str, BeforeValidator(parse_server_budget)]
Cap = Annotated[
    int | str | None, BeforeValidator(lambda cap: None if cap is None else parse_budget(cap))
]


def budget_tokens(budget: int | str) -> int | None:
    """A parsed budget in tokens, or None where it is a share."""
    return budget if isinstance(budget, int) else None


def budget_share(budget: int | str) -> float | None:
    """A parsed budget as a share in (0, 1], or None where it is in tokens or a loss."""
    if isinstance(budget, int) or budget_loss(budget) is not None:
        return None
    return float(budget.partition("%")[0]) / 100


def budget_loss(budget: int | str) -> float | None:
    """What answers may lose under a parsed budget, in nats per token; None for other budgets."""
    if isinstance(budget, int) or not budget.startswith(LOSS):
        return None
    return float(budget.removeprefix(LOSS))


def budget_least(budget: int | str) -> int:
    """Tokens that a parsed share comes to at least."""
    return int(str(budget).partition(LEAST)[2] or 0)


def check_cap(budget: int | str, cap: int | str) -> None:
    """Refuse a cap on the budgets of requests that the server's own exceeds.

    Raises:
        ValueError: In one sentence, which of the two to change.

    """
    least = budget_least(budget)
    if isinstance(cap, int) and cap < least:
        raise ValueError(
            f"--kv-eviction-max-budget {cap} is below the {least} tokens that the budget "
            f"{budget} is at least; raise it or lower that"
        )
    mine = budget_share(budget) or budget_tokens(budget)
    most = budget_share(cap) or budget_tokens(cap)
    comparable = isinstance(cap, int) == isinstance(budget, int)
    if comparable and mine is not None and most is not None and mine > most:
        raise ValueError(
            f"--kv-eviction-max-budget {cap} is below the budget of {budget} that every "
            "request has; raise it or lower --kv-eviction-budget"
        )


def check_beside(budget: int | str, recent: int, window: int) -> None:
    """Refuse a budget in tokens that the tokens which always stay fill.

    Args:
        budget: As parsed.
        recent: Last tokens that some policy of the server never evicts.
        window: Observation window.

    Raises:
        ValueError: In one sentence, what to change.

    """
    tokens = budget_tokens(budget)
    if tokens is None or tokens > recent:
        return
    what, less = f"the window of {recent} tokens", "lower --kv-eviction-window"
    if recent != window:
        what = f"the last {recent} tokens, which stay"
        less = "lower probe_recent in --kv-eviction-options"
    raise ValueError(
        f"budget {budget} leaves no room beside {what}; raise --kv-eviction-budget or {less}"
    )
