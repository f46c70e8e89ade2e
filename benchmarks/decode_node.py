"""A decode server under load: stock vLLM against eviction, in one run.

    python -m benchmarks.decode_node [--memory 2,4,8,all] [--budget 12.5%] [--also CHECKOUT]

Prompts are not computed: vLLM's ``DecodeBenchConnector`` fills their KV with random numbers, as if
a prefill server had sent it. Each memory size has a pair of servers that differ in
``--kv-eviction`` alone, and ``vllm bench serve`` sends the same requests to both. Memory is given
in whole requests (prompt and answer) that it holds without eviction, ``all`` for all requests at
once, or in bytes such as ``84M``. The answers are meaningless; only times are measured.
With ``--also`` the same run measures the evicting server of another checkout of this repository.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.load import Load, measure
from benchmarks.provenance import provenance, sentence
from benchmarks.server import Server

FOLDER = Path(".cache") / "decode_node"
ALL = "all"
CONNECTOR = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    # Constant keys would tie every score.
    "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0},
}
COLUMNS = (
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
    ("sequences at once", "peak_running", "{:.0f}"),
    ("TPOT p50", "tpot_ms_median", "{:.1f}"),
    ("TPOT p99", "tpot_ms_p99", "{:.1f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("evictions", "evictions", "{:.0f}"),
)
STOCK, EVICTION = "stock vLLM", "eviction"


def block_bytes(model: Path, block_size: int, item_bytes: int = 2) -> int:
    """Return the bytes of one block of all layers."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * heads * block_size * 2 * size * item_bytes)


def kv_bytes(args: argparse.Namespace, model: Path, memory: str) -> int:
    """Return the bytes of KV cache for one value of ``--memory``.

    Raises:
        ValueError: The value is neither a number of requests, ``all``, nor bytes with M.

    """
    if memory.endswith("M") and memory[:-1].isdigit():
        return int(memory[:-1]) * 10**6
    if memory != ALL and not (memory.isdigit() and int(memory)):
        raise ValueError(
            f"--memory: give whole requests, {ALL}, or bytes such as 84M, not {memory!r}"
        )
    requests = args.requests if memory == ALL else int(memory)
    # Sampling the last token takes no slot, and vLLM keeps one block for itself.
    blocks = requests * -(-(args.prompt + args.output) // args.block_size) + 1
    return blocks * block_bytes(model, args.block_size, 4 if args.dtype == "float32" else 2)


def engine_args(args: argparse.Namespace, num_bytes: int) -> list[str]:
    """Return the arguments of ``vllm serve`` that set the sizes of a server.

    Args:
        args: ``prompt``, ``output`` and ``block_size`` in tokens, ``requests``, ``dtype``,
            ``eager``.
        num_bytes: Bytes of the KV cache.

    """
    longest = (-(-(args.prompt + args.output) // args.block_size) + 1) * args.block_size
    flags = [
        "--dtype", args.dtype, "--block-size", str(args.block_size), "--seed", "0",
        "--max-model-len", str(longest), "--max-num-batched-tokens", str(max(2048, longest)),
        "--max-num-seqs", str(max(args.requests, 2)), "--kv-cache-memory-bytes", str(num_bytes),
    ]  # fmt: skip
    return [*flags, "--enforce-eager"] if args.eager else flags


def server_args(args: argparse.Namespace, num_bytes: int, evicts: bool) -> list[str]:
    """Return the arguments of ``vllm serve``, equal in both servers of a pair but for eviction."""
    flags = [*engine_args(args, num_bytes), "--kv-transfer-config", json.dumps(CONNECTOR)]
    if evicts:
        flags += ["--kv-eviction", args.policy, "--kv-eviction-budget", args.budget]
        if args.groups is not None:
            flags += ["--kv-eviction-options.groups", str(args.groups)]
    return flags


def checkout_env(checkout: Path) -> dict[str, str]:
    """Return the environment in which a server imports the plugin of another checkout.

    Raises:
        ValueError: The folder holds no checkout of this repository.

    """
    # Without the safe path Python takes the plugin of the current folder.
    env = {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import vllm_kvevict; print(vllm_kvevict.__file__)"],
        env=dict(os.environ) | env, capture_output=True, text=True,
    )  # fmt: skip
    if not Path(found.stdout.strip()).is_relative_to(checkout.resolve()):
        raise ValueError(f"--also: {checkout} is no checkout of this repository")
    return env


def settings(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the servers of each memory size: name, and what their environment has in addition."""
    found: dict[str, dict[str, str]] = {STOCK: {}, EVICTION: {}}
    if args.also is not None:
        env = checkout_env(args.also)
        command = ["git", "-C", str(args.also), "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        found[f"{EVICTION}, commit {commit}"] = env
    return found


def run(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """Measure the servers of each memory size ``--repeats`` times, alternating.

    Raises:
        RuntimeError: A request failed, or a server with eviction did not evict.

    """
    load = Load(args.prompt, args.output, args.requests, args.requests)
    rows = []
    servers = settings(args)
    with tqdm(total=len(servers) * len(args.memory) * args.repeats) as bar:
        for memory in args.memory:
            num_bytes = kv_bytes(args, model, memory)
            for repeat in range(args.repeats):
                for number, (setting, env) in enumerate(servers.items()):
                    bar.set_description(f"{setting}, memory {memory}")
                    log = FOLDER / f"{number}-{memory}-{repeat}.log"
                    flags = server_args(args, num_bytes, setting != STOCK)
                    with Server(model, flags, log, timeout_s=1800, env=env) as server:
                        # The first requests of a server pay for warm-up.
                        measure(server, model, Load(min(64, args.prompt), 8, 4, 4, seed=99))
                        before = server.evictions()["evictions"]
                        row = measure(server, model, load)
                        row["evictions"] = server.evictions()["evictions"] - before
                    bar.update()
                    rows.append(
                        dict(setting=setting, memory=memory, kv_bytes=num_bytes, measured=row)
                    )
                    if row["failed"] or row["completed"] != args.requests:
                        raise RuntimeError(f"requests failed: {rows[-1]}; see {log}")
                    if bool(row["evictions"]) != (setting != STOCK):
                        raise RuntimeError(f"{row['evictions']} evictions: {rows[-1]}; see {log}")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    out = [
        "| memory | MB | setting | " + " | ".join(title for title, *_ in COLUMNS) + " |",
        "| ---: | ---: | --- |" + " ---: |" * len(COLUMNS),
    ]
    for row in rows:
        cells = [form.format(row["measured"][key]) for _, key, form in COLUMNS]
        mb = f"{row['kv_bytes'] / 1e6:.0f}"
        out.append(f"| {row['memory']} | {mb} | {row['setting']} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def ratios(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the output tokens/s of each server with eviction relative to stock vLLM, by memory.

    The servers follow in the order in which they were measured.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        rate = row["measured"]["output_tokens_per_s"]
        if row["setting"] == STOCK:
            stock = rate
        else:
            found.setdefault(row["memory"], []).append(round(rate / stock, 3))
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--memory", default="2,4,8,all", help="comma-separated (2,4,8,all)")
    for name, default in dict(
        prompt=1500, output=128, requests=24, block_size=32, repeats=1
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--budget", default="12.5%")
    parser.add_argument("--groups", type=int, help="1: one budget for all layers")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument(
        "--also", type=Path, metavar="CHECKOUT",
        help="another checkout of this repository; its evicting server is measured, too",
    )  # fmt: skip
    parser.add_argument(
        "--output-path", type=Path, default=Path("benchmarks/results/decode_node.json")
    )
    args = parser.parse_args(argv)
    args.memory = [part.strip() for part in args.memory.split(",") if part.strip()]
    return args


def main() -> None:
    from benchmarks.smollm2 import real_model

    args = parse()
    model = args.model or real_model()
    for memory in args.memory:
        kv_bytes(args, model, memory)
    rows = run(args, model)
    options = {key: str(value) for key, value in vars(args).items()}
    result = provenance() | dict(options=options, ratios=ratios(rows), rows=rows)
    args.output_path.parent.mkdir(parents=True, exist_ok=True)
    args.output_path.write_text(json.dumps(result, indent=1) + "\n")
    text = table(rows) + f"\n\nOutput tokens/s, eviction to stock vLLM: {ratios(rows)}\n"
    args.output_path.with_suffix(".md").write_text(
        f"# A decode server under load\n\n{sentence(result)} Times in ms.\n\n{text}"
    )
    print(text)


if __name__ == "__main__":
    main()
