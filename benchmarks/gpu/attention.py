"""Part 1: decode attention with uneven heads, against FlashAttention with equal lengths.

``python -m benchmarks.gpu.attention --help``. On a CPU (``--device cpu``, tiny sizes, under
TRITON_INTERPRET=1) it tries the script; FlashAttention is left out there.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import copy_bandwidth, milliseconds, spread
from benchmarks.gpu.heads import Step
from benchmarks.gpu.part import Part
from vllm_kvevict.attention.evicting import head_pages
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.attention.sequences import Extend
from vllm_kvevict.attention.xformers_ops import GATHERED

RESULTS = Path("benchmarks/results/gpu")
GRAPH_SPLITS = 32
"""vLLM's default of ``flash_attn_max_num_splits_for_cuda_graph``."""


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def flash(step: Step, per_head: bool) -> Any:
    """A call of vLLM's FlashAttention on the step: one sequence per head, or stock."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    heads = step.shape.num_heads
    # As in a server's graphs, which are captured for its longest request and bound the splits.
    version, longest = get_flash_attn_version(), step.shape.max_model_len
    common = dict(
        max_seqlen_q=1, softmax_scale=step.scale, causal=True, window_size=[-1, -1],
        fa_version=version, num_splits=GRAPH_SPLITS if version == 3 else 0,
        max_seqlen_k=longest,
    )  # fmt: skip
    if per_head:
        sequences = step.requests * heads
        size = step.shape.head_size
        common |= dict(
            q=step.query.view(sequences, -1, size), out=step.out.view(sequences, -1, size),
            cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32, device=step.device),
            seqused_k=step.lengths[0],
        )  # fmt: skip
        common |= dict(zip("kv", head_pages(step.cache), strict=True))
        return lambda: flash_attn_varlen_func(block_table=step.write_table(), **common)
    length = step.budget + step.tail
    keys, values = step.cache.transpose(1, 2).split(step.shape.head_size, dim=-1)
    common |= dict(
        q=step.query, out=step.out, k=keys, v=values, block_table=step.equal_table,
        cu_seqlens_q=torch.arange(step.requests + 1, dtype=torch.int32, device=step.device),
        seqused_k=torch.full_like(step.seq_lens, length),
    )  # fmt: skip
    return lambda: flash_attn_varlen_func(**common)


def memory_efficient(step: Step, paged: bool) -> Any:
    """A call of xformers' attention on the step, on its pages or over gathered ones."""
    from vllm_kvevict.attention.parts import cut
    from vllm_kvevict.attention.xformers import attend

    scratch = Scratch("xformers", step.shape, step.device)
    scratch.paged = paged
    sequences, size = step.requests * step.shape.num_heads, step.shape.head_size
    table = scratch.pages(sequences, int(step.lengths.max()))
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=step.device)
    plan = Extend(
        rows=step.rows, places=step.rows, order=starts, block_table=step.block_table,
        lengths=step.lengths, query_start_loc=starts, table=table, max_query_len=1,
        max_seq_len=step.shape.max_model_len,
        parts=cut(starts.tolist(), starts, scratch.gathered(table.shape[1])),
    )  # fmt: skip
    query, out = step.query.view(sequences, -1, size), step.out.view(sequences, -1, size)

    def run() -> None:
        step.write_table(table)
        attend(query, step.cache, out, plan, step.lengths[0], step.scale, scratch)

    return run


def measure(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    bandwidth = copy_bandwidth(device, args.copy_bytes)
    part = Part("attention", args, device, copy_bytes_per_s=bandwidth)
    for requests in args.batches:
        for budget in args.budgets:
            if part.has(requests=requests, budget=budget):
                continue
            longest = max(args.max_model_len, 8 * budget + args.tail)
            shape = Shape(
                args.heads, args.group, args.head_size, args.block_size, requests, longest
            )
            step = Step(
                requests, budget, args.tail, shape, dtype, device, layers=args.layers
            )  # fmt: skip
            step.measure()
            step.plan()
            runs: dict[str, Any] = {
                "triton": step.run_triton,
                "lengths, all layers of a step": step.measure,
                "plan of work, all layers of a step": step.plan,
            }
            if device.type == "cuda":
                runs["flash per head"] = flash(step, True)
                runs["flash, equal lengths"] = flash(step, False)
                served = torch.cuda.get_device_capability(device) <= GATHERED[1]
                if served and importlib.util.find_spec("xformers"):
                    runs["xformers on pages"] = memory_efficient(step, True)
                    runs["xformers, gathered"] = memory_efficient(step, False)
            row: dict[str, Any] = {
                "requests": requests,
                "budget": budget,
                "bytes": step.num_bytes,
                "floor_ms": step.num_bytes / bandwidth * 1000,
            }
            for name, run in runs.items():
                row[name] = spread(milliseconds(run, device, args.repeats))
            part.add(row)
            del step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--budgets", type=numbers, default=[512, 1024, 4096])
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--tail", type=int, default=96, help="tokens behind the tail start")
    parser.add_argument("--layers", type=int, default=32, help="planned together, one timed")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--copy-bytes", type=int, default=4 * 2**30)
    parser.add_argument("--output", type=Path, default=RESULTS / "attention.json")
    args = parser.parse_args()
    measure(args)
    print(args.output)


if __name__ == "__main__":
    main()
