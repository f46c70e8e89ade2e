"""What users have reported of vLLM, tried on engines that evict, one test for each report.

Others are where their subject is tested: salts and adapters in ``test_tenants.py`` (vllm#53495),
aborts in ``test_abort.py`` (kvpress#244), whole hits from a prefill server in ``test_handover.py``
and ``test_two_servers.py`` (vllm#52617), and loads beside a full queue in
``engine/test_full_queue.py`` (vllm#45414, #49674).
"""

from collections import Counter

import pytest
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

from tests.e2e.test_sharing import SETTINGS as SHARING
from tests.e2e.test_stores import computed
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine

LONGEST = 512
FULL = random_prompt(LONGEST - 8, seed=1)
SHORT = [random_prompt(60, seed=2 + number) for number in range(3)]
SHARE = dict(policy="ada-snapkv", budget="25%")
TO_THE_END = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

POOLS = {
    "share": (SHARE, 16),
    "share, every": (SHARE | dict(every=64), 16),
    "share, two groups": (SHARE | dict(policy="ada-pyramid"), 32),
    "inside prompts": (dict(policy="ada-snapkv", budget=96, prefill_interval=128), 9),
}
"""Settings, and the least blocks of requests with which such a server starts."""


def steps_until(llm, names, patience=400):
    """The steps after which each request ended; none may be left after ``patience``."""
    ended = {}
    for step in range(patience):
        for output in llm.step():
            if output.finished:
                ended[output.request_id] = step
                assert len(output.outputs[0].token_ids) == TO_THE_END.max_tokens
    assert ended.keys() == set(names), "somebody waits for ever"
    return ended


@pytest.mark.parametrize("case", [nightly(name) if "," in name else name for name in POOLS])
def test_the_longest_prompt_fits_the_smallest_pool(tiny_model, case):
    """A prompt that fits the model but never the pool keeps its server busy for ever (vllm#39734).

    One block less, and the server does not start. A request that asks for more than the pool is
    sure of is refused at once, and nobody waits behind it.
    """
    settings, blocks = POOLS[case]
    options = dict(
        max_model_len=LONGEST, max_num_batched_tokens=256, enable_prefix_caching=True,
        num_gpu_blocks_override=blocks,
    )  # fmt: skip
    with (
        pytest.raises(ValueError, match="To serve at least one request"),
        engine(tiny_model, settings | dict(allow="none"), **options),
    ):
        pytest.fail("it started")
    options["num_gpu_blocks_override"] += 1
    with engine(tiny_model, settings | dict(allow="none"), **options) as run:
        llm, free = run.llm.llm_engine, run.free_blocks()
        assert free == blocks
        evicts_inside = "prefill_interval" in settings
        for asked in ({"kv_eviction": "none"}, {"kv_eviction_budget": "80%"}):
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=asked)
            if evicts_inside:
                with pytest.raises(ValueError, match="KV eviction: "):
                    llm.add_request("refused", dict(prompt_token_ids=FULL), params)
            else:
                llm.add_request("asked", dict(prompt_token_ids=FULL), params)
                steps_until(llm, ["asked"])
        for name, prompt in [("long", FULL), *((str(n), one) for n, one in enumerate(SHORT))]:
            llm.add_request(name, dict(prompt_token_ids=prompt), TO_THE_END)
        steps_until(llm, ["long", "0", "1", "2"])
        assert run.counters.evictions_prefill > 0
        assert run.free_blocks() == free


POINT = {"kv_eviction_at": 400}
NEVER = {"kv_eviction": "none"}


@pytest.mark.parametrize("policy", ["ada-snapkv", nightly("ada-pyramid")])
def test_events_name_the_copy_that_is_left(tiny_model, policy):
    """Of two blocks with one hash, one leaves, and the other is still found (vllm#55092).

    A router that counts announcements and one that does not expect the same, and a request finds
    what they expect. ``engine/test_grouped_events.py`` has random days.
    """
    prompt = random_prompt(420, seed=70)
    options = dict(
        max_model_len=1024, max_num_batched_tokens=1024, enable_prefix_caching=True,
        num_gpu_blocks_override=45 if policy == "ada-snapkv" else 90,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )  # fmt: skip
    settings = dict(policy=policy, budget=128, interval=32, allow="none")
    with engine(tiny_model, settings, **options) as run:
        counted, believed, order = Counter(), set(), []
        groups = len(run.scheduler.kv_cache_config.kv_cache_groups)

        def publish(batch):
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    counted.clear()
                    believed.clear()
                    continue
                named = {(one, event.group_idx) for one in event.block_hashes}
                if isinstance(event, BlockStored):
                    counted.update(named)
                    believed.update(named)
                    order.extend(one for one in event.block_hashes if one not in order)
                else:
                    counted.subtract(named)
                    believed.difference_update(named)
            assert believed == {one for one, count in counted.items() if count}

        run.scheduler.kv_event_publisher.publish = publish
        copies = lambda: [  # noqa: E731
            one
            for one in run.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
            ._cache.values()
            if isinstance(one, dict) and len(one) > 1
        ]  # fmt: skip
        run.generate([prompt], 1, [NEVER])
        # A request for the logprobs of its prompt computes all of it again.
        run.generate([prompt], 1, [NEVER], prompt_logprobs=0)
        assert len(copies()) >= 12 * groups
        assert len(believed) == 13 * groups
        for number in range(2):  # Others take blocks, and evict.
            run.generate([random_prompt(500, seed=71 + number)], 40)
        assert run.counters.evictions_prefill == 2 and run.counters.evictions_decode
        assert not copies(), "both copies are still there"
        names = {one for one, _ in believed}
        counts = computed(run)
        run.generate([prompt], 1, [NEVER])
        expected = next((n for n, one in enumerate(order[:13]) if one not in names), 13)
        assert 0 < expected == (len(prompt) - counts[0]) // 32


def test_servers_with_another_hash_or_block_size_share_no_file(tiny_model, tmp_path):
    """vLLM's own files were read by servers that name blocks otherwise (vllm#54490, #54487)."""
    settings = SHARING | dict(store_path=str(tmp_path))
    prompt = random_prompt(520, seed=80)
    found, kept = [], {}
    for other in (
        dict(prefix_caching_hash_algo="sha256"),
        dict(prefix_caching_hash_algo="sha256_cbor"),
        dict(prefix_caching_hash_algo="sha256", block_size=64),
        dict(prefix_caching_hash_algo="sha256"),
    ):
        options = dict(max_num_batched_tokens=256, max_model_len=1024, enable_prefix_caching=True)
        with engine(tiny_model, settings, **options | other) as run:
            run.recorder.saved.update(kept)
            counts = computed(run)
            run.generate([prompt], 2, [POINT])
            kept |= run.recorder.saved
            run.worker.kv_eviction.stores.tiers.flush()
            found.append((run.counters.stores_restored_file, sum(counts) - 1))
            assert run.counters.files_refused == 0
            assert run.counters.stores_published == 1 - found[-1][0]
    assert found == [(0, 520)] * 3 + [(1, 520 - 400)]
    assert len(list(tmp_path.iterdir())) == 3
