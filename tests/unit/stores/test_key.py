"""A key names everything that the kept tokens depend on."""

from dataclasses import fields, replace

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from benchmarks.bare_scheduler import Setup, make_request
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.stores.key import ShareKey, share_key

KEY = ShareKey(b"a", (1, 2), None, 100, "probe", 4, ((0, 7),), 0.25)
OTHERS = dict(
    prefix=b"b", rest=(1, 3), extra=("salt",), point=101, policy="snapkv", protect_first=5,
    stores=((0, 8),), share=0.5, in_context=True, parent=b"d", tails=((0, 8),),
)  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(ShareKey)])
def test_every_field_makes_another_key(name):
    other = replace(KEY, **{name: OTHERS[name]})
    assert other != KEY and other.digest != KEY.digest and hash(other) != hash(KEY)
    assert replace(other, **{name: getattr(KEY, name)}) == KEY


init_none_hash(sha256)
SETUP = Setup(block_size=8)
PROMPT = list(range(2, 132))
RULE = EvictionRule(block_size=8, window=8, interval=64, budget_tokens=40)
STREAMED = replace(RULE, prefill_interval=64)


def key(
    prompt=PROMPT, rule=RULE, at=100, policy="probe", first=0, reads_share=True, end=0, **options
):
    request = make_request(SETUP, "r", prompt, 4, **options)
    progress = {0: EvictionProgress(rule, len(prompt), len(prompt), requested_point=at)}
    return share_key(request, progress, 8, policy, first, reads_share, end)


def test_equal_requests_have_equal_keys():
    assert key() == key() is not None
    assert key() == key(PROMPT[:110] + [500] * 20), "what follows the point does not count"


@pytest.mark.parametrize(
    "change",
    [
        dict(prompt=[1, *PROMPT[1:]]),
        dict(prompt=[*PROMPT[:98], 1, *PROMPT[99:]]),
        dict(at=101),
        dict(policy="snapkv"),
        dict(first=1),
        dict(rule=replace(RULE, budget_tokens=48)),
        dict(end=100),
        dict(cache_salt="mine"),
    ],
    ids=["token", "last token", "point", "policy", "first", "budget", "context", "salt"],
)
def test_every_input_of_a_request_makes_another_key(change):
    assert key(**change) is not None and key(**change) != key()


def test_the_share_that_a_whole_prompt_leaves_counts_for_policies_that_read_it():
    """Prompts that evict as they stream in: probes weigh prose by the share of all that is kept."""
    shorter, longer = PROMPT, PROMPT + [7] * 300
    streamed = dict(rule=STREAMED, at=None)
    assert key(shorter, **streamed) != key(longer, **streamed)
    blind = streamed | dict(reads_share=False)
    assert key(shorter, **blind) == key(longer, **blind) is not None
