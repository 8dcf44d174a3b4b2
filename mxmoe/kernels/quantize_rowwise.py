"""Quantize along the last dim: blocks of 1x32, scales plain or in the 128x4 blocked layout.

    x (M, K)                           qdata (M, K) fp8          scale (M, K32) uint8
              BLOCK_K                          BLOCK_K                  BLOCK_K / 32
         +----------------+               +----------------+         +----+
 BLOCK_M | 32 | 32 | 32 | |     ---->     |                |    +    |    |
         +----------------+               +----------------+         +----+
           one scale each

    blocked scales: a tile is 8 rows of one 128-row unit, two adjacent ones in each quarter: r, r+1, r+32, r+33, ...
    Their scales are 2 x 16 bytes of every 512-byte tile: whole 32-byte sectors. Units restart at every group.

Grid     (row tiles * column tiles / STEPS, batch), columns fastest; a program does STEPS column tiles of its rows, so
         the search for its group is paid once. Blocked with groups: as many units as ``_blocks.py`` says.
Writes   every byte of qdata and scale once: 0 in rows of no group (scale byte too), in padding and slack of scales.
Traffic  bf16: 2 bytes read, 1 + 1/32 written per element.
Index    int64 for rows, tiles and the batch.
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
from ._blocks import NONE, batch_grid, batch_index, find_unit
from ._e8m0 import constants, quantize_last
from ._groups import last_end
from ._tiles import SF_TILE, tile_byte

# (BLOCK_M, BLOCK_K, STEPS, num_warps); BLOCK_K a multiple of 128: a tile holds whole columns of blocked tiles.
TILE = (8, 512, 1, 4)
TILE_GROUPS = (8, 256, 4, 2)  # blocked scales of M groups, 128 groups: 0.97 of a copy at (131072, 7168) (8 x 512: 0.89;
# 32 x 256: 0.98), 0.84 at (16384, 5120), where groups fill their tiles of 128 rows by half (32 x 256: 0.69).


@triton.jit(do_not_specialize=["B", "M", "G", "units"])
def _quantize_rowwise_kernel(
    q_ptr,  # (B, M, K) uint8, contiguous
    scale_ptr,  # (B, M, K32) uint8, contiguous; or blocked, (B, row units, col_tiles, 512)
    x_ptr,  # (B, M, K), last stride 1
    offs_ptr,  # (G,) int32 or None
    M,
    K,
    G,
    units,  # 128-row units of the blocked scale of one matrix
    B,
    stride_xb,
    stride_xm,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKED: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K * STEPS
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 1. Which rows and columns are mine?
    NK: tl.constexpr = BLOCK_K // 32
    pid = tl.program_id(0)
    batch = batch_index(B)
    col_programs = tl.cdiv(K, BLOCK_K * STEPS)
    tile = pid // col_programs
    first_col = (pid % col_programs) * (BLOCK_K * STEPS)
    i = tl.arange(0, BLOCK_M)
    K32 = (K + 31) // 32

    # 2. Coordinates: rows of x, how far they are data, how far they are mine to write.
    if BLOCKED:
        PER_UNIT: tl.constexpr = 128 // BLOCK_M
        QUARTER: tl.constexpr = BLOCK_M // 4
        unit = tile // PER_UNIT
        r = (tile % PER_UNIT) * QUARTER + (i % QUARTER) + 32 * (i // QUARTER)
        if GROUPED:
            start, end, first_unit, _, _ = find_unit(unit, offs_ptr, M, G, G_POW2, 128)
            rows = start + (unit - first_unit) * 128 + r
            live_end = tl.where(end == NONE, 0, end)
            keep_end = tl.where(end == NONE, M, end)
        else:
            rows = unit * 128 + r
            live_end = M
            keep_end = M
    else:
        rows = tile * BLOCK_M + i
        keep_end = M
        live_end = M
        if GROUPED:
            live_end = last_end(offs_ptr, G, M, G_POW2)
    live = (rows < live_end)[:, None]
    keep = (rows < keep_end)[:, None]
    row = rows.to(tl.int64)[:, None]
    x_row = x_ptr + batch * stride_xb + row * stride_xm
    q_row = q_ptr + (batch * M + row) * K
    if BLOCKED:
        col_tiles = (K32 + 3) // 4
        scale_row = scale_ptr + (batch * units + unit) * col_tiles * SF_TILE + tile_byte(r, 0)[:, None]
        scale_keep = unit < units
    else:
        scale_row = scale_ptr + (batch * M + row) * K32

    for step in tl.range(STEPS):
        # 3. Load; what is not data is zero: it adds nothing to a block and gives byte 0.
        col = first_col + step * BLOCK_K
        cols = (col + tl.arange(0, BLOCK_K))[None, :]
        if EVEN_K:
            x = tl.load(x_row + cols, mask=live, other=0)
        else:
            x = tl.load(x_row + cols, mask=live & (cols < K), other=0)
        q, byte = quantize_last(x, E5M2, THRESH, HW)

        # 4. Store.
        if EVEN_K:
            tl.store(q_row + cols, q, mask=keep)
        else:
            tl.store(q_row + cols, q, mask=keep & (cols < K))
        c = (col // 32 + tl.arange(0, NK))[None, :]
        if BLOCKED:
            tl.store(scale_row + (c // 4) * SF_TILE + c % 4, byte.to(tl.uint8), mask=scale_keep & (c < col_tiles * 4))
        else:
            tl.store(scale_row + c, byte.to(tl.uint8), mask=keep & (c < K32))


def quantize_rowwise(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract.

    Blocked scales of groups: bf16 and fp16 with 16-byte rows go to the Gluon form on sm_90 and later, whose tiles hold
    parts of several groups, so that short groups leave none half empty. It gives the same bytes.
    """
    if blocked and offs is not None and gluon_both.supported(x, offs, True, elem_dtype, device.capability(x.device)):
        return gluon_both.quantize_rowwise(x, offs, True, elem_dtype, scale_mode)
    return quantize_rowwise_triton(x, offs, blocked, elem_dtype, scale_mode)


def quantize_rowwise_triton(
    x: Tensor, offs: Tensor | None, blocked: bool, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    """The kernel of this file: any input, any chip, the interpreter."""
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    *_, m, k = x.shape
    batch = x.shape[0] if x.ndim == 3 else 1
    groups = None if offs is None else offs.shape[0]
    q_shape, scale_shape = shapes.rowwise(x.shape)
    if blocked:
        scale_shape = shapes.rowwise_blocked_scale(x.shape, groups)
    q = torch.empty(q_shape, dtype=elem_dtype, device=x.device)
    scale = torch.empty(scale_shape, dtype=torch.uint8, device=x.device)
    if not q.numel() and not scale.numel():
        return q, scale
    units = 0
    if blocked:
        units = shapes.cdiv(m, SF_ROWS) if groups is None else shapes.blocked_m_groups(m, 1, groups)[0] // SF_ROWS
    block_m, block_k, steps, warps = TILE_GROUPS if blocked and groups is not None else TILE
    steps = min(steps, shapes.cdiv(k, block_k))
    row_tiles = shapes.cdiv(m, block_m)
    if blocked:
        row_tiles = (units + (groups is not None)) * (SF_ROWS // block_m)
    width = block_k * steps
    _quantize_rowwise_kernel[batch_grid(row_tiles * shapes.cdiv(k, width), batch)](
        q.view(torch.uint8),
        scale,
        x,
        offs,
        m,
        k,
        groups or 1,
        units,
        batch,
        x.stride(0) if x.ndim == 3 else 0,
        x.stride(-2),
        G_POW2=triton.next_power_of_2(groups or 1),
        GROUPED=groups is not None,
        BLOCKED=blocked,
        EVEN_K=k % width == 0,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        STEPS=steps,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )
    return q, scale


assert TILE[1] % (4 * BLOCK) == 0
assert TILE_GROUPS[1] % (4 * BLOCK) == 0
