"""The policy that docs/policies.md writes down: one file and one line, and it evicts."""

import re
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.ops.reference.select import select_tokens
from vllm_kvevict.policies import registry
from vllm_kvevict.settings import names
from vllm_kvevict.settings.config import EvictionConfig

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


@pytest.fixture
def added(tmp_path, monkeypatch):
    """The page's file as a module of the package, and its line in the table."""
    code, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "key_norm.py"
    path.write_text(code)
    spec = util.spec_from_file_location("vllm_kvevict.policies.key_norm", path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, spec.name, module)
    table = names.TABLE | eval("{" + line + "}", {"Entry": names.Entry})
    monkeypatch.setattr(names, "TABLE", table)
    monkeypatch.setattr(registry, "POLICIES", names._names())


def build(name: str):
    return registry.build_policy(EvictionConfig.model_construct(policy=name, floor=0.0))


def test_the_page_adds_a_policy_and_its_adaptive_twin(added):
    candidates = random_candidates(padding=(0, 4))
    norms = candidates.keys.norm(dim=-1)
    caps = torch.tensor([[6, 5]])
    for name in ("key-norm", "ada-key-norm"):
        policy = build(name)
        assert not policy.needs_window
        scores = policy.scorer.scores(candidates)[None]
        pages = policy.allocator.pages(scores, caps, 3, 4)
        kept = select_tokens(scores, pages, 4)[0].split((4 * pages[0]).tolist())
        assert sum(map(len, kept)) == 24
        for head, columns in enumerate(kept):
            own = range(4 * head, 24)
            smallest = sorted(own, key=lambda c, head=head: norms[head, c])[: len(columns)]
            assert columns.tolist() == sorted(smallest)


def test_the_page_names_every_policy():
    text = PAGE.read_text()
    for name, entry in names.TABLE.items():
        assert text.count(f"`{name}`") >= 3, f"{name}: when to take it, its score, its cost"
        assert entry.adaptive == (f"`{name}`" in text.split("| `ada-` before")[1].split("|")[0])
