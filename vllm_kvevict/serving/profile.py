"""Whose profile a file of ``--kv-eviction-profile`` is, and where ``auto`` looks for one."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_kvevict
from vllm_kvevict.config import probe_weights
from vllm_kvevict.config.memory_budget import evictable_layers
from vllm_kvevict.config.names import AUTO, LEARNED, MEASURE
from vllm_kvevict.config.profile import ModelIdentity, ProbeFile, Profile, parse

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

FLAG = "KV eviction: --kv-eviction-profile"

SHIPPED = Path(vllm_kvevict.__file__).parent / "profiles"

SHAPE = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim layer_types tie_word_embeddings"
).split()
"""Fields of a model's configuration that tell models apart whatever they are served with."""


def identity(vllm_config: "VllmConfig") -> ModelIdentity:
    """The identity of the model that vLLM serves."""
    model = vllm_config.model_config
    shape = {name: getattr(model.hf_text_config, name, None) for name in SHAPE}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return ModelIdentity(
        architecture=str(model.architecture),
        layers=evictable_layers(vllm_config),
        kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        config=digest[:16],
    )


def cache_folder() -> Path:
    """Where calibrate leaves profiles for ``auto``: below vLLM's cache root."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT).expanduser() / "kv_eviction" / "profiles"


def cached_name(model: ModelIdentity) -> str:
    """Name of a model's profile in :func:`cache_folder`."""
    return f"{model.architecture}-{model.config}.json"


def check_learned(config: "EvictionConfig", model: str) -> None:
    """Refuse a policy that reads its scores from a profile if no profile was given.

    Raises:
        ValueError: In one sentence, with the flag and the command that makes a profile.

    """
    learned = [name for name in config.policies if name in LEARNED]
    if not learned:
        return
    make = f"make one with vllm-kvevict calibrate {model}"
    if config.profile is None:
        raise ValueError(
            f"KV eviction: {learned[0]} needs the model's profile: give --kv-eviction-profile and "
            f"a file, or auto; {make}"
        )
    if isinstance(config.profile, Profile) and config.profile.probe is None:
        raise ValueError(f"{FLAG}: the file has shares, but no scores for {learned[0]}; {make}")


def load(where: "str | Profile", vllm_config: "VllmConfig") -> Profile:
    """The profile of the model that vLLM serves.

    Args:
        where: A file, "auto" for a shipped or cached one, or a profile that was read before.
        vllm_config: As vLLM built it.

    Raises:
        ValueError: In one sentence: no file, not one of this kind, or of another model.

    """
    mine = identity(vllm_config)
    if where == AUTO:
        if (found := find(vllm_config)) is not None:
            return found
        raise ValueError(
            f"{FLAG} auto: no profile ships for {mine}, and none is in {cache_folder()}; make it "
            f"with vllm-kvevict calibrate {vllm_config.model_config.model}, or start "
            f"with {MEASURE} instead of auto"
        )
    profile = where if isinstance(where, Profile) else read(Path(where))
    if profile.model != mine:
        raise ValueError(
            f"{FLAG}: the profile is that of {profile.model}, and this model is {mine}; make its "
            f"own with vllm-kvevict calibrate {vllm_config.model_config.model}"
        )
    return profile


def read(path: Path) -> Profile:
    """Read a profile; its probes stay in the file.

    Raises:
        ValueError: In one sentence, what is wrong with it.

    """
    path = path.expanduser()
    try:
        content = path.read_bytes()
        value = json.loads(content.decode("utf-8"))
        probe = value.pop("probe", None) if isinstance(value, dict) else None
        profile = parse(value)
        if probe is None:
            return profile
        probe_weights.decode(probe, profile.model)
        where = ProbeFile(file=str(path.absolute()), sha256=probe_weights.digest(content))
        return profile.model_copy(update={"probe": where})
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(f"{FLAG}: {path}: {problem}")


def to_json(profile: Profile, weights: "probe_weights.ProbeWeights | None") -> dict[str, Any]:
    """Return the content of a profile's file."""
    value = profile.model_dump(mode="json", exclude={"probe"})
    return value if weights is None else value | {"probe": weights.to_json()}


def find(vllm_config: "VllmConfig") -> Profile | None:
    """The profile that ships for the model that vLLM serves, else a cached one, else None.

    Raises:
        ValueError: In one sentence, what is wrong with a file.

    """
    mine = identity(vllm_config)
    cached = cache_folder() / cached_name(mine)
    for path in (*sorted(SHIPPED.glob("*.json")), *([cached] if cached.is_file() else ())):
        profile = read(path)
        if profile.model == mine:
            return profile
    return None
