"""Backend ``native``: ``torch._scaled_grouped_mm`` on the MXFP8 tensor cores of sm_100.

The quantizers write what the op reads: column-major values where the contraction must be contiguous, scales in the
128x4 blocked layout. What the op leaves unwritten is zeroed on the device: rows of no group, slices of empty groups.

    GEMM    a                          b                              offs           result
    fprop   (M, K) rowwise             (G, K, N) view of (G, N, K)    row ends       (M, N)
    dgrad   (M, N) rowwise             (G, N, K) column-major         row ends       (M, K)
    wgrad   (N, Mp) view of colwise    (Mp, K) colwise                padded ends    (G, N, K)

The op accumulates in fp32 and rounds to bf16, nothing else: other output types are converted from that, a bias is added
in fp32 afterwards and rounded once more. On other devices the call would launch and kill the CUDA context instead of
raising, so it is guarded here once more. Source: ``docs/layouts.md``, the contract line by line.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import device as devices
from ... import groups, shapes
from ...formats import BLOCK, SCALE_DTYPE
from ...recipe import MXRecipe
from ...tensor import MXTensor, make
from .._impl import impl
from . import dequant
from .triton import square_scale_rows, values

Operand = Tensor | MXTensor
_ALIGN = 16
_E4M3 = torch.float8_e4m3fn


# --- operands --------------------------------------------------------------------------------------------------------
def _rows(x: Tensor, q: Tensor, scale: Tensor) -> MXTensor:
    return make(q, scale, block="rowwise", layout="blocked", shape=x.shape, orig_dtype=x.dtype)


def _cols(x: Tensor, q: Tensor, scale: Tensor, padded: Tensor, offs: Tensor | None) -> MXTensor:
    ends = {} if offs is None else {"offs": padded, "source_offs": offs, "k_groups": True}
    return make(q, scale, block="colwise", layout="blocked", shape=x.shape, orig_dtype=x.dtype, **ends)  # type: ignore[arg-type]


def rows_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> MXTensor:
    """x quantized along K, scales in the M-group layout."""
    return _rows(x, *impl(x.device).quantize_rowwise(x, offs, True, elem_dtype, recipe.scale_mode))


def cols_operand(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe) -> MXTensor:
    """x quantized along the rows of each group, column-major, scales in the K-group layout."""
    q, scale, padded = impl(x.device).quantize_colwise(x, offs, True, elem_dtype, recipe.scale_mode)
    return _cols(x, q, scale, padded, offs)


def both_operands(
    x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, recipe: MXRecipe
) -> tuple[MXTensor, MXTensor]:
    """``rows_operand`` and ``cols_operand`` from one read."""
    q_row, s_row, q_col, s_col, padded = impl(x.device).quantize_both(x, offs, True, elem_dtype, recipe.scale_mode)
    return _rows(x, q_row, s_row), _cols(x, q_col, s_col, padded, offs)


def weight_operand(b: Tensor, recipe: MXRecipe) -> MXTensor:
    """b ``(G, N, K)`` quantized along K, K contiguous in the result however b is stored; expert layout of scales."""
    kernels = impl(b.device)
    transposed = shapes.is_transposed(b.stride())
    stored = b.mT if transposed else b
    if recipe.weight_block != (1, BLOCK):
        q, scale = kernels.quantize_square(stored, transposed, recipe.elem_dtype, recipe.scale_mode)
        q, scale = (q.mT, scale.mT) if transposed else (q, scale)
        return _rows(b, q, kernels.to_blocked_experts(square_scale_rows(scale, b.shape[1])))
    if transposed:
        q, scale, _ = kernels.quantize_colwise(stored, None, True, recipe.elem_dtype, recipe.scale_mode)
        return _rows(b, q.mT, scale)  # a blocked scale belongs to the contraction: the same bytes for either view
    return _rows(b, *kernels.quantize_rowwise(b, None, True, recipe.elem_dtype, recipe.scale_mode))


def weight_operands(b: Tensor, recipe: MXRecipe) -> tuple[MXTensor, MXTensor]:
    """``weight_operand`` of b and of b.mT, for fprop and dgrad: 1x32 from one read, 32x32 in two launches."""
    kernels = impl(b.device)
    transposed = shapes.is_transposed(b.stride())
    stored = b.mT if transposed else b
    if recipe.weight_block != (1, BLOCK):
        q, q_col, scale = kernels.quantize_square_both(stored, recipe.elem_dtype, recipe.scale_mode)
        s_row = kernels.to_blocked_experts(square_scale_rows(scale, stored.shape[1]))
        s_col = kernels.to_blocked_experts(square_scale_rows(scale.mT, stored.shape[2]))
    else:
        q, s_row, q_col, s_col, _ = kernels.quantize_both(stored, None, True, recipe.elem_dtype, recipe.scale_mode)
    along, across = _rows(stored, q, s_row), _rows(stored.mT, q_col.mT, s_col)
    return (across, along) if transposed else (along, across)


def expand(t: MXTensor) -> MXTensor:
    """An MXTensor is what this backend multiplies; a plain scale is laid out when the groups are known."""
    return t


# --- the op and its contract -----------------------------------------------------------------------------------------
def _refuse(what: str, value: object, cure: str) -> None:
    raise ValueError(f"native MXFP8 GEMM: {what}, got {value}: {cure}")


def _check(a: Tensor, b: Tensor, sizes: dict[str, int]) -> None:
    """What the op does not check itself (or answers by killing the CUDA context)."""
    if not devices.has_mxfp8_tensor_cores(a.device):
        raise RuntimeError(f"native MXFP8 GEMM needs sm_100, this tensor is on {devices.name(a.device)}")
    for t in (a, b):
        if t.dtype != _E4M3:
            _refuse("elements must be float8_e4m3fn", t.dtype, 'use backend="triton" or "dequant"')
    for letter, size in sizes.items():
        multiple = BLOCK if letter in "KM" else _ALIGN
        if size % multiple:
            _refuse(f"{letter} must be a multiple of {multiple}", size, 'pad it, or use backend="triton" or "dequant"')


def _native(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = torch._scaled_grouped_mm(
        a, b, scale_a.view(SCALE_DTYPE), scale_b.view(SCALE_DTYPE), offs=ends, out_dtype=torch.bfloat16
    )
    return out


def _zero_rows(out: Tensor, ends: Tensor) -> Tensor:
    if out.is_cuda:
        from ...kernels.zero_tail import zero_tail_rows

        return zero_tail_rows(out, ends)  # type: ignore[no-any-return]
    return out.masked_fill_((torch.arange(out.shape[0], device=out.device) >= ends[-1])[:, None], 0)


def _zero_groups(out: Tensor, offs: Tensor, total: int) -> Tensor:
    if out.is_cuda:
        from ...kernels.zero_tail import zero_empty_groups

        return zero_empty_groups(out, offs, total)  # type: ignore[no-any-return]
    empty = groups.sizes(groups.safe_ends(offs, total)) == 0
    return out.masked_fill_(empty[:, None, None], 0)


def _finish(out: Tensor, ends: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if bias is not None:
        none = bias.new_zeros(1, bias.shape[1])
        out = (out.float() + torch.cat([bias, none]).float()[groups.group_of(ends, out.shape[0])]).to(out_dtype)
    return out.to(out_dtype)


def _along_contraction(*operands: Operand, k_groups: bool) -> bool:
    return all(
        isinstance(t, MXTensor) and (t.k_groups if k_groups else t.block == "rowwise" and not t.k_groups)
        for t in operands
    )


def mm_m_groups(a: Operand, b: Operand, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, K)``, b ``(G, N, K)`` -> ``(M, N)``; rows of no group are zero."""
    if not _along_contraction(a, b, k_groups=False):
        return dequant.mm_m_groups(values(a), values(b), offs, bias, out_dtype)
    assert isinstance(a, MXTensor)
    assert isinstance(b, MXTensor)
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0 or k == 0:
        return _finish(a.qdata.new_zeros(m, n, dtype=torch.bfloat16), groups.safe_ends(offs, m), bias, out_dtype)
    _check(a.qdata, b.qdata, {"K": k, "N": n})
    ends = groups.safe_ends(offs, m)
    kernels = impl(a.device)
    scale_a, scale_b = a.scale_bytes, b.scale_bytes
    if a.layout == "plain":
        scale_a = kernels.to_blocked_m_groups(scale_a, ends, "parallel")
    if b.layout == "plain":
        scale_b = kernels.to_blocked_experts(scale_b)
    a_q, b_q = (t if t.stride(-1) == 1 else t.contiguous() for t in (a.qdata, b.qdata))
    out = _zero_rows(_native(a_q, b_q.mT, scale_a, scale_b, ends), ends)
    return _finish(out, ends, bias, out_dtype)


def mm_k_groups(a: Operand, b: Operand, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, N)``, b ``(M, K)`` -> ``(G, N, K)``; an empty group gives zeros."""
    if not _along_contraction(a, b, k_groups=True):
        return dequant.mm_k_groups(values(a), values(b), offs, out_dtype)
    assert isinstance(a, MXTensor)
    assert isinstance(b, MXTensor)
    assert a.offs is not None
    n, k, g = a.shape[1], b.shape[1], offs.shape[0]
    padded_rows = a.qdata.shape[0]
    if padded_rows == 0 or n == 0 or k == 0:
        return a.qdata.new_zeros(g, n, k, dtype=out_dtype)
    _check(a.qdata, b.qdata, {"N": n, "columns": k, "M": padded_rows})
    kernels = impl(a.device)
    blocks = a.offs // BLOCK
    scale_a, scale_b = (
        t.scale_bytes if t.layout == "blocked" else kernels.to_blocked_k_groups(t.scale_bytes.t(), blocks, "parallel")
        for t in (a, b)
    )
    a_q, b_q = (t if t.stride(0) == 1 else t.t().contiguous().t() for t in (a.qdata, b.qdata))
    out = _native(a_q.t(), b_q, scale_a, scale_b, a.offs)
    return _zero_groups(out, offs, a.shape[0]).to(out_dtype)
