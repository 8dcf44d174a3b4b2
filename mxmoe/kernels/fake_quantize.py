"""Quantize and dequantize in one pass: the values a GEMM sees, in bf16 (or fp16, fp32), row-major, in x's row order.

    x (M, K)                        rowwise (M, K)              colwise (M, K)
           BLOCK_K                     BLOCK_K                     BLOCK_K
         +---------+                 +---------+                 +---------+
      32 |  block  |     ---->       |32|32|32 |       and/or    | 32      |
         +---------+                 +---------+                 +---------+

    Colwise blocks restart at every group (``_blocks.py``); nothing is padded, since the result is no fp8 operand.

Grid     (row tiles * column tiles / STEPS, batch), columns fastest; a program does STEPS column tiles of its rows, so
         the search for its group is paid once.
Writes   every element of the result once; rows of no group are zero.
Traffic  bf16: 2 bytes read, 2 written per element and direction. bf16 to bf16 runs on words of two (``_packed.py``).
Index    int64 for rows and the batch.
Source   OCP MX 1.0; ``docs/numerics.md``. e4m3 times 2**s is exact in bf16 for s in -124..119.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shapes
from ..formats import BLOCK
from ._blocks import batch_grid, batch_index, block_rows
from ._e8m0 import constants, elem_value, quantize_last, quantize_middle, quantize_tile, scale_value
from ._groups import last_end
from ._packed import in_words, round_word_last, round_word_rows, round_word_tile
from .quantize_colwise import load_blocks, row_units

# (BLOCK_M, BLOCK_K, STEPS, num_warps); _GROUPS: with offs.
TILE_ROWWISE = (8, 512, 1, 4)
TILE_ROWWISE_GROUPS = (8, 512, 1, 4)
# Measured on an H200, 2026-11-30, share of a copy at (131072, 7168) bf16: colwise 1.00, 0.98 with 1 or 128 groups
# (four warps: 0.76; STEPS = 4: 0.90); both 0.97, with 1 group 0.97, with 128 groups 0.93 (four warps: 0.74).
TILE_COLWISE = (32, 128, 1, 2)
TILE_COLWISE_GROUPS = (32, 64, 1, 1)
TILE_BOTH = (32, 128, 1, 4)
TILE_BOTH_GROUPS = (32, 128, 1, 4)
TILE_BOTH_MANY_GROUPS = (32, 64, 1, 1)
MANY_GROUPS = 32
TILE_SQUARE = (32, 128, 1, 4)

# In words of two bf16: (BLOCK_W, num_warps). H200, 2026-12-01, TB/s of 4.29 copied, (131072, 7168): colwise 4.26, 4.26
# with 8 groups; both 4.12, 4.12 (one warp x 32 words: 3.90; 128 x 8 warps with groups: 3.73). Alone the fp32 form is
# as fast (4.31, 4.20; 4.19, 3.97). Between GEMMs it is not: the chip is at its power limit then and its clock low, and
# a step at (131072, 2048, 7168, 8) took 2156 us of casts, 19.3 ms in all, against 1862 us and 18.4 ms in words.
TILE_WORDS = (64, 4)

KINDS = {"colwise": 0, "both": 1, "square": 2}


@triton.jit(do_not_specialize=["B", "M", "G"])
def _fake_rowwise_kernel(
    out_ptr,  # (B, M, K), last stride 1; int32 if WORDS
    x_ptr,  # (B, M, K), last stride 1; int32 if WORDS
    offs_ptr,  # (G,) int32 or None
    M,
    K,  # columns; words if WORDS
    G,
    B,
    stride_ob,
    stride_om,
    stride_xb,
    stride_xm,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    WORDS: tl.constexpr,  # x and the result in words of two bf16
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
    first_col = (pid % col_programs) * (BLOCK_K * STEPS)

    # 2. Coordinates.
    rows = (pid // col_programs * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    live_end = M
    if GROUPED:
        live_end = last_end(offs_ptr, G, M, G_POW2)
    x_row = x_ptr + batch * stride_xb + rows.to(tl.int64) * stride_xm
    out_row = out_ptr + batch * stride_ob + rows.to(tl.int64) * stride_om

    for step in tl.range(STEPS):
        # 3. Load; what is not data is zero.
        cols = (first_col + step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        live = rows < live_end
        keep = rows < M
        if not EVEN_K:
            live = live & (cols < K)
            keep = keep & (cols < K)
        x = tl.load(x_row + cols, mask=live, other=0)
        if WORDS:
            y = round_word_last(x, E5M2, THRESH, HW)
        else:
            q, byte = quantize_last(x, E5M2, THRESH, HW)
            q = tl.reshape(q, (BLOCK_M, NK, 32))
            y = tl.reshape(elem_value(q, E5M2, HW) * scale_value(byte)[:, :, None], (BLOCK_M, BLOCK_K))

        # 4. Store.
        tl.store(out_row + cols, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["B", "M", "G"])
def _fake_words_kernel(
    row_ptr,  # (B, M, W) int32: rowwise result (KIND 1)
    out_ptr,  # (B, M, W) int32: colwise or square result
    x_ptr,  # (B, M, W) int32: words of two bf16
    offs_ptr,  # (G,) int32 or None
    M,
    W,  # words of a row
    G,
    B,
    stride_ob,
    stride_om,
    stride_xb,
    stride_xm,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    KIND: tl.constexpr,  # 0 colwise, 1 both, 2 square
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    EVEN_W: tl.constexpr,  # W is a multiple of BLOCK_W
    BLOCK_W: tl.constexpr,
):
    # 1. Which tile is mine? 32 rows of one group.
    pid = tl.program_id(0)
    batch = batch_index(B)
    col_programs = tl.cdiv(W, BLOCK_W)
    src, live_end, keep_end, _, _, _, _ = block_rows(pid // col_programs, offs_ptr, M, M, G, G_POW2, GROUPED, 1)

    # 2. Coordinates.
    rows = (tl.max(src, 0) + tl.arange(0, 32))[:, None]
    cols = (pid % col_programs * BLOCK_W + tl.arange(0, BLOCK_W))[None, :]
    live = rows < live_end
    keep = rows < keep_end
    if not EVEN_W:
        live = live & (cols < W)
        keep = keep & (cols < W)

    # 3. Load; what is not data is zero.
    w = tl.load(x_ptr + batch * stride_xb + rows.to(tl.int64) * stride_xm + cols, mask=live, other=0)

    # 4. Round, store.
    out = batch * stride_ob + rows.to(tl.int64) * stride_om + cols
    if KIND == 1:
        tl.store(row_ptr + out, round_word_last(w, E5M2, THRESH, HW), mask=keep)
    if KIND == 2:
        w = round_word_tile(w, E5M2, THRESH, HW)
    else:
        w = round_word_rows(w, E5M2, THRESH, HW)
    tl.store(out_ptr + out, w, mask=keep)


@triton.jit(do_not_specialize=["B", "M", "G"])
def _fake_blocks_kernel(
    row_ptr,  # (B, M, K), last stride 1: rowwise result (KIND 1)
    out_ptr,  # (B, M, K), last stride 1: colwise or square result
    x_ptr,  # (B, M, K), last stride 1
    offs_ptr,  # (G,) int32 or None
    M,
    K,
    G,
    B,
    stride_ob,
    stride_om,
    stride_xb,
    stride_xm,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    KIND: tl.constexpr,  # 0 colwise, 1 both, 2 square
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K * STEPS
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

    # 2. Coordinates: rows of x of each block; slack blocks take the rows of no group.
    src, live_end, keep_end, _, _, _, _ = block_rows(tile, offs_ptr, M, M, G, G_POW2, GROUPED, NB)
    rows = (src[:, None] + tl.arange(0, 32)[None, :])[:, :, None]
    out_row = batch * stride_ob + rows.to(tl.int64) * stride_om

    for step in tl.range(STEPS):
        # 3. Load; what is not data is zero.
        first_col = (pid % col_programs * STEPS + step) * BLOCK_K
        x = load_blocks(x_ptr + batch * stride_xb, src, live_end, stride_xm, first_col, K, EVEN_K, BLOCK_K)

        # 4. Quantize, expand, store.
        cols = (first_col + tl.arange(0, BLOCK_K))[None, None, :]
        keep = rows < keep_end
        if not EVEN_K:
            keep = keep & (cols < K)
        if KIND == 1:
            q, byte = quantize_last(tl.reshape(x, (NB * 32, BLOCK_K)), E5M2, THRESH, HW)
            q = tl.reshape(q, (NB * 32, NK, 32))
            y = tl.reshape(elem_value(q, E5M2, HW) * scale_value(byte)[:, :, None], (NB, 32, BLOCK_K))
            tl.store(row_ptr + out_row + cols, y.to(row_ptr.dtype.element_ty), mask=keep)
        if KIND == 2:
            q, byte = quantize_tile(x, E5M2, THRESH, HW)
            q = tl.reshape(q, (NB, 32, NK, 32))
            y = tl.reshape(elem_value(q, E5M2, HW) * scale_value(byte)[:, None, :, None], (NB, 32, BLOCK_K))
        else:
            q, byte = quantize_middle(x, E5M2, THRESH, HW)
            y = elem_value(q, E5M2, HW) * scale_value(byte)[:, None, :]
        tl.store(out_ptr + out_row + cols, y.to(out_ptr.dtype.element_ty), mask=keep)


def fake_quantize(
    x: Tensor,
    block: str,
    offs: Tensor | None,
    elem_dtype: torch.dtype,
    scale_mode: str,
    out_dtype: torch.dtype,
    *,
    row_stride: int | None = None,
) -> Tensor:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract.

    ``row_stride``: elements from row to row of the result, if it must be more than K (16-byte rows of a TMA operand).
    """
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    out = row_major_output(x.shape, out_dtype, x.device, row_stride)
    if not out.numel():
        return out
    if block != "rowwise" and in_words(x, out):
        _launch_words(KINDS[block], None, out, x, offs, elem_dtype, scale_mode)
        return out
    if block != "rowwise":
        tile = TILE_SQUARE if block == "square" else TILE_COLWISE if offs is None else TILE_COLWISE_GROUPS
        _launch_blocks(KINDS[block], None, out, x, offs, elem_dtype, scale_mode, tile)
        return out
    block_m, block_k, steps, warps = TILE_ROWWISE if offs is None else TILE_ROWWISE_GROUPS
    words = in_words(x, out)
    result = out
    if words:
        block_k, x, out = block_k // 2, x.view(torch.int32), out.view(torch.int32)
    *_, m, k = x.shape
    steps = min(steps, shapes.cdiv(k, block_k))
    batch = x.shape[0] if x.ndim == 3 else 1
    grid = batch_grid(shapes.cdiv(m, block_m) * shapes.cdiv(k, block_k * steps), batch)
    _fake_rowwise_kernel[grid](
        out,
        x,
        offs,
        m,
        k,
        1 if offs is None else offs.shape[0],
        batch,
        out.stride(0) if x.ndim == 3 else 0,
        out.stride(-2),
        x.stride(0) if x.ndim == 3 else 0,
        x.stride(-2),
        G_POW2=1 if offs is None else triton.next_power_of_2(offs.shape[0]),
        GROUPED=offs is not None,
        WORDS=words,
        EVEN_K=k % (block_k * steps) == 0,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        STEPS=steps,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )
    return result


def fake_quantize_both(
    x: Tensor,
    offs: Tensor | None,
    elem_dtype: torch.dtype,
    scale_mode: str,
    out_dtype: torch.dtype,
    *,
    row_stride: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch. Arguments are already checked by ``mxmoe.ops``; ``row_stride`` as for :func:`fake_quantize`."""
    x = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    row = row_major_output(x.shape, out_dtype, x.device, row_stride)
    col = row_major_output(x.shape, out_dtype, x.device, row_stride)
    if row.numel() and in_words(x, row):
        _launch_words(KINDS["both"], row, col, x, offs, elem_dtype, scale_mode)
    elif row.numel():
        tile = TILE_BOTH
        if offs is not None:
            tile = TILE_BOTH_MANY_GROUPS if offs.shape[0] > MANY_GROUPS else TILE_BOTH_GROUPS
        _launch_blocks(KINDS["both"], row, col, x, offs, elem_dtype, scale_mode, tile)
    return row, col


def _launch_words(
    kind: int,
    row: Tensor | None,
    out: Tensor,
    x: Tensor,
    offs: Tensor | None,
    elem_dtype: torch.dtype,
    scale_mode: str,
) -> None:
    block_w, warps = TILE_WORDS
    *_, m, k = x.shape
    groups = None if offs is None else offs.shape[0]
    batch = x.shape[0] if x.ndim == 3 else 1
    strides = [s // 2 for t in (out, x) for s in (t.stride(0) if t.ndim == 3 else 0, t.stride(-2))]
    grid = batch_grid(row_units(m, groups, BLOCK) * shapes.cdiv(k // 2, block_w), batch)
    _fake_words_kernel[grid](
        None if row is None else row.view(torch.int32),
        out.view(torch.int32),
        x.view(torch.int32),
        offs,
        m,
        k // 2,
        groups or 1,
        batch,
        *strides,
        G_POW2=triton.next_power_of_2(groups or 1),
        GROUPED=offs is not None,
        KIND=kind,
        EVEN_W=k // 2 % block_w == 0,
        BLOCK_W=block_w,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )


def _launch_blocks(
    kind: int,
    row: Tensor | None,
    out: Tensor,
    x: Tensor,
    offs: Tensor | None,
    elem_dtype: torch.dtype,
    scale_mode: str,
    tile: tuple[int, int, int, int],
) -> None:
    block_m, block_k, steps, warps = tile
    *_, m, k = x.shape
    steps = min(steps, shapes.cdiv(k, block_k))
    groups = None if offs is None else offs.shape[0]
    batch = x.shape[0] if x.ndim == 3 else 1
    grid = batch_grid(row_units(m, groups, block_m) * shapes.cdiv(k, block_k * steps), batch)
    _fake_blocks_kernel[grid](
        row,
        out,
        x,
        offs,
        m,
        k,
        groups or 1,
        batch,
        out.stride(0) if x.ndim == 3 else 0,
        out.stride(-2),
        x.stride(0) if x.ndim == 3 else 0,
        x.stride(-2),
        G_POW2=triton.next_power_of_2(groups or 1),
        GROUPED=offs is not None,
        KIND=kind,
        EVEN_K=k % (block_k * steps) == 0,
        NB=block_m // BLOCK,
        BLOCK_K=block_k,
        STEPS=steps,
        num_warps=warps,
        **constants(elem_dtype, scale_mode, x.device),
    )


def row_major_output(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, row_stride: int | None
) -> Tensor:
    """Uninitialized row-major result; ``row_stride`` elements from row to row."""
    *lead, k = shape
    return torch.empty((*lead, row_stride or k), dtype=dtype, device=device)[..., :k]
