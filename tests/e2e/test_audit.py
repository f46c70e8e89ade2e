"""What audits report is what the masked oracle says of the same evictions, and changes no token."""

import pytest

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Kept, Life, MaskedModel, check_tokens
from tests.profiles import random_profile

PROMPTS = [random_prompt(n, seed=n) for n in (500, 333, 60)]
NEW_TOKENS = 100
OPTIONS = dict(enable_prefix_caching=True, disable_log_stats=False, max_num_batched_tokens=256)
WINDOW = 32


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def serving(model, settings, **options):
    return engine(model, dict(interval=32) | settings, **OPTIONS | options)


def listen(run):
    """What the engine core is told of audits, in order."""
    found, measured = [], run.scheduler._reporter.measured

    def noted(**values):
        found.extend(values.get("audits", ()))
        measured(**values)

    run.scheduler._reporter.measured = noted
    return found


def expected(oracle, tokens, lives, window=WINDOW):
    """Nats and agreement of every eviction of a request: its last tokens before it and after."""
    found = []
    for life in lives:
        former: list[Kept] = []
        for kept in life.evictions:
            start = max(kept.n - window, kept.tail_start)
            now = Kept(start, kept.tail_start, kept.positions)
            before, after = (
                oracle.predictions(tokens[: kept.n], Life(start + 1, evictions)).log_softmax(-1)
                for evictions in ([*former], [*former, now])
            )
            nats = (before.exp() * (before - after)).sum(-1).mean()
            agreed = (before.argmax(-1) == after.argmax(-1)).float().mean()
            found.append((float(nats), float(agreed)))
            former.append(kept)
    return found


def assert_told(told, wanted):
    assert len(told) == len(wanted)
    for audit, (nats, agreed) in zip(told, wanted, strict=True):
        assert audit[3] == pytest.approx(nats, rel=1e-3, abs=1e-5)
        assert audit[4] == pytest.approx(agreed, abs=1.5 / WINDOW)


CASES = {
    "ada-snapkv": dict(policy="ada-snapkv", budget=96),
    "ada-defensive": dict(policy="ada-defensive", budget="25%"),
    "a policy without a window": dict(policy="streaming-llm", budget=96),
    "groups": dict(policy="pyramidkv", budget=128, options=dict(groups=2)),
    "draws": dict(policy="nacl", budget=96),
    "sums of attention": dict(policy="h2o", budget=96),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_oracle_says(tiny_model, oracle, case):
    settings = CASES[case] | dict(audit="100%")
    with serving(tiny_model, settings) as run:
        free, told = run.free_blocks(), listen(run)
        for _ in range(2):  # The second time with prefix hits.
            told.clear()
            outputs = run.generate(PROMPTS, NEW_TOKENS)
            assert len(told) > 6
            for number, prompt in enumerate(PROMPTS):
                mine = [one for one in told if int(one[0].split("-")[0]) % 3 == number]
                lives, output = run.lives()[number], outputs[number]
                assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
                assert_told(mine, expected(oracle, [*prompt, *output], lives))
        assert run.counters.audits_dropped == 0
        assert run.counters.tokens_audited == 2 * len(told) * WINDOW
        assert run.free_blocks() == free
