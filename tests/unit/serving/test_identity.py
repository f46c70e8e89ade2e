"""Whose profile a profile is: the same weights in any form, related weights, other weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.serving.test_recommend import nothing_ships, settled, write
from vllm_kvevict.serving import identity as module
from vllm_kvevict.serving import profile
from vllm_kvevict.serving.identity import Match, file_name, identity, match

__all__ = ["nothing_ships"]

pytestmark = pytest.mark.usefixtures("registered")

SHAPES = {
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "mlp.up_proj.weight": (64, 64),
    "input_layernorm.weight": (64,),
}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Weights of the model that ``build`` builds, in bfloat16 as checkpoints have them."""
    generator = torch.Generator().manual_seed(seed)
    names = {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in SHAPES.items()}
    names |= {"model.embed_tokens.weight": (128, 64)}
    return {
        name: (0.05 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in names.items()
    }


@pytest.fixture
def folder(model: str) -> Path:
    save_file(drawn(0), Path(model) / "model.safetensors")
    return Path(model)


def of(build: Any, folder: Path, name: str, weights: Any, **options: Any) -> Any:
    """Identity of a copy of the model with other weights."""
    other = folder.parent / name
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("*.safetensors"))
    if callable(weights):
        weights(other)
    else:
        save_file(weights, other / "model.safetensors")
    return identity(build(model=str(other), **options))


def in_two_files(folder: Path) -> None:
    weights = drawn(0)
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:]), 1):
        save_file({name: weights[name] for name in part}, folder / f"model-{number}.safetensors")
    # Mistral's own names, which vLLM does not load from a folder that has both.
    save_file({"layers.0.wq.weight": torch.ones(4, 4)}, folder / "consolidated.safetensors")


SAME: dict[str, Any] = {
    "float32": {name: tensor.float() for name, tensor in drawn(0).items()},
    "float16": {name: tensor.half() for name, tensor in drawn(0).items()},
    "two files": in_two_files,
    "PyTorch's format": lambda folder: torch.save(drawn(0), folder / "pytorch_model.bin"),
    "tied embeddings": drawn(0) | {"lm_head.weight": torch.ones(128, 64)},
    "buffers": drawn(0) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)},
}


@pytest.mark.parametrize("form", SAME)
def test_another_form_of_the_same_weights(build: Any, folder: Path, form: str) -> None:
    mine, other = identity(build()), of(build, folder, "other", SAME[form])
    assert match(mine, other)[0] is match(other, mine)[0] is Match.SAME
    assert file_name(mine) == file_name(other)


def changed(change: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: change(name, tensor) for name, tensor in drawn(0).items()}


def tuned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    noise = 0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
    return (tensor + noise).bfloat16()


RELATED: dict[str, Any] = {
    "fine-tuned": changed(tuned),
    "one matrix changed": changed(lambda n, t: tuned(n, t) if "1.self_attn.q" in n else t),
    "FP8": changed(lambda n, t: (t * 500).to(torch.float8_e4m3fn) if t.dim() > 1 else t),
    "packed integers": {
        name.replace("weight", "qweight") if "proj" in name else name: (
            torch.ones(tensor.shape, dtype=torch.int32) if "proj" in name else tensor
        )
        for name, tensor in drawn(0).items()
    },
    "other names": {f"transformer.{name}": tensor for name, tensor in drawn(0).items()},
    "no weights": lambda folder: None,
    "damaged": lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100),
}  # fmt: skip


@pytest.mark.parametrize("form", RELATED)
def test_related_weights(build: Any, folder: Path, form: str) -> None:
    mine, other = identity(build()), of(build, folder, "other", RELATED[form])
    assert match(mine, other)[0] is match(other, mine)[0] is Match.RELATED
    assert file_name(mine) != file_name(other)


def test_other_weights_of_the_same_shape(build: Any, folder: Path) -> None:
    mine, other = identity(build()), of(build, folder, "other", drawn(1))
    assert other.config == mine.config
    relation, reason = match(mine, other)
    assert relation is Match.OTHER and "the weights are different" in reason


def test_random_weights_are_not_those_of_the_files(build: Any, folder: Path) -> None:
    assert identity(build(load_format="dummy")).weights is None


def test_files_that_change_are_sampled_again(build: Any, folder: Path) -> None:
    before = identity(build())
    save_file(drawn(1), folder / "model.safetensors")
    assert match(before, identity(build()))[0] is Match.OTHER


def test_a_name_on_the_hub(build: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Hub's cache has it, weights are found by name and revision."""
    hub = folder.parent / "hub"
    snapshot = hub / "models--maker--small" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (hub / "models--maker--small" / "refs").mkdir()
    (hub / "models--maker--small" / "refs" / "main").write_text("abc")
    files = module.local_files("maker/small", None, str(hub))
    assert files == [snapshot / "model.safetensors"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert module.local_files("maker/large", None, str(hub)) is None


def test_weights_of_the_hub_are_downloaded_first(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.model_executor.model_loader as loaders

    asked: list[str] = []

    class Loader:
        def __init__(self, load: Any) -> None:
            self.load = load

        def download_model(self, model: Any) -> None:
            asked.append(model.model)
            raise OSError("no network")

    monkeypatch.setattr(loaders, "get_model_loader", Loader)
    config = build()
    module.download(config)
    assert asked == [], "it is on this machine"
    config.model_config.model = "maker/large"
    module.download(config)
    assert asked == ["maker/large"], "and vLLM reports what failed"


class Tokenizer:
    def __init__(self, *first: int) -> None:
        self.first = first

    def encode(self, text: str) -> list[int]:
        return [*self.first, *map(ord, text)]


def test_another_tokenizer(
    build: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    import vllm.tokenizers

    def found(tokenizer: Any) -> Any:
        monkeypatch.setattr(
            vllm.tokenizers, "cached_tokenizer_from_config", lambda _: tokenizer
        )  # fmt: skip
        return identity(build())

    unknown, plain, begins = found(None), found(Tokenizer()), found(Tokenizer(1))
    assert unknown.tokenizer is None
    relation, reason = match(plain, begins)
    assert relation is Match.RELATED and "the tokenizer is another" in reason
    assert match(plain, unknown)[0] is match(plain, found(Tokenizer()))[0] is Match.SAME


def warnings(records: Any) -> list[str]:
    return [r.getMessage() for r in records if r.levelname == "WARNING" and "may be" in r.msg]


def test_a_related_models_profile_is_used_with_a_warning(
    build: Any, folder: Path, nothing_ships: Path, records: Any
) -> None:
    write(build, nothing_ships / "a.json")
    asked = dict(policy="probe", profile="auto")
    assert settled(build(asked)).profile is not None
    assert warnings(records) == []
    save_file(changed(tuned), folder / "model.safetensors")
    assert settled(build(asked)).profile is not None
    (warning,) = warnings(records)
    assert "a.json may be another model's: the weights are similar" in warning
    assert f"vllm-kvevict calibrate {folder}" in warning
    save_file(drawn(1), folder / "model.safetensors")
    with pytest.raises(ValueError, match="no profile ships for"):
        build(asked)
    with pytest.raises(ValueError, match="the weights are different"):
        build(asked | dict(profile=str(nothing_ships / "a.json")))


def test_which_profile_is_found(
    build: Any, folder: Path, nothing_ships: Path, records: Any
) -> None:
    """One's own before a shipped one, and this model's before a related model's."""
    cache = profile.cache_folder()
    cache.mkdir()

    def found() -> str:
        best = profile.find(build())
        return "" if best is None else str(best.profile.made["name"])

    mine = file_name(identity(build()))
    assert found() == ""
    (cache / mine.replace("-", "-x", 2)).write_text("foreign")
    write(build, nothing_ships / "a.json", made={"name": "shipped"})
    assert found() == "shipped"
    write(build, cache / mine, made={"name": "own"})
    assert found() == "own"
    save_file(changed(tuned), folder / "model.safetensors")
    assert found() == "own", "the base model's"
    write(build, nothing_ships / "b.json", made={"name": "shipped for the fine-tune"})
    assert found() == "shipped for the fine-tune"
    assert not [r for r in records if "foreign" in r.getMessage()]
    (cache / file_name(identity(build()))).write_text("{")
    with pytest.raises(ValueError, match=r"-\w+\.json: Expecting"):
        found()
    (cache / file_name(identity(build()))).unlink()
    (cache / mine).write_text("{")
    assert found() == "shipped for the fine-tune", "a related model's file is not needed"


def test_the_shipped_profile_is_that_of_the_model_of_the_benchmarks(
    build: Any, tmp_path: Path
) -> None:
    """In bfloat16, as converted, and in float32."""
    from benchmarks.packaged_model import MODELS
    from benchmarks.smollm2 import NAME

    real = MODELS / NAME
    if not real.exists():
        pytest.skip("the model has not been fetched: python -m benchmarks.smollm2")
    value = json.loads((Path(module.__file__).parents[1] / "profiles" / f"{NAME}.json").read_text())
    shipped = profile.parse(value | {"probe": None}).model
    served = identity(build(model=str(real), skip_tokenizer_init=False))
    assert match(shipped, served)[0] is Match.SAME and shipped.tokenizer == served.tokenizer
    whole = load_file(real / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in whole.items()}, tmp_path / "a.safetensors")
    as_float = served.model_copy(update={"weights": module.sample([tmp_path / "a.safetensors"])})
    assert match(shipped, as_float)[0] is Match.SAME
