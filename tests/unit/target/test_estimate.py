"""What answers are taken to lose, by what a trial says."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.target.estimate import Estimate

AUDITS = {
    "keys": {"6.25%": [0.8, 0.5], "25%": [0.08, 0.05]},
    "joined": {"6.25%": [0.4, 0.2], "25%": [0.04, 0.03]},
}


def estimate(audits=AUDITS, **options) -> Estimate:
    model = dict(architecture="A", layers=2, kv_heads=1, config="c")
    profile = dict(model=model, policy="probe", budget="25%", layers=[1, 1], audits=audits)
    given = dict(policy="probe", budget="25%", profile=profile, options=options)
    found = EvictionConfig.parse(given)
    assert found is not None
    return Estimate(found)


@pytest.mark.parametrize("window, first", [("auto", 0.2), ("none", 0.5)])
def test_an_audit_as_usual_is_the_usual_loss(window, first):
    known = estimate(probe_window=window)
    audit = AUDITS["joined" if window == "auto" else "keys"]["6.25%"][0]
    assert known.loss("probe", "6.25%", audit) == pytest.approx(first)
    assert known.loss("ada-probe", "6.25%", audit) == pytest.approx(first)


def test_ten_times_the_usual_audit_is_twice_the_usual_loss():
    assert estimate().loss("probe", "25%", 0.4) == pytest.approx(0.03 * 10**0.3)
    assert estimate().loss("probe", "25%", 0.004) == pytest.approx(0.03 / 10**0.3)
    assert estimate().loss("probe", "25%", 0.0) < 0.002


def usual(policy, share, said, audits=AUDITS) -> float:
    """What the last of some trials comes to: by hand, over all that were seen."""
    logs = [math.log(max(nats, 1e-6)) for nats in said]
    mean = sum(logs) / len(logs)
    own = 0.5 + 0.5 * 4 / (3 + len(logs))
    factor = 1.0 if policy == "probe" else 1.5
    return factor * math.exp(mean + own * (logs[-1] - mean))


@pytest.mark.parametrize(
    "policy, audits", [("ada-defensive", AUDITS), ("snapkv", AUDITS), ("probe", {})]
)
@given(said=st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_without_a_profile_the_mean_of_what_was_seen_counts_more_and_more(policy, audits, said):
    known = estimate(audits)
    found = [known.loss(policy, "25%", nats) for nats in said]
    expected = [usual(policy, "25%", said[:n]) for n in range(1, len(said) + 1)]
    assert found == pytest.approx(expected, rel=1e-6)
    known.forget()
    first = 2.0 * (1.0 if policy == "probe" else 1.5)
    assert known.loss(policy, "25%", 2.0) == pytest.approx(first)


def test_budgets_and_policies_are_apart():
    known = estimate()
    for nats in (0.001, 10.0):
        known.loss("snapkv", "25%", nats)
    assert known.loss("snapkv", "50%", 0.4) == pytest.approx(0.6)
    assert known.loss("defensive", "25%", 0.4) == pytest.approx(0.6)
    assert known.loss("probe", "25%", 0.04) == pytest.approx(0.03)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from(["probe", "snapkv"]))
def test_more_nats_are_never_a_smaller_loss(less, more, policy):
    less, more = sorted((less, more))
    for share in ("6.25%", "25%", "50%"):
        least, most = (estimate().loss(policy, share, nats) for nats in (less, more))
        assert least <= most


@pytest.mark.parametrize("pair", [[0.0, 0.1], [0.1, -1], [float("inf"), 0.1], [0.1], ["x", 1]])
def test_a_profile_whose_audits_are_no_nats_is_refused(pair):
    with pytest.raises(ValueError, match="audits"):
        estimate({"joined": {"25%": pair}})


@pytest.mark.parametrize("policy", ["probe", "snapkv"])
def test_what_is_no_number_loses_too_much_and_is_forgotten(policy):
    known = estimate()
    for nats in (float("nan"), float("inf")):
        assert known.loss(policy, "25%", nats) == float("inf")
    assert known.loss(policy, "25%", 0.04) == pytest.approx(0.03 if policy == "probe" else 0.06)


@pytest.mark.parametrize("policy", ["probe", "snapkv"])
def test_rounding_below_nothing_is_next_to_nothing(policy):
    assert 0 < estimate().loss(policy, "25%", -1e-7) < 0.002


def test_traffic_that_changes_is_followed():
    known = estimate()
    for _ in range(1000):
        known.loss("snapkv", "25%", 0.01)
    for _ in range(1000):
        last = known.loss("snapkv", "25%", 1.0)
    assert last == pytest.approx(1.5, rel=0.06)


def test_tenants_do_not_move_each_others_budgets():
    known = estimate()
    for salt in (None, "theirs"):
        for _ in range(300):
            known.loss("snapkv", "25%", 1e-5, salt)
    assert known.loss("snapkv", "25%", 0.4, "mine") == pytest.approx(0.6)
    assert known.loss("snapkv", "25%", 0.4, "theirs") < 0.01


def test_salts_by_the_thousand_take_no_memory():
    known = estimate()
    for number in range(5000):
        known.loss("snapkv", "25%", 1.0, str(number))
        known.loss("snapkv", "25%", 0.01, "mine")
    assert len(known._seen) == 4096
    assert known.loss("snapkv", "25%", 1.0, "mine") < 0.3, "who asks often is not forgotten"


def test_a_long_cache_salt_is_not_kept() -> None:
    estimate = Estimate(EvictionConfig(policy="ada-defensive"))
    estimate.loss("ada-defensive", "25%", 0.01, "s" * 100_000)
    mine, theirs = (estimate.loss("ada-defensive", "25%", 0.04, 100_000 * one) for one in "st")
    assert mine != theirs
    assert len(pickle.dumps(estimate._seen)) < 1000
