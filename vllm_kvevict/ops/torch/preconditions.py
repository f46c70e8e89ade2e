"""Preconditions on data: checked on the host for CPU tensors, asserted on the device for others."""

from collections.abc import Callable

import torch


def require(condition: torch.Tensor, message: Callable[[], str]) -> None:
    """Require that every element of a condition is True.

    On a device the host does not wait for the result. A failed assertion there ends the process,
    as in the CUDA kernels.

    Args:
        condition: [...] bool.
        message: Returns the reason; called only if it is raised.

    Raises:
        ValueError: An element of a condition on the CPU is False.

    """
    if condition.is_cpu:
        if not bool(condition.all()):
            raise ValueError(message())
    else:
        torch._assert_async(condition.all(), "KV eviction: a precondition on the device failed")
