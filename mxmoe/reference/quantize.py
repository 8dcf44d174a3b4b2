"""Quantization in plain PyTorch, on any device: the specification that every kernel equals bit by bit.

Everything is one routine: pad the blocked dim with zeros to a multiple of 32, view it as blocks, take the integer scale
rule of :mod:`mxmoe.formats`, divide by the power of two, clamp, cast. Source: ``docs/numerics.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import groups, shapes
from ..formats import BLOCK, ELEM_NAN, SCALE_BIAS, SCALE_NAN, elem_format
from . import blocked as layouts


# --- one block -------------------------------------------------------------------------------------------------------
def scale_bytes(amax: Tensor, elem_dtype: torch.dtype, scale_mode: str) -> Tensor:
    """Scale byte of every block from its largest magnitude ``amax`` (fp32): uint8, 255 where amax is Inf or NaN."""
    fmt = elem_format(elem_dtype)
    bits = amax.float().view(torch.int32) & 0x7FFFFFFF
    round_up = (bits & 0x7FFFFF) > fmt.threshold(scale_mode)
    byte = ((bits >> 23) - fmt.emax + round_up.to(torch.int32)).clamp(0, SCALE_NAN - 1)
    return torch.where(bits >= 0x7F800000, SCALE_NAN, byte).to(torch.uint8)


def scale_values(scale: Tensor) -> Tensor:
    """uint8 scale bytes -> fp32 powers of two. Byte 0 is 2**-127 (a subnormal), byte 255 is NaN."""
    byte = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == SCALE_NAN, 0x7FC00000, bits).view(torch.float32)


def _scaled(
    blocks: Tensor, elem_dtype: torch.dtype, scale_mode: str, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """x over its scale, clamped (in a NaN block: anything), and scale bytes; ``dims`` span one block and are kept."""
    fmt = elem_format(elem_dtype)
    x = blocks.float()
    scale = scale_bytes(x.abs().amax(dims, keepdim=True), elem_dtype, scale_mode)  # torch's amax keeps NaN
    inv = ((2 * SCALE_BIAS - scale.to(torch.int32)) << 23).view(torch.float32)  # 2**(127 - byte)
    return (x * inv).clamp_(-fmt.max, fmt.max), scale


def _quantize_blocks(
    blocks: Tensor, elem_dtype: torch.dtype, scale_mode: str, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Quantize a view whose ``dims`` span one block each. Returns bytes (uint8, like blocks) and scale (dims kept)."""
    y, scale = _scaled(blocks, elem_dtype, scale_mode, dims)
    return torch.where(scale == SCALE_NAN, ELEM_NAN, y.to(elem_dtype).view(torch.uint8)), scale


def _pad_dim(x: Tensor, dim: int) -> Tensor:
    """Zero-pad ``dim`` (negative) to a multiple of 32."""
    extra = -x.shape[dim] % BLOCK
    return pad(x, [0, 0] * (-dim - 1) + [0, extra]) if extra else x


def _quantize_last(x: Tensor, elem_dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor]:
    """``(..., K)`` -> bytes ``(..., K)``, scale ``(..., ceil(K/32))``, both contiguous."""
    blocks = _pad_dim(x, -1).unflatten(-1, (-1, BLOCK)) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 0, BLOCK)
    if blocks.numel() == 0:
        return x.new_zeros(x.shape, dtype=torch.uint8), x.new_zeros(shapes.rowwise(x.shape)[1], dtype=torch.uint8)
    q, scale = _quantize_blocks(blocks, elem_dtype, scale_mode, (-1,))
    return q.flatten(-2)[..., : x.shape[-1]].contiguous(), scale.squeeze(-1)


# --- groups ----------------------------------------------------------------------------------------------------------
def _zero_tail(x: Tensor, offs: Tensor | None) -> Tensor:
    """x with the rows that belong to no group set to zero."""
    if offs is None or x.shape[0] == 0:
        return x
    ends = groups.safe_ends(offs, x.shape[0])
    inside = torch.arange(x.shape[0], device=x.device) < ends[-1]
    return torch.where(inside[:, None], x, x.new_zeros(()))


def _padded_index(offs: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Source row of every padded row (``m``: padding), int64 ``(Mp,)``, and the padded ends, int32 ``(G,)``."""
    ends = groups.safe_ends(offs, m)
    padded = groups.padded_ends(ends)
    mp = shapes.padded_rows(m, offs.numel())
    row = torch.arange(mp, device=offs.device)
    g = groups.group_of(padded, mp).clamp(max=offs.numel() - 1)
    source = row - groups.starts(padded)[g] + groups.starts(ends)[g]
    return torch.where((source < ends[g]) & (row < padded[-1]), source, m), padded


def _pad_groups(x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x with every group padded to a multiple of 32 by zero rows ``(Mp, K)``, and the padded ends."""
    source, padded = _padded_index(offs, x.shape[0])
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[source], padded


# --- quantize --------------------------------------------------------------------------------------------------------
def quantize_rowwise(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    """``(..., M, K)`` -> qdata ``(..., M, K)``, scale ``(..., M, ceil(K/32))`` uint8, blocks along K."""
    q, scale = _quantize_last(_zero_tail(x, offs), elem_dtype, scale_mode)
    if blocked:
        scale = _to_blocked(scale, offs)
    return q.view(elem_dtype), scale


def _to_blocked(scale: Tensor, offs: Tensor | None) -> Tensor:
    if scale.ndim == 3:
        return layouts.to_blocked_experts(scale)
    if offs is None:
        return layouts.to_blocked(scale)
    return layouts.to_blocked_m_groups(scale, offs, "parallel")


def quantize_colwise(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``(..., M, K)`` -> qdata, scale (both column-major), padded ends. Blocks along M, restarting at each group."""
    padded = torch.empty(0, dtype=torch.int32, device=x.device)
    if offs is not None:
        x, padded = _pad_groups(x, offs)
    q, scale = _quantize_last(x.mT, elem_dtype, scale_mode)  # (..., K, Mp), (..., K, Mp/32)
    if not blocked:
        return q.view(elem_dtype).mT, scale.mT, padded
    if scale.ndim == 2 and offs is not None:
        return q.view(elem_dtype).mT, layouts.to_blocked_k_groups(scale, padded // BLOCK, "parallel"), padded
    return q.view(elem_dtype).mT, _to_blocked(scale, None), padded


def quantize_both(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rowwise qdata and scale, colwise qdata and scale, padded ends."""
    row = quantize_rowwise(x, offs, blocked, elem_dtype, scale_mode)
    return *row, *quantize_colwise(x, offs, blocked, elem_dtype, scale_mode)


def quantize_square(x: Tensor, column_major: bool, elem_dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor]:
    """``(..., M, K)`` -> qdata ``(..., M, K)``, scale ``(..., ceil(M/32), ceil(K/32))``: one scale per 32x32 tile."""
    m, k = x.shape[-2:]
    if x.numel() == 0:
        q, scale = (x.new_zeros(s, dtype=torch.uint8) for s in shapes.square(x.shape))
    else:
        tiles = _pad_dim(_pad_dim(x, -1), -2).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
        q, scale = _quantize_blocks(tiles, elem_dtype, scale_mode, (-3, -1))
        q = q.flatten(-2).flatten(-3, -2)[..., :m, :k]
        scale = scale.squeeze(-1).squeeze(-2)
    q = q.mT.contiguous().mT if column_major else q.contiguous()
    return q.view(elem_dtype), scale.contiguous()


def quantize_square_both(x: Tensor, elem_dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize_square`` in both orders: qdata row-major, the same values column-major, scale."""
    q, scale = quantize_square(x, False, elem_dtype, scale_mode)
    return q, q.mT.contiguous().mT, scale


# --- dequantize ------------------------------------------------------------------------------------------------------
def _scale_per_element(scale: Tensor, block: str, m: int, k: int) -> Tensor:
    """fp32 scale of every element, ``(..., M, K)``."""
    factor = scale_values(scale)
    if block != "rowwise":
        factor = factor.repeat_interleave(BLOCK, -2)[..., :m, :]
    if block != "colwise":
        factor = factor.repeat_interleave(BLOCK, -1)[..., :k]
    return factor


def dequantize(
    qdata: Tensor,
    scale: Tensor,
    block: str,
    offs: Tensor | None,
    source_offs: Tensor | None,
    rows: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """qdata * scale, rounded once to ``out_dtype``, row-major; colwise groups go back to their original rows."""
    m, k = qdata.shape[-2:]
    x = (qdata.float() * _scale_per_element(scale, block, m, k)).to(out_dtype)
    if block == "colwise" and source_offs is not None:
        source, _ = _padded_index(source_offs, rows)
        x = x.new_zeros(rows + 1, k).index_copy_(0, source, x)[:rows]
        x = _zero_tail(x, source_offs)
    return x.contiguous()


def _round_trip(
    blocks: Tensor, elem_dtype: torch.dtype, scale_mode: str, dims: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """The values of a view whose ``dims`` span one block each, after quantization."""
    y, scale = _scaled(blocks, elem_dtype, scale_mode, dims)
    # A table of the 256 values: on a CPU five times faster than the cast back. Its NaNs are all alike, since a NaN
    # block (whose scale is NaN) holds elements of either sign here.
    table = torch.arange(256, dtype=torch.uint8, device=y.device).view(elem_dtype).float().nan_to_num_(torch.nan)
    values = table.index_select(0, y.to(elem_dtype).view(torch.uint8).flatten().int()).view(y.shape)
    return values.mul_(scale_values(scale)).to(out_dtype)


def fake_quantize(
    x: Tensor, block: str, offs: Tensor | None, elem_dtype: torch.dtype, scale_mode: str, out_dtype: torch.dtype
) -> Tensor:
    """``dequantize`` of the quantized x in one pass: what a GEMM sees, row-major. Rows of no group are zero."""
    m, k = x.shape[-2:]
    if x.numel() == 0:
        return x.new_zeros(x.shape, dtype=out_dtype)

    def values(blocks: Tensor, *dims: int) -> Tensor:
        return _round_trip(blocks, elem_dtype, scale_mode, dims, out_dtype)

    match block:
        case "rowwise":
            y = values(_pad_dim(_zero_tail(x, offs), -1).unflatten(-1, (-1, BLOCK)), -1).flatten(-2)[..., :k]
        case "colwise" if offs is None:
            y = values(_pad_dim(x, -2).unflatten(-2, (-1, BLOCK)), -2).flatten(-3, -2)[..., :m, :]
        case "colwise":
            assert offs is not None
            source, _ = _padded_index(offs, m)
            padded = torch.cat([x, x.new_zeros(1, k)])[source]
            y = values(padded.unflatten(0, (-1, BLOCK)), -2).flatten(0, 1)
            y = y.new_zeros(m + 1, k).index_copy_(0, source, y)[:m]
        case "square":
            tiles = _pad_dim(_pad_dim(x, -1), -2).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
            y = values(tiles, -3, -1).flatten(-2).flatten(-3, -2)[..., :m, :k]
        case _:
            raise ValueError(f"unknown block {block!r}")
    return y.contiguous()


def fake_quantize_both(
    x: Tensor, offs: Tensor | None, elem_dtype: torch.dtype, scale_mode: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The rowwise and the colwise form of :func:`fake_quantize`."""
    row = fake_quantize(x, "rowwise", offs, elem_dtype, scale_mode, out_dtype)
    return row, fake_quantize(x, "colwise", offs, elem_dtype, scale_mode, out_dtype)
