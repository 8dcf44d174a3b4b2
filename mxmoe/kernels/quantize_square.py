"""Quantize weights in 32x32 tiles, one scale each: valid MX in both directions, one copy of W serves fprop and dgrad.

    x (M, K)                      qdata (M, K), either order             scale (ceil(M/32), ceil(K/32))
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
    q_ptr,  # (B, M, K) uint8, contiguous, or None
    q_t_ptr,  # (B, K, M) uint8, contiguous, or None
    scale_ptr,  # (B, ceil(M/32), ceil(K/32)) uint8
    x_ptr,  # (B, M, K), last stride 1
    M,
    K,
    B,
    stride_xb,
    stride_xm,
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
    inside = (rows < M) & (cols < K)
    if q_ptr is not None:
        tl.store(q_ptr + (batch * M + rows) * K + cols, q, mask=inside)
    if q_t_ptr is not None:
        tl.store(q_t_ptr + batch * K * M + cols.to(tl.int64) * M + rows, q, mask=inside)
    b = (tile * NB + tl.arange(0, NB))[:, None]
    c = (first_col // 32 + tl.arange(0, NK))[None, :]
    K32 = (K + 31) // 32
    M32 = (M + 31) // 32
    tl.store(scale_ptr + (batch * M32 + b) * K32 + c, byte.to(tl.uint8), mask=(b < M32) & (c < K32))


def _launch(
    q: Tensor | None,
    q_t: Tensor | None,
    scale: Tensor,
    x: Tensor,
    tile: tuple[int, int, int],
    elem_dtype: torch.dtype,
    scale_mode: str,
) -> None:
    """Fill what is given; q and q_t, the transposed q, are contiguous."""
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    *_, m, k = x.shape
    batch = x.shape[0] if x.ndim == 3 else 1
    if not x.numel():
        return
    block_m, block_k, warps = tile
    grid = batch_grid(shapes.cdiv(m, block_m) * shapes.cdiv(k, block_k), batch)
    _quantize_square_kernel[grid](
        None if q is None else q.view(torch.uint8),
        None if q_t is None else q_t.view(torch.uint8),
        scale,
        x,
        m,
        k,
        batch,
        x.stride(0) if x.ndim == 3 else 0,
        x.stride(-2),
        EVEN_K=k % block_k == 0,
        ALIGNED=m % 16 == 0,
        NB=block_m // BLOCK,
        BLOCK_K=block_k,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )


def quantize_square(x: Tensor, column_major: bool, elem_dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor]:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract."""
    q_shape, scale_shape = shapes.square(x.shape)
    strides = shapes.column_major(q_shape) if column_major else shapes.row_major(q_shape)
    q = torch.empty_strided(q_shape, strides, dtype=elem_dtype, device=x.device)
    scale = torch.empty(scale_shape, dtype=torch.uint8, device=x.device)
    if column_major:
        _launch(None, q.mT, scale, x, TILE_COLUMN_MAJOR, elem_dtype, scale_mode)
    else:
        _launch(q, None, scale, x, TILE, elem_dtype, scale_mode)
    return q, scale


def quantize_square_both(x: Tensor, elem_dtype: torch.dtype, scale_mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize_square`` in both orders: qdata row-major, the same column-major, scale. Two launches.

    One launch with both stores, from one read, gave wrong bytes in the column-major result on an H200 where its stores
    are vectors (2026-11-30; right in the interpreter; cause not found): it is not used.
    """
    q, scale = quantize_square(x, False, elem_dtype, scale_mode)
    return q, quantize_square(x, True, elem_dtype, scale_mode)[0], scale
