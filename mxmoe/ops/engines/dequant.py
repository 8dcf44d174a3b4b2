"""Backend ``dequant``: round to MXFP8 and expand exactly to bf16 in one pass, then a bf16 grouped GEMM.

e4m3 x 2**s fits bf16 (s in -124..119), so the GEMM sees exactly the values that MXFP8 tensor cores see and bf16 tensor
cores compute exactly their products. On a CPU, operands of fp32 tensors are expanded to fp32: the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import groups, shapes
from ...formats import BLOCK
from ...recipe import MXRecipe
from ...reference import grouped_mm as loop
from ...tensor import MXTensor
from .. import bf16_grouped_mm
from .._impl import impl
from ..quantize import plain_scale

_ALIGN = 16
"""Bytes that TMA and torch's grouped GEMM want every row stride to be a multiple of."""


def value_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.is_cuda or x.dtype == torch.bfloat16 else torch.float32


def _row_stride(x: Tensor) -> dict[str, int]:
    """On a GPU: rows of the result start at multiples of 16 bytes, whatever K is."""
    k = x.shape[-1]
    per_row = _ALIGN // 2
    return {"row_stride": shapes.round_up(k, per_row)} if x.is_cuda and k % per_row else {}


def values_like(x: Tensor) -> Tensor:
    """Uninitialized memory of the shape, strides and dtype that the values of x have."""
    stride = _row_stride(x).get("row_stride", x.shape[-1])
    return torch.empty_strided(x.shape, (stride, 1), dtype=value_dtype(x), device=x.device)


def _fake_quantize(x: Tensor, block: str, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> Tensor:
    dtype = value_dtype(x)
    return impl(x.device).fake_quantize(x, block, offs, elem_dtype, recipe.scale_mode, dtype, **_row_stride(x))


def rows_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> Tensor:
    """The values of x rounded along K."""
    return _fake_quantize(x, "rowwise", offs, elem_dtype, recipe)


def cols_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> Tensor:
    """The values of x rounded along the rows of each group."""
    return _fake_quantize(x, "colwise", offs, elem_dtype, recipe)


def both_operands(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> tuple[Tensor, Tensor]:
    """``rows_operand`` and ``cols_operand`` from one read."""
    row, col = impl(x.device).fake_quantize_both(
        x, offs, elem_dtype, recipe.scale_mode, value_dtype(x), **_row_stride(x)
    )
    return row, col


def weight_operand(b: Tensor, recipe: MXRecipe) -> Tensor:
    """The values of b ``(G, N, K)`` rounded along K, stored as b is: bf16 tensor cores read either order."""
    if shapes.is_transposed(b.stride()):
        block, stored = "colwise", b.mT
    else:
        block, stored = "rowwise", b
    if recipe.weight_block != (1, BLOCK):
        block = "square"
    values = _fake_quantize(stored, block, None, recipe.elem_dtype, recipe)
    return values.mT if stored is not b else values


def expand(t: MXTensor) -> Tensor:
    """The values of an MXTensor in its original row order, bf16."""
    if t.block == "colwise" and not t.k_groups:
        return expand(t.mT).mT  # read and write along the contiguous dim
    offs, source = (t.offs, t.source_offs) if t.k_groups else (None, None)
    return impl(t.device).dequantize(
        t.qdata, plain_scale(t), t.block, offs, source, t.shape[-2], torch.bfloat16, **_row_stride(t.qdata)
    )


def _aligned(t: Tensor) -> bool:
    """torch._grouped_mm takes t: one dim contiguous, the other with a stride of a multiple of 16 bytes."""
    rows, cols = t.stride()[-2:]
    step = cols if rows == 1 else rows
    return 1 in (rows, cols) and step * t.element_size() % _ALIGN == 0 and step >= t.shape[-1 if cols == 1 else -2]


def mm_m_groups(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, K)``, b ``(G, N, K)`` -> ``(M, N)``; rows of no group are zero."""
    if a.is_cuda:
        return bf16_grouped_mm.mm_m_groups(a, b, offs, bias, out_dtype)
    if out_dtype != torch.bfloat16 or bias is not None or a.dtype != b.dtype:
        a, b = a.float(), b.float()
    if not (_aligned(a) and _aligned(b) and a.numel() and b.numel()):
        return loop.mm_m_groups(a, b, offs, bias, out_dtype, compute=a.dtype)
    ends = groups.safe_ends(offs, a.shape[0])
    out = torch._grouped_mm(a, b.mT, offs=ends)
    if bias is not None:
        row_bias = torch.cat([bias.float(), bias.new_zeros(1, bias.shape[1], dtype=torch.float32)])
        out = out + row_bias[groups.group_of(ends, a.shape[0])]
    out = torch.where(torch.arange(a.shape[0])[:, None] < ends[-1], out, out.new_zeros(()))
    return out.to(out_dtype).contiguous()


def mm_k_groups(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, N)``, b ``(M, K)`` -> ``(G, N, K)``; an empty group gives zeros."""
    if a.is_cuda:
        return bf16_grouped_mm.mm_k_groups(a, b, offs, out_dtype)
    if out_dtype != torch.bfloat16 or a.dtype != b.dtype:
        a, b = a.float(), b.float()
    if not (_aligned(a) and _aligned(b) and a.numel() and b.numel()):
        return loop.mm_k_groups(a, b, offs, out_dtype, compute=a.dtype)
    ends = groups.safe_ends(offs, a.shape[0])
    return torch._grouped_mm(a.t(), b, offs=ends).to(out_dtype).contiguous()
