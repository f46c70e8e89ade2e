"""What answers are taken to lose, by what a trial says."""

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
    assert estimate().loss("probe", "25%", 0.0) == 0.0


def test_an_audit_stands_for_the_answer_where_nothing_was_measured():
    assert estimate({}).loss("probe", "25%", 0.4) == 0.4
    assert estimate().loss("probe", "50%", 0.4) == 0.4


@pytest.mark.parametrize("policy", ["ada-defensive", "snapkv", "streaming-llm"])
def test_policies_without_probes_lose_more_than_they_are_seen_to(policy):
    assert estimate().loss(policy, "25%", 0.4) == pytest.approx(0.6)
    config = EvictionConfig.parse(dict(policy=policy, budget="25%"))
    assert config is not None
    assert Estimate(config).loss(policy, "25%", 0.4) == pytest.approx(0.6)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from(["probe", "snapkv"]))
def test_more_nats_are_never_a_smaller_loss(less, more, policy):
    less, more = sorted((less, more))
    for share in ("6.25%", "25%", "50%"):
        assert estimate().loss(policy, share, less) <= estimate().loss(policy, share, more)


@pytest.mark.parametrize("pair", [[0.0, 0.1], [0.1, -1], [float("inf"), 0.1], [0.1], ["x", 1]])
def test_a_profile_whose_audits_are_no_nats_is_refused(pair):
    with pytest.raises(ValueError, match="audits"):
        estimate({"joined": {"25%": pair}})
