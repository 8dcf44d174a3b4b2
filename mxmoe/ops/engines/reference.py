"""Backend ``reference``: the specification. Plain PyTorch quantization, fp32 products, a loop over groups; any device.

Sync: copies offs to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...recipe import MXRecipe
from ...reference import grouped_mm, quantize
from ...tensor import MXTensor
from ..quantize import plain_scale


def rows_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> Tensor:
    """The values of x rounded along K, fp32."""
    return quantize.fake_quantize(x, "rowwise", offs, elem_dtype, recipe.scale_mode, torch.float32)


def cols_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> Tensor:
    """The values of x rounded along the rows of each group, fp32."""
    return quantize.fake_quantize(x, "colwise", offs, elem_dtype, recipe.scale_mode, torch.float32)


def both_operands(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> tuple[Tensor, Tensor]:
    """``rows_operand`` and ``cols_operand``."""
    return rows_operand(x, offs, elem_dtype, recipe), cols_operand(x, offs, elem_dtype, recipe)


def weight_operand(b: Tensor, recipe: MXRecipe) -> Tensor:
    """The values of b ``(G, N, K)`` rounded along K (or in 32x32 tiles), fp32."""
    block = "square" if recipe.weight_block != (1, 32) else "rowwise"
    return quantize.fake_quantize(b, block, None, recipe.elem_dtype, recipe.scale_mode, torch.float32)


def expand(t: MXTensor) -> Tensor:
    """The values of an MXTensor in its original row order, fp32."""
    offs, source = (t.offs, t.source_offs) if t.k_groups else (None, None)
    return quantize.dequantize(t.qdata, plain_scale(t), t.block, offs, source, t.shape[-2], torch.float32)


def mm_m_groups(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, K)``, b ``(G, N, K)`` -> ``(M, N)``."""
    return grouped_mm.mm_m_groups(a, b, offs, bias, out_dtype)


def mm_k_groups(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, N)``, b ``(M, K)`` -> ``(G, N, K)``."""
    return grouped_mm.mm_k_groups(a, b, offs, out_dtype)
