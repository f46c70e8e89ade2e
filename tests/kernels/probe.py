"""Scores of ``probe`` against keys turned back as complex numbers, in float64."""

import math
from dataclasses import dataclass, replace

import torch

from tests.kernels.defensive import kept_of, peaks_of, value_shares_of
from tests.kernels.scene import Lengths, Scene, Shape
from tests.kernels.score import Case, layers_of
from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch
from vllm_kvevict.ops.cuda.probe import NetworkLayers, ProbeLayers, probe_scores
from vllm_kvevict.ops.cuda.score import WindowLayers
from vllm_kvevict.ops.torch.pages import candidate_grid

# Sums of up to 256 products, and logarithms of window scores that differ by 2e-4 relative.
TOLERANCE = dict(rtol=2e-4, atol=3e-4)


@dataclass(frozen=True)
class Rotated:
    """How keys were rotated: ``dims`` of them, by tables of a type, one layer not."""

    dims: int
    table: torch.dtype
    interleaved: bool = False
    nope: int = -1


def tables_of(scene: Scene, rotated: Rotated) -> list[torch.Tensor]:
    """[positions, dims] of each layer, scaled as YaRN's are; another base in each layer."""
    longest = max(due.num_tokens for due in scene.due)
    tables = []
    for layer in range(scene.shape.layers):
        pairs = rotated.dims // 2
        speed = (100.0 + layer) ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        angles = torch.arange(longest)[:, None] * speed
        table = 1.25 * torch.cat([angles.cos(), angles.sin()], -1)
        table = table if layer != rotated.nope else table[:0]
        tables.append(table.to(rotated.table).to(scene.device))
    return tables


def probes_of(
    scene: Scene,
    rotated: Rotated,
    channels: int,
    spare: int = 0,
    prose: bool = True,
    units: int = 0,
) -> ProbeLayers:
    """Random probes; with networks of so many ``units``, if any."""
    shape = scene.shape
    probes = channels * (1 + prose)
    weights = torch.randn(
        shape.layers, shape.heads, probes, shape.head_size + 4, generator=scene.generator
    )
    window = torch.rand(shape.layers, shape.heads, generator=scene.generator)
    return ProbeLayers(
        channels=channels,
        caches=scene.caches,
        weights=weights.to(scene.device),
        window_weights=window.to(scene.device),
        rotary=tables_of(scene, rotated),
        interleaved=rotated.interleaved,
        kept=kept_of(scene, channels + spare),
        head_indptr=scene.head_indptr,
        old_store=scene.stores,
        networks=networks_of(scene, units) if units else None,
    )


def networks_of(scene: Scene, units: int) -> NetworkLayers:
    """Return random networks. For most keys, their units are neither linear nor saturated."""
    shape = scene.shape
    heads = shape.layers, shape.heads
    weights = torch.randn(*heads, shape.head_size + 4, units, generator=scene.generator)
    weights[:, :, : shape.head_size + 1] /= shape.head_size**0.5
    shares = torch.randn(*heads, generator=scene.generator)
    return NetworkLayers(weights.to(scene.device), shares.to(scene.device))


def added_by_networks(
    networks: NetworkLayers, layer: int, keys: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """[H, N] float64 what the networks of a layer add, unit by unit.

    Args:
        networks: Of all layers.
        layer: Its index.
        keys: [H, N, D] float64 before their rotation.
        share: [H, N] float64 shares of the value norms.

    """
    logs = share.clamp(min=1e-6).log()
    found = networks.shares[layer].cpu().double()[:, None] * logs
    size = keys.shape[-1]
    for unit in networks.weights[layer].cpu().double().unbind(-1):
        of_norm, one, of_share, out = unit[:, size:, None].unbind(1)
        z = torch.einsum("hnd,hd->hn", keys, unit[:, :size])
        z = z + of_norm * keys.norm(dim=-1) + one + of_share * logs
        found = found + out * z * (1 + torch.erf(z / math.sqrt(2))) / 2
    return found


def turned_back(
    scene: Scene, probes: ProbeLayers, due: Due, layer: int, grid: torch.Tensor, dims: int
) -> torch.Tensor:
    """[H, tail columns, D] float64: keys before their rotation."""
    shape, bs = scene.shape, scene.shape.block_size
    tail = (due.tail_start - due.old_tail_start) // bs
    width = grid.shape[-1] - len(due.positional)
    keys = scene.caches[layer].cpu().float().flatten(0, 1)[..., : shape.head_size].double()
    keys = keys[grid[layer, :, width : width + tail]].flatten(1, 2)
    table = probes.rotary[layer].cpu().double()
    if not len(table):
        return keys
    pairs = dims // 2
    first = torch.arange(pairs) * 2 if probes.interleaved else torch.arange(pairs)
    second = first + (1 if probes.interleaved else pairs)
    mine = table[due.old_tail_start : due.tail_start]
    pointers = torch.complex(mine[:, :pairs], mine[:, pairs:])
    found = keys.clone()
    back = torch.complex(keys[..., first], keys[..., second]) / pointers
    found[..., first], found[..., second] = back.real, back.imag
    return found


def expected(
    scene: Scene, case: Case, probes: ProbeLayers, dims: int, window: WindowLayers | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [batch.columns] and parts [C, batch.columns], in the flat layout."""
    shape, size = scene.shape, scene.shape.page_tokens
    probed, scores, parts = probes.channels, [], []
    for due in scene.due:
        grid, padding = candidate_grid(
            scene.indptr(due), scene.store(due), torch.tensor(due.positional)
        )
        width = grid.shape[-1] - len(due.positional)
        for layer in range(shape.layers):
            keys = turned_back(scene, probes, due, layer, grid, dims)
            ages = due.num_tokens - torch.arange(due.old_tail_start, due.tail_start)
            ages = torch.stack([ages.double().log(), ages.double().log() ** 2], -1)
            ages = (ages - ages.mean(0)).expand(*keys.shape[:-1], 2)
            norms = keys.norm(dim=-1, keepdim=True)
            features = torch.cat([keys, norms, torch.ones_like(norms), ages], -1)
            said = features @ probes.weights[layer].cpu().double().mT
            new = features[..., :-2] @ probes.weights[layer, :, :probed, :-2].cpu().double().mT
            if said.shape[-1] > probed:
                new += said[..., probed:].clamp(min=0)
            weight = probes.window_weights[layer].cpu().double()[:, None]
            share = value_shares_of(scene, due, layer, grid)
            if probed > 1:
                new[..., 1] += weight * share.clamp(min=1e-6).log()
            if probes.networks is not None:
                new += added_by_networks(probes.networks, layer, keys, share)[..., None]
            stored = probes.kept[layer].cpu().double()[grid[layer, :, :width]][..., :probed]
            both = torch.cat([stored.flatten(1, 2), new], 1)
            score = both[..., 0]
            if window is not None:
                peaks = peaks_of(scene, case, window, due, layer)[:, : both.shape[1]]
                score = both[..., 1] + weight * peaks.clamp(min=1e-6).log()
            score = score.clamp(min=-1e30)
            for head in range(shape.heads):
                first = int(padding[layer, head]) * size
                mine = score[head, first:].clone()
                mine[: due.protect_first] = 1e30
                scores.append(mine)
                parts.append(both[head, first:].T)
    return torch.cat(scores).float(), torch.cat(parts, 1).float()


def check_scores(device: str, case: Case, rotated: Rotated, units: int = 0) -> None:
    """All layers and requests in one launch: without a window, and joined with it."""
    ways = (
        (1, False, False),
        (1, False, True),
        (2, False, True),
        (2, True, False),
        (2, True, True),
    )
    for channels, joined, prose in ways:
        scene = Scene(case.shape, device, seed=case.group)
        window = layers_of(scene, case) if joined else None
        probes = probes_of(scene, rotated, channels, channels - 1, prose, units)
        scores, parts = probe_scores(scene.batch, probes, window, lambda totals: totals)
        wanted, wanted_parts = expected(scene, case, probes, rotated.dims, window)
        torch.testing.assert_close(parts.cpu(), wanted_parts, **TOLERANCE)
        close = TOLERANCE if case.shape.stored.as_cached else dict(rtol=4e-3, atol=4e-3)
        torch.testing.assert_close(scores.cpu(), wanted, **close)


def check_ranks(device: str, case: Case, rotated: Rotated) -> None:
    """Another rank with the same norms halves shares of new tokens, and nothing else."""
    scene = Scene(case.shape, device, seed=1)
    probes = probes_of(scene, rotated, 2)
    _, alone = probe_scores(scene.batch, probes, None, lambda totals: totals)
    _, beside = probe_scores(scene.batch, probes, None, lambda totals: totals * 2)
    assert torch.equal(alone[0], beside[0])
    less = (alone - beside)[1].cpu()
    stored = sum(int(scene.indptr(due)[:, -1].sum()) * case.shape.page_tokens for due in scene.due)
    assert int((less == 0).sum()) == stored
    by = probes.window_weights.cpu().flatten() * torch.tensor(2.0).log()
    nearest = (less[less != 0][:, None] - by).abs().amin(-1)
    assert float(nearest.max()) < 1e-4


def check_networks_of_ranks(device: str, case: Case, rotated: Rotated) -> None:
    """Two ranks with half of the heads each find what one with all of them is expected to find."""
    shape = replace(case.shape, heads=4, requests=case.shape.requests[:1])
    for channels in (1, 2):
        scene = Scene(shape, device, seed=1)
        probes = probes_of(scene, rotated, channels, units=40)
        assert probes.networks is not None
        _, wanted = expected(scene, case, probes, rotated.dims, None)
        batch = EvictionBatch.build(
            scene.due, shape.layers, 2, shape.block_size, shape.window, scene.device
        )
        halves = [_of_heads(probes, slice(start, start + 2)) for start in (0, 2)]
        totals: list[torch.Tensor] = []

        def measured(of_rank: torch.Tensor, totals: list[torch.Tensor] = totals) -> torch.Tensor:
            totals.append(of_rank.clone())
            return of_rank

        alone = [probe_scores(batch, half, None, measured)[1] for half in halves]
        assert len(totals) == 2
        together = [
            probe_scores(batch, half, None, lambda _, t=totals: t[0] + t[1])[1] for half in halves
        ]

        def joined(parts: list[torch.Tensor], channels: int = channels) -> torch.Tensor:
            """[C, columns] of all heads."""
            by_head = [part.cpu().view(channels, shape.layers, 2, -1) for part in parts]
            return torch.cat(by_head, 2).flatten(1)

        torch.testing.assert_close(joined(together), wanted, **TOLERANCE)
        assert float((joined(alone) - wanted).abs().mean()) > 0.1


def _of_heads(probes: ProbeLayers, heads: slice) -> ProbeLayers:
    """The probes and caches of some heads, on a rank that holds no stores."""
    networks = probes.networks
    assert networks is not None
    mine = NetworkLayers(
        networks.weights[:, heads].contiguous(), networks.shares[:, heads].contiguous()
    )
    count = heads.stop - heads.start
    return replace(
        probes,
        caches=[cache[:, heads].contiguous() for cache in probes.caches],
        weights=probes.weights[:, heads].contiguous(),
        window_weights=probes.window_weights[:, heads].contiguous(),
        networks=mine,
        head_indptr=probes.head_indptr[..., : count + 1].contiguous(),
    )


def check_without_values(device: str, case: Case, rotated: Rotated, units: int = 0) -> None:
    """A token without values in one head, or in all, has the least share there is."""
    scene = Scene(case.shape, device, seed=1)
    block = scene.due[0].positional[0]
    for cache in scene.caches:
        cache[block, 0, 2, case.shape.head_size :] = 0
        cache[block, :, 5, case.shape.head_size :] = 0
    probes = probes_of(scene, rotated, 2, units=units)
    _, parts = probe_scores(scene.batch, probes, None, lambda totals: totals)
    _, wanted = expected(scene, case, probes, rotated.dims, None)
    torch.testing.assert_close(parts.cpu(), wanted, **TOLERANCE)


def check_infinite(device: str, case: Case, rotated: Rotated) -> None:
    """A key that is worth infinitely little stays above padding, which is not kept."""
    scene = Scene(case.shape, device, seed=1)
    probes = probes_of(scene, rotated, 1)
    probes.weights[:] = -1.0
    probes.rotary[0] = probes.rotary[0][:0]
    scene.caches[0][scene.due[0].positional[0], 0, 3, 1] = float("inf")
    scores, _ = probe_scores(scene.batch, probes, None, lambda totals: totals)
    assert float(scores.min()) == float(scores[3]) == -float(torch.tensor(1e30))


def check_not_a_number(device: str, case: Case, rotated: Rotated, units: int = 0) -> None:
    """A cached key that is no number makes its token's score none, and no other's."""
    scene = Scene(case.shape, device, seed=1)
    probes = probes_of(scene, rotated, 1, units=units)
    plain, _ = probe_scores(scene.batch, probes, None, lambda totals: totals)
    scene.caches[0][scene.due[0].positional[0], 0, 3, 1] = float("nan")
    scores, _ = probe_scores(scene.batch, probes, None, lambda totals: totals)
    assert scores.isnan().nonzero().flatten().tolist() == [3]
    others = torch.arange(len(scores)) != 3
    assert torch.equal(scores.cpu()[others], plain.cpu()[others])


def _requests(bs: int) -> tuple[Lengths, ...]:
    """Fresh; evicted before, protected; of heads of one page; without new candidates."""
    return (
        Lengths(0, 0, 3, 3 * bs + 8 + 5, 1),
        Lengths(2, 5, 6, 6 * bs + 8, 2, protect_first=3),
        Lengths(1, 2, 2, 3 * bs + 8, 1),
    )


def _case(
    head_size: int,
    heads: int,
    bs: int,
    cache: torch.dtype,
    queries: torch.dtype,
    window: int = 8,
    group: int = 2,
) -> Case:
    shape = Shape(2, heads, bs, head_size, window, _requests(bs), cache)
    return Case(shape, group, queries)


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = [
    (_case(64, 3, 16, BF16, BF16), Rotated(64, BF16)),
    (_case(64, 2, 16, FP32, FP32), Rotated(32, FP32, interleaved=True)),
    (_case(80, 1, 32, FP16, FP16), Rotated(20, FP16)),
    (_case(96, 2, 16, FP16, FP16), Rotated(48, FP32, interleaved=True, nope=0)),
    (_case(128, 2, 16, BF16, BF16), Rotated(128, FP32, nope=1)),
    (_case(256, 1, 16, BF16, BF16), Rotated(64, BF16)),
    (_case(256, 1, 64, FP32, FP32), Rotated(256, FP32)),
    (_case(128, 2, 16, torch.float8_e4m3fn, BF16), Rotated(128, BF16)),
    (_case(80, 2, 16, torch.float8_e5m2, FP16), Rotated(40, FP16, interleaved=True)),
    (replace(_case(64, 2, 16, FP32, FP32), softcap=2.0), Rotated(0, FP32)),
    # Candidates inside the window: 8 tokens or 13 are protected.
    (_case(64, 3, 16, BF16, BF16, window=32), Rotated(64, BF16)),
    (_case(80, 2, 16, FP16, FP16, window=40, group=9), Rotated(20, FP16)),
    (_case(64, 1, 16, torch.float8_e4m3fn, BF16, window=37), Rotated(64, BF16)),
    (
        Case(Shape(1, 1, 128, 64, 64, (Lengths(0, 0, 16, 2048 + 1, 3),), FP32), 3, FP32),
        Rotated(64, FP32),
    ),
]
UNITS = [32, 1, 40, 24, 32, 5, 64, 32, 33, 32, 32, 31, 32, 32]
"""Units of the networks of each case."""
