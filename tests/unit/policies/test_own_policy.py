"""The policy that docs/policies.md writes down: two files and pip, and it evicts."""

from collections.abc import Iterator

import pytest
import torch

from tests.plugins import PAGE, importable, install_documented
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config import names
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.registry import build_policy


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(install_documented(tmp_path_factory.mktemp("own"))):
        yield


def test_the_page_adds_a_policy_and_its_adaptive_twin(installed):
    candidates = random_candidates(padding=(0, 4))
    norms = candidates.keys.norm(dim=-1)
    caps = torch.tensor([[6, 5]])
    for name in ("key-norm", "ada-key-norm"):
        policy = build_policy(EvictionConfig(policy=name, options=dict(floor=0.0)))
        assert policy.requirements.window == "none"
        scores = policy.scorer.scores(candidates)[None]
        pages = policy.allocator.pages(scores, caps, 3, 4)
        kept = select_tokens(scores, pages, 4)[0].split((4 * pages[0]).tolist())
        assert sum(map(len, kept)) == 24
        for head, columns in enumerate(kept):
            own = range(4 * head, 24)
            smallest = sorted(own, key=lambda c, head=head: norms[head, c])[: len(columns)]
            assert columns.tolist() == sorted(smallest)


@pytest.mark.slow
def test_an_engine_evicts_with_it(installed, tiny_model):
    """In this process, after prefill and in decode; every block comes back."""
    from tests.models import random_prompt
    from tests.oracles.engine import engine

    with engine(tiny_model, dict(policy="ada-key-norm", budget=96, interval=32)) as run:
        free = run.free_blocks()
        run.generate([random_prompt(400, seed=1)], 70)
        assert run.counters.evictions_prefill == 1 and run.counters.evictions_decode >= 1
        assert run.worker.kv_eviction.evictions == run.counters.evictions
        assert run.scheduler._turns.slots is None, "the policy needs no queries"
        assert run.free_blocks() == free


def test_the_page_names_every_policy():
    text = PAGE.read_text()
    for name, entry in names.TABLE.items():
        assert text.count(f"`{name}`") >= 3, f"{name}: when to take it, its score, its cost"
        assert entry.adaptive == (f"`{name}`" in text.split("| `ada-` before")[1].split("|")[0])
