"""What h2o has added up for each survivor equals transformers' attention under the same masks."""

import pytest
import torch

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

pytestmark = pytest.mark.nightly

SERVER = dict(policy="h2o", budget=160, interval=32, allow="ada-h2o,snapkv")
REQUESTS = [
    (500, {}),
    (420, {"kv_eviction_at": 300}),
    (300, {"kv_eviction": "snapkv"}),
    (333, {"kv_eviction": "ada-h2o", "kv_eviction_protect_first": 40}),
]
SNAPKV = 2
PROMPTS = [random_prompt(n, seed=n) for n, _ in REQUESTS]
ASKED = [asked for _, asked in REQUESTS]
NEW_TOKENS = 40


class WatchedModel(MaskedModel):
    """Keeps the attention weights of every layer."""

    def __init__(self, path):
        super().__init__(path)
        self.model.set_attn_implementation("eager")
        self.parts: dict[int, list[torch.Tensor]] = {}
        for index, layer in enumerate(self.model.model.layers):
            self.parts[index] = []
            layer.self_attn.register_forward_hook(
                lambda module, args, output, index=index: self.parts[index].append(output[1][0])
            )

    def sums(self, tokens, life):
        """For every eviction [L, H, n] float64: weight that each token got from all queries
        before it, averaged over the query heads of a group."""
        for parts in self.parts.values():
            parts.clear()
        self.predictions(tokens, life)
        evictions = []
        for eviction in life.evictions:
            layers = []
            for parts in self.parts.values():
                total = torch.zeros(self.heads, len(tokens), dtype=torch.float64)
                done = 0
                for part in parts:
                    mine = part[:, : max(0, eviction.n - done)].double()
                    total[:, : part.shape[2]] += mine.sum(1)
                    done += part.shape[1]
                layers.append(total.unflatten(0, (-1, self.group)).mean(1))
            evictions.append(torch.stack(layers))
        return evictions


@pytest.fixture(scope="module")
def oracle(tiny_model_kv4):
    return WatchedModel(tiny_model_kv4)


def watch(run):
    """Sums of the survivors of every eviction [L, S * H * bs], by request, as they were moved."""
    found: dict[str, list[torch.Tensor]] = {}
    worker = run.worker.kv_eviction

    def listener(record):
        state = worker.states[record.group.group_id]
        heads = state.num_heads
        pages = [block * heads + i for block in record.group.store for i in range(heads)]
        values = [worker.token_stats.layer(n)[pages, :, 0].flatten() for n in state.layer_names]
        found.setdefault(record.eviction.request_id, []).append(torch.stack(values))

    worker.listeners.append(listener)
    return found


def assert_sums(oracle, run, found, outputs) -> int:
    """Every sum of every survivor equals the oracle's; returns how many evictions were compared."""
    compared = 0
    for request_id, values in sorted(found.items(), key=lambda item: int(item[0].split("-")[0])):
        index = int(request_id.split("-")[0]) % len(PROMPTS)
        life = run.recorder.lives[request_id][-1]
        if index == SNAPKV:
            continue
        expected = oracle.sums([*PROMPTS[index], *outputs[index][:-1]], life)
        values = values[len(values) - len(life.evictions) :]
        for eviction, mine, theirs in zip(life.evictions, values, expected, strict=True):
            for layer, heads in enumerate(eviction.positions):
                wanted = [theirs[layer, head, kept] for head, kept in enumerate(heads)]
                torch.testing.assert_close(
                    mine[layer].double(), torch.cat(wanted), rtol=1e-3, atol=1e-3
                )
            compared += 1
    return compared


def preempt_all(run, step: int) -> None:
    """Preempt every running request before the ``step``-th step from now."""
    schedule, steps = run.scheduler.schedule, iter(range(1, step + 1))

    def scheduled(*args, **kwargs):
        if next(steps, None) == step:
            assert run.scheduler.running
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    run.scheduler.schedule = scheduled


def test_chunks_points_prefix_hits_and_preemption(tiny_model_kv4, oracle):
    memory = 64 << 20
    options = dict(
        max_num_batched_tokens=160, enable_prefix_caching=True, kv_cache_memory_bytes=memory
    )
    with engine(tiny_model_kv4, SERVER, **options) as run:
        caches = run.worker.kv_eviction._caches.values()
        beside = run.worker.kv_eviction.token_stats.num_bytes
        cache = sum(cache.pages.numel() * cache.pages.element_size() for cache in caches)
        assert beside == cache // (2 * 32) and 0.98 * memory < cache + beside <= memory

        free, found, first = run.free_blocks(), watch(run), None
        for case in ("fresh", "in the prefix cache", "preempted"):
            found.clear()
            if case == "preempted":
                preempt_all(run, 30)
            outputs = run.generate(PROMPTS, NEW_TOKENS, ASKED)
            lives = run.lives()
            for prompt, output, mine in zip(PROMPTS, outputs, lives, strict=True):
                assert check_tokens(oracle, prompt, output, mine) == (NEW_TOKENS, NEW_TOKENS)
            compared = assert_sums(oracle, run, found, outputs)
            assert compared == sum(len(mine[-1].evictions) for mine in lives) - len(
                lives[SNAPKV][-1].evictions
            )
            assert compared >= (3 if case == "preempted" else 6), case
            assert run.free_blocks() == free
            if case == "fresh":
                first = lives
            elif case == "in the prefix cache":
                assert lives == first
                assert run.counters.prefix_hits_capped >= 3
            else:
                assert any(len(mine) > 1 and mine[-1].evictions for mine in lives)
        assert run.counters.postponed == 0
