"""Run the grid: one server for each setting and KV memory, every dataset on it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.load import Load, measure
from benchmarks.server import Server
from benchmarks.serving.datasets import Dataset, Random, SharedPrefix, Trace
from benchmarks.serving.options import Options

FOLDER = Path(".cache") / "serving"


@dataclass(frozen=True)
class Setting:
    """One way to serve; no policy is stock vLLM."""

    policy: str | None = None
    budget: str | None = None

    @property
    def label(self) -> str:
        return f"{self.policy} {self.budget}" if self.policy else "stock vLLM"

    def args(self) -> list[str]:
        if self.policy is None:
            return []
        return ["--kv-eviction", self.policy, "--kv-eviction-budget", str(self.budget)]


@dataclass(frozen=True)
class Row:
    """One load on one server. Times in ms, memory in bytes."""

    setting: str
    memory: int
    kv_bytes: int
    dataset: str
    measured: dict[str, float]


def settings(options: Options) -> list[Setting]:
    """Stock vLLM first, then every policy with every budget."""
    pairs = [Setting(policy, budget) for policy in options.policies for budget in options.budgets]
    return [Setting(), *pairs]


def datasets(options: Options) -> list[Dataset]:
    """The chosen ones; the trace is written."""
    shape = (options.prompt, options.output, options.requests)
    trace = Trace(*shape, options.rate, FOLDER / "trace.jsonl")
    trace.write()
    every: list[Dataset] = [
        Random(*shape, options.concurrency), SharedPrefix(*shape, options.concurrency), trace
    ]  # fmt: skip
    return [dataset for dataset in every if dataset.name in options.datasets]


def block_bytes(model: Path, block_size: int) -> int:
    """Bytes of one block of a float32 cache, all layers."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * heads * block_size * 2 * size * 4)


def kv_bytes(options: Options, memory: int) -> int:
    """Bytes that hold ``memory`` full requests, and vLLM's null block."""
    blocks = memory * -(-(options.prompt + options.output) // options.block_size) + 1
    return blocks * block_bytes(options.folder, options.block_size)


def server_args(options: Options, memory: int) -> list[str]:
    longest = options.prompt + options.output + options.block_size
    return [
        "--dtype", "float32", "--enforce-eager", "--enable-prefix-caching", "--seed", "0",
        "--block-size", str(options.block_size), "--max-num-seqs", "64",
        "--max-model-len", str(-(-longest // options.block_size) * options.block_size),
        "--max-num-batched-tokens", "1024", "--kv-cache-memory-bytes",
        str(kv_bytes(options, memory)),
    ]  # fmt: skip


def run(options: Options) -> list[Row]:
    """Measure the grid.

    Raises:
        RuntimeError: A request failed, stock vLLM evicted, or a setting with eviction did not.

    """
    rows, loads = [], datasets(options)
    grid = [(memory, setting) for memory in options.memory for setting in settings(options)]
    with tqdm(total=len(grid) * len(loads)) as bar:
        for memory, setting in grid:
            name = f"{setting.label} {memory}".replace(" ", "-").replace("%", "")
            bar.set_description(f"{setting.label}, memory for {memory}: starting")
            args = server_args(options, memory) + setting.args()
            model = options.folder
            with Server(model, args, FOLDER / f"{name}.log") as server:
                # The first requests of a server pay for warm-up.
                measure(server, model, Load(64, 8, 4, 4, seed=99))
                for load in loads:
                    bar.set_description(f"{setting.label}, memory for {memory}, {load.name}")
                    rows.append(_row(server, options, setting, memory, load))
                    bar.update()
    return rows


def _row(
    server: Server, options: Options, setting: Setting, memory: int, load: Dataset
) -> Row:  # fmt: skip
    before = server.evictions()
    measured = measure(server, options.folder, load)
    counted = {key: value - before.get(key, 0) for key, value in server.evictions().items()}
    row = Row(
        setting.label, memory, kv_bytes(options, memory), load.name, measured | counted
    )  # fmt: skip
    if measured["failed"] or measured["completed"] != options.requests:
        raise RuntimeError(f"requests failed: {asdict(row)}")
    if bool(counted["evictions"]) != (setting.policy is not None):
        raise RuntimeError(f"{counted['evictions']} evictions: {asdict(row)}")
    return row
