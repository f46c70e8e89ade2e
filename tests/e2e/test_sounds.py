"""A model that takes audio: evictions before, inside and behind a sound, token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.architectures import GQA, SHAPE, spread_weights
from tests.models import cached_tiny_llama, random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

pytestmark = pytest.mark.nightly
AUDIO = 1024
SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
RATE = 16000
TOWER: dict[str, Any] = dict(
    encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128, d_model=64
)
EVICTION = dict(policy="ada-snapkv", budget=128, interval=64)
NEW_TOKENS = 80
# Behind the first sound; inside the sound.
AT = [{"kv_eviction_at": 201}, {"kv_eviction_at": 290}]


def sound(seconds: float, seed: int) -> Any:
    """Noise, 25 tokens a second."""
    return torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(seed)).numpy()


SOUNDS = [[sound(2, 1), sound(1.2, 2)], [sound(2, 3)]]


def heard(n: int, seed: int, at: tuple[int, ...]) -> list[int]:
    """A prompt of ``n`` words in which sounds follow the words ``at``."""
    tokens = random_prompt(n, seed=seed)
    for place in reversed(at):
        tokens[place:place] = [AUDIO]
    return tokens


PROMPTS = [heard(400, 1, (30, 300)), heard(300, 2, (270,))]


def with_ears(path: Path) -> Path:
    """Write a float32 Qwen2-Audio checkpoint of random weights, and its processor."""
    import transformers as hf

    tokenizer = hf.AutoTokenizer.from_pretrained(cached_tiny_llama(kv_heads=2))
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids(SPECIAL[0]) == AUDIO
    ids = dict(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = hf.Qwen2AudioConfig(
        text_config=SHAPE | GQA | ids | dict(vocab_size=1056, model_type="qwen2"),
        audio_config=TOWER | dict(model_type="qwen2_audio_encoder"),
        audio_token_index=AUDIO,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.Qwen2AudioForConditionalGeneration(config)
        spread_weights(model)
        # Words alone are said.
        model.get_output_embeddings().weight.data[1024:] = 0
    model.save_pretrained(path)
    # Published checkpoints have one "model" there; transformers 5.19 writes two.
    weights = load_file(path / "model.safetensors")
    weights = {name.replace("model.model.", "model."): one for name, one in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    extractor = hf.WhisperFeatureExtractor(feature_size=128)
    hf.Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(path)
    return path


class MaskedEars(MaskedModel):
    """The oracle; ``sounds`` of a prompt go with each call."""

    def __init__(self, path: Path) -> None:
        from transformers import Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

        self.model = Qwen2AudioForConditionalGeneration.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._extractor = WhisperFeatureExtractor(feature_size=128)
        config = self.model.config.text_config
        self.heads = config.num_attention_heads
        self.group = self.heads // config.num_key_value_heads
        self.sounds: list[Any] = []
        self._masks: list[torch.Tensor] = []
        self._decoder = self.model.model.language_model.layers
        for index, layer in enumerate(self._decoder):
            layer.self_attn.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    @property
    def _layers(self) -> int:
        return len(self._decoder)

    @torch.inference_mode()
    def predictions(self, tokens: list[int], life: Life) -> torch.Tensor:
        """All tokens in one pass, the prompt's sounds among them."""
        n = len(tokens)
        self._masks = [self._mask(index, 0, n, life) for index in range(self._layers)]
        features = self._extractor(
            self.sounds, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
        )
        logits = self.model(
            torch.tensor([tokens]),
            input_features=features["input_features"],
            feature_attention_mask=features["attention_mask"],
            use_cache=False,
        ).logits[0]
        self._masks = []
        return logits[life.prefill_end - 1 :]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_ears(tmp_path_factory.mktemp("ears"))


@pytest.mark.parametrize(
    ("asked", "chunk"), [(None, 1024), (None, 128), (AT, 256)], ids=["whole", "chunks", "points"]
)
def test_sounds_beside_evictions(model, asked, chunk):
    oracle = MaskedEars(model)
    options = dict(
        max_num_batched_tokens=chunk, max_model_len=1024, limit_mm_per_prompt={"audio": 2}
    )
    with engine(model, EVICTION, **options) as run:
        free = run.free_blocks()
        media = [{"audio": [(one, RATE) for one in mine]} for mine in SOUNDS]
        outputs = run.generate(PROMPTS, NEW_TOKENS, asked, media=media)
        assert [prompt.count(AUDIO) for prompt in run.prompts] == [80, 50]
        full = 0
        for tokens, output, lives, mine in zip(
            run.prompts, outputs, run.lives(), SOUNDS, strict=True
        ):
            oracle.sounds = mine
            agreed, total = check_tokens(oracle, tokens, output, lives)
            assert agreed == total == NEW_TOKENS
            full += check_tokens(oracle, tokens, output, [Life(len(tokens))])[0]
        assert full < 0.9 * len(PROMPTS) * NEW_TOKENS, "full attention would agree as well"
        if asked:
            assert [lives[0].evictions[0].n for lives in run.lives()] == [201, 290]
        assert run.counters.evictions >= 4 and run.free_blocks() == free
