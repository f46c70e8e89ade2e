"""Ring slots: handed out once, and as many as memory allows."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.engine.cases import BOTH, engine, evictions, tokens
from tests.engine.harness import Setup, vllm_config
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import RING_BYTES, ring_bytes
from vllm_kvevict.config.store_tiers import parse_size
from vllm_kvevict.policies import requirements
from vllm_kvevict.rules.ring_slots import RingSlots
from vllm_kvevict.rules.rule import EvictionRule


def test_slots_are_handed_out_once():
    slots = RingSlots(3)
    assert {slots.pop(), slots.pop(), slots.pop()} == {0, 1, 2}
    assert slots.num_free == 0 and slots.pop() is None
    slots.give_back(1)
    assert slots.num_free == 1 and slots.pop() == 1


@pytest.mark.parametrize("slot", [-1, 0, 2])
def test_a_slot_that_nobody_holds_is_not_taken_back(slot):
    slots = RingSlots(2)
    assert slots.pop() == 0
    slots.give_back(0)
    with pytest.raises(AssertionError, match=f"ring slot {slot} is not held"):
        slots.give_back(slot)
    assert slots.num_free == 2


def config(policy: str, window: int = 16) -> EvictionConfig:
    return EvictionConfig(policy=policy, budget=64, window=window)


def test_one_ring_holds_the_window_of_every_layer():
    # The tiny model: 4 layers, 8 query heads of size 32, float32.
    ring = ring_bytes(vllm_config(Setup()), config("snapkv"))
    assert ring == 4 * 16 * 8 * 32 * 4


@pytest.mark.parametrize(
    "policy, megabytes, slots",
    [("snapkv", 512, 8), ("ada-snapkv", 512, 8), ("snapkv", 0.25, 4), ("snapkv", 0, 1)],
)
def test_one_slot_for_every_sequence_where_memory_allows(policy, megabytes, slots):
    # 16 * 4096 bytes a ring: 16 rings fit into 1 MB.
    limited = config(policy).model_copy(update={"ring_memory": int(megabytes * 2**20)})
    assert requirements.ring_slots(vllm_config(Setup(max_num_seqs=8)), limited) == slots


def test_the_limit_is_a_flag():
    default = config("snapkv")
    assert parse_size(default.ring_memory) == RING_BYTES
    # 16 * 4096 bytes a ring, for each of 100,000 requests.
    setup = vllm_config(Setup())
    setup.scheduler_config.max_num_seqs = 100_000
    assert requirements.ring_slots(setup, default) == RING_BYTES // 2**16 == 8192
    more = EvictionConfig.parse({"policy": "snapkv", "window": default.window, "ring_memory": "1G"})
    assert requirements.ring_slots(setup, more) == 16384
    with pytest.raises(ValueError, match="--kv-eviction-ring-memory: give bytes such as 4G"):
        EvictionConfig.parse({"policy": "snapkv", "ring_memory": "much"})


def test_no_slot_if_the_policy_reads_no_queries():
    assert requirements.ring_slots(vllm_config(Setup()), config("streaming-llm")) == 0


def test_rings_have_the_layers_that_evict_and_no_others(monkeypatch):
    every = ring_bytes(vllm_config(Setup()), config("snapkv"))
    hybrid = vllm_config(Setup())
    text = SimpleNamespace(layer_types=["full_attention"] + ["sliding_attention"] * 3)
    monkeypatch.setattr(hybrid.model_config, "hf_text_config", text)
    assert ring_bytes(hybrid, config("snapkv")) == every // 4


@pytest.mark.parametrize(
    "slots, interval, sequences", [(64, 128, 256), (64, 16, 64), (64, 0, None), (0, 128, None)]
)
def test_how_many_sequences_slots_sustain(slots, interval, sequences):
    rule = EvictionRule(block_size=32, window=32, interval=interval, budget_tokens=1024)
    assert requirements.sustained(slots, rule) == sequences


@BOTH
@pytest.mark.parametrize("hogs", [1, 4])
def test_a_request_whose_windows_follow_one_another_lets_others_record(setup, hogs):
    """One request with ``kv_eviction_interval: 1``, or ``n: 64`` of them, and no other decodes on
    less: a user who asked for a budget holds all of a long answer, and the pool fills up.

    An interval is at least a block. With a window as long, the next window begins where the last
    ended, and the ring slot was given back when the request ended.
    """
    core = engine(replace(setup, rings=1, blocks=400, max_batched=512))
    others = [core.add(tokens(30, 10 + index), 300) for index in range(2)]
    for index in range(hogs):
        core.add(tokens(30, index), 300, asked={"kv_eviction_interval": 1})
    seen: Counter[str] = Counter()
    for _ in range(280):
        seen.update(evictions(core.step()).keys())
    assert sum(seen.values()) >= 20, "the slot is in use"
    assert min(seen[other.request_id] for other in others) >= 2, seen
    core.finish()
