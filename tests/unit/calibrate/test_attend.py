"""Texts in one row follow the context alone, as if each had a row of its own."""

import pytest
import torch

from vllm_kvevict.calibrate import attend
from vllm_kvevict.calibrate.attend import Kind, packed, positions_behind, weights_behind

HEADS, GROUP, SIZE, CONTEXT, LENGTHS = 2, 3, 8, 20, (4, 1, 6)


@pytest.mark.parametrize(
    "kind",
    [
        Kind(0.3),
        Kind(0.3, softcap=5.0),
        Kind(0.3, window=7),
        Kind(0.3, sinks=torch.ones(HEADS, GROUP)),
    ],
    ids=["plain", "softcap", "window", "sinks"],
)
def test_each_text_sees_the_context_and_itself(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    q = torch.randn(1, HEADS, GROUP, tokens, SIZE, generator=generator)
    own = torch.randn(1, HEADS, tokens, SIZE, generator=generator)
    keys = torch.randn(HEADS, CONTEXT, SIZE, generator=generator)
    keep = torch.rand(1, HEADS, CONTEXT, generator=generator) > 0.3
    together = weights_behind(q, keys, own, kind, keep, LENGTHS)
    begin = 0
    for length in LENGTHS:
        part = slice(begin, begin + length)
        alone = weights_behind(q[..., part, :], keys, own[..., part, :], kind, keep)
        rows = together[..., part, :]
        torch.testing.assert_close(rows[..., :CONTEXT], alone[..., :CONTEXT])
        mine = slice(CONTEXT + begin, CONTEXT + begin + length)
        torch.testing.assert_close(rows[..., mine], alone[..., CONTEXT:])
        left = 1 - rows[..., :CONTEXT].sum(-1) - rows[..., mine].sum(-1)
        if kind.sinks is None:
            assert left.abs().max() < 1e-5, "another text takes attention"
        begin += length


def test_texts_are_packed_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "ROWS", 4 * 10 * (100 + 10))
    texts = [[1] * 4, [2] * 6, [3] * 5, [4] * 30, [5]]
    found = list(packed(texts, queries=4, context=100))
    assert [[len(text) for text in some] for some in found] == [[4, 6], [5], [30], [1]]
    assert [text for some in found for text in some] == texts
    assert list(packed([], 4, 100)) == []
    at = positions_behind(7, [2, 3], torch.device("cpu"))
    assert at.tolist() == [7, 8, 7, 8, 9]
