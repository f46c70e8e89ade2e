"""What the front end refuses and the engine core refuses again."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from tests.unit.config.test_requests import rules, server
from vllm_kvevict.config.core_options import read_options
from vllm_kvevict.config.limits import check_limits
from vllm_kvevict.config.requests import RequestOptions


def test_no_pressure_beside_drafts():
    pressed = RequestOptions("snapkv", when="pressure")
    with pytest.raises(ValueError, match="kv_eviction_when pressure cannot be combined"):
        check_limits(pressed, drafts=True)
    check_limits(pressed, drafts=False)
    check_limits(RequestOptions("snapkv"), drafts=True)


@pytest.mark.parametrize(
    "asked, drafts",
    [
        (dict(kv_eviction_when="pressure"), True),
        (dict(kv_eviction_prefill_interval=1), False),
    ],
)
def test_the_core_takes_its_own_settings_where_no_front_end_has_refused(asked, drafts):
    request = SimpleNamespace(
        request_id="r",
        sampling_params=SamplingParams(extra_args=asked),
        num_prompt_tokens=100,
        max_tokens=16,
    )
    config = server()
    found = read_options(request, config, rules(config), drafts, 4096, blocks=10**6)
    assert found == RequestOptions("snapkv")


def test_nor_a_request_that_could_fill_more_than_the_pool():
    """Preempted late, it would replay prompt and answer, and wait at the head of the queue."""
    config = server(prefill_interval=64, budget=64, policy="snapkv")
    request = SimpleNamespace(
        request_id="r",
        sampling_params=SamplingParams(extra_args=dict(kv_eviction_prefill_interval=0)),
        num_prompt_tokens=1000,
        max_tokens=3000,
    )
    groups = rules(config)
    enough = len(groups) * 4000 // groups[0].block_size
    for blocks, own in ((enough - 1, False), (enough, True)):
        found = read_options(request, config, groups, False, 8000, blocks)
        assert (found.prefill_interval == 0) is own
