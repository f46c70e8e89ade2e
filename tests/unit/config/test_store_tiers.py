"""Sizes and folders of the tiers behind the KV cache, as operators write them."""

import pytest

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.store_tiers import parse_folder, parse_size


@pytest.mark.parametrize(
    "value, size",
    [(0, 0), ("0", 0), (7, 7), ("4G", 4 << 30), ("4 GiB", 4 << 30), ("512m", 512 << 20)],
)
def test_sizes(value, size):
    assert parse_size(value) == size


@pytest.mark.parametrize("value", ["", "4X", "-1", -1, "1.5G", True, None, "G", "9" * 16])
def test_no_sizes(value):
    with pytest.raises(ValueError, match="give bytes such as 4G"):
        parse_size(value)


@pytest.mark.parametrize(
    "value, found",
    [
        ("/var/stores", ("/var/stores", None)),
        ("/var/stores,max=100G", ("/var/stores", 100 << 30)),
        ("a,max=b,max=1K", ("a,max=b", 1024)),
    ],
)
def test_folders(value, found):
    assert parse_folder(value) == found


@pytest.mark.parametrize("value", ["", " ", ",max=4G", 5, "a\0b", "/var,max=lots"])
def test_no_folders(value):
    with pytest.raises(ValueError):
        parse_folder(value)


@pytest.mark.parametrize(
    "field, value, flag",
    [
        ("store_memory", "lots", "--kv-eviction-store-memory"),
        ("store_path", "/a,max=b", "--kv-eviction-store-path"),
    ],
)
def test_the_flag_is_named(field, value, flag):
    with pytest.raises(ValueError, match=flag):
        EvictionConfig.parse({"policy": "snapkv", field: value})
