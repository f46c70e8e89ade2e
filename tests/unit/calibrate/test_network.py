"""Networks find what linear probes cannot, and are never worse than these on held-out tokens."""

import pytest
import torch

from vllm_kvevict.calibrate import network
from vllm_kvevict.calibrate.network import Examples, trained
from vllm_kvevict.ops.torch.probe import Network

HEADS, TOKENS, SIZE = 2, 3000, 6


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "STEPS", 400)
    monkeypatch.setattr(network, "BATCH", 256)


def tokens(seed: int, worth) -> tuple[Examples, torch.Tensor]:
    """Examples of planted worth, and their keys, norms and 1 in float64."""
    generator = torch.Generator().manual_seed(seed)
    keys = 5 + 2 * torch.randn(HEADS, TOKENS, SIZE, generator=generator)
    shares = torch.rand(HEADS, TOKENS, generator=generator).clamp(min=0.01)
    norms = keys.norm(dim=-1, keepdim=True)
    x = torch.cat([keys, norms, torch.ones_like(norms)], -1)
    y = worth(keys, shares) + 0.1 * torch.randn(HEADS, TOKENS, generator=generator)
    return Examples.of(x, shares, y, torch.zeros_like(y)), x.double()


def learned(worth):
    """Relative held-out errors [H]: of least squares, of the network, and those it names."""
    learn, x = tokens(1, worth)
    held, held_x = tokens(2, worth)
    linear = torch.linalg.lstsq(x, learn.y.double()[..., None]).solution[..., 0]
    with torch.inference_mode():  # as in a worker
        found = trained(learn.x, learn.y, held.x, held.y, linear.float())
    said = held.scores(found.linear, Network.of(found.hidden, found.out))
    alone = (held_x * linear[:, None]).sum(-1)
    of_both = ((one - held.y).square().mean(1) / learn.y.var(1) for one in (alone, said))
    return *of_both, found


def test_a_relation_that_is_not_linear_is_found() -> None:
    of_linear, of_network, found = learned(
        lambda keys, shares: 2 * (keys[..., 0] - 5).abs() + shares.log() + keys[..., 1]
    )
    assert (of_network < 0.1).all() and (of_linear > 0.4).all()
    torch.testing.assert_close(found.loss[:, 1], of_network, rtol=1e-3, atol=1e-4)


def test_noise_teaches_nothing_worse_than_the_linear_probe() -> None:
    of_linear, of_network, found = learned(lambda keys, shares: 0.2 * keys[..., 0])
    torch.testing.assert_close(found.loss[:, 0], of_linear.float(), rtol=1e-2, atol=1e-4)
    assert (of_network < 1.001 * of_linear).all()


def test_a_feature_that_never_changes_is_no_obstacle() -> None:
    """The share of a layer's only head is 1, and its logarithm 0."""
    _, of_network, found = learned(lambda keys, shares: shares.fill_(1.0) * keys[..., 0].abs())
    assert found.hidden.isfinite().all() and found.out.isfinite().all()
    assert (of_network < 0.2).all()


def test_a_part_of_the_tokens_stands_for_all() -> None:
    """Features and targets of a token stay together, in all heads."""
    some, _ = tokens(3, lambda keys, shares: keys[..., 0])
    few = some.thinned(100, torch.Generator().manual_seed(0))
    assert few.x.shape[1] == few.y.shape[1] == few.seen.shape[1] == 100
    at = [(some.y[0] == y).nonzero()[0, 0] for y in few.y[0]]
    assert len(set(map(int, at))) == 100
    for name in ("x", "y"):
        torch.testing.assert_close(getattr(few, name), getattr(some, name)[:, torch.stack(at)])
    assert some.thinned(TOKENS, torch.Generator()) is some


def test_layers_that_are_trained_together_keep_their_own_networks() -> None:
    worths = (
        lambda keys, shares: 2 * (keys[..., 0] - 5).abs(),
        lambda keys, shares: 2 * (keys[..., 1] - 5).abs(),
    )
    learn, held = ([tokens(seed, worth)[0] for worth in worths] for seed in (1, 2))
    linear = torch.zeros(2 * HEADS, SIZE + 2)
    mine, judges = Examples.of_heads(learn), Examples.of_heads(held)
    found = trained(mine.x, mine.y, judges.x, judges.y, linear).split(HEADS)
    assert [len(one.linear) for one in found] == [HEADS, HEADS]
    for own, layer in zip(found, held, strict=True):
        said = layer.scores(own.linear, Network.of(own.hidden, own.out))
        assert ((said - layer.y).square().mean(1) < 0.1 * layer.y.var(1)).all()
