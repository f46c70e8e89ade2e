"""What prompts came to is remembered, and forgotten in its turn."""

from vllm_kvevict.target.verdicts import MOST, Verdicts


def test_the_last_asked_stay():
    verdicts = Verdicts()
    for number in range(MOST):
        verdicts.put((number,), "25%", {"25%": 0.01 * number})
    assert verdicts.get((0,)) == ("25%", {"25%": 0.0})
    verdicts.put((MOST,), "100%", {"50%": 0.2})
    assert verdicts.get((1,)) is None, "longest not asked for"
    assert verdicts.get((0,)) == ("25%", {"25%": 0.0}) and verdicts.get((MOST,)) == (
        "100%",
        {"50%": 0.2},
    )
    verdicts.put((0,), "50%", {"50%": 0.2})
    assert verdicts.get((0,)) == ("50%", {"50%": 0.2})
    verdicts.clear()
    assert verdicts.get((0,)) is None
