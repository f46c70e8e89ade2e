"""What policies require: what follows from it, and what contradicts itself."""

from dataclasses import replace
from pkgutil import resolve_name

import pytest

from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.attention.extensions.base import AttentionExtension, make_extensions
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import LEARNED, POLICY_NAMES
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.policies.probe import KeyProbe
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.requirements import floats_per_token, ring_slots


def requirements(name: str) -> Requirements:
    profile = dict(profile="x.json") if name in LEARNED else {}
    return build_policy(EvictionConfig(policy=name, **profile)).requirements


@pytest.mark.parametrize(
    "contradiction, says",
    [
        (dict(value_shares=True), "floats_per_token of at least 1"),
        (dict(key_scores=True), "floats_per_token of at least 1"),
        (dict(every_query=True, attention="a:B"), "floats_per_token of at least 1"),
        (dict(weighs=True, floats_per_token=1, attention="a:B"), "floats_per_token of at least 2"),
        (dict(every_query=True, floats_per_token=1), "must name an attention extension"),
        (dict(weighs=True, floats_per_token=2), "must name an attention extension"),
        (dict(attention="a:B"), "must name an attention extension"),
        (dict(keeps_state=True, heads_alone=True), "cannot combine keeps_state with heads_alone"),
        (dict(keeps_state=True, layers_alone=True), "cannot combine keeps_state with heads_alone"),
    ],
)
def test_contradictions(contradiction, says):
    with pytest.raises(ValueError, match=says):
        Requirements(**contradiction)


def test_which_policies_share_stores():
    alone = {name for name in POLICY_NAMES if not requirements(name).shares_stores}
    assert alone == {"h2o", "ada-h2o", "nacl", "subgen-stream"}
    assert Requirements().shares_stores and not Requirements(keeps_state=True).shares_stores


def test_the_row_of_a_request_is_for_policies_that_keep_a_state():
    candidates = random_candidates()
    assert candidates.row == 0
    with pytest.raises(ValueError, match="must require keeps_state"):
        _ = replace(candidates, state_row=None).row


def test_what_probe_reads_and_keeps():
    auto = EvictionConfig(policy="ada-probe", profile="x.json")
    for name in ("probe", "ada-probe"):
        policy = build_policy(auto.model_copy(update={"policy": name}))
        assert policy.requirements.window == "optional" and not policy.requirements.keys
    assert floats_per_token(auto) == 2
    none = EvictionConfig(policy="ada-probe", profile="x.json", options=dict(probe_window="none"))
    assert isinstance(build_policy(none).scorer, KeyProbe)
    assert build_policy(none).requirements.window == "none"
    assert floats_per_token(none) == 1
    assert ring_slots(None, none) == 0, "no memory for a window that nobody reads"


def test_extensions_are_made_once_by_name():
    named = {requirements(name).attention for name in POLICY_NAMES} - {""}
    assert len(named) == 2 and all(
        issubclass(resolve_name(name), AttentionExtension) for name in named
    )
    caches, values = object(), object()
    made = make_extensions(["", *sorted(named), *named], caches, values)
    assert [type(one) for one in made] == [resolve_name(name) for name in sorted(named)]
    assert all(one.caches is caches and one.token_stats is values for one in made)
    assert make_extensions(["", ""], caches, None) == []
