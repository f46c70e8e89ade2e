"""Run by test_upstream.py under a vLLM that has the patches of docs/upstream: what they add."""

import argparse

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import EngineArgsExtension, engine_args_extensions
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.worker.gpu_worker import Worker

BLOCK = 16
MODEL = "benchmarks/quality/model"
"""Any folder, so that nothing is looked up."""


def request(name: str) -> Request:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(max_tokens=4)
    return Request(name, list(range(100)), params, None, block_hasher=hasher)


def cache() -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(11, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config, max_model_len=256, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )


def bounds() -> None:
    manager, maker = cache(), request("maker")
    maker.max_published_tokens = 70
    assert manager.allocate_slots(maker, 100) is not None
    # Of six whole blocks four lie within the bound.
    assert manager.get_computed_blocks(request("all"))[1] == 64
    reader = request("reader")
    reader.max_cache_hit_tokens = 40
    assert manager.get_computed_blocks(reader)[1] == 32
    reader.prefill_stop = 48
    clips = [Scheduler._stop_prefill(reader, start, 32) for start in (0, 16, 32, 48)]
    assert clips == [32, 32, 16, 32]


def admission(extra: int) -> tuple[bool, list[int]]:
    admitted: list[int] = []

    def more(self, request, num_tokens, new_computed_blocks, full_sequence):
        return extra

    SingleTypeKVCacheManager.get_num_extra_blocks_to_admit = more
    SingleTypeKVCacheManager.on_admitted = lambda self, request, tokens: admitted.append(tokens)
    # Ten blocks beside the null block; the prompt takes seven.
    return cache().allocate_slots(request("new"), 100) is not None, admitted


def steps() -> None:
    class Extended(Worker):
        def __init__(self) -> None:
            self.model_runner = argparse.Namespace(sample_tokens=lambda grammar: [1])

        def after_step(self, output):
            return [*output, 2]

    assert Extended().sample_tokens(None) == [1, 2]
    assert Extended()._after_step(None) is None


def flags() -> None:
    class Flags(EngineArgsExtension):
        def add_cli_args(self, parser):
            parser.add_argument("--of-plugin", type=int)

        def from_cli_args(self, engine_args, args):
            engine_args.additional_config = {"of_plugin": args.of_plugin}

    engine_args_extensions.append(Flags())
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    read = EngineArgs.from_cli_args(parser.parse_args(["--model", MODEL, "--of-plugin", "3"]))
    assert read.additional_config == {"of_plugin": 3}


bounds()
assert admission(3) == (True, [100])
assert admission(4) == (False, [])
steps()
flags()
print("upstream: all four")
