"""Numbers of prompts: the same for the same tokens, whatever the request is called."""

from types import SimpleNamespace

import pytest

from vllm_kvevict.worker.prompts import PromptDigests


def step(new=None, finished=()):
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=tokens)
            for name, tokens in (new or {}).items()
        ],
        finished_req_ids=set(finished),
    )


def test_numbers_follow_the_tokens():
    digests = PromptDigests()
    digests.begin_step(step(dict(a=[1, 2, 3], b=[1, 2, 3], c=[3, 2, 1], d=[1, 2], e=None)))
    assert digests.digest("a") == digests.digest("b")
    assert len({digests.digest(name) for name in "acde"}) == 4
    assert all(-(2**63) <= digests.digest(name) < 2**63 for name in "abcde")
    other = PromptDigests()
    other.begin_step(step(dict(renamed=[1, 2, 3])))
    assert other.digest("renamed") == digests.digest("a")


def test_finished_requests_are_forgotten_and_ids_may_return():
    digests = PromptDigests()
    digests.begin_step(step(dict(a=[1], b=[2])))
    first = digests.digest("a")
    digests.begin_step(step(finished=["a", "unknown"]))
    with pytest.raises(KeyError):
        digests.digest("a")
    digests.begin_step(step(dict(a=[2]), finished=["b"]))
    assert digests.digest("a") != first
