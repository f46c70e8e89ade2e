"""Settings of all tests in vLLM's real schedulers."""

import pytest

from vllm_kvevict.config import config


@pytest.fixture(autouse=True)
def short_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of these tests have few tokens, of which a share should keep fewer."""
    monkeypatch.setattr(config, "EVERY_MIN_TOKENS", 1)
