"""score against the reference's, request by request; and one eviction from scores to store."""

from dataclasses import dataclass, replace

import torch

from tests.kernels.scene import Lengths, Scene, Shape
from vllm_kvevict.ops.cuda.allocate import batch_pages
from vllm_kvevict.ops.cuda.batch import Due
from vllm_kvevict.ops.cuda.pages import compact
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.score import WindowLayers, column_sums, pool, window_lse, window_scores
from vllm_kvevict.ops.cuda.select import batch_columns
from vllm_kvevict.ops.torch import score as reference
from vllm_kvevict.ops.torch.pages import candidate_grid
from vllm_kvevict.policies.base import Candidates, protect

# Products of 16-bit and FP8 numbers are exact in float32, and sums are float32 in every case, so
# the dtype of the inputs does not matter: the reference multiplies the same numbers. What remains
# is the order of summation: D terms of a logit, thousands of a softmax, up to 256 rows of a column.
TOLERANCE = dict(rtol=2e-4, atol=2e-7)


@dataclass(frozen=True)
class Case:
    shape: Shape
    group: int = 1
    queries: torch.dtype = torch.float32
    softcap: float = 0.0
    kernel: int = 7
    kind: str = "max"


def layers_of(scene: Scene, case: Case) -> WindowLayers:
    """Rings filled for every slot, and a scale of its own for each layer."""
    shape = case.shape
    sizes = (len(scene.due) + 2) * shape.window, case.group * shape.heads, shape.head_size
    return WindowLayers(
        caches=scene.caches,
        rings=[
            torch.randn(sizes, generator=scene.generator).to(case.queries).to(scene.device)
            for _ in range(shape.layers)
        ],
        scales=[2 / shape.head_size**0.5 / (1 + index) for index in range(shape.layers)],
        head_indptr=scene.head_indptr,
        old_store=scene.stores,
        softcap=case.softcap,
        token_format=shape.stored,
        centres=scene.centres,
    )


def candidates_of(
    scene: Scene, case: Case, layers: WindowLayers, due: Due, layer: int
) -> Candidates:
    """The reference's view of one layer of one request."""
    shape = case.shape
    grid, padding = candidate_grid(
        scene.indptr(due), scene.store(due), torch.tensor(due.positional)
    )
    store_pages = grid.shape[-1] - len(due.positional)
    size = shape.page_tokens
    columns = store_pages * size + due.num_tokens - due.old_tail_start
    pages = layers.caches[layer].cpu().float().flatten(0, 1)[..., : shape.head_size]
    keys = pages[grid[layer]].flatten(1, 2)
    if not shape.stored.as_cached:
        # Kernels multiply in the type of the queries.
        cached = scene.layer_cache(layer).key_sequences(grid[layer], store_pages)
        keys = cached.to(case.queries).float()
    position = torch.arange(due.num_tokens - shape.window, due.num_tokens)
    queries = layers.rings[layer].cpu().float()[due.ring * shape.window + position % shape.window]
    return Candidates(
        keys=keys[:, :columns],
        valid=torch.arange(columns) >= (padding[layer] * size)[:, None],
        queries=queries.unflatten(1, (shape.heads, case.group)).permute(1, 2, 0, 3),
        window=shape.window,
        num_candidates=store_pages * size + due.tail_start - due.old_tail_start,
        scale=layers.scales[layer],
        softcap=layers.softcap,
    )


def tolerance(case: Case) -> dict[str, float]:
    """Of scores. The reference rotates stored keys in another order, so that few of their elements
    are rounded to the other neighbour in 16 bits."""
    rounded = not case.shape.stored.as_cached and case.queries.itemsize < 4
    return dict(rtol=4e-3, atol=1e-5) if rounded else TOLERANCE


def expected_scores(scene: Scene, case: Case, layers: WindowLayers) -> torch.Tensor:
    """[batch.columns], in the flat layout."""
    flat = []
    for due in scene.due:
        for layer in range(case.shape.layers):
            candidates = candidates_of(scene, case, layers, due, layer)
            attention = reference.window_attention(candidates)
            valid = candidates.valid[:, : attention.shape[1]]
            pooled = reference.pool(attention, valid, case.kernel, case.kind)
            pooled = protect(pooled, candidates.valid, due.protect_first)
            kept = candidates.valid[:, : candidates.num_candidates]
            flat.append(pooled[:, : candidates.num_candidates][kept])
    return torch.cat(flat)


def check_scores(device: str, case: Case) -> None:
    """All layers and requests in one launch."""
    scene = Scene(case.shape, device, seed=case.group)
    layers = layers_of(scene, case)
    expected = expected_scores(scene, case, layers)
    scores = window_scores(scene.batch, layers, case.kernel, case.kind)
    torch.testing.assert_close(scores.cpu(), expected, **tolerance(case))


def check_not_a_number(device: str, case: Case) -> None:
    """A cached key that is no number makes its head's scores no numbers, and no other's."""
    scene = Scene(case.shape, device, seed=1)
    layers = layers_of(scene, case)
    block = scene.due[0].positional[0]
    scene.caches[0][block, 0, 3, 1] = float("nan")
    expected = expected_scores(scene, case, layers)
    assert 0 < int(expected.isnan().sum()) < len(expected)
    scores = window_scores(scene.batch, layers, case.kernel, case.kind)
    torch.testing.assert_close(scores.cpu(), expected, equal_nan=True, **TOLERANCE)


def check_column_sums(device: str, case: Case) -> None:
    """NACL's Algorithm 2 from a log-sum-exp of another source: float64 attention, spelled out."""
    requests = tuple(replace(one, protect_first=0) for one in case.shape.requests)
    scene = Scene(replace(case.shape, requests=requests), device, seed=case.group)
    layers = layers_of(scene, case)
    lse, expected = [], []
    for due in scene.due:
        for layer in range(case.shape.layers):
            one = candidates_of(scene, case, layers, due, layer)
            keys = one.keys.double().masked_fill(~one.valid[..., None], 0.0)
            logits = one.queries.double().flatten(1, 2) @ keys.mT * one.scale
            window, columns = one.window, keys.shape[1]
            own = torch.arange(columns - window, columns).repeat(case.group)
            seen = one.valid[:, None] & (torch.arange(columns) <= own[:, None])
            logits = logits.masked_fill(~seen, -torch.inf)
            lse.append(logits.logsumexp(-1))
            sums = (logits - lse[-1][..., None]).exp().sum(1)[:, : one.num_candidates]
            expected.append(sums[one.valid[:, : one.num_candidates]])
    batch, shape = scene.batch, case.shape
    given = torch.stack(lse).view(len(scene.due), shape.layers, shape.heads, -1).float().to(device)
    torch.testing.assert_close(window_lse(batch, layers), given, rtol=2e-6, atol=2e-5)
    sums = column_sums(batch, layers, given)
    scores = pool(batch, sums, scene.head_indptr, 1.0, 1, "max").cpu()
    torch.testing.assert_close(scores, torch.cat(expected).float(), rtol=2e-4, atol=2e-6)


def check_eviction(device: str, case: Case) -> None:
    """From rings and caches to stores: what a head's pages hold afterwards are its best tokens."""
    scene = Scene(case.shape, device, seed=3)
    layers, shape, bs = layers_of(scene, case), case.shape, case.shape.block_size
    before = [cache.cpu().clone() for cache in scene.caches]
    scores = window_scores(scene.batch, layers, case.kernel, case.kind)
    rows = candidate_rows(scene.batch, scene.head_indptr)
    pages = batch_pages(scene.batch, scores, rows, 0.2)
    columns = batch_columns(scene.batch, scores, pages, rows)
    compact(scene.caches, columns, pages, scene.batch, scene.head_indptr, scene.stores)
    flat, first = scores.cpu().tolist(), 0
    for index, due in enumerate(scene.due):
        grid, padding = candidate_grid(
            scene.indptr(due), scene.store(due), torch.tensor(due.positional)
        )
        for layer in range(shape.layers):
            shares, caps = pages[index, layer].tolist(), scene.caps(due)[layer].tolist()
            assert sum(shares) == len(due.store) * shape.heads
            now = scene.caches[layer].cpu()[torch.tensor(due.store)].flatten(0, 1)
            now = now.flatten(0, 1).view(torch.uint8)
            for head, (share, cap) in enumerate(zip(shares, caps, strict=True)):
                mine = flat[first : first + cap * bs]
                best = sorted(sorted(range(cap * bs), key=lambda c: (-mine[c], c))[: share * bs])
                first += cap * bs
                at = grid[layer, head, int(padding[layer, head]) :]
                tokens = [before[layer].flatten(0, 1)[at[c // bs], c % bs] for c in best]
                assert torch.equal(now[: share * bs], torch.stack(tokens).view(torch.uint8))
                now = now[share * bs :]
    assert first == len(flat)


def _requests(bs: int) -> tuple[Lengths, ...]:
    """Fresh, with columns between tail start and window; evicted before, protected; heads of one
    page."""
    return (
        Lengths(0, 0, 2, 2 * bs + 32 + 5, 1),
        Lengths(2, 5, 6, 6 * bs + 32, 2, protect_first=3),
        Lengths(1, 2, 2, 3 * bs + 32, 1),
    )


def _case(head_size: int, heads: int, bs: int, cache: torch.dtype, **options: object) -> Case:
    shape = Shape(2, heads, bs, head_size, 32, _requests(bs), cache)
    queries = options.pop("queries", cache)
    return Case(shape, queries=queries, **options)


CASES = [
    _case(64, 2, 16, torch.float16, group=4),
    _case(80, 1, 32, torch.bfloat16, group=3, kind="avg", kernel=5),
    _case(96, 2, 16, torch.float16, group=1, softcap=2.0),
    _case(128, 2, 16, torch.bfloat16, group=2),
    _case(256, 1, 16, torch.bfloat16, group=2, kernel=1),
    _case(64, 2, 64, torch.float32, group=2),
    _case(80, 1, 16, torch.float32, group=1, softcap=3.0),
    _case(256, 1, 16, torch.float32, group=1),
    _case(64, 1, 16, torch.float8_e4m3fn, queries=torch.bfloat16, group=2),
    _case(80, 1, 16, torch.float8_e5m2, queries=torch.float16, group=1),
    _case(64, 1, 16, torch.float8_e4m3fn, queries=torch.float32, group=1),
    # More query rows than one block holds; a window that is no multiple of 16.
    _case(64, 1, 16, torch.float16, group=9),
    Case(Shape(1, 1, 16, 64, 5, _requests(16), torch.bfloat16), 3, torch.bfloat16),
    # Several chunks, the last of one column before the window.
    Case(
        Shape(1, 1, 128, 64, 32, (Lengths(0, 0, 16, 2048 + 32 + 1, 3),), torch.float16),
        1,
        torch.float16,
    ),
]
EVICTION = _case(64, 3, 16, torch.bfloat16, group=2)
