"""docs/compatibility.md against what the code refuses and which tests there are."""

import re
from pathlib import Path

import pytest

from vllm_kvevict.serving.connectors import BESIDE_TRANSFERS
from vllm_kvevict.serving.support import REFUSALS

ROOT = Path(__file__).parents[2]
TEXT = " ".join((ROOT / "docs" / "compatibility.md").read_text().split())


@pytest.mark.parametrize("what", sorted({refusal.what for refusal in REFUSALS}))
def test_every_refusal_is_listed(what):
    assert what in TEXT


def test_every_refusal_beside_connectors_is_listed():
    plain = TEXT.replace("`", "")
    assert [one.what for one in BESIDE_TRANSFERS if one.what not in plain] == []


def test_the_tests_it_names_exist():
    named = set(re.findall(r"`((?:e2e|engine)/[\w/.]+)`", TEXT))
    assert len(named) > 8
    missing = [name for name in named if not (ROOT / "tests" / name).exists()]
    assert missing == []
