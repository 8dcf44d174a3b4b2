"""The functions of F2 for a device: plain PyTorch on a CPU, Triton on CUDA. Same names, same signatures, same bytes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

_STEMS = ("quantize_rowwise", "quantize_colwise", "quantize_both", "quantize_square", "dequantize")


@functools.cache
def cpu() -> SimpleNamespace:
    from ..reference import blocked, grouped_mm, quantize

    more = ("quantize_square_both", "fake_quantize", "fake_quantize_both")
    found = {name: getattr(quantize, name) for name in (*_STEMS, *more)}
    found |= {
        name: getattr(blocked, name) for name in ("to_blocked_k_groups", "to_blocked_m_groups", "to_blocked_experts")
    }
    return SimpleNamespace(**found, group_sum=grouped_mm.group_sum)


@functools.cache
def cuda() -> SimpleNamespace:
    import importlib

    def kernel(stem: str, name: str) -> object:
        return getattr(importlib.import_module(f"..kernels.{stem}", __package__), name)

    found = {name: kernel(name, name) for name in _STEMS}
    found |= {name: kernel("fake_quantize", name) for name in ("fake_quantize", "fake_quantize_both")}
    found |= {
        name: kernel("blocked", name) for name in ("to_blocked_k_groups", "to_blocked_m_groups", "to_blocked_experts")
    }
    found["quantize_square_both"] = kernel("quantize_square", "quantize_square_both")
    return SimpleNamespace(**found, group_sum=kernel("group_sum", "group_sum"))


def impl(device: torch.device) -> SimpleNamespace:
    """The implementations that run on ``device``."""
    match device.type:
        case "cpu":
            return cpu()
        case "cuda":
            return cuda()
        case other:
            raise NotImplementedError(f"mxmoe runs on cpu and cuda tensors, got a tensor on {other}")


def register_cuda(op: Any) -> None:
    """Register the Triton launcher of the same name as the CUDA kernel of a custom op."""
    name = (
        op._name.removeprefix("mxmoe::")
        if hasattr(op, "_name")
        else op._opoverload._schema.name.removeprefix("mxmoe::")
    )

    def launch(*args: Any) -> Any:
        return getattr(cuda(), name)(*args)

    op.register_kernel("cuda")(launch)
