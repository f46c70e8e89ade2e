"""Scores of ``defensive`` against float64 attention spelled out."""

import torch
from torch.nn import functional

from tests.kernels.scene import Scene
from tests.kernels.score import Case, candidates_of, layers_of, tolerance
from vllm_kvevict.ops.cuda.batch import Due
from vllm_kvevict.ops.cuda.defensive import defensive_scores
from vllm_kvevict.ops.cuda.score import WindowLayers
from vllm_kvevict.ops.torch.pages import candidate_grid


def kept_of(scene: Scene, channels: int = 1) -> list[torch.Tensor]:
    """Numbers beside every slot of every layer; NaN where none was written."""
    shape = scene.shape
    sizes = (scene.num_blocks * shape.heads, shape.page_tokens, channels)
    kept = [torch.rand(sizes, generator=scene.generator) for _ in range(shape.layers)]
    stores = {block for due in scene.due for block in scene.store(due).tolist()}
    for layer in kept:
        pages = torch.arange(len(layer)) // shape.heads
        layer[[int(page) not in stores for page in pages]] = torch.nan
    return [layer.to(scene.device) for layer in kept]


def peaks_of(scene: Scene, case: Case, layers: WindowLayers, due: Due, layer: int) -> torch.Tensor:
    """[H, candidates, or columns before the window] float64, floored; NaN on padding."""
    one = candidates_of(scene, case, layers, due, layer)
    keys = one.keys.double().masked_fill(~one.valid[..., None], 0.0)
    logits = one.queries.double().flatten(1, 2) @ keys.mT * one.scale
    if one.softcap:
        logits = (logits / one.softcap).tanh() * one.softcap
    columns, window = keys.shape[1], one.window
    own = torch.arange(columns - window, columns).repeat(case.group)
    seen = one.valid[:, None] & (torch.arange(columns) <= own[:, None])
    scored = max(columns - window, one.num_candidates)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)[..., :scored]
    peaks = functional.avg_pool1d(weights, 5, 1, 2).amax(1)
    peaks = peaks.masked_fill(~one.valid[:, :scored], 0.0)
    # A peak covers two tokens before it and fourteen after it.
    peaks = functional.pad(peaks, (14, 2)).unfold(-1, 17, 1).amax(-1)
    peaks = peaks.masked_fill(~one.valid[:, :scored], torch.nan)
    return peaks.maximum(peaks.nanmean(-1, keepdim=True))


def value_shares_of(scene: Scene, due: Due, layer: int, grid: torch.Tensor) -> torch.Tensor:
    """[H, tail columns] float64: a head's part in the norms of a token's values."""
    shape = scene.shape
    tail = (due.tail_start - due.old_tail_start) // shape.block_size
    width = grid.shape[-1] - len(due.positional)
    values = scene.caches[layer].cpu().float().flatten(0, 1)[..., shape.head_size :]
    norms = values[grid[layer, :, width : width + tail]].double().norm(dim=-1).flatten(1)
    return (norms / norms.sum(0)).nan_to_num(nan=0.0)


def expected(
    scene: Scene, case: Case, layers: WindowLayers, kept: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and shares [batch.columns], in the flat layout."""
    shape, size = case.shape, case.shape.page_tokens
    scores, shares = [], []
    for due in scene.due:
        for layer in range(shape.layers):
            grid, padding = candidate_grid(
                scene.indptr(due), scene.store(due), torch.tensor(due.positional)
            )
            width = grid.shape[-1] - len(due.positional)
            share = value_shares_of(scene, due, layer, grid)
            stored = kept[layer][..., 0].cpu().double()[grid[layer, :, :width]].flatten(1)
            peaks = peaks_of(scene, case, layers, due, layer)
            both = torch.cat([stored, share], 1)
            product = peaks[:, : both.shape[1]] * both
            for head in range(shape.heads):
                first = int(padding[layer, head]) * size
                mine = product[head, first:].clone()
                mine[: due.protect_first] = 1e30
                scores.append(mine)
                shares.append(both[head, first:])
    return torch.cat(scores).float(), torch.cat(shares).float()


def check_scores(device: str, case: Case) -> None:
    """All layers and requests in one launch; the other rank holds as much as this one."""
    scene = Scene(case.shape, device, seed=case.group)
    layers, kept = layers_of(scene, case), kept_of(scene)
    scores, shares = defensive_scores(scene.batch, layers, kept, lambda totals: totals)
    wanted, wanted_shares = expected(scene, case, layers, kept)
    torch.testing.assert_close(shares.cpu(), wanted_shares, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(scores.cpu(), wanted, **tolerance(case))
    # Another rank with the same norms halves what is measured, and nothing that is remembered.
    _, halved = defensive_scores(scene.batch, layers, kept, lambda totals: totals * 2)
    remembered = torch.isclose(halved.cpu(), shares.cpu())
    assert torch.allclose(halved.cpu()[~remembered], shares.cpu()[~remembered] / 2)
    stored = sum(int(scene.indptr(due)[:, -1].sum()) * case.shape.page_tokens for due in scene.due)
    assert int(remembered.sum()) == stored


def check_not_a_number(device: str, case: Case) -> None:
    """A cached key that is no number makes its head's scores no numbers, and no other's."""
    scene = Scene(case.shape, device, seed=1)
    layers, kept = layers_of(scene, case), kept_of(scene)
    plain, _ = defensive_scores(scene.batch, layers, kept, lambda totals: totals)
    scene.caches[0][scene.due[0].positional[0], 0, 3, 1] = float("nan")
    scores, _ = defensive_scores(scene.batch, layers, kept, lambda totals: totals)
    cap = int(scene.caps(scene.due[0])[0, 0]) * case.shape.block_size
    assert scores[:cap].isnan().all() and torch.equal(scores[cap:], plain[cap:])
