"""Which state leaves the KV cache first: what a newer one continues, then by last use."""

import pytest

from tests.engine.cases import BOTH, SYNC, counters, hit, tokens
from tests.engine.harness import Engine
from tests.engine.test_chains import conversations, say

GROUPS = dict(budget="25%", pyramid=3, shares=(2.0731, 0.6083, 0.3186))
"""Three groups of layers."""


def fill(core: Engine, seed: int = 1000) -> None:
    """Leave hardly any block blank: the others hold what ended requests computed."""
    queue = core.scheduler.kv_cache_manager.block_pool.free_block_queue
    while sum(block.block_hash is None for block in queue.get_all_free_blocks()) > 4:
        core.add(tokens(200, seed), 2, asked={"kv_eviction": "none"})
        core.finish()
        seed += 1
        assert seed < 1100


def states(core: Engine, request_id: str) -> dict[int, bool]:
    """Whether each state of a request that is still running is there, by its point."""
    stores = core.scheduler._stores
    return {
        key.point: stores.has(key) for key in core.scheduler._table.states[request_id].chain.keys
    }


@BOTH
@pytest.mark.parametrize("prompt", [140, 150, 160])
def test_the_last_state_of_a_prompt_is_kept_where_groups_evict_at_different_positions(
    setup, prompt
):
    """A next turn that does not repeat the answer starts with it. Positions are a block apart, so
    that groups that keep much evict at some of them only, and share their blocks with states
    before."""
    core = conversations(setup, blocks=240, every=8, **GROUPS)
    fill(core)
    first = core.add(tokens(prompt), 60)
    while first.num_output_tokens < 50:
        core.step()
    points = states(core, first.request_id)
    last = max(point for point in points if point <= prompt)
    assert len([point for point in points if point > prompt]) >= 2, "positions in the answer"
    assert points[last], f"{points}, {last} is gone"
    core.finish()
    assert counters(core).evictions_decode > 2


def test_no_state_is_overwritten_for_which_a_request_has_returned():
    """All tokens of the steps go to the first prompt, which evicts past the state."""
    core = conversations(SYNC, max_batched=32, blocks=60)
    fill(core)
    common = tokens(200)
    first = core.add(common + tokens(250, 1), 4)
    core.step()
    second, seen = core.add(common + tokens(60, 2), 4), {}
    while core.scheduler.has_unfinished_requests():
        for new in core.step().scheduled_new_reqs:
            seen[new.req_id] = new.num_computed_tokens, first.num_computed_tokens
    core.finish()
    computed, of_first = seen[second.request_id]
    assert of_first >= 450, "it started while the first one computed its prompt"
    assert computed >= 168


def rotate(core: Engine, clients: int, turns: int) -> list[int]:
    """Conversations that take turns, two at once; tokens found in each later turn."""
    said: dict[int, object] = {}
    found = []
    for turn in range(turns):
        for first in range(0, clients, 2):
            pair = []
            for client in (first, first + 1):
                seed = 100 * client + turn
                if turn:
                    pair.append(say(core, said[client], 40, 24, seed=seed))
                else:
                    pair.append(core.add(tokens(340, seed), 24))
                said[client] = pair[-1]
            computed = {}
            while core.scheduler.has_unfinished_requests():
                for new in core.step().scheduled_new_reqs:
                    size = len(new.prompt_token_ids)
                    computed[new.req_id] = new.num_computed_tokens / size
            core.finish()
            found += [computed[request.request_id] for request in pair] if turn else []
    return found


@pytest.mark.slow
def test_conversations_in_rotation_find_their_states():
    """Six conversations of 340 tokens and more, two at once, in a cache that holds eight states."""
    core = conversations(SYNC, blocks=345, **GROUPS)
    found = rotate(core, 6, 3)
    assert len(found) == 12 and all(share > 0.5 for share in found), found
    states = core.scheduler._stores._published.values()
    assert 8 * max(len(state.hashes) for state in states) <= 345
    assert counters(core).stores_reused == 12


@BOTH
def test_a_beginning_that_prompts_share_is_not_superseded(setup):
    """It is shorter than the first position, so that no state has it."""
    core = conversations(setup, blocks=100)
    fill(core)
    common, hits = tokens(56), []
    for seed in range(8):
        request = core.add(common + tokens(250, seed), 40)
        hits.append(hit(core.step(), request))
        core.finish()
    assert hits[2:] == [56] * 6, hits
