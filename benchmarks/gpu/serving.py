"""Part 3: serving Llama-3.1-8B's shapes with dummy weights, stock against eviction.

``python -m benchmarks.gpu.serving --help``. Each setting is a server of its own under
``vllm bench serve``; stock and evicting servers get the same KV memory, prefix caching, async
scheduling and graphs. ``--tiny`` replaces the model by a small one, to try the script on a CPU.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import RESULTS, numbers
from benchmarks.gpu.part import Part
from benchmarks.load import Load, measure
from benchmarks.server import Server

LLAMA_8B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    dtype="bfloat16",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
)
TINY = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=4096,
)  # fmt: skip


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """A configuration, and a tokenizer in which every id is a word of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)
    return folder


def loads(text: str) -> list[tuple[int, int, int, int]]:
    """``input/output/requests that stock holds/requests in all``, comma-separated."""
    return [tuple(int(part) for part in item.split("/")) for item in text.split(",")]  # type: ignore[misc]


def token_bytes(config: dict[str, Any], itemsize: int) -> int:
    """Bytes of keys and values of one token."""
    heads = config["num_key_value_heads"] * config["head_dim"]
    return config["num_hidden_layers"] * heads * 2 * itemsize


def run(
    model: Path, args: argparse.Namespace, memory: int | None, longest: int, load: Load,
    eviction: list[str], log: str,
) -> dict[str, Any]:  # fmt: skip
    """One server and one load; an evicting server must have evicted where it should."""
    block = -(-longest // args.block_size) * args.block_size
    options = ["--load-format", "dummy", "--max-model-len", str(block), "--block-size"]
    options += [str(args.block_size), "--max-num-seqs", str(args.max_num_seqs)]
    if memory is not None:
        options += ["--kv-cache-memory-bytes", str(memory)]
    server = Server(
        model, [*options, *eviction, *args.serve_args.split()],
        args.output.parent / f"{log}.log", timeout_s=900,
    )  # fmt: skip
    with server:
        figures: dict[str, Any] = dict(measure(server, model, load))
        figures["evictions"] = server.metric("vllm_kvevict:evictions_total") if eviction else 0
    return figures


def sweep(args: argparse.Namespace) -> None:
    config = LLAMA_8B | (TINY if args.tiny else {})
    model = make_model(args.output.parent / "model", config)
    on_cpu = not torch.cuda.is_available()
    per_token = token_bytes(config, 2)
    part = Part("serving", args, torch.device("cpu" if on_cpu else "cuda"))

    def enter(load: Load, memory: int | None, eviction: list[str], **case: Any) -> None:
        if part.has(**case):
            return
        longest = load.input_len + load.output_len + 64
        log = "-".join(str(value).replace(" ", "-") for value in case.values())
        figures = run(model, args, memory, longest, load, eviction, log)
        if case["case"] == "memory-bound" and eviction and not figures["evictions"]:
            raise RuntimeError(f"nothing was evicted in {case} with {eviction}")
        part.add(case | {"kv_bytes": memory} | figures)

    for prompt in args.prefills:
        load = Load(prompt, 1, 5, 1)
        enter(load, args.free_memory, [], case="prefill", input=prompt, setting="stock")
    policy = ["--kv-eviction", args.policy, "--kv-eviction-budget"]
    for prompt, output, held, total in args.loads:
        settings: dict[str, list[str]] = {"stock": []}
        settings |= {f"{100 / share:g}x": [*policy, f"{share:g}%"] for share in args.shares}
        for name, eviction in settings.items():
            load = Load(prompt, output, total, total)
            memory = held * (prompt + output) * per_token
            case = dict(case="memory-bound", input=prompt, output=output, setting=name)
            enter(load, memory, eviction, **case)
    # Room for all, and a budget that no prompt reaches: what the plugin itself costs.
    prompt, output = args.loads[0][:2]
    nothing = [*policy, str(2 * (prompt + output))]
    for name, eviction in {"stock": [], "nothing to evict": nothing}.items():
        load = Load(prompt, output, args.few, args.few)
        case = dict(case="not memory-bound", input=prompt, output=output, setting=name)
        enter(load, args.free_memory, eviction, **case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--loads", type=loads, default=loads("6000/500/16/128,32000/4000/8/32"))
    parser.add_argument("--shares", type=lambda t: [float(x) for x in t.split(",")],
                        default=[12.5], help="budgets in % of the prompt")  # fmt: skip
    parser.add_argument("--prefills", type=numbers, default=[32768])
    parser.add_argument("--few", type=int, default=16, help="requests where memory is no limit")
    parser.add_argument("--policy", default="ada-snapkv")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--free-memory", type=int, default=None, help="bytes; vLLM's choice")
    parser.add_argument("--serve-args", default="", help="further arguments of vllm serve")
    parser.add_argument("--output", type=Path, default=RESULTS / "serving.json")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    sweep(args)
    print(args.output)


if __name__ == "__main__":
    main()
