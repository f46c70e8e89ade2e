"""What the quality benchmark can be told."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from benchmarks.quality.kvpress_baseline import KVZIP, PRESSES
from benchmarks.quality.prompt import SCENARIOS
from benchmarks.quality.ruler.tasks import TASKS
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import COMPARABLE, POLICY_NAMES

POOLED = ("snapkv", "ada-snapkv")
"""Policies whose scores are pooled along the sequence."""
QUICK: dict[str, Any] = dict(
    tasks=("s-niah",), policies=("ada-snapkv", "ada-defensive"), budgets=("25%",), samples=8,
    kvpress=False, threads=2, output=Path(".cache/quality/quick.json"),
)  # fmt: skip


class Options(BaseModel):
    """Options of ``python -m benchmarks.quality``; a field ``x_y`` is the flag ``--x-y``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    budgets: tuple[str, ...] = Field(
        ("12.5%", "25%", "50%"),
        description="shares of what is in the cache at the eviction, or tokens; comma-separated",
    )
    scenarios: tuple[str, ...] = Field(SCENARIOS, description="scenarios, comma-separated")
    quick: bool = Field(
        False, description="few samples, one task and no kvpress: five minutes on two cores"
    )
    samples: int = Field(100, ge=1, description="samples of each task")
    length: int = Field(1400, ge=50, description="tokens of a sample's prompt, about")
    max_tokens: int | None = Field(
        None, ge=2, description="most tokens of an answer; without it each task has its own"
    )
    seed: int = Field(0, ge=0, description="seed of the samples")
    concurrency: int = Field(8, ge=1, description="samples that are asked at once")
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
    groups: int | None = Field(
        None, ge=2, description="groups of layers, with --layers; the server's choice without it"
    )
    server_args: str = Field(
        "", description="more arguments of the servers with --layers, in one word (own server only)"
    )
    window: int = Field(32, ge=1, description="observation window of the server")
    block_size: int | None = Field(
        None, ge=1, description="block size of the server, where it does not publish it"
    )
    dtype: str = Field("bfloat16", description="precision of an own server and of kvpress")
    kv_memory: str = Field("1G", description="KV-cache memory of an own server")
    threads: int = Field(
        1, ge=1, description="CPU threads of an own server; processes of kvpress, one thread each"
    )
    output: Path = Field(Path("benchmarks/results/quality.json"), description="result file")
    resume: bool = Field(False, description="keep the answers that an earlier run left in --work")
    work: Path = Field(Path(".cache/quality"), description="folder of logs and raw answers")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Those of ``quick``, below what is given."""
        return (QUICK if given.get("quick") else {}) | given

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name, given, valid in (
            ("tasks", self.tasks, TASKS),
            ("policies", self.policies, POLICY_NAMES),
            ("layers-policies", self.layers_policies, COMPARABLE),
            ("scenarios", self.scenarios, SCENARIOS),
            ("presses", self.presses, (*PRESSES, KVZIP)),
        ):
            unknown = [value for value in given if value not in valid]
            # With --layers no other server is needed.
            alone = name == "policies" and self.layers and self.base_url is None
            if unknown or not (given or alone):
                raise ValueError(
                    f"--{name}: {', '.join(unknown) or 'nothing given'}; choose from "
                    f"{', '.join(valid)}"
                )
        for budget in self.budgets:
            EvictionConfig(policy="snapkv", budget=budget, window=self.window)
        if self.base_url is None and self.model is not None and not Path(self.model).is_dir():
            raise ValueError(f"--model: no folder {self.model}")
        return self

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Self:
        """Read the command line; ends the process with a message where it is wrong."""
        parser = argparse.ArgumentParser(
            prog="python -m benchmarks.quality",
            description="What each policy and budget costs in answers, through a vLLM server.",
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
