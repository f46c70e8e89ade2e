"""What an eviction by the PyTorch operations reads: the keys of 128k tokens are 0.8 GB a layer."""

import pytest
import torch

from tests.kernels.evict import run, steps, worker
from vllm_kvevict.cache.layer_cache import LayerCache

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("fp8", [False, True], ids=["as the model", "fp8"])
@pytest.mark.parametrize(
    "policy, looks", [("streaming-llm", False), ("h2o", False), ("snapkv", True)]
)
def test_only_policies_that_look_at_keys_read_them(policy, looks, fp8, monkeypatch):
    read: list[torch.Tensor] = []
    keys = LayerCache.key_sequences

    def watched(cache: LayerCache, pages: torch.Tensor, *more: int) -> torch.Tensor:
        read.append(keys(cache, pages, *more))
        return read[-1]

    monkeypatch.setattr(LayerCache, "key_sequences", watched)
    made = worker(policy, fused=False, fp8=fp8)
    run(made, steps(policy))
    assert made.evictions == 4
    assert (sum(found.numel() for found in read) > 0) == looks


def test_keys_are_read_in_the_type_of_the_cache(monkeypatch):
    """Not widened: the keys of a long context would take twice the memory."""
    made, seen = worker("snapkv", fused=False), set()
    for name, cache in made._caches.items():
        made._caches[name] = LayerCache(
            cache.pages.to(torch.bfloat16), cache.layout, cache.scale, cache.softcap
        )
    scorer = type(made.policies["snapkv"].scorer)
    scores = scorer.scores
    monkeypatch.setattr(
        scorer,
        "scores",
        lambda self, candidates: seen.add(candidates.keys.dtype) or scores(self, candidates),
    )
    run(made, steps("snapkv"))
    assert made.evictions == 4 and seen == {torch.bfloat16}
