"""Budgets as written by an operator or a request: tokens, or a share of the tokens so far.

An operator's share may have a minimum number of tokens: ``"25%,min=256"``. An operator may also
give the loss that answers may have, ``"loss=0.05"``. The front end replaces it by a share from the
profile.
"""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm_kvevict.config.sentences import shown

MIN_SUFFIX = ",min="
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
    """Read a budget that may be a share with a minimum number of tokens, or a loss.

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
    share, separator, tokens = (
        value.partition(MIN_SUFFIX) if isinstance(value, str) else (value, "", "")
    )
    tokens = tokens.strip()
    if separator and not (share.strip().endswith("%") and tokens.isascii() and tokens.isdigit()):
        raise ValueError(f"give tokens (1024) or a share (25% or 25%,min=256), not {shown(value)}")
    budget = parse_budget(share)
    return f"{budget}{MIN_SUFFIX}{parse_budget(tokens)}" if separator else budget


Budget = Annotated[int | str, BeforeValidator(parse_server_budget)]
Cap = Annotated[
    int | str | None, BeforeValidator(lambda cap: None if cap is None else parse_budget(cap))
]


def budget_tokens(budget: int | str) -> int | None:
    """Return a parsed budget in tokens, or None if it is a share."""
    return budget if isinstance(budget, int) else None


def budget_share(budget: int | str) -> float | None:
    """Return a parsed budget as a share in (0, 1], or None if it is in tokens or a loss."""
    if isinstance(budget, int) or budget_loss(budget) is not None:
        return None
    return float(budget.partition("%")[0]) / 100


def measured_part(budget: int | str) -> float | None:
    """Return the part of the tokens that a parsed budget keeps, in (0, 1).

    None if the budget is in tokens or a loss, or keeps all tokens.
    """
    share = budget_share(budget)
    return share if share is not None and share < 1 else None


def budget_loss(budget: int | str) -> float | None:
    """Return the loss that a parsed budget allows, in nats per token; None for other budgets."""
    if isinstance(budget, int) or not budget.startswith(LOSS):
        return None
    return float(budget.removeprefix(LOSS))


def min_budget_tokens(budget: int | str) -> int:
    """Return the minimum number of tokens of a parsed budget; 0 for none."""
    return int(str(budget).partition(MIN_SUFFIX)[2] or 0)


def check_cap(budget: int | str, cap: int | str) -> None:
    """Reject a cap on the budgets of requests that is below the server's own budget.

    Raises:
        ValueError: The cap is below the budget; the message says in one sentence which to change.

    """
    minimum = min_budget_tokens(budget)
    if isinstance(cap, int) and cap < minimum:
        raise ValueError(
            f"--kv-eviction-max-budget {cap} is below the {minimum} tokens that the budget "
            f"{budget} keeps at least; raise --kv-eviction-max-budget or lower the minimum"
        )
    own = budget_share(budget) or budget_tokens(budget)
    maximum = budget_share(cap) or budget_tokens(cap)
    comparable = isinstance(cap, int) == isinstance(budget, int)
    if comparable and own is not None and maximum is not None and own > maximum:
        raise ValueError(
            f"--kv-eviction-max-budget {cap} is below the budget of {budget} that every "
            "request has; raise --kv-eviction-max-budget or lower --kv-eviction-budget"
        )


def check_exceeds_recent(budget: int | str, recent: int, window: int) -> None:
    """Reject a budget in tokens that is not larger than the number of recent tokens.

    Args:
        budget: Parsed budget.
        recent: Largest number of last tokens that a policy of the server never evicts.
        window: Observation window.

    Raises:
        ValueError: The budget is too small; the message says in one sentence what to change.

    """
    tokens = budget_tokens(budget)
    if tokens is None or tokens > recent:
        return
    what, less = f"the window of {recent} tokens", "lower --kv-eviction-window"
    if recent != window:
        what = f"the last {recent} tokens, which are always kept"
        less = "lower probe_recent in --kv-eviction-options"
    raise ValueError(
        f"budget {budget} leaves no room beyond {what}; raise --kv-eviction-budget or {less}"
    )
