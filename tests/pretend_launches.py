"""Kernels of a pretended device: they run nothing, and take no tensor of the host."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction
from vllm.v1.attention.backends import flash_attn, triton_attn

from tests.pretend_gpu import OnDevice


def stub_launches(monkeypatch: Any) -> list[str]:
    """Launch nothing.

    Returns:
        Names of the kernels, as they are launched.

    Raises:
        RuntimeError: At a launch: a tensor does not lie on the device.

    """
    names: list[str] = []

    def launch(name: str, *arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnDevice):
                raise RuntimeError(f"{name} of a tensor of the host")
        names.append(name)

    def triton(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launch(kernel.fn.__name__, args, kwargs)

    def xformers(op: Any, inputs: Any) -> torch.Tensor:
        bias = inputs.attn_bias
        launch(op.__name__, *map(vars, (inputs, bias, bias.q_seqinfo, bias.k_seqinfo)))
        return torch.zeros_like(inputs.query)

    def flash(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        launch("flash_attn", kwargs)
        query = kwargs["q"]
        return kwargs["out"], torch.zeros(query.shape[1], len(query), device=query.device)

    monkeypatch.setattr(JITFunction, "run", triton)
    monkeypatch.setattr("vllm_kvevict.attention.xformers.attend._run", xformers)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda: 3, raising=False)
    monkeypatch.setattr(
        triton_attn, "unified_attention", lambda **kwargs: launch("unified_attention", kwargs),
        raising=False,
    )  # fmt: skip
    return names
