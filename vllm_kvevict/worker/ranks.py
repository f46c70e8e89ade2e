"""Sums and means over the tensor-parallel ranks of a layer, and the heads that each rank owns.

Each rank shares out the pages of its own KV heads. Block counts are equal on all ranks, but an
adaptive split cannot move budget between ranks.
"""

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)


def sum_of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tensor-parallel ranks; every rank must call it and gets the sum."""
    size = get_tensor_model_parallel_world_size()
    return tensor if size == 1 else tensor_model_parallel_all_reduce(tensor)


def mean_of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the average over the tensor-parallel ranks; every rank must call it."""
    return sum_of_ranks(tensor) / get_tensor_model_parallel_world_size()


def of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all tensor-parallel ranks, [ranks, ...]; every rank must call it."""
    size = get_tensor_model_parallel_world_size()
    return tensor[None] if size == 1 else tensor_model_parallel_all_gather(tensor[None], dim=0)


def on_all_ranks(conditions: list[bool]) -> list[bool]:
    """Return which conditions hold on every tensor-parallel rank; every rank must call it.

    The result is exchanged on the host, so the device is not waited for.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return conditions
    held = torch.tensor(conditions, dtype=torch.int32)
    group = get_tp_group().cpu_group
    torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MIN, group=group)
    return [bool(value) for value in held]


def union_of_ranks(values: set[int]) -> set[int]:
    """Return what any tensor-parallel rank has; every rank must call it.

    The result is exchanged on the host, so the device is not waited for.
    """
    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return values
    found: list[set[int]] = [set()] * size
    torch.distributed.all_gather_object(found, values, group=get_tp_group().cpu_group)
    return set().union(*found)


def first_head(num_heads: int) -> int:
    """Return the index of this rank's first KV head in its layer, for ``num_heads`` heads per rank.

    If ranks share a KV head, its copies count as separate heads, because each rank evicts by its
    own query heads.
    """
    return get_tensor_model_parallel_rank() * num_heads
