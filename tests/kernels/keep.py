"""Numbers beside survivors: every one in its place, and no other is touched."""

import torch

from tests.kernels.defensive import kept_of
from tests.kernels.scene import Scene
from tests.kernels.score import Case
from vllm_kvevict.ops.cuda.token_stats import keep_page_values


def check_keep(device: str, case: Case, made: int, channels: int) -> None:
    """``made`` numbers of each token, of ``channels`` beside it; heads keep their last pages."""
    scene = Scene(case.shape, device, seed=2)
    shape, size = case.shape, case.shape.page_tokens
    kept = kept_of(scene, channels)
    numbers = torch.rand(made, scene.batch.columns, generator=scene.generator)
    # Every head keeps as many pages as the store has blocks: the last that it has.
    pages = torch.tensor([[[len(due.store)] * shape.heads] * shape.layers for due in scene.due])
    columns, wanted, first = [], [layer.cpu().clone() for layer in kept], 0
    for due in scene.due:
        for layer in range(shape.layers):
            for head in range(shape.heads):
                cap = int(scene.columns(due)[layer, head])
                count = len(due.store) * size
                columns += list(range(cap - count, cap))
                for index in range(len(due.store)):
                    flat = head * len(due.store) + index
                    page = due.store[flat // shape.heads] * shape.heads + flat % shape.heads
                    at = first + cap - count + index * size
                    wanted[layer][page, :, :made] = numbers[:, at : at + size].T
                first += cap
    keep_page_values(
        kept,
        numbers.to(device),
        torch.tensor(columns, dtype=torch.int32, device=device),
        pages.int().to(device),
        scene.batch,
        scene.head_indptr,
        scene.stores,
    )
    for layer, right in zip(kept, wanted, strict=True):
        assert torch.equal(layer.cpu().nan_to_num(-1.0), right.nan_to_num(-1.0))
