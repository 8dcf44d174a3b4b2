"""Quantization ops (torch.library: CPU = reference, CUDA = Triton, fake = shapes) and their public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, shapes
from ..formats import BLOCK
from ..tensor import MXTensor, check, make
from ._impl import cpu, register_cuda
from .blocked import from_blocked, from_blocked_experts, from_blocked_k_groups, from_blocked_m_groups

_U8 = torch.uint8


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, column_major: bool = False) -> Tensor:
    strides = shapes.column_major(shape) if column_major else shapes.row_major(shape)
    return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)


def _padded_ends(x: Tensor, offs: Tensor | None) -> Tensor:
    return torch.empty(0 if offs is None else offs.shape[0], dtype=torch.int32, device=x.device)


# --- ops: scales are uint8 here, since float8_e8m0fnu does not survive op boundaries under torch.compile -------------
@torch.library.custom_op("mxmoe::quantize_rowwise", mutates_args=(), device_types="cpu")
def _quantize_rowwise(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    return cpu().quantize_rowwise(x, offs, blocked, elem_dtype, scale_mode)


@_quantize_rowwise.register_fake
def _(x, offs, blocked, elem_dtype, scale_mode):  # type: ignore[no-untyped-def]
    q_shape, s_shape = shapes.rowwise(x.shape)
    if blocked:
        s_shape = shapes.rowwise_blocked_scale(x.shape, None if offs is None else offs.shape[0])
    return _empty(q_shape, elem_dtype, x), _empty(s_shape, _U8, x)


@torch.library.custom_op("mxmoe::quantize_colwise", mutates_args=(), device_types="cpu")
def _quantize_colwise(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    return cpu().quantize_colwise(x, offs, blocked, elem_dtype, scale_mode)


@_quantize_colwise.register_fake
def _(x, offs, blocked, elem_dtype, scale_mode):  # type: ignore[no-untyped-def]
    groups = None if offs is None else offs.shape[0]
    if groups is None:
        q_shape, s_shape = shapes.colwise(x.shape)
    else:
        q_shape, s_shape = shapes.colwise_groups(x.shape[0], x.shape[1], groups)
    q = _empty(q_shape, elem_dtype, x, column_major=True)
    if blocked:
        return q, _empty(shapes.colwise_blocked_scale(x.shape, groups), _U8, x), _padded_ends(x, offs)
    return q, _empty(s_shape, _U8, x, column_major=True), _padded_ends(x, offs)


@torch.library.custom_op("mxmoe::quantize_both", mutates_args=(), device_types="cpu")
def _quantize_both(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return cpu().quantize_both(x, offs, blocked, elem_dtype, scale_mode)


@_quantize_both.register_fake
def _(x, offs, blocked, elem_dtype, scale_mode):  # type: ignore[no-untyped-def]
    row = torch.ops.mxmoe.quantize_rowwise(x, offs, blocked, elem_dtype, scale_mode)
    col = torch.ops.mxmoe.quantize_colwise(x, offs, blocked, elem_dtype, scale_mode)
    return *row, *col


@torch.library.custom_op("mxmoe::quantize_square", mutates_args=(), device_types="cpu")
def _quantize_square(x: Tensor, column_major: bool, elem_dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor]:
    return cpu().quantize_square(x, column_major, elem_dtype, scale_mode)


@_quantize_square.register_fake
def _(x, column_major, elem_dtype, scale_mode):  # type: ignore[no-untyped-def]
    q_shape, s_shape = shapes.square(x.shape)
    return _empty(q_shape, elem_dtype, x, column_major), _empty(s_shape, _U8, x)


@torch.library.custom_op("mxmoe::dequantize", mutates_args=(), device_types="cpu")
def _dequantize(
    qdata: Tensor,
    scale: Tensor,
    block: str,
    offs: Tensor | None,
    source_offs: Tensor | None,
    rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return cpu().dequantize(qdata, scale, block, offs, source_offs, rows, out_dtype)


@_dequantize.register_fake
def _(qdata, scale, block, offs, source_offs, rows, out_dtype):  # type: ignore[no-untyped-def]
    shape = (rows, qdata.shape[1]) if source_offs is not None and block == "colwise" else tuple(qdata.shape)
    return _empty(shape, out_dtype, qdata)


@torch.library.custom_op("mxmoe::fake_quantize", mutates_args=(), device_types="cpu")
def _fake_quantize(
    x: Tensor, block: str, offs: Tensor | None, elem_dtype: torch.dtype, scale_mode: str, out_dtype: torch.dtype
) -> Tensor:
    return cpu().fake_quantize(x, block, offs, elem_dtype, scale_mode, out_dtype)


@_fake_quantize.register_fake
def _(x, block, offs, elem_dtype, scale_mode, out_dtype):  # type: ignore[no-untyped-def]
    return _empty(tuple(x.shape), out_dtype, x)


@torch.library.custom_op("mxmoe::fake_quantize_both", mutates_args=(), device_types="cpu")
def _fake_quantize_both(
    x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, scale_mode: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return cpu().fake_quantize_both(x, offs, elem_dtype, scale_mode, out_dtype)


@_fake_quantize_both.register_fake
def _(x, offs, elem_dtype, scale_mode, out_dtype):  # type: ignore[no-untyped-def]
    return _empty(tuple(x.shape), out_dtype, x), _empty(tuple(x.shape), out_dtype, x)


for _op in (
    _quantize_rowwise,
    _quantize_colwise,
    _quantize_both,
    _quantize_square,
    _dequantize,
    _fake_quantize,
    _fake_quantize_both,
):
    register_cuda(_op)


# --- public functions ------------------------------------------------------------------------------------------------
def _checked(x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, scale_mode: str, layout: str) -> Tensor | None:
    checks.tensor(x, "x", dims=(2, 3))
    checks.elem_dtype(elem_dtype)
    checks.scale_mode(scale_mode)
    checks.layout(layout)
    if offs is None:
        return None
    if x.ndim != 2:
        raise ValueError(f"offs groups the rows of a 2-D x, got x of shape {tuple(x.shape)}: pass offs=None")
    return checks.offs(offs, "offs", x.device, total=x.shape[0])


def quantize(
    x: Tensor,
    *,
    block: str = "rowwise",
    offs: Tensor | None = None,
    layout: str = "plain",
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
) -> MXTensor:
    """Quantize a tensor to MXFP8 along its last dim (rowwise), along dim -2 (colwise), or in 32x32 tiles (square).

    | argument | shape | dtype | notes |
    |---|---|---|---|
    | ``x`` | ``(M, K)`` or ``(G, M, K)`` | bf16, fp16, fp32 | any strides; M, K need not be multiples of 32 |
    | ``block`` | | str | "rowwise": 1x32 along K; "colwise": 32x1 along M; "square": one scale per 32x32 tile |
    | ``offs`` | ``(G,)`` | int32, int64 | ends of row groups of a 2-D x; colwise blocks restart at every group |
    | ``layout`` | | str | "plain", or "blocked": scales in the 128x4 layout of the tensor cores |
    | ``elem_dtype`` | | dtype | float8_e4m3fn or float8_e5m2 |
    | ``scale_mode`` | | str | "rceil", "floor", "ceil", "even" |
    | returns | see :class:`MXTensor` | | colwise with offs: each group padded to a multiple of 32 rows |

    Raises: ``TypeError``, ``ValueError`` naming the argument. Sync: none.
    Empty: M or K = 0 give empty tensors; rows at or beyond ``offs[-1]`` are zero with scale byte 0.
    Gradient: none. Source: OCP MX 1.0; ``docs/numerics.md``.
    """
    offs = _checked(x, offs, elem_dtype, scale_mode, layout)
    blocked = layout == "blocked"
    common: dict[str, Any] = {"block": block, "layout": layout, "shape": x.shape, "orig_dtype": x.dtype}
    match checks.block(block):
        case "rowwise":
            q, s = torch.ops.mxmoe.quantize_rowwise(x, offs, blocked, elem_dtype, scale_mode)
            return make(q, s, **common, offs=offs, source_offs=offs)
        case "colwise":
            q, s, padded = torch.ops.mxmoe.quantize_colwise(x, offs, blocked, elem_dtype, scale_mode)
            ends = None if offs is None else padded
            return make(q, s, **common, offs=ends, source_offs=offs, k_groups=offs is not None)
        case "square":
            if blocked:
                raise ValueError('block="square" has no blocked layout: quantize plain, each GEMM expands the scales')
            if offs is not None:
                raise ValueError('block="square" is for weights and takes no offs')
            q, s = torch.ops.mxmoe.quantize_square(x, False, elem_dtype, scale_mode)
            return make(q, s, **common)
    raise AssertionError(block)


def quantize_both(
    x: Tensor,
    *,
    offs: Tensor | None = None,
    layout: str = "plain",
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
) -> tuple[MXTensor, MXTensor]:
    """Quantize a tensor along both dims with one read of it: ``(rowwise, colwise)``.

    | argument | shape | dtype | notes |
    |---|---|---|---|
    | ``x`` | ``(M, K)`` or ``(G, M, K)`` | bf16, fp16, fp32 | any strides |
    | ``offs`` | ``(G,)`` | int32, int64 | ends of row groups of a 2-D x |
    | ``layout``, ``elem_dtype``, ``scale_mode`` | | | as for :func:`quantize` |
    | returns | two :class:`MXTensor` | | equal to the two results of :func:`quantize`, bit by bit |

    Raises, Sync, Empty, Gradient, Source: as for :func:`quantize`.
    """
    offs = _checked(x, offs, elem_dtype, scale_mode, layout)
    q_row, s_row, q_col, s_col, padded = torch.ops.mxmoe.quantize_both(
        x, offs, layout == "blocked", elem_dtype, scale_mode
    )
    common: dict[str, Any] = {"layout": layout, "shape": x.shape, "orig_dtype": x.dtype, "source_offs": offs}
    ends = None if offs is None else padded
    return (
        make(q_row, s_row, block="rowwise", offs=offs, **common),
        make(q_col, s_col, block="colwise", offs=ends, k_groups=offs is not None, **common),
    )


def plain_scale(t: MXTensor) -> Tensor:
    """The scale of ``t`` in the plain layout, uint8: undoes ``layout="blocked"``."""
    if t.layout == "plain":
        return t.scale_bytes
    rows, cols = t.qdata.shape[-2:]
    flip = t.block == "colwise"
    if flip:
        rows, cols = cols, rows
    cols = shapes.cdiv(cols, BLOCK)
    if t.ndim == 3:
        scale = from_blocked_experts(t.scale_bytes, rows, cols)
    elif t.offs is None:
        scale = from_blocked(t.scale_bytes, rows, cols)
    elif t.k_groups:
        scale = from_blocked_k_groups(t.scale_bytes, t.offs // BLOCK, rows, cols)
    else:
        scale = from_blocked_m_groups(t.scale_bytes, t.offs, rows, cols)
    return scale.mT if flip else scale


def dequantize(t: MXTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Expand an MXTensor to ``dtype``, row-major, in the shape and row order it was quantized from.

    | argument | shape | dtype | notes |
    |---|---|---|---|
    | ``t`` | :class:`MXTensor` | | any block, any layout |
    | ``dtype`` | | bf16, fp16, fp32 | e4m3 times 2**s is exact in bf16 for s in -124..119 |
    | returns | ``t.shape`` | ``dtype`` | row-major |

    Raises: ``TypeError``. Sync: none. Empty: empty in, empty out; rows of no group are zero.
    Gradient: none. Source: ``docs/numerics.md``.
    """
    if not isinstance(t, MXTensor):
        raise TypeError(f"t must be an MXTensor (mxmoe.quantize makes one), got {type(t).__name__}")
    checks.value_dtype(dtype, "dtype")
    check(t, "t")
    if t.k_groups and t.block == "rowwise":  # a transposed colwise tensor: groups along the columns
        return dequantize(t.mT, dtype).mT.contiguous()
    grouped = t.k_groups
    return torch.ops.mxmoe.dequantize(
        t.qdata,
        plain_scale(t),
        t.block,
        t.offs if grouped else None,
        t.source_offs if grouped else None,
        t.shape[-2] if grouped else t.qdata.shape[-2],
        dtype,
    )


def fake_quantize(
    x: Tensor,
    *,
    block: str = "rowwise",
    offs: Tensor | None = None,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Round a tensor to its MXFP8 values in one pass: ``dequantize(quantize(x))`` without the bytes in between.

    | argument | shape | dtype | notes |
    |---|---|---|---|
    | ``x`` | ``(M, K)`` or ``(G, M, K)`` | bf16, fp16, fp32 | any strides |
    | ``block``, ``offs``, ``elem_dtype``, ``scale_mode`` | | | as for :func:`quantize` |
    | ``dtype`` | | bf16, fp16, fp32 | of the result |
    | returns | ``x.shape`` | ``dtype`` | row-major; rows of no group are zero |

    Raises, Sync, Empty, Gradient, Source: as for :func:`quantize`.
    """
    offs = _checked(x, offs, elem_dtype, scale_mode, "plain")
    checks.value_dtype(dtype, "dtype")
    if checks.block(block) == "square" and offs is not None:
        raise ValueError('block="square" is for weights and takes no offs')
    return torch.ops.mxmoe.fake_quantize(x, block, offs, elem_dtype, scale_mode, dtype)
