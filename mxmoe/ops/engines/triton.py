"""Backend ``triton``: MXFP8 operands with plain scales into our ``tl.dot_scaled`` grouped GEMM.

sm_100, sm_120 and gfx950 multiply the fp8 values and apply the scales in hardware; on older GPUs the compiler expands
to bf16 inside the loop: the same numbers, slowly. Operands whose blocks do not run along the contraction (the backward
of a GEMM on already quantized weights) are expanded exactly and go through bf16, as ``dequant`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import shapes
from ...formats import BLOCK
from ...recipe import MXRecipe
from ...tensor import MXTensor, make
from .._impl import impl
from . import dequant

Operand = Tensor | MXTensor


def _rows(x: Tensor, q: Tensor, scale: Tensor) -> MXTensor:
    return make(q, scale, block="rowwise", layout="plain", shape=x.shape, orig_dtype=x.dtype)


def _cols(x: Tensor, q: Tensor, scale: Tensor, padded: Tensor, offs: Tensor | None) -> MXTensor:
    ends = {} if offs is None else {"offs": padded, "source_offs": offs, "k_groups": True}
    return make(q, scale, block="colwise", layout="plain", shape=x.shape, orig_dtype=x.dtype, **ends)  # type: ignore[arg-type]


def rows_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> MXTensor:
    """x quantized along K."""
    return _rows(x, *impl(x.device).quantize_rowwise(x, offs, False, elem_dtype, recipe.scale_mode))


def cols_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> MXTensor:
    """x quantized along the rows of each group, groups padded to 32 rows."""
    q, scale, padded = impl(x.device).quantize_colwise(x, offs, False, elem_dtype, recipe.scale_mode)
    return _cols(x, q, scale, padded, offs)


def both_operands(
    x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe
) -> tuple[MXTensor, MXTensor]:
    """``rows_operand`` and ``cols_operand`` from one read."""
    q_row, s_row, q_col, s_col, padded = impl(x.device).quantize_both(x, offs, False, elem_dtype, recipe.scale_mode)
    return _rows(x, q_row, s_row), _cols(x, q_col, s_col, padded, offs)


def square_scale_rows(scale: Tensor, rows: int) -> Tensor:
    """Scales of 32x32 tiles ``(G, ceil(N/32), K32)`` as scales of 1x32 blocks ``(G, N, K32)``."""
    return scale.repeat_interleave(BLOCK, -2)[..., :rows, :].contiguous()


def weight_operand(b: Tensor, recipe: MXRecipe) -> MXTensor:
    """b ``(G, N, K)`` quantized along K, K contiguous in the result however b is stored."""
    kernels = impl(b.device)
    transposed = shapes.is_transposed(b.stride())
    stored = b.mT if transposed else b
    if recipe.weight_block != (1, BLOCK):
        q, scale = kernels.quantize_square(stored, transposed, recipe.elem_dtype, recipe.scale_mode)
        q, scale = (q.mT, scale.mT) if transposed else (q, scale)
        return _rows(b, q, square_scale_rows(scale, b.shape[1]))
    if transposed:
        q, scale, _ = kernels.quantize_colwise(stored, None, False, recipe.elem_dtype, recipe.scale_mode)
        return _rows(b, q.mT, scale.mT)
    return _rows(b, *kernels.quantize_rowwise(b, None, False, recipe.elem_dtype, recipe.scale_mode))


def expand(t: MXTensor) -> MXTensor:
    """An MXTensor is what this backend multiplies."""
    return t


def values(t: Operand) -> Tensor:
    """bf16 values of an operand."""
    return dequant.expand(t) if isinstance(t, MXTensor) else t


def mm_m_groups(a: Operand, b: Operand, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, K)``, b ``(G, N, K)`` -> ``(M, N)``; rows of no group are zero."""
    if not (isinstance(a, MXTensor) and isinstance(b, MXTensor) and a.block == b.block == "rowwise"):
        return dequant.mm_m_groups(values(a), values(b), offs, bias, out_dtype)
    from ...kernels.mx_grouped_mm import mx_mm_m_groups

    out: Tensor = mx_mm_m_groups(a.qdata, a.scale_bytes, b.qdata, b.scale_bytes, offs, bias, out_dtype)
    return out


def mm_k_groups(a: Operand, b: Operand, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, N)``, b ``(M, K)`` -> ``(G, N, K)``; an empty group gives zeros."""
    if not (isinstance(a, MXTensor) and isinstance(b, MXTensor) and a.k_groups and b.k_groups):
        return dequant.mm_k_groups(values(a), values(b), offs, out_dtype)
    from ...kernels.mx_grouped_mm import mx_mm_k_groups

    assert a.offs is not None
    a_t, b_t = a.t(), b.t()
    out: Tensor = mx_mm_k_groups(a_t.qdata, a_t.scale_bytes, b_t.qdata, b_t.scale_bytes, a.offs, out_dtype)
    return out
