"""What the quality benchmark can be told."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from benchmarks.quality.kvpress_baseline import KVZIP, PRESSES
from benchmarks.quality.prompt import SCENARIOS
from benchmarks.quality.ruler.tasks import TASKS
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import COMPARABLE
from vllm_kvevict.config.plugins import policy_names
from vllm_kvevict.ops.fp8 import CACHE_DTYPES

POOLED = ("snapkv", "ada-snapkv")
"""Policies whose scores are pooled along the sequence."""
STORE_DTYPE, CACHE_DTYPE = "--kv-eviction-store-dtype", "--kv-cache-dtype"
QUICK: dict[str, Any] = dict(
    tasks=("s-niah",), policies=("ada-snapkv", "ada-defensive"), budgets=("25%",), samples=8,
    kvpress=False, threads=2, output=Path(".cache/quality/quick.json"),
)  # fmt: skip


class OwnOptions(BaseModel):
    """Options of each measurement of answers that starts its server; ``x_y`` is the flag ``--x-y``.

    A subclass states the name and the purpose of its command, and where its result goes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    PROG: ClassVar[str]
    DESCRIPTION: ClassVar[str]

    model: str | None = Field(
        None, description="folder of the model to serve; without it SmolLM2-135M-Instruct, which "
        "is fetched"
    )  # fmt: skip
    policies: tuple[str, ...] = Field(("probe",), description="policies, comma-separated")
    budgets: tuple[str, ...] = Field(
        ("12.5%", "25%", "50%"),
        description="shares of what is in the cache at the eviction, or tokens; comma-separated",
    )
    samples: int = Field(100, ge=1, description="samples")
    length: int = Field(1400, ge=50, description="tokens of a sample's prompt, about")
    seed: int = Field(0, ge=0, description="seed of the samples")
    concurrency: int = Field(8, ge=1, description="samples that are asked at once")
    layers: str | None = Field(
        None, description="profile of the model: a file for --kv-eviction-profile, auto, or none"
    )
    groups: int | None = Field(
        None, ge=2, description="groups of layers, with --layers; the server's choice without it"
    )
    server_args: str = Field("", description="more arguments of the server, in one word")
    window: int = Field(32, ge=1, description="observation window of the server")
    block_size: int | None = Field(None, ge=1, description="block size of the server, or 32")
    dtype: str = Field("bfloat16", description="precision of the server")
    kv_memory: str = Field("1G", description="KV-cache memory of the server")
    threads: int = Field(1, ge=1, description="CPU threads of the server")
    resume: bool = Field(False, description="keep the answers that an earlier run left in --work")
    output: Path = Field(description="result file")
    work: Path = Field(Path(".cache/quality"), description="folder of logs and raw answers")

    @model_validator(mode="after")
    def _own_known(self) -> Self:
        self._choose("policies", self.policies, policy_names(), self._may_omit_policies())
        for budget in self.budgets:
            EvictionConfig(policy="snapkv", budget=budget, window=self.window)
        if not self._is_remote() and self.model is not None and not Path(self.model).is_dir():
            raise ValueError(f"--model: no folder {self.model}")
        return self

    def _may_omit_policies(self) -> bool:
        return False

    @property
    def store_dtype(self) -> str:
        """Type in which a server with ``server_args`` stores the tokens that it keeps."""
        given = shlex.split(self.server_args)
        values = {
            name: given[given.index(name) + 1] if name in given else "auto"
            for name in (STORE_DTYPE, CACHE_DTYPE)
        }
        fp8_cache = values[CACHE_DTYPE] in CACHE_DTYPES
        return "int4_fp8" if fp8_cache and values[STORE_DTYPE] == "int4" else values[STORE_DTYPE]

    def _is_remote(self) -> bool:
        """True if the server runs already, so that ``model`` is a name."""
        return False

    @staticmethod
    def _choose(
        name: str, given: Sequence[str], valid: Sequence[str], optional: bool = False
    ) -> None:
        """Raise ValueError if a value is unknown, or if none is given."""
        unknown = [value for value in given if value not in valid]
        if unknown or not (given or optional):
            raise ValueError(
                f"--{name}: {', '.join(unknown) or 'nothing given'}; choose from {', '.join(valid)}"
            )

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Self:
        """Read the command line; ends the process with a message where it is wrong."""
        parser = argparse.ArgumentParser(
            prog=cls.PROG,
            description=cls.DESCRIPTION,
            argument_default=argparse.SUPPRESS,
        )
        for name, field in cls.model_fields.items():
            flag, text = f"--{name.replace('_', '-')}", field.description or ""
            if isinstance(field.default, bool):
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
                continue
            default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
            parser.add_argument(flag, help=f"{text} (default: {default})".replace("%", "%%"))
        given = vars(parser.parse_args(arguments))
        for name, value in given.items():
            if isinstance(cls.model_fields[name].default, tuple):
                given[name] = tuple(part.strip() for part in value.split(",") if part.strip())
        try:
            return cls(**given)
        except ValueError as error:
            parser.error(str(error))


class Options(OwnOptions):
    """Options of ``python -m benchmarks.quality``."""

    PROG = "python -m benchmarks.quality"
    DESCRIPTION = "What each policy and budget costs in answers, through a vLLM server."

    base_url: str | None = Field(
        None, description="a running server; without it one is started here and ended"
    )
    model: str | None = Field(
        None,
        description="folder of the model to serve, or its name at --base-url; without it "
        "SmolLM2-135M-Instruct, which is fetched",
    )
    tasks: tuple[str, ...] = Field(TASKS, description="tasks, comma-separated")
    policies: tuple[str, ...] = Field(
        ("streaming-llm", "snapkv", "ada-snapkv", "ada-defensive"),
        description="policies, comma-separated; with --layers '' for none beside it",
    )
    scenarios: tuple[str, ...] = Field(SCENARIOS, description="scenarios, comma-separated")
    quick: bool = Field(
        False, description="few samples, one task and no kvpress: five minutes on two cores"
    )
    max_tokens: int | None = Field(
        None, ge=2, description="most tokens of an answer; without it each task has its own"
    )
    threshold: float = Field(
        0.5, ge=0, le=1, description="full-cache accuracy below which a task is left out"
    )
    kvpress: bool = Field(True, description="also measure kvpress (own server only)")
    presses: tuple[str, ...] = Field(PRESSES, description="presses of kvpress, comma-separated")
    kvpress_samples: int | None = Field(
        None, ge=1, description="samples of each task that kvpress answers; all without it"
    )
    check: int = Field(
        0, ge=0, description="samples that kvpress answers in two ways; they agree in float32"
    )
    like_for_like: bool = Field(
        False, description="also measure ours with kvpress's pooling (own server only)"
    )
    layers: str | None = Field(
        None,
        description="also measure with shares of layers: a file for --kv-eviction-profile, or auto "
        "(own server only)",
    )
    layers_policies: tuple[str, ...] = Field(
        ("defensive", "ada-defensive"), description="policies that --layers measures"
    )
    server_args: str = Field(
        "", description="more arguments of the servers with --layers, in one word (own server only)"
    )
    block_size: int | None = Field(
        None, ge=1, description="block size of the server, where it does not publish it"
    )
    dtype: str = Field("bfloat16", description="precision of an own server and of kvpress")
    threads: int = Field(
        1, ge=1, description="CPU threads of an own server; processes of kvpress, one thread each"
    )
    output: Path = Field(Path("benchmarks/results/quality.json"), description="result file")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Those of ``quick``, below what is given."""
        return (QUICK if given.get("quick") else {}) | given

    @model_validator(mode="after")
    def _known(self) -> Self:
        self._choose("tasks", self.tasks, TASKS)
        self._choose("layers-policies", self.layers_policies, COMPARABLE)
        self._choose("scenarios", self.scenarios, SCENARIOS)
        self._choose("presses", self.presses, (*PRESSES, KVZIP))
        return self

    def _may_omit_policies(self) -> bool:
        # With --layers no other server is needed.
        return bool(self.layers) and self.base_url is None

    def _is_remote(self) -> bool:
        return self.base_url is not None
