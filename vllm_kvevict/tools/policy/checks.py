"""What a scorer must do, one function for each promise of the contract.

Each raises AssertionError with one sentence that says what is wrong.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, replace

import torch

from vllm_kvevict.policies.base import PROTECTED, Candidates, Scorer
from vllm_kvevict.tools.policy.scene import COLUMNS, heads, on_two_ranks, padded, scene

Check = Callable[[Scorer], None]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
EQUAL = 0.95
"""Share of the scores that must be within the tolerance."""


def problem(check: Check, scorer: Scorer) -> str | None:
    """Return what a check found wrong with a scorer, in one sentence; None for nothing."""
    try:
        check(copy.deepcopy(scorer))
    except AssertionError as error:
        return str(error)
    except Exception as error:
        return f"scores raised {type(error).__name__}: {error}"
    return None


def shapes(scorer: Scorer) -> None:
    """Scores are [H, num_candidates] float32, finite and below the score of protected tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        candidates = scene(scorer.requirements, dtype=dtype)
        found = _fresh(scorer, candidates)
        wanted = candidates.num_heads, candidates.num_candidates
        _say(tuple(found.shape) == wanted, f"the shape is {tuple(found.shape)}, not {wanted}")
        _say(found.dtype == torch.float32, f"the type is {found.dtype}, not float32")
        kept = found[candidates.valid[:, :COLUMNS]]
        _say(bool(kept.isfinite().all()), f"a token has a score that is not finite ({dtype} keys)")
        _say(bool((kept < PROTECTED).all()), f"a score is not below {PROTECTED:g}")


def padding(scorer: Scorer) -> None:
    """Padding scores -inf, and more of it changes no score."""
    candidates = scene(scorer.requirements)
    found = _fresh(scorer, candidates)
    outside = found[~candidates.valid[:, :COLUMNS]]
    _say(bool((outside == float("-inf")).all()), "a padded column has a score other than -inf")
    if scorer.requirements.random:
        return
    more = _fresh(scorer, padded(candidates, 8))[:, 8:]
    valid = candidates.valid[:, :COLUMNS]
    # Scores may be positions, whose order alone matters.
    _say(
        _close(found, more) or torch.equal(_order(found[valid]), _order(more[valid])),
        "scores change when all rows get 8 more columns of padding; divide a mean by "
        "valid.sum(-1), not by the number of columns",
    )


def ties(scorer: Scorer) -> None:
    """Equal and zero inputs give finite scores."""
    candidates = scene(scorer.requirements)
    same = {
        field.name: torch.zeros_like(value)
        for field in fields(candidates)
        if isinstance(value := getattr(candidates, field.name), torch.Tensor)
        and value.is_floating_point()
    }
    found = _fresh(scorer, replace(candidates, **same))
    kept = found[candidates.valid[:, :COLUMNS]]
    _say(bool(kept.isfinite().all()), "inputs that are all 0 give scores that are not finite")


def determinism(scorer: Scorer) -> None:
    """The same eviction has the same scores, and inputs stay as they were."""
    candidates = scene(scorer.requirements)
    before = copy.deepcopy(candidates)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = _fresh(scorer, candidates)
        torch.manual_seed(2)
        second = _fresh(scorer, candidates)
    _say(
        torch.equal(first, second),
        "two calls give different scores; seed draws by candidates.seed and candidates.layer",
    )
    for field in fields(candidates):
        old, new = getattr(before, field.name), getattr(candidates, field.name)
        if isinstance(old, torch.Tensor):
            _say(torch.equal(old, new), f"scores changes its input {field.name}")


def state(scorer: Scorer) -> None:
    """Requests do not mix, and a row that was cleared begins anew."""
    if not scorer.requirements.keeps_state:
        return
    mine, other = scene(scorer.requirements, row=0), scene(scorer.requirements, seed=2, row=1)
    alone = _fresh(scorer, mine)
    scorer.scores(other)
    _say(_close(alone, scorer.scores(mine)), "a request's scores depend on another request")
    scorer.clear_rows([0])
    reused = replace(other, state_row=0)
    expected = _fresh(copy.deepcopy(scorer), reused)
    _say(_close(expected, scorer.scores(reused)), "a row that was cleared keeps its old state")


def heads_apart(scorer: Scorer) -> None:
    """With ``heads_alone`` a head's scores do not depend on the heads that come with it."""
    if not scorer.requirements.heads_alone:
        return
    candidates = scene(scorer.requirements)
    whole = _fresh(scorer, candidates)
    for head in range(candidates.num_heads):
        alone = _fresh(scorer, replace(heads(candidates, slice(head, head + 1)), first_head=0))
        _say(
            _close(whole[head : head + 1], alone),
            f"scores of head {head} depend on other heads, but requirements say heads_alone",
        )


def ranks(scorer: Scorer) -> None:
    """Two tensor-parallel ranks choose what one chooses."""
    candidates = scene(scorer.requirements)
    copies = [copy.deepcopy(scorer), copy.deepcopy(scorer)]
    whole = _fresh(scorer, candidates)
    try:
        parts, calls = on_two_ranks(copies, candidates)
    except Exception as error:
        raise AssertionError(f"two ranks fail: {type(error).__name__} {error}") from None
    crosses = scorer.requirements.crosses_ranks
    _say(crosses or not calls, "scores calls mean_of_ranks, but requires no crosses_ranks")
    _say(
        _close(whole, torch.cat(parts)),
        "two ranks with half of the heads each score otherwise than one; average over the heads "
        "of a layer by mean_of_ranks, and require crosses_ranks",
    )


CHECKS: tuple[Check, ...] = (shapes, padding, ties, determinism, state, heads_apart, ranks)


def _fresh(scorer: Scorer, candidates: Candidates) -> torch.Tensor:
    """Score a request of which the scorer has no state."""
    if candidates.state_row is not None:
        scorer.clear_rows([candidates.state_row])
    return scorer.scores(candidates)


def _order(scores: torch.Tensor) -> torch.Tensor:
    return scores.argsort(stable=True)


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether scores are equal but for rounding, which a threshold may turn into a step."""
    if first.shape != second.shape:
        return False
    return float(torch.isclose(first, second, **TOLERANCE).float().mean()) >= EQUAL


def _say(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
