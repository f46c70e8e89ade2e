"""Calibrates a model that has no profile when a server starts: runs calibrate in a process of its
own."""

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

import vllm_kvevict
from vllm_kvevict.config.budget import budget_loss
from vllm_kvevict.config.names import AUTO, CALIBRATE, CONFIG_KEY
from vllm_kvevict.processes import Leash, end_group
from vllm_kvevict.serving import profile
from vllm_kvevict.serving.cpu_dtype import SLOW, lacks_bfloat16
from vllm_kvevict.serving.identity import Match, download, file_name, identity
from vllm_kvevict.serving.profile import FLAG, find
from vllm_kvevict.serving.recommend import BUDGET, WITH_PROFILE, budget_of, changed, is_parent
from vllm_kvevict.serving.support import check

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

logger = init_logger("vllm.kv_eviction.calibrate")

FIELDS = (
    "tokenizer tokenizer_mode tokenizer_revision trust_remote_code revision code_revision "
    "hf_config_path hf_overrides config_format load_format download_dir dtype quantization "
    "tensor_parallel_size distributed_executor_backend gpu_memory_utilization"
).split()
"""Fields of vLLM's ``EngineArgs`` that say which model it is, and where it fits."""

PARTS = {"probes": 0.4, "shares": 0.15, "quality": 0.45}
"""Parts of calibrate by the names of their progress bars, and their approximate shares of the
time, until calibrate says them."""

ESTIMATE = re.compile(r"calibrating takes about (\d+) s: (.*)")
PART = re.compile(r"(\w+) (\d+) s")

BAR = re.compile(r"([\w ]+):\s+\d+%\|.*\| (\d+)/(\d+) \[")

USED = 0.9
"""Part of the limit that calibrate plans for."""

EARLY = 0.05
"""Part of the work after which the expected time is compared with the limit."""

EVERY = 10.0
"""Minimum number of seconds between two lines about progress."""


def check_nodes(vllm_config: "VllmConfig", config: "EvictionConfig", headless: bool) -> None:
    """Reject a profile that each of several nodes would look for, or calibrate, by itself.

    ``vllm serve`` builds a configuration on every node. Ray builds one for all.

    Args:
        vllm_config: As vLLM built it.
        config: The settings.
        headless: True on a node without an API server (``--headless``).

    Raises:
        ValueError: In one sentence, which flag makes all nodes use the same profile.

    """
    parallel = vllm_config.parallel_config
    elsewhere = parallel.data_parallel_size_local < parallel.data_parallel_size
    if not (
        headless or parallel.nnodes > 1 or (elsewhere and parallel.data_parallel_backend != "ray")
    ):
        return
    implicit = config.policy == AUTO and "profile" not in config.model_fields_set
    if implicit or config.profile in (AUTO, CALIBRATE):
        raise ValueError(
            f"{FLAG} must be a file, the same on all nodes, or none, because each of several nodes "
            "would otherwise choose a profile, a policy and a budget of its own; make the file "
            f"with vllm-kvevict calibrate {vllm_config.model_config.model}"
        )


def calibrated(
    engine_args: Any, vllm_config: "VllmConfig", config: "EvictionConfig"
) -> "tuple[EvictionConfig, str | None]":
    """Calibrate the model if it has no profile and the settings ask for one.

    ``--kv-eviction auto`` without ``--kv-eviction-profile`` asks for a profile, and ``calibrate``
    insists on it. Nothing is calibrated if the server could not use the profile.

    Args:
        engine_args: vLLM's ``EngineArgs``, from which ``vllm_config`` was built.
        vllm_config: As vLLM built it.
        config: The settings.

    Returns:
        The settings with the profile ``auto`` instead of ``calibrate``, and the reason why an
        implicit calibration was impossible, or None.

    Raises:
        ValueError: In one sentence, why ``calibrate`` was impossible, and the command that does
            it by hand.

    """
    insists = config.profile == CALIBRATE
    if insists:
        config = changed(config, {"profile": AUTO})
    elif config.policy != AUTO or "profile" in config.model_fields_set:
        return config, None
    if not is_parent(vllm_config) or not is_usable(vllm_config, config):
        return config, None
    download(vllm_config)
    found = find(vllm_config)
    if found is not None and (insists or found.match is Match.SAME):
        return config, None
    words = [str(engine_args.model), *flags(engine_args)]
    by_hand = f"vllm-kvevict calibrate {shlex.join(words)}"
    failure = _failure_file(vllm_config)
    problem = None
    if not insists:
        problem = cannot_calibrate(vllm_config) or failed_before(vllm_config, config)
    if problem is None:
        problem = _calibrate(words, by_hand, config.calibrate_seconds, failure)
        if problem is None and find(vllm_config) is None:
            problem = "what it wrote is another model's"
    if problem is not None and insists:
        raise ValueError(f"{FLAG} {CALIBRATE}: {problem}; calibrate by hand with {by_hand}")
    return config, problem


def flags(engine_args: Any) -> list[str]:
    """Return the flags of calibrate for the model of ``engine_args``.

    A type that this CPU multiplies slowly is left to calibrate: a profile does not depend on it.
    """
    given = {name: getattr(engine_args, name) for name in FIELDS}
    if given["dtype"] in SLOW and lacks_bfloat16():
        del given["dtype"]
    others = {k: v for k, v in (engine_args.additional_config or {}).items() if k != CONFIG_KEY}
    found = []
    for name, value in (given | {"additional_config": others}).items():
        if not value or callable(value) or value == getattr(type(engine_args), name, None):
            continue
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return found


@dataclass
class Progress:
    """Progress of calibrate by the lines that it prints.

    Args:
        limit: Seconds that the calibration may take.
        started: Time at which it began.
        expected: Expected seconds in all, including the time in which the model is loaded; 0 if
            they are unknown.

    """

    limit: float
    started: float = field(default_factory=time.monotonic)
    expected: float = 0.0
    _parts: dict[str, float] = field(default_factory=PARTS.copy)
    _first: float | None = None
    _said: float = 0.0

    def line(self, text: str) -> str | None:
        """Return what to log about a line, or None."""
        if estimate := ESTIMATE.match(text):
            self.expected = time.monotonic() - self.started + int(estimate[1])
            given = {name: float(seconds) for name, seconds in PART.findall(estimate[2])}
            total = sum(given.values())
            if given.keys() == PARTS.keys() and total:
                self._parts = {name: seconds / total for name, seconds in given.items()}
            return text
        bar = BAR.match(text)
        if bar is None or bar[1] not in PARTS:
            return None if bar else text
        name, done, count = bar[1], int(bar[2]), max(1, int(bar[3]))
        now = time.monotonic()
        if self._first is None:
            self._first = now
        before = sum(list(self._parts.values())[: list(self._parts).index(name)])
        part = before + self._parts[name] * done / count
        if part >= EARLY:
            self.expected = self._first - self.started + (now - self._first) / part
        if done not in (0, count) and now - self._said < EVERY:
            return None
        self._said = now
        left = ""
        if self.expected:
            left = f", about {max(0.0, self.expected - (now - self.started)):.0f} s left in all"
        return f"{name} {done} of {count}{left}"

    @property
    def is_too_long(self) -> bool:
        """True if the calibration is expected to take longer than the limit."""
        return self.expected > self.limit


@dataclass(frozen=True)
class FailureFile:
    """Reason why a model could not be calibrated, in a file next to the place of its profile.

    Args:
        path: Path of the file, which may not exist.

    """

    path: Path

    def read(self, limit: float) -> str | None:
        """Return why another attempt would fail as well, or None.

        Args:
            limit: Seconds that the attempt may take.

        """
        try:
            value = json.loads(self.path.read_text())
            seconds, reason = float(value["seconds"]), str(value["reason"])
            if value["vllm_kvevict"] != vllm_kvevict.__version__ or 0 < seconds <= limit:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return f"{reason} (found at an earlier start; remove {self.path} to try again)"

    def write(self, reason: str, seconds: float = 0.0) -> None:
        """Record a reason; ``seconds`` is the time that is needed if the limit is the reason."""
        value = {"vllm_kvevict": vllm_kvevict.__version__, "reason": reason, "seconds": seconds}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(value))
        except OSError as error:
            logger.debug("KV eviction: %s: %s", self.path, error)


def _failure_file(vllm_config: "VllmConfig") -> FailureFile:
    return FailureFile(profile.cache_folder() / f"{file_name(identity(vllm_config))}.failed")


def failed_before(vllm_config: "VllmConfig", config: "EvictionConfig") -> str | None:
    """Return why an earlier start could not calibrate a model, so that this one does not try it
    again; None if it tries."""
    return _failure_file(vllm_config).read(config.calibrate_seconds)


def cannot_calibrate(vllm_config: "VllmConfig") -> str | None:
    """Return why start-up cannot calibrate a model, or None."""
    if vllm_config.load_config.load_format == "dummy":
        return "its weights are random (--load-format dummy)"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "it is calibrated on one pipeline stage only (--pipeline-parallel-size)"
    if vllm_config.model_config.skip_tokenizer_init:
        return "it has no tokenizer (--skip-tokenizer-init)"
    return None


def is_usable(vllm_config: "VllmConfig", config: "EvictionConfig") -> bool:
    """Return whether a server with these settings could use a profile."""
    try:
        if budget_loss(config.budget) is not None:
            # It stands for a share, which the profile will say.
            config = changed(config, {"budget": BUDGET})
        if config.policy == AUTO:
            config = changed(config, {"policy": WITH_PROFILE} | budget_of(config, BUDGET))
        check(vllm_config, changed(config, {"profile": AUTO}))
    except ValueError:
        return False
    return True


def _calibrate(words: list[str], by_hand: str, limit: float, failure: FailureFile) -> str | None:
    """Run calibrate. Return why there is no profile, or None."""
    logger.info(
        "KV eviction: this model has no profile yet, so it is calibrated now, before it is served. "
        "This takes several minutes for a small model on a few CPU cores, and at most %g s "
        "(--kv-eviction-calibrate-seconds). --kv-eviction-profile none skips it. The command: %s",
        limit,
        by_hand,
    )
    started = time.monotonic()
    # The rest of the time is for what takes longer than expected.
    words = [*words, "--seconds", f"{USED * limit:g}"]
    status, last, progress = _run([sys.executable, "-m", "vllm_kvevict.calibrate", *words], limit)
    seconds = time.monotonic() - started
    if status == 0:
        logger.info("KV eviction: the model was calibrated in %.0f s.", seconds)
        return None
    if status is None:
        needed = max(progress.expected, limit + 1)
        what = "it would take about" if progress.expected > limit else "it takes more than"
        number = progress.expected if progress.expected > limit else limit
        problem = (
            f"{what} {number:.0f} s, and the limit is {limit:g} s (--kv-eviction-calibrate-seconds)"
        )
        failure.write(problem, needed)
        return problem
    problem = f"calibrate ended with status {status} ({last.removeprefix('error: ')})"
    if last.startswith("error: "):
        failure.write(problem)
    return problem


def _run(command: list[str], limit: float) -> tuple[int | None, str, Progress]:
    """Run a command and log its progress.

    Args:
        command: The command.
        limit: Seconds after which it is ended, or earlier if it is expected to take longer.

    Returns:
        Its exit status, or None if it was ended because of the limit; its last line; its progress.

    """
    progress, late = Progress(limit), threading.Event()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ranks of its own end with it.
        start_new_session=True,
    )

    def end() -> None:
        late.set()
        end_group(process, 0)

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        with Leash(process.pid):
            last = _follow(process, progress, end, late)
    except BaseException:
        end_group(process, 0)
        raise
    finally:
        timer.cancel()
        process.wait()
    return (None if late.is_set() else process.returncode), last, progress


def _follow(
    process: "subprocess.Popen[str]",
    progress: Progress,
    end: Callable[[], None],
    ended: threading.Event,
) -> str:
    """Log what a command prints, and end it if it will take too long. Return the last line."""
    last = "it said nothing"
    assert process.stdout is not None
    with process.stdout as lines:
        # A progress bar ends its lines with carriage returns, which read as line ends.
        for line in filter(None, map(str.strip, lines)):
            if text := progress.line(line):
                logger.info("calibrate: %s", text)
                last = text
            if progress.is_too_long and not ended.is_set():
                end()
    return last
