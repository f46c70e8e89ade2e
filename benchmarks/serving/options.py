"""What the sweep can be told."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from benchmarks.smollm2 import real_model
from vllm_kvevict.config.budget import parse_budget
from vllm_kvevict.config.plugins import policy_names

DATASETS = ("random", "shared-prefix", "timed-trace")


class Options(BaseModel):
    """Options of ``python -m benchmarks.serving``; a field ``x_y`` is the flag ``--x-y``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(
        None, description="folder of the model; without it SmolLM2-135M-Instruct, which is fetched"
    )
    policies: tuple[str, ...] = Field(
        ("ada-snapkv", "streaming-llm"), description="policies, comma-separated"
    )
    budgets: tuple[str, ...] = Field(
        ("12.5%", "25%"), description="tokens or shares of the prompt, comma-separated"
    )
    memory: tuple[int, ...] = Field(
        (2, 4, 8),
        description="KV memory in requests of full length that it holds without eviction",
    )
    datasets: tuple[str, ...] = Field(DATASETS, description="datasets, comma-separated")
    prompt: int = Field(1024, ge=128, description="tokens of a prompt, of the longest in the trace")
    output: int = Field(96, ge=8, description="tokens of an answer, of the longest in the trace")
    requests: int = Field(24, ge=4, description="requests of each load")
    concurrency: int = Field(16, ge=1, description="requests at once; the trace has its own times")
    rate: float = Field(4.0, gt=0, description="requests a second in the trace")
    block_size: int = Field(32, ge=32, description="tokens in a block")
    output_path: Path = Field(
        Path("benchmarks/results/serving.json"),
        description="JSON file; tables and plots are written beside it",
    )

    @field_validator("policies", "budgets", "memory", "datasets", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name, given, known in (
            ("--policies", self.policies, policy_names()),
            ("--datasets", self.datasets, DATASETS),
        ):
            wrong = [one for one in given if one not in known]
            if wrong:
                raise ValueError(f"{name}: unknown {wrong[0]!r}; choose from {', '.join(known)}")
        for budget in self.budgets:
            try:
                parse_budget(budget)
            except ValueError as error:
                raise ValueError(f"--budgets: {error}") from None
        if not self.memory or min(self.memory) < 1:
            raise ValueError("--memory: give numbers of full requests, 1 or more")
        return self

    @property
    def folder(self) -> Path:
        """Folder of the model to serve."""
        return Path(self.model or real_model())

    @classmethod
    def from_args(cls, args: Sequence[str] | None = None) -> Self:
        """Read a command line; a wrong value ends the program with one sentence."""
        parser = argparse.ArgumentParser(
            description="Drive `vllm bench serve` over policies, budgets and KV memory."
        )
        for name, field in cls.model_fields.items():
            default = field.default
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            text = f"{field.description} ({shown})".replace("%", "%%")
            parser.add_argument(
                f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=text,
                metavar=name.upper(),
            )  # fmt: skip
        given = vars(parser.parse_args(args))
        try:
            return cls(**given)
        except ValueError as error:
            first = error.errors()[0] if hasattr(error, "errors") else {}
            where = "".join(f"--{part} ".replace("_", "-") for part in first.get("loc", ())[:1])
            parser.error(where + first.get("msg", str(error)).removeprefix("Value error, "))
