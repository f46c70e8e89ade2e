"""observe, against a dictionary of who wrote which query last."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.observe import observe, observe_index, window_queries

HEADS, SIZE = 3, 4


@given(
    window=st.integers(1, 9),
    steps=st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=4), min_size=1, max_size=5),
    beyond=st.integers(0, 2),
    data=st.data(),
)
def test_ring_holds_the_last_queries(window, steps, beyond, data):
    """Requests with random chunk sizes; some hold slots, some do not.

    ``beyond`` tokens that come again with the next chunk follow each, as in a draft model's pass.
    """
    num_requests = max(map(len, steps))
    slots = data.draw(st.permutations(range(num_requests)))
    holders = data.draw(st.lists(st.booleans(), min_size=num_requests, max_size=num_requests))
    rings = torch.zeros(num_requests * window, HEADS, SIZE)
    queries = {r: [] for r in range(num_requests)}
    for chunks in steps:
        batch = [torch.randn(count + beyond, HEADS, SIZE) for count in chunks]
        for request, chunk in enumerate(batch):
            queries[request].extend(chunk[: chunks[request]])
        starts = torch.tensor([0, *(count + beyond for count in chunks)]).cumsum(0)
        ring = torch.tensor([slots[r] if holders[r] else -1 for r in range(len(chunks))])
        index = observe_index(
            starts.int(),
            torch.tensor([len(queries[r]) + beyond for r in range(len(chunks))]).int(),
            ring,
            window,
            beyond,
        )
        assert len(index[1].unique()) == len(index[1]), "an entry is written twice"
        observe(rings, torch.cat(batch), *index)
    for request, seen in queries.items():
        if holders[request] and len(seen) >= window:
            recorded = window_queries(rings, slots[request], len(seen), window)
            torch.testing.assert_close(recorded, torch.stack(seen[-window:]), rtol=0, atol=0)
        elif not holders[request]:
            mine = rings[slots[request] * window : (slots[request] + 1) * window]
            assert not mine.any(), "a request without a slot wrote to a ring"
