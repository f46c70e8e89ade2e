"""Pages that offer policies say which of them a platform refuses."""

import re
from pathlib import Path

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import LEARNED, POLICIES
from vllm_kvevict.policies.requirements import policy_requirements

ROOT = Path(__file__).parents[3]


def test_policies_that_gpus_refuse_are_named_where_they_are_offered() -> None:
    """Every policy with an attention extension, which only the CPU backend has."""
    refused = {
        name
        for name in set(POLICIES) - LEARNED
        if policy_requirements(EvictionConfig(policy=name))[name].attention
    }
    assert refused >= {"h2o", "subgen-stream"}
    page = (ROOT / "docs" / "policies.md").read_text()
    (told,) = re.findall(r"^\*\*GPUs refuse (.*)\*\* at start-up", page, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", told)) == refused
    for name in refused:
        rows = [row for row in page.split("\n") if row.startswith("|") and row.count("|") == 3]
        assert all("CPUs only" in row for row in rows if f"`{name}`" in row.split("|")[2])
