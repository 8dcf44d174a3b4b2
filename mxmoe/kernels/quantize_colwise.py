"""Quantize along the rows: blocks of 32x1 that restart at every group, column-major result.

    x (M, K)                       qdata.t() (K, Mp) fp8              scale.t() (K, Mp/32) uint8
           BLOCK_K                         NB * 32                            NB
         +--------+                      +---------------+                  +----+
      32 | block 0|             BLOCK_K  | block0 block1 |                  |    |
         +--------+     ---->            |               |        +         |    |
      32 | block 1|                      +---------------+                  +----+
         +--------+

    The rows of a tile are one unit of one group (``_blocks.py``).
    Blocked scales: the unit is 128 rows = 4 columns of scale.t() = one column of 128x4 tiles.

Grid     (row tiles * column tiles, batch), columns fastest.
Writes   every byte of qdata, scale and padded_offs once: 0 in padding and slack rows, in padding and slack of scales.
Traffic  bf16: 2 bytes read, 1 + 1/32 written per element.
Index    int64 for rows, columns of the result and the batch.
Source   OCP MX 1.0; ``docs/numerics.md``; blocked layout: ``docs/layouts.md``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import device, shapes
from ..formats import BLOCK, SF_ROWS
from . import gluon_colwise
from ._blocks import aligned, batch_grid, batch_index, block_rows, store_padded_ends
from ._e8m0 import constants, quantize_middle
from ._tiles import k_group_byte

# (BLOCK_M, BLOCK_K, num_warps)
TILE = (64, 32, 2)
TILE_BLOCKED = (SF_ROWS, 32, 4)


@triton.jit
def store_colwise(
    q_ptr,  # (K, MP) uint8 of one matrix
    scale_ptr,  # (K, blocks) uint8 of one matrix; or blocked
    q,  # (NB, 32, BLOCK_K) uint8
    byte,  # (NB, BLOCK_K) int32
    tile,
    first_col,
    dst,
    dst_end,
    first_unit,
    units,  # of the group, 128 rows each
    all_units,  # of the buffer
    K,
    MP,
    blocks,
    BLOCKED: tl.constexpr,
    NB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Store one tile transposed, and its scales plain or blocked."""
    cols = first_col + tl.arange(0, BLOCK_K)
    rows = dst[:, None] + tl.arange(0, 32)[None, :]
    mine = (rows < dst_end[:, None])[:, :, None] & (cols < K)[None, None, :]
    at = cols[None, None, :].to(tl.int64) * MP + rows[:, :, None]
    tl.store(q_ptr + at, q, mask=mine)
    c = cols[None, :]
    if BLOCKED:
        i = tl.arange(0, NB)[:, None] + (tile - first_unit) * NB
        units = tl.minimum(units, all_units - first_unit)  # slack: all units that are left
        at = k_group_byte(c, i, tl.zeros_like(i) + first_unit, units, (K + 127) // 128)
        # Every byte of the group's tiles: rows (columns of x) up to a multiple of 128, blocks up to a multiple of 4.
        inside = (c < (K + 127) // 128 * 128) & (tile < all_units)
        tl.store(scale_ptr + at, byte.to(tl.uint8), mask=inside)
    else:
        # A block without rows of its own must not write: its place is the next group's first block.
        own = (dst < dst_end)[:, None] & (c < K)
        tl.store(scale_ptr + c.to(tl.int64) * blocks + dst[:, None] // 32, byte.to(tl.uint8), mask=own)


@triton.jit
def load_blocks(x_ptr, src, live_end, stride_xm, first_col, K, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows of x of every block, ``(NB, 32, BLOCK_K)``: zeros where there is no data."""
    cols = (first_col + tl.arange(0, BLOCK_K))[None, None, :]
    rows = src[:, None] + tl.arange(0, 32)[None, :]
    live = (rows < live_end)[:, :, None]
    at = rows.to(tl.int64)[:, :, None] * stride_xm + cols
    if EVEN_K:
        return tl.load(x_ptr + at, mask=live, other=0)
    else:
        return tl.load(x_ptr + at, mask=live & (cols < K), other=0)


@triton.jit(do_not_specialize=["B", "M", "MP", "G", "all_units"])
def _quantize_colwise_kernel(
    q_ptr,  # (B, K, MP) uint8, contiguous
    scale_ptr,  # (B, K, MP/32) uint8, contiguous; or blocked, (B, 512 * row tiles * units)
    padded_offs_ptr,  # (G,) int32 or None
    x_ptr,  # (B, M, K), last stride 1
    offs_ptr,  # (G,) int32 or None
    M,
    MP,
    K,
    G,
    all_units,  # columns of tiles of the blocked scale of one matrix
    B,
    stride_xb,
    stride_xm,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKED: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    EVEN_K: tl.constexpr,  # no column tile reaches beyond K
    ALIGNED: tl.constexpr,  # MP is a multiple of 16
    NB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 1. Which tile am I?
    pid = tl.program_id(0)
    batch = batch_index(B)
    if GROUPED:  # noqa: SIM102
        if pid == 0:
            store_padded_ends(padded_offs_ptr, offs_ptr, M, G, G_POW2)
    padded_k = (K + 127) // 128 * 128 if BLOCKED else K
    col_tiles = tl.maximum(tl.cdiv(padded_k, BLOCK_K), 1)
    tile = pid // col_tiles
    first_col = pid % col_tiles * BLOCK_K

    # 2. Coordinates: source and destination of each of its blocks.
    MP = aligned(MP, ALIGNED)
    src, live_end, _, dst, dst_end, first_unit, units = block_rows(tile, offs_ptr, M, MP, G, G_POW2, GROUPED, NB)

    # 3. Load; what is not data is zero.
    x = load_blocks(x_ptr + batch * stride_xb, src, live_end, stride_xm, first_col, K, EVEN_K, BLOCK_K)
    q, byte = quantize_middle(x, E5M2, THRESH, HW)

    # 4. Store.
    blocks = (MP + 31) // 32
    scale_columns = 4 * all_units if BLOCKED else blocks
    store_colwise(
        q_ptr + batch * K * MP,
        scale_ptr + batch * padded_k * scale_columns,
        q,
        byte,
        tile,
        first_col,
        dst,
        dst_end,
        first_unit,
        units,
        all_units,
        K,
        MP,
        blocks,
        BLOCKED,
        NB,
        BLOCK_K,
    )


def quantize_colwise(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract.

    bf16 and fp16 with 16-byte rows on sm_90 and later go to the Gluon form, which gives the same bytes.
    """
    if gluon_colwise.supported(x, offs, blocked, elem_dtype, device.capability(x.device)):
        return gluon_colwise.quantize_colwise(x, offs, blocked, elem_dtype, scale_mode)
    return quantize_colwise_triton(x, offs, blocked, elem_dtype, scale_mode)


def quantize_colwise_triton(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of this file: any input, any chip, the interpreter."""
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    *_, m, k = x.shape
    batch = x.shape[0] if x.ndim == 3 else 1
    q, scale, padded = colwise_outputs(x, offs, blocked, elem_dtype)
    if not (q.numel() or scale.numel() or padded.numel()):
        return q, scale, padded
    block_m, block_k, warps = TILE_BLOCKED if blocked else TILE
    mp = q.shape[-2]
    groups = None if offs is None else offs.shape[0]
    tiles = row_units(m, groups, block_m)
    col_tiles = shapes.cdiv(shapes.round_up(k, SF_ROWS) if blocked else k, block_k)
    grid = batch_grid(tiles * max(col_tiles, 1), batch)
    _quantize_colwise_kernel[grid](
        q.mT.view(torch.uint8),
        scale if blocked else scale.mT,
        padded if offs is not None else None,
        x,
        offs,
        m,
        mp,
        k,
        groups or 1,
        tiles - (groups is not None),
        batch,
        x.stride(0) if x.ndim == 3 else 0,
        x.stride(-2),
        G_POW2=triton.next_power_of_2(groups or 1),
        GROUPED=offs is not None,
        BLOCKED=blocked,
        EVEN_K=k > 0 and k % (max(block_k, SF_ROWS) if blocked else block_k) == 0,
        ALIGNED=mp % 16 == 0,
        NB=block_m // BLOCK,
        BLOCK_K=block_k,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )
    return q, scale, padded


def colwise_outputs(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized qdata, scale and padded ends of a colwise result."""
    groups = None if offs is None else offs.shape[0]
    q_shape, scale_shape = shapes.colwise(x.shape) if groups is None else shapes.colwise_groups(*x.shape, groups)
    scale_strides = shapes.column_major(scale_shape)
    if blocked:
        scale_shape = shapes.colwise_blocked_scale(x.shape, groups)
        scale_strides = shapes.row_major(scale_shape)
    return (
        torch.empty_strided(q_shape, shapes.column_major(q_shape), dtype=elem_dtype, device=x.device),
        torch.empty_strided(scale_shape, scale_strides, dtype=torch.uint8, device=x.device),
        torch.empty(groups or 0, dtype=torch.int32, device=x.device),
    )


def row_units(m: int, groups: int | None, unit: int) -> int:
    """Row tiles of a grid over units of x; with groups the upper bound and one more, see ``_blocks.py``."""
    return shapes.cdiv(m, unit) if groups is None else (m + (unit - 1) * groups) // unit + 1
