"""A request is aborted at any moment: nothing leaks, and nobody else notices."""

import pytest
from vllm import SamplingParams

from tests.models import random_prompt
from tests.oracles.engine import engine

EVICTION = dict(policy="ada-snapkv", budget=96, interval=32, shared_blocks="evict")
BYSTANDER = random_prompt(180, seed=2)
VICTIM = BYSTANDER[:100] + random_prompt(200, seed=1)  # shares blocks under prefix caching
NEW_TOKENS = 45


class Scene:
    """A victim and a bystander, step by step."""

    def __init__(self, run) -> None:
        self.run, self.llm, self.core = run, run.llm.llm_engine, run.core
        self.evicting: list[str] = []
        run.worker.kv_eviction.listeners.append(
            lambda record: self.evicting.append(record.eviction.request_id)
        )
        self.rounds = 0

    def start(self, victim: bool = True) -> None:
        self.rounds += 1
        self.run.llm.reset_prefix_cache()
        self.names = [f"{self.rounds}-bystander", f"{self.rounds}-victim"]
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        self.ids = [
            self.llm.add_request(name, dict(prompt_token_ids=prompt), params)
            for name, prompt in zip(self.names, [BYSTANDER, VICTIM][: 1 + victim], strict=False)
        ]
        self.tokens: list[int] = []

    def step(self) -> bool:
        """One step; whether the victim evicted in it."""
        self.evicting.clear()
        for output in self.llm.step():
            if output.request_id == self.names[0]:
                self.tokens = list(output.outputs[0].token_ids)
        return len(self.ids) > 1 and self.ids[1] in self.evicting

    def finish(self) -> list[int]:
        """The bystander's tokens."""
        while self.llm.has_unfinished_requests():
            self.step()
        return self.tokens

    def abort_during_the_step(self) -> None:
        """The abort arrives while the model runs; vLLM reads it before the step's output."""
        process = self.core._process_aborts_queue

        def arriving() -> None:
            self.core.aborts_queue.put_nowait([self.ids[1]])
            process()

        self.core._process_aborts_queue = arriving
        try:
            self.step()
        finally:
            self.core._process_aborts_queue = process
        self.llm.abort_request([self.names[1]])


def abort_everywhere(run) -> int:
    """Before, in and after each eviction of the victim; returns how many aborts there were."""
    free, aborts = run.free_blocks(), 0
    fresh = run.generate([VICTIM, BYSTANDER], 8)
    assert run.counters.evictions_prefill == 2
    scene = Scene(run)
    scene.start(victim=False)
    alone = scene.finish()
    scene.start()
    evicting = [step for step in range(1, 60) if scene.step()]
    assert len(evicting) >= 2, "at the end of prefill and in decode"
    assert scene.finish() == alone
    near = {step + offset for step in evicting for offset in (-1, 0)}
    for step in sorted(near | {0, 3}):
        for during in (False, True):
            scene.start()
            evicted = [scene.step() for _ in range(step)]
            if during:
                scene.abort_during_the_step()
            else:
                assert evicted.count(True) == sum(s <= step for s in evicting)
                scene.llm.abort_request([scene.names[1]])
                assert scene.ids[1] not in run.scheduler.requests
            assert scene.finish() == alone
            # What was left in the middle of an eviction is nobody else's (kvpress#244).
            assert run.generate([VICTIM, BYSTANDER], 8) == fresh
            assert run.free_blocks() == free
            assert not run.scheduler._table.states
            rings = run.scheduler._turns.slots
            assert rings.num_free == rings.count
            aborts += 1
    return aborts


@pytest.mark.parametrize("caching", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_abort_at_any_step(tiny_model, caching):
    with engine(
        tiny_model, EVICTION, max_num_batched_tokens=96, enable_prefix_caching=caching
    ) as run:
        abort_everywhere(run)
