"""The policies that docs/own-policy.md writes down: two files and pip, and they evict."""

from collections.abc import Iterator

import pytest
import torch

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.plugins import documented, importable, install_documented, write_package
from tests.snippets import ROOT
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config import names
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.metrics.prometheus import info
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


POWERED = """
from key_norm import KeyNorm

class Powered(KeyNorm):
    def __init__(self, power):
        self.power = power

def build(config):
    given = config.options.own("powered")
    power = given.pop("power", 1)
    if given or not isinstance(power, int):
        raise ValueError(f"powered has the option power, a whole number, not {given or power}")
    return Powered(power)
"""


def test_a_policy_of_a_package_has_options_of_its_own(tmp_path):
    modules = {"key_norm": documented("key_norm.py"), "powered": POWERED}
    write_package(tmp_path, "powered", modules, ["powered = powered:build"])

    def config(given, **more):
        return EvictionConfig.parse(dict(policy="powered", options=given, **more))

    with importable(tmp_path):
        assert build_policy(config({})).scorer.power == 1
        made = config({"powered": {"power": 3}, "groups": 2})
        assert build_policy(made).scorer.power == 3
        assert build_policy(EvictionConfig.parse(made.model_dump())).scorer.power == 3
        assert "powered" in info(made, 16), "replicas with other options differ"
        with pytest.raises(ValueError, match="powered has the option power"):
            build_policy(config({"powered": {"speed": 3}}))
        with pytest.raises(ValueError, match="give the options of powered as a JSON object"):
            config({"powered": 3})
        with pytest.raises(ValueError, match="'no-such' is no option of powered"):
            config({"no-such": {"power": 3}})
        with pytest.raises(ValueError, match="'powered' is no option of snapkv"):
            EvictionConfig.parse(dict(policy="snapkv", options={"powered": {"power": 3}}))


@pytest.mark.slow
def test_an_engine_evicts_with_it(installed, tiny_model):
    """In this process, after prefill and in decode; every block comes back."""
    with engine(tiny_model, dict(policy="ada-key-norm", budget=96, interval=32)) as run:
        free = run.free_blocks()
        run.generate([random_prompt(400, seed=1)], 70)
        assert run.counters.evictions_prefill == 1 and run.counters.evictions_decode >= 1
        assert run.worker.kv_eviction.evictions == run.counters.evictions
        assert run.scheduler._turns.slots is None, "the policy needs no queries"
        assert run.free_blocks() == free


COUNTED = """
from key_diff import KeyDiff

SEEN = []

class Counted(KeyDiff):
    def scores(self, candidates):
        result = super().scores(candidates)
        SEEN.append((candidates.row, candidates.layer_name, candidates.num_tokens,
                     candidates.keys.float(), self.sums[candidates.row, candidates.layer_name][0]))
        return result

def build(config):
    return Counted()
"""


@pytest.mark.slow
def test_a_policy_that_keeps_a_running_mean_answers_the_same_beside_shared_stores(
    tiny_model, tmp_path
):
    """Its requests make and take none, so each has the mean of all of its own keys."""
    modules = {"key_diff": documented("key_diff.py"), "counted": COUNTED}
    modules["key_norm"] = documented("key_norm.py")
    entries = ["key-diff = counted:build", "stateless = key_norm:build"]
    write_package(tmp_path, "running", modules, entries)
    document = random_prompt(300, seed=1)
    prompts = [document + random_prompt(30 + 9 * i, seed=10 + i) for i in range(3)]
    asked = [{"kv_eviction_at": len(document)}] * len(prompts)
    settings = dict(policy="key-diff", allow="stateless", budget=128, interval=32)
    settings |= dict(shared_blocks="evict")
    with importable(tmp_path):
        from counted import SEEN

        with engine(tiny_model, settings) as alone:
            expected = alone.generate(prompts, 80, asked)
            lives = [[kept.positions for kept in life[0].evictions] for life in alone.lives()]
            assert all(len(evictions) >= 3 for evictions in lives)
        # A later eviction sees survivors, which it has seen before, and keys that are new.
        totals: dict = {}
        for row, layer, tokens, keys, total in SEEN:
            count, sums, known = totals.get((row, layer), (0, 0.0, [set()] * len(keys)))
            heads = [{tuple(key): key for key in head.tolist()} for head in keys]
            new = [
                [key for mark, key in head.items() if mark not in old]
                for head, old in zip(heads, known, strict=True)
            ]
            sums = sums + torch.stack([torch.tensor(each).sum(0) for each in new])
            count += len(new[0])
            known = [old | head.keys() for head, old in zip(heads, known, strict=True)]
            totals[row, layer] = count, sums, known
            assert count == tokens and {len(each) for each in new} == {len(new[0])}
            torch.testing.assert_close(total, sums, rtol=1e-4, atol=1e-3)
        with engine(tiny_model, settings, enable_prefix_caching=True) as run:
            for _ in range(2):
                assert run.generate(prompts, 80, asked) == expected
                assert [[k.positions for k in life[0].evictions] for life in run.lives()] == lives
            assert run.counters.stores_published == run.counters.stores_reused == 0
            assert run.counters.evictions_prefill >= 2 * len(prompts)
            stateless = [one | {"kv_eviction": "stateless"} for one in asked]
            run.generate(prompts, 80, stateless)
            assert run.counters.stores_published == 1
            assert run.counters.stores_reused == len(prompts) - 1


def test_the_pages_name_every_policy():
    text = (ROOT / "docs" / "policies.md").read_text()
    for name, entry in names.TABLE.items():
        assert text.count(f"`{name}`") >= 3, f"{name}: when to take it, its score, its cost"
        assert entry.adaptive == (f"`{name}`" in text.split("| `ada-` before")[1].split("|")[0])
