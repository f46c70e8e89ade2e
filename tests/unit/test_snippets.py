"""Commands and requests that the documentation shows: vLLM's parser and ours take them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from vllm_kvevict.front.plugin import fold_flags
from vllm_kvevict.settings.requests import KEYS

pytestmark = pytest.mark.usefixtures("registered")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "README.md"]


def commands(page: Path) -> list[str]:
    """Indented lines that start a server, with the lines that a backslash adds."""
    text = page.read_text().replace("\\\n", " ")
    return re.findall(r"^    (?:\w+=\S+ )*(vllm serve [^\n#|&]*)", text, re.MULTILINE)


OWN = "key-norm"
"""Of the policy that docs/policies.md writes down; `policies/test_own_policy.py` installs it."""

SERVERS = [(page, one) for page in PAGES for one in commands(page) if OWN not in one]


def test_there_are_commands():
    assert len(SERVERS) > 10


@pytest.mark.parametrize(
    ("page", "command"), SERVERS, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(SERVERS)]
)
def test_a_server_starts_with_these_flags(parser: Any, page: Path, command: str) -> None:
    _, _, model, *flags = shlex.split(command.replace("...", ""))
    assert not model.startswith("-")
    args = parser.parse_args([model, *flags])
    assert "kv_eviction" in (fold_flags(args).additional_config or {}), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_requests_have_known_keys(page: Path) -> None:
    for key in re.findall(r'"(kv_eviction\w*)":', page.read_text()):
        assert key in KEYS, key
