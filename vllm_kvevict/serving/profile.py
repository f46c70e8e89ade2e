"""Reads and finds profiles (``--kv-eviction-profile``)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

import vllm_kvevict
from vllm_kvevict.config import probe_weights
from vllm_kvevict.config.names import AUTO, CALIBRATE, LEARNED
from vllm_kvevict.config.profile import ProbeFile, Profile, parse
from vllm_kvevict.serving.identity import Match, file_name, identity, match

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

logger = init_logger("vllm.kv_eviction.profile")

FLAG = "KV eviction: --kv-eviction-profile"

SHIPPED = Path(vllm_kvevict.__file__).parent / "profiles"


class Found(NamedTuple):
    """A profile, and its relation to the model that is served."""

    profile: Profile
    match: Match
    reason: str


def cache_folder() -> Path:
    """Where calibrate leaves profiles for ``auto``: below vLLM's cache root."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT).expanduser() / "kv_eviction" / "profiles"


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
    """Return the profile of the model that vLLM serves, or of a related model.

    Args:
        where: A file, "auto" for a cached or shipped one, or a profile that was read before.
        vllm_config: As vLLM built it.

    Raises:
        ValueError: In one sentence: no file, not one of this kind, or of another model.

    """
    mine = identity(vllm_config)
    if where == AUTO:
        if (found := find(vllm_config)) is not None:
            return found.profile
        raise ValueError(
            f"{FLAG} auto: no profile ships for {mine}, and none is in {cache_folder()}; make it "
            f"with vllm-kvevict calibrate {vllm_config.model_config.model}, or start "
            f"with {CALIBRATE} instead of auto"
        )
    profile = where if isinstance(where, Profile) else read(Path(where))
    relation, reason = match(profile.model, mine)
    if relation is Match.OTHER:
        raise ValueError(
            f"{FLAG}: the profile is that of {profile.model}, and this model is {mine}: {reason}; "
            f"make its own with vllm-kvevict calibrate {vllm_config.model_config.model}"
        )
    return profile


def warn_of_related(profile: Profile, vllm_config: "VllmConfig") -> None:
    """Log a warning if a profile is that of a related model."""
    relation, reason = match(profile.model, identity(vllm_config))
    if relation is Match.RELATED:
        logger.warning(
            "KV eviction: the profile %s may be another model's: %s. Answers may lose more than "
            "the profile says; make this model's own with vllm-kvevict calibrate %s.",
            profile.probe.file if profile.probe is not None else f"of {profile.model}",
            reason,
            vllm_config.model_config.model,
        )


def warn_of_few_lessons(profile: Profile, vllm_config: "VllmConfig") -> None:
    """Log a warning if a profile was learned from fewer texts than it should, for lack of time."""
    lessons = profile.made.get("lessons")
    if isinstance(lessons, dict) and lessons.get("stopped") == "time":
        logger.warning(
            "KV eviction: the profile was learned from %s of %s texts, because the time for "
            "calibrate was up. Answers may lose more than with all of them; "
            "vllm-kvevict calibrate %s, without --seconds, makes a profile of all.",
            lessons.get("learned"),
            lessons.get("planned"),
            vllm_config.model_config.model,
        )


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


def find(vllm_config: "VllmConfig") -> Found | None:
    """Return the profile of the model that vLLM serves, else one of a related model, else None.

    A profile that calibrate left in the cache is preferred to one that ships.

    Raises:
        ValueError: In one sentence, what is wrong with the model's own file or a shipped one.

    """
    mine = identity(vllm_config)
    own = cache_folder() / file_name(mine)
    others = sorted(cache_folder().glob(f"{mine.architecture}-{mine.config}-*.json"))
    others = [path for path in others if path != own]
    paths = [own, *others, *sorted(SHIPPED.glob("*.json"))]
    best: Found | None = None
    for path in filter(Path.is_file, paths):
        try:
            profile = read(path)
        except ValueError as error:
            if path in others:
                logger.warning("%s", error)
                continue
            raise
        relation, reason = match(profile.model, mine)
        if relation is Match.SAME:
            return Found(profile, relation, reason)
        if relation is Match.RELATED and best is None:
            best = Found(profile, relation, reason)
    return best
