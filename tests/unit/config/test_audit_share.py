"""The share of requests that are audited, as operators write it."""

import pytest

from vllm_kvevict.config.audit_share import parse_share
from vllm_kvevict.config.config import EvictionConfig


@pytest.mark.parametrize(
    "value, share",
    [(0, 0), ("0", 0), (1, 1), ("1%", 0.01), (" 0.5 % ", 0.005), ("100%", 1), (0.25, 0.25)],
)
def test_shares(value, share):
    assert parse_share(value) == pytest.approx(share)
    assert EvictionConfig(policy="snapkv", audit=value).audits == (share > 0)


@pytest.mark.parametrize("value", ["", "%", -0.1, 2, "101%", "some", None, True, "nan", "1%%"])
def test_no_shares(value):
    with pytest.raises(ValueError, match="give a share of the requests such as 1% or 0"):
        parse_share(value)


def test_the_flag_is_named():
    with pytest.raises(ValueError, match=r"--kv-eviction-audit: give a share .*, not 'lots'"):
        EvictionConfig.parse(dict(policy="snapkv", audit="lots"))
