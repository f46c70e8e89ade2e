"""Models of latent attention have nothing that a profile could hold."""

from types import SimpleNamespace

import pytest

from vllm_kvevict.calibrate import engine
from vllm_kvevict.calibrate.options import CalibrateError
from vllm_kvevict.settings.config import EvictionConfig


def test_no_profile_is_made(monkeypatch):
    model = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    ended = []
    core = SimpleNamespace(shutdown=lambda: ended.append(True))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=model, engine_core=core))
    monkeypatch.setattr(engine, "start", lambda arguments: llm)
    monkeypatch.setattr(engine, "sized", lambda arguments, tokens: arguments)
    with pytest.raises(CalibrateError, match="has one head and no keys"):
        engine.ranked(None, EvictionConfig(policy="snapkv"), [([1, 2], 2)])
    assert ended
