"""What the engine core says of budgets in whole blocks."""

from typing import Any
from unittest.mock import patch

import pytest

from vllm_kvevict.config import budget_log as budgets
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY


def report(config: Any, block_size: int | None = None) -> list[str]:
    """What is said of a configuration, in the engine's blocks or in the configuration's."""
    settings = EvictionConfig.parse(config.additional_config[CONFIG_KEY])
    assert settings is not None
    with patch.object(budgets, "logger") as logger:
        budgets.report_budgets(config, settings, block_size or config.cache_config.block_size)
    return [f"{name} {args[0] % args[1:]}" for name, args, _ in logger.method_calls]


@pytest.mark.parametrize(
    ("eviction", "says"),
    [
        # 1024 - 32 tokens are 7 whole blocks of 128.
        ("ada-snapkv", ["every 128 decode steps", "block size 128", "store blocks: 7 per"]),
        ({"policy": "snapkv", "budget": "25%", "interval": 130},
         ["evicts every 256 decode steps", "grows with the sequence"]),
        ({"policy": "snapkv", "interval": 0}, ["evicts after prefill only"]),
    ],
)  # fmt: skip
def test_says_how_much_and_when(build: Any, eviction: Any, says: list[str]) -> None:
    (line,) = report(build(eviction))
    assert line.startswith("info") and all(part in line for part in says)


def test_counts_in_the_blocks_that_the_engine_made(build: Any) -> None:
    config = build({"policy": "snapkv", "budget": 288}, block_size=32)
    assert "block size 32 tokens, store blocks: 8 per request" in report(config)[0]
    line, warning = report(config, block_size=544)
    assert "block size 544 tokens, store blocks: 1 per request, evicts every 544" in line
    assert "keeps 576 tokens per KV head instead of the budget of 288" in warning
    assert warning.endswith("A budget of 576, or a smaller --block-size, fits.")


def test_names_the_flags_that_help_a_hybrid(build: Any, monkeypatch: Any) -> None:
    """Of a hybrid vLLM enlarges the blocks whatever --block-size says."""
    config = build({"policy": "snapkv", "budget": 288}, block_size=32)
    monkeypatch.setattr(type(config.model_config), "is_hybrid", True)
    warning = report(config, block_size=544)[1]
    assert "A budget of 576, or a smaller recurrent state (--mamba-ssm-cache-dtype, " in warning
    assert "--block-size" not in warning


@pytest.mark.parametrize("policy, shown", [("pyramidkv", "by layer"), ("snapkv", "31 per request")])
def test_says_what_the_groups_of_a_pyramid_keep(build: Any, policy: str, shown: str) -> None:
    said = report(build({"policy": policy, "allow": "ada-pyramid"}, block_size=32))
    assert f"store blocks: {shown}" in said[0]
    # Of the budget of 1024 the shallower of two layers keeps 1942 beside the window and the
    # other 49: 60.7 and 1.6 blocks.
    assert "groups of 1, 1, shallow to deep, with stores of 60, 2 blocks" in said[1]
    assert all(line.startswith("info") for line in said)


def test_warns_of_what_uneven_groups_waste(build: Any) -> None:
    overrides = {"num_hidden_layers": 26}
    config = build(
        {"policy": "ada-pyramid", "options": {"groups": 4}}, block_size=32, hf_overrides=overrides
    )
    said = report(config)
    assert [line.split()[0] for line in said] == ["info", "info", "warning"]
    assert "7, 7, 6, 6 layers leave 7.1% of the KV cache unused" in said[2]
    assert "divides the 26 layers" in said[2]


@pytest.mark.parametrize(
    ("eviction", "warns"),
    [
        # One block is the least a store can have: 128 + 32 tokens.
        ({"policy": "snapkv", "budget": 64}, "keeps 160 tokens per KV head instead of the budget"),
        ({"policy": "snapkv", "budget": 280}, "keeps 160 tokens per KV head instead of the budget"),
        ({"policy": "snapkv", "budget": 4096}, "will never run"),
    ],
)
def test_warns_of_settings_that_disappoint(build: Any, eviction: Any, warns: str) -> None:
    _, warning = report(build(eviction))
    assert warning.startswith("warning") and warns in warning
