"""Quantize along both dims with one read of x: the results of ``quantize_rowwise`` and ``quantize_colwise``.

    x (M, K)                    q_row (M, K)             q_col.t() (K, Mp)
           BLOCK_K                  BLOCK_K                  NB * 32
         +---------+              +---------+              +---------+
      32 |  block  |    ---->     |32|32|32 |      +       | 32      |
         +---------+              +---------+      BLOCK_K |         |
                                                           +---------+

    A tile holds whole blocks of both kinds: NB blocks of 32 rows, one unit of one group (``_blocks.py``), and
    BLOCK_K / 32 blocks of 32 columns. Rows of no group belong to slack tiles, which write zeros there.
    Blocked scales: the unit is 128 rows, for both scales.

Grid     (row tiles * column tiles, batch), columns fastest.
Writes   every byte of all five outputs once.
Traffic  bf16: 2 bytes read, 2 + 2/32 written per element.
Index    int64 for rows, columns of the colwise result and the batch.
Source   OCP MX 1.0; ``docs/numerics.md``; blocked layout: ``docs/layouts.md``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import device, shapes
from ..formats import BLOCK, SF_ROWS
from . import gluon_both
from ._blocks import aligned, batch_grid, batch_index, block_rows, store_padded_ends
from ._e8m0 import constants, quantize_last, quantize_middle
from ._tiles import SF_TILE, tile_byte
from .quantize_colwise import colwise_outputs, load_blocks, row_units, store_colwise

# (BLOCK_M, BLOCK_K, num_warps); BLOCK_K a multiple of 128: a tile holds whole columns of blocked tiles.
TILE = (32, 128, 4)
TILE_BLOCKED = (SF_ROWS, 128, 8)


@triton.jit(do_not_specialize=["B", "M", "MP", "G", "all_units"])
def _quantize_both_kernel(
    q_row_ptr,  # (B, M, K) uint8, contiguous
    s_row_ptr,  # (B, M, K32) uint8, contiguous; or blocked, (B, units, col_tiles, 512)
    q_col_ptr,  # (B, K, MP) uint8, contiguous
    s_col_ptr,  # (B, K, MP/32) uint8, contiguous; or blocked, (B, 512 * row tiles * units)
    padded_offs_ptr,  # (G,) int32 or None
    x_ptr,  # (B, M, K), last stride 1
    offs_ptr,  # (G,) int32 or None
    M,
    MP,
    K,
    G,
    all_units,  # 128-row units of the blocked scales of one matrix
    B,
    stride_xb,
    stride_xm,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKED: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    ALIGNED: tl.constexpr,  # MP is a multiple of 16
    NB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 1. Which tile am I?
    NK: tl.constexpr = BLOCK_K // 32
    pid = tl.program_id(0)
    batch = batch_index(B)
    if GROUPED:  # noqa: SIM102
        if pid == 0:
            store_padded_ends(padded_offs_ptr, offs_ptr, M, G, G_POW2)
    K32 = (K + 31) // 32
    padded_k = (K + 127) // 128 * 128 if BLOCKED else K
    col_tiles = tl.maximum(tl.cdiv(padded_k, BLOCK_K), 1)
    tile = pid // col_tiles
    first_col = pid % col_tiles * BLOCK_K

    # 2. Coordinates: source and destination of each of its blocks.
    MP = aligned(MP, ALIGNED)
    src, live_end, keep_end, dst, dst_end, first_unit, units = block_rows(tile, offs_ptr, M, MP, G, G_POW2, GROUPED, NB)

    # 3. Load; what is not data is zero.
    x = load_blocks(x_ptr + batch * stride_xb, src, live_end, stride_xm, first_col, K, EVEN_K, BLOCK_K)

    # 4. Store: first the rowwise half,
    q, byte = quantize_last(tl.reshape(x, (NB * 32, BLOCK_K)), E5M2, THRESH, HW)
    q = tl.reshape(q, (NB, 32, BLOCK_K))
    byte = tl.reshape(byte.to(tl.uint8), (NB, 32, NK))
    r = tl.arange(0, 32)[None, :, None]
    rows = src[:, None, None] + r
    keep = rows < keep_end
    row = batch * M + rows
    cols = (first_col + tl.arange(0, BLOCK_K))[None, None, :]
    c = (first_col // 32 + tl.arange(0, NK))[None, None, :]
    tl.store(q_row_ptr + row * K + cols, q, mask=keep & (cols < K))
    if BLOCKED:
        tiles_k = (K + 127) // 128
        unit_ptr = s_row_ptr + (batch * all_units + tile) * tiles_k * SF_TILE
        at = (c // 4) * SF_TILE + tile_byte(32 * tl.arange(0, NB)[:, None, None] + r, c % 4)
        tl.store(unit_ptr + at, byte, mask=(c < tiles_k * 4) & (tile < all_units))
    else:
        tl.store(s_row_ptr + row * K32 + c, byte, mask=keep & (c < K32))

    #    then the colwise half.
    q, byte = quantize_middle(x, E5M2, THRESH, HW)
    blocks = (MP + 31) // 32
    scale_columns = 4 * all_units if BLOCKED else blocks
    store_colwise(
        q_col_ptr + batch * K * MP,
        s_col_ptr + batch * padded_k * scale_columns,
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


def quantize_both(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract.

    bf16 and fp16 with 16-byte rows on sm_90 and later go to the Gluon form, which gives the same bytes.
    """
    if gluon_both.supported(x, offs, blocked, elem_dtype, device.capability(x.device)):
        return gluon_both.quantize_both(x, offs, blocked, elem_dtype, scale_mode)
    return quantize_both_triton(x, offs, blocked, elem_dtype, scale_mode)


def quantize_both_triton(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel of this file: any input, any chip, the interpreter."""
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    *_, m, k = x.shape
    batch = x.shape[0] if x.ndim == 3 else 1
    groups = None if offs is None else offs.shape[0]
    q_shape, scale_shape = shapes.rowwise(x.shape)
    if blocked:
        scale_shape = shapes.rowwise_blocked_scale(x.shape, groups)
    q_row = torch.empty(q_shape, dtype=elem_dtype, device=x.device)
    s_row = torch.empty(scale_shape, dtype=torch.uint8, device=x.device)
    q_col, s_col, padded = colwise_outputs(x, offs, blocked, elem_dtype)
    if not any(t.numel() for t in (q_row, s_row, q_col, s_col, padded)):
        return q_row, s_row, q_col, s_col, padded
    block_m, block_k, warps = TILE_BLOCKED if blocked else TILE
    mp = q_col.shape[-2]
    tiles = row_units(m, groups, block_m)
    grid = batch_grid(tiles * max(shapes.cdiv(k, block_k), 1), batch)
    _quantize_both_kernel[grid](
        q_row.view(torch.uint8),
        s_row,
        q_col.mT.view(torch.uint8),
        s_col if blocked else s_col.mT,
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
        EVEN_K=k > 0 and k % block_k == 0,
        ALIGNED=mp % 16 == 0,
        NB=block_m // BLOCK,
        BLOCK_K=block_k,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )
    return q_row, s_row, q_col, s_col, padded
