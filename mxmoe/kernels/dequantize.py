"""Expand quantized values: qdata * scale, rounded once, row-major; groups go back to their original rows.

    rowwise: qdata (M, K), scale (M, K32)    colwise: qdata.t() (K, Mp), scale.t() (K, Mp/32)     square: either order
         +--------------+                         +----------+                                        +-----+
         |32| 32 | 32   |                 BLOCK_K | 32 | 32  |                                     32 | 32  |
         +--------------+                         +----------+                                        +-----+
                 \\                                    |                                               /
                  `----------------------->  out (M, K) row-major  <---------------------------------'

    Colwise tiles are read column by column and written row by row; padding rows are dropped, rows of no group are zero.

Grid     (row tiles * column tiles / STEPS, batch), columns fastest; a program does STEPS column tiles of its rows, so
         the search for its group is paid once.
Writes   every element of the result once.
Traffic  1 + 1/32 bytes read, 2 written (bf16) per element.
Index    int64 for rows, columns of a column-major qdata, and the batch.
Source   ``docs/numerics.md``. e4m3 times 2**s is exact in bf16 for s in -124..119.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import device, shapes
from ..formats import BLOCK
from . import gluon_dequantize
from ._blocks import aligned, batch_grid, batch_index, block_rows
from ._e8m0 import elem_value, hardware_cast, scale_value
from .fake_quantize import row_major_output
from .quantize_colwise import row_units

# (BLOCK_M, BLOCK_K, STEPS, num_warps); _GROUPS: with groups, column-major.
# Measured on an H200, 2026-11-30, share of a copy at (131072, 7168): rowwise 0.97 (4 warps: 0.96); column-major 0.89
# (64 x 64: 0.80); with 128 groups 0.82 (64 x 64: 0.75).
TILE_ROWWISE = (8, 512, 1, 8)
TILE_ROW_MAJOR = (32, 128, 1, 4)
TILE_COLUMN_MAJOR = (128, 64, 1, 8)
TILE_GROUPS = (128, 64, 2, 4)


@triton.jit(do_not_specialize=["B", "M"])
def _dequantize_rowwise_kernel(
    out_ptr,  # (B, M, K), last stride 1
    q_ptr,  # (B, M, K) uint8
    scale_ptr,  # (B, M, K32) uint8
    M,
    K,
    B,
    stride_ob,
    stride_om,
    stride_qb,
    stride_qm,
    stride_qk,
    stride_sb,
    stride_sm,
    stride_sk,
    E5M2: tl.constexpr,
    HW: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K * STEPS
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 1. Which tiles are mine?
    NK: tl.constexpr = BLOCK_K // 32
    pid = tl.program_id(0)
    batch = batch_index(B)
    col_programs = tl.cdiv(K, BLOCK_K * STEPS)

    # 2. Coordinates.
    rows = (pid // col_programs * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    row = rows.to(tl.int64)
    q_row = q_ptr + batch * stride_qb + row * stride_qm
    scale_row = scale_ptr + batch * stride_sb + row * stride_sm
    out_row = out_ptr + batch * stride_ob + row * stride_om

    for step in tl.range(STEPS):
        # 3. Load.
        first_col = (pid % col_programs * STEPS + step) * BLOCK_K
        cols = (first_col + tl.arange(0, BLOCK_K))[None, :]
        c = (first_col // 32 + tl.arange(0, NK))[None, :]
        keep = rows < M
        keep_scale = keep
        if not EVEN_K:
            keep = keep & (cols < K)
            keep_scale = keep_scale & (c < (K + 31) // 32)
        q = tl.load(q_row + cols.to(tl.int64) * stride_qk, mask=keep, other=0)
        byte = tl.load(scale_row + c.to(tl.int64) * stride_sk, mask=keep_scale, other=0)

        # 4. Expand, store.
        y = elem_value(tl.reshape(q, (BLOCK_M, NK, 32)), E5M2, HW) * scale_value(byte)[:, :, None]
        tl.store(out_row + cols, tl.reshape(y.to(out_ptr.dtype.element_ty), (BLOCK_M, BLOCK_K)), mask=keep)


@triton.jit(do_not_specialize=["B", "M", "MP", "G"])
def _dequantize_blocks_kernel(
    out_ptr,  # (B, M, K), last stride 1
    q_ptr,  # (B, MP, K) uint8, row- or column-major
    scale_ptr,  # (B, ceil(MP/32), K) or SQUARE (B, ceil(MP/32), K32) uint8
    offs_ptr,  # (G,) int32 or None: ends of the groups in the result
    M,
    MP,  # rows of qdata
    K,
    G,
    B,
    stride_ob,
    stride_om,
    stride_qb,
    stride_qm,
    stride_qk,
    stride_sb,
    stride_sm,
    stride_sk,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    HW: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K * STEPS
    ALIGNED: tl.constexpr,  # MP is a multiple of 16
    NB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 1. Which tiles are mine?
    NK: tl.constexpr = BLOCK_K // 32
    pid = tl.program_id(0)
    batch = batch_index(B)
    col_programs = tl.cdiv(K, BLOCK_K * STEPS)
    tile = pid // col_programs

    # 2. Coordinates: where each block of padded rows lies in qdata (dst) and in the result (src).
    MP = aligned(MP, ALIGNED)
    src, live_end, keep_end, dst, dst_end, _, _ = block_rows(tile, offs_ptr, M, MP, G, G_POW2, GROUPED, NB)
    r = tl.arange(0, 32)[None, :, None]
    rows = src[:, None, None] + r
    q_rows = dst[:, None, None] + r
    keep = rows < keep_end
    # Whole blocks are read (the bounds of a vector): padding rows are dropped at the store, rows of no group are zeros.
    live = (src < live_end)[:, None, None] & (q_rows < dst_end[:, None, None])
    some = (src < live_end)[:, None]
    q_row = q_ptr + batch * stride_qb + q_rows.to(tl.int64) * stride_qm
    out_row = out_ptr + batch * stride_ob + rows.to(tl.int64) * stride_om
    scale_row = scale_ptr + batch * stride_sb + (dst // 32)[:, None].to(tl.int64) * stride_sm

    for step in tl.range(STEPS):
        # 3. Load.
        first_col = (pid % col_programs * STEPS + step) * BLOCK_K
        cols = (first_col + tl.arange(0, BLOCK_K))[None, None, :]
        here = (cols < K) if not EVEN_K else True
        q = tl.load(q_row + cols.to(tl.int64) * stride_qk, mask=live & here, other=0)

        # 4. Expand, store.
        if SQUARE:
            c = (first_col // 32 + tl.arange(0, NK))[None, :]
            byte = tl.load(scale_row + c * stride_sk, mask=some & (c < (K + 31) // 32), other=0)
            y = elem_value(tl.reshape(q, (NB, 32, NK, 32)), E5M2, HW) * scale_value(byte)[:, None, :, None]
            y = tl.reshape(y.to(out_ptr.dtype.element_ty), (NB, 32, BLOCK_K))
        else:
            c = (first_col + tl.arange(0, BLOCK_K))[None, :]
            byte = tl.load(scale_row + c.to(tl.int64) * stride_sk, mask=some & (c < K), other=0)
            y = (elem_value(q, E5M2, HW) * scale_value(byte)[:, None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_row + cols, y, mask=keep & here)


def dequantize(
    qdata: Tensor,
    scale: Tensor,
    block: str,
    offs: Tensor | None,
    source_offs: Tensor | None,
    rows: int,
    out_dtype: torch.dtype,
    *,
    row_stride: int | None = None,
) -> Tensor:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract.

    Where groups were padded follows from ``source_offs`` alone. ``row_stride`` as for ``fake_quantize``.
    Column-major colwise values of groups go to the Gluon form on sm_90 and later, where sizes allow: the same bytes.
    """
    source = source_offs if block == "colwise" else None
    if source is not None and gluon_dequantize.supported(
        qdata, scale, block, source, rows, out_dtype, row_stride, device.capability(qdata.device)
    ):
        return gluon_dequantize.dequantize(qdata, scale, source, rows, out_dtype, row_stride)
    return dequantize_triton(qdata, scale, block, offs, source_offs, rows, out_dtype, row_stride=row_stride)


def dequantize_triton(
    qdata: Tensor,
    scale: Tensor,
    block: str,
    offs: Tensor | None,
    source_offs: Tensor | None,
    rows: int,
    out_dtype: torch.dtype,
    *,
    row_stride: int | None = None,
) -> Tensor:
    """The kernels of this file: any input, any chip, the interpreter."""
    *lead, mp, k = qdata.shape
    grouped = block == "colwise" and source_offs is not None
    m = rows if grouped else mp
    out = row_major_output((*lead, m, k), out_dtype, qdata.device, row_stride)
    if not out.numel():
        return out
    batched = qdata.ndim == 3
    sizes = {
        "stride_ob": out.stride(0) if batched else 0,
        "stride_om": out.stride(-2),
        "stride_qb": qdata.stride(0) if batched else 0,
        "stride_qm": qdata.stride(-2),
        "stride_qk": qdata.stride(-1),
        "stride_sb": scale.stride(0) if batched else 0,
        "stride_sm": scale.stride(-2),
        "stride_sk": scale.stride(-1),
        "E5M2": qdata.dtype == torch.float8_e5m2,
        "HW": hardware_cast(qdata.device),
    }
    q = qdata.view(torch.uint8)
    block_m, block_k, steps, warps = _tile(block, grouped, column_major=qdata.stride(-1) != 1)
    steps = min(steps, shapes.cdiv(k, block_k))
    sizes |= {"EVEN_K": k % (block_k * steps) == 0, "BLOCK_K": block_k, "STEPS": steps, "num_warps": warps}
    col_programs = shapes.cdiv(k, block_k * steps)
    batch = qdata.shape[0] if batched else 1
    if block == "rowwise":
        grid = batch_grid(shapes.cdiv(m, block_m) * col_programs, batch)
        _dequantize_rowwise_kernel[grid](out, q, scale, m, k, batch, **sizes, BLOCK_M=block_m)
        return out
    groups = source_offs.shape[0] if grouped else None
    _dequantize_blocks_kernel[batch_grid(row_units(m, groups, block_m) * col_programs, batch)](
        out,
        q,
        scale,
        source_offs if grouped else None,
        m,
        mp,
        k,
        groups or 1,
        batch,
        **sizes,
        G_POW2=triton.next_power_of_2(groups or 1),
        GROUPED=grouped,
        SQUARE=block == "square",
        ALIGNED=mp % 16 == 0,
        NB=block_m // BLOCK,
    )
    return out


def _tile(block: str, grouped: bool, column_major: bool) -> tuple[int, int, int, int]:
    if block == "rowwise":
        return TILE_ROWWISE
    if grouped:
        return TILE_GROUPS
    return TILE_COLUMN_MAJOR if column_major else TILE_ROW_MAJOR
