"""Tiny random-weight models that take images, and their token oracle.

Their classes need torchvision (``pictures_script.py`` says how it gets here).
"""

from pathlib import Path
from typing import Any

import torch

from tests.e2e.architectures import FULL_ATTENTION, HEADS, LINEAR, SHAPE, spread_weights
from tests.models import cached_tiny_llama, random_prompt
from tests.oracles.masked import Life, MaskedModel

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(1024, 1028)
# What InternVL's processor calls them.
INTERN = ("start_image_token", "end_image_token", "context_image_token", "video_token")
VOCAB = 1056
TEXT: dict[str, Any] = SHAPE | HEADS | dict(vocab_size=VOCAB)
ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=1e6)
TOWER: dict[str, Any] = dict(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=256,
)
QWEN_IDS: dict[str, Any] = dict(
    vision_start_token_id=START,
    vision_end_token_id=END,
    image_token_id=IMAGE,
    video_token_id=VIDEO,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "InternVL": dict(
        text_config=TEXT | dict(model_type="qwen2"),
        vision_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=[112, 112],
        ),
        image_token_id=IMAGE,
        image_seq_length=16,
        tie_word_embeddings=False,
    ),
    "Qwen2_5_VL": dict(
        text_config=TEXT | dict(rope_parameters=ROPE | dict(mrope_section=[4, 6, 6])),
        vision_config=TOWER | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1]),
        **QWEN_IDS,
    ),
    "Qwen3VL": dict(
        text_config=TEXT
        | dict(rope_parameters=ROPE | dict(mrope_section=[6, 5, 5], mrope_interleaved=True)),
        vision_config=TOWER
        | dict(patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        **QWEN_IDS,
    ),
    "Qwen3_5": dict(
        text_config=TEXT
        | LINEAR
        | dict(
            rope_parameters=ROPE
            | dict(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
        ),
        vision_config=TOWER | dict(patch_size=16, num_position_embeddings=64),
        **QWEN_IDS,
    ),
}


def picture(seed: int) -> Any:
    """An image of noise, 112 by 168 pixels."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (112, 168, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def shown(n: int, seed: int, at: tuple[int, ...]) -> list[int]:
    """A prompt of ``n`` words in which images follow the words ``at``."""
    tokens = random_prompt(n, seed=seed)
    for place in reversed(at):
        tokens[place:place] = [START, IMAGE, END]
    return tokens


def with_tower(name: str, path: Path) -> Path:
    """Write a float32 checkpoint of a model with a vision tower, and its processor."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        cached_tiny_llama(kv_heads=2), **dict(zip(INTERN, SPECIAL, strict=True))
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [START, END, IMAGE, VIDEO]
    ids = dict(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    settings = dict(CONFIGS[name])
    settings["text_config"] = settings["text_config"] | ids
    config = getattr(transformers, f"{name}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        spread_weights(model)
        # Words alone are said.
        model.lm_head.weight.data[1024:] = 0
    model.save_pretrained(path)
    _processor(name, tokenizer, config).save_pretrained(path)
    return path


def _processor(name: str, tokenizer: Any, config: Any) -> Any:
    import transformers as hf

    if name == "InternVL":
        square = dict(size=dict(height=112, width=112))
        return hf.InternVLProcessor(
            hf.GotOcr2ImageProcessor(crop_to_patches=False, max_patches=1, **square),
            tokenizer,
            hf.InternVLVideoProcessor(**square),
            image_seq_length=16,
        )
    size = dict(shortest_edge=4096, longest_edge=1 << 16)
    patches = dict(patch_size=config.vision_config.patch_size, size=size)
    images = hf.Qwen2VLImageProcessor(**patches)
    if name == "Qwen2_5_VL":
        return hf.Qwen2_5_VLProcessor(images, tokenizer, hf.Qwen2VLVideoProcessor(**patches))
    return hf.Qwen3VLProcessor(images, tokenizer, hf.Qwen3VLVideoProcessor(**patches))


class MaskedTower(MaskedModel):
    """The oracle for a model with a vision tower; ``pictures`` of a prompt go with each call."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.model = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.processor = AutoProcessor.from_pretrained(path)
        config = self.model.config.text_config
        self.heads = config.num_attention_heads
        self.group = self.heads // config.num_key_value_heads
        self.pictures: list[Any] = []
        self._masks: list[torch.Tensor] = []
        layers = self.model.model.language_model.layers
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        self._full = [
            layer for layer, kind in zip(layers, kinds, strict=True) if kind in FULL_ATTENTION
        ]
        for index, layer in enumerate(self._full):
            layer.self_attn.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    @property
    def _layers(self) -> int:
        return len(self._full)

    @torch.inference_mode()
    def predictions(self, tokens: list[int], life: Life) -> torch.Tensor:
        """All tokens in one pass, the prompt's images among them."""
        n = len(tokens)
        self._masks = [self._mask(index, 0, n, life) for index in range(self._layers)]
        ids = torch.tensor([tokens])
        images = self.processor.image_processor(self.pictures, return_tensors="pt")
        images.pop("num_patches", None)
        logits = self.model(
            ids, use_cache=False, mm_token_type_ids=(ids == IMAGE).int(), **images
        ).logits[0]
        self._masks = []
        return logits[life.prefill_end - 1 :]
