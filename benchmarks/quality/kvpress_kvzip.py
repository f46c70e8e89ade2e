"""What kvpress's KVzipPress keeps of a context. Imported by .venv-kvpress alone.

It repeats the context behind itself, so it is a context manager around a whole model, where other
presses compress a layer at a time.
"""

import torch
from kvpress import KVzipPress
from transformers import PreTrainedModel

from benchmarks.quality.kvpress_kept import LayerPrefill, prefill

KVZIP = "kvzip"
"""Its name among the presses."""


class KeptByKVzip(KVzipPress):
    """Notes what each of several ratios keeps, by one and the same scores."""

    def __init__(self, point: int, keeps: list[int]) -> None:
        super().__init__(compression_ratio=0.5)
        self._point, self._keeps = point, keeps
        self.masks: list[list[torch.Tensor]] = []
        """[H, point] bool by layer, for each of ``keeps`` tokens a head on average."""

    def compress_post(self, model: PreTrainedModel) -> None:
        """As kvpress's, once for each ratio. Half a token more, because it rounds down."""
        scores = self.score_val.clone()
        for keep in self._keeps:
            self.compression_ratio = 1 - (keep + 0.5) / self._point
            self.score_val = scores.clone()
            super().compress_post(model)
            masks = []
            for layer in model.model.layers:
                mask = torch.ones(scores.shape[2], self._point, dtype=torch.bool)
                _, heads, positions = layer.self_attn.masked_key_indices
                mask[heads, positions] = False
                layer.self_attn.masked_key_indices = None
                masks.append(mask)
            self.masks.append(masks)


def kvzip_masks(
    model: PreTrainedModel, ids: list[int], point: int, keeps: list[int]
) -> tuple[list[LayerPrefill], list[torch.Tensor]]:
    """Layers of a context, and [len(keeps), H, point] bool masks of each."""
    press = KeptByKVzip(point, keeps)
    with press(model):
        layers, _ = prefill(model, ids[:point])
    return layers, [torch.stack(rows) for rows in zip(*press.masks, strict=True)]
