"""Quantize weights in 32x32 tiles, one scale each: valid MX in both directions, one copy of W serves fprop and dgrad.

    x (M, K)                      qdata (M, K), row- or column-major     scale (ceil(M/32), ceil(K/32))
           BLOCK_K
         +----+----+----+            +----+----+----+                      +-+-+-+
      32 | 0  | 1  | 2  |   ---->    | 0  | 1  | 2  |          +           |0|1|2|
         +----+----+----+            +----+----+----+                      +-+-+-+

Grid     (row tiles * column tiles, batch), columns fastest.
Writes   every byte of qdata and scale once.
Traffic  bf16: 2 bytes read, 1 + 1/1024 written per element.
Index    int64 for rows, columns of a column-major result, and the batch.
Source   OCP MX 1.0; ``docs/numerics.md``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from ..formats import BLOCK
from ._blocks import aligned, batch_grid, batch_index
from ._e8m0 import constants, quantize_tile
from .quantize_colwise import load_blocks

# (BLOCK_M, BLOCK_K, num_warps)
TILE = (32, 128, 4)
TILE_COLUMN_MAJOR = (64, 32, 2)


@triton.jit(do_not_specialize=["B", "M"])
def _quantize_square_kernel(
    q_ptr,  # (B, M, K) uint8, contiguous; COLUMN_MAJOR: (B, K, M)
    scale_ptr,  # (B, ceil(M/32), ceil(K/32)) uint8
    x_ptr,  # (B, M, K), last stride 1
    M,
    K,
    B,
    stride_xb,
    stride_xm,
    COLUMN_MAJOR: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    ALIGNED: tl.constexpr,  # M is a multiple of 16
    NB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 1. Which tile am I?
    NK: tl.constexpr = BLOCK_K // 32
    pid = tl.program_id(0)
    batch = batch_index(B)
    col_tiles = tl.cdiv(K, BLOCK_K)
    tile = pid // col_tiles
    first_col = pid % col_tiles * BLOCK_K

    # 2. Coordinates.
    M = aligned(M, ALIGNED)
    src = tl.multiple_of(32 * (tile * NB + tl.arange(0, NB)), 32)
    rows = (src[:, None] + tl.arange(0, 32)[None, :])[:, :, None]
    cols = (first_col + tl.arange(0, BLOCK_K))[None, None, :]

    # 3. Load; what is not data is zero.
    x = load_blocks(x_ptr + batch * stride_xb, src, M, stride_xm, first_col, K, EVEN_K, BLOCK_K)
    q, byte = quantize_tile(x, E5M2, THRESH, HW)

    # 4. Store.
    if COLUMN_MAJOR:
        at = batch * K * M + cols.to(tl.int64) * M + rows
    else:
        at = (batch * M + rows) * K + cols
    tl.store(q_ptr + at, q, mask=(rows < M) & (cols < K))
    b = (tile * NB + tl.arange(0, NB))[:, None]
    c = (first_col // 32 + tl.arange(0, NK))[None, :]
    K32 = (K + 31) // 32
    M32 = (M + 31) // 32
    tl.store(scale_ptr + (batch * M32 + b) * K32 + c, byte.to(tl.uint8), mask=(b < M32) & (c < K32))


def quantize_square(x: Tensor, column_major: bool, elem_dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor]:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract."""
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    *_, m, k = x.shape
    batch = x.shape[0] if x.ndim == 3 else 1
    q_shape, scale_shape = shapes.square(x.shape)
    strides = shapes.column_major(q_shape) if column_major else shapes.row_major(q_shape)
    q = torch.empty_strided(q_shape, strides, dtype=elem_dtype, device=x.device)
    scale = torch.empty(scale_shape, dtype=torch.uint8, device=x.device)
    if not q.numel():
        return q, scale
    block_m, block_k, warps = TILE_COLUMN_MAJOR if column_major else TILE
    grid = batch_grid(shapes.cdiv(m, block_m) * shapes.cdiv(k, block_k), batch)
    _quantize_square_kernel[grid](
        (q.mT if column_major else q).view(torch.uint8),
        scale,
        x,
        m,
        k,
        batch,
        x.stride(0) if x.ndim == 3 else 0,
        x.stride(-2),
        COLUMN_MAJOR=column_major,
        EVEN_K=k % block_k == 0,
        ALIGNED=m % 16 == 0,
        NB=block_m // BLOCK,
        BLOCK_K=block_k,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )
    return q, scale
