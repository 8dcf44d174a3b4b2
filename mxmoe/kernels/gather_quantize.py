"""Tokens to expert-sorted rows, rounded to MXFP8 on the way: along the row, or along the rows of each group.

    along the row: by token                          along the rows: by 32 rows of a group
         x (T, H)              out (M, H)                 x (T, H)              out (M, H)
         BLOCK_H                                                                     BLOCK_H
        +-------+   choice 0  +-------+                  +-------+                  +-------+
      t | round | ----------> |       |                  | t3    | ---------------> | t3    |
        | once  | --------\\   +-------+                  | t9    |   32 rows that   | t9    | one scale per column
        +-------+  ch. 1   \\> |       |                  | t1    |   one expert got | t1    |
                              +-------+                  +-------+                  +-------+

Grid     rows: token tiles * column tiles, columns fastest. cols: slabs of columns; within one, units of 32 rows; within
         one, column tiles. A slab of x, T * columns * 2 bytes, stays in L2 while its rows are read k times.
Writes   every element of out once; rows at or beyond offs[-1] are zeros.
Traffic  rows: x once, 2 bytes per routed element written. cols: the same from DRAM, k reads of x from L2.
Index    int64 for rows of x and out.
Source   ``mxmoe/reference/moe.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import cdiv
from ._groups import last_end
from ._moe import round_last, round_rows, rounding, unit_rows, unit_table
from ._offline import Case
from ._packed import in_words, round_word_last, round_word_rows

ROWS_TILE = (4, 512, 4)  # (BLOCK_T, BLOCK_H, num_warps)
COLS_TILE = (64, 1, 256)  # (BLOCK_H, num_warps, columns of a slab)
# bf16, rounded in words of two: H200, 2026-12-01, TB/s at 131072 x 2048 | 7168, 2.91 | 3.40; (64, 1, 256) 2.93 | 2.97,
# four warps 2.66 | 3.27, slabs of 512 columns 2.44 | 2.79. In fp32: 2.88 | 2.95.
COLS_WORDS = (128, 1, 256)


@triton.jit(do_not_specialize=["T", "M", "G"])
def _gather_rows_kernel(
    out_ptr,  # (M, H), contiguous
    x_ptr,  # (T, H), last stride 1
    position_ptr,  # (T, k) int32
    weights_ptr,  # (T, k), or None
    offs_ptr,  # (G,) int32
    T,
    H,
    M,
    G,
    top_k,
    stride_xt,
    G_POW2: tl.constexpr,
    ROUND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    WORDS: tl.constexpr,  # x, out and H in words of two bf16
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # 1. Which tokens and columns are mine?
    col_tiles = tl.cdiv(H, BLOCK_H)
    tokens = (tl.program_id(0) // col_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = ((tl.program_id(0) % col_tiles) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    inside = (tokens < T)[:, None] & (cols < H)

    # 2. Load once, round once. Columns beyond H are zeros: they add nothing to a block.
    x = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * stride_xt + cols, mask=inside, other=0)
    if ROUND and WORDS:
        x = round_word_last(x, E5M2, THRESH, HW)
    elif ROUND:
        x = round_last(x, E5M2, THRESH, HW)

    # 3. Store to the row of every choice; rows without an expert get zeros.
    end = last_end(offs_ptr, G, M, G_POW2)
    for j in range(top_k):
        slot = tokens * top_k + j
        row = tl.load(position_ptr + slot, mask=tokens < T, other=-1)
        value = x
        if WEIGHTED:
            value = x.to(tl.float32) * tl.load(weights_ptr + slot, mask=tokens < T, other=0.0).to(tl.float32)[:, None]
        value = tl.where((row < end)[:, None], value.to(out_ptr.dtype.element_ty), 0)
        keep = inside & ((row >= 0) & (row < M))[:, None]
        tl.store(out_ptr + row.to(tl.int64)[:, None] * H + cols, value, mask=keep)


@triton.jit(do_not_specialize=["M", "units"])
def _gather_cols_kernel(
    out_ptr,  # (M, H), contiguous
    x_ptr,  # (T, H), last stride 1
    order_ptr,  # (M,) int32
    units_ptr,  # (units, 2) int32
    H,
    M,
    units,
    top_k,
    stride_xt,
    ROUND: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    WORDS: tl.constexpr,  # x, out and H in words of two bf16
    BLOCK_H: tl.constexpr,
    SLAB: tl.constexpr,
):
    # 1. Which 32 rows of which group? Behind the last group: rows without an expert.
    pid = tl.program_id(0)
    unit = pid // SLAB % units
    tile = pid // (SLAB * units) * SLAB + pid % SLAB
    rows, live, keep = unit_rows(unit, units_ptr, M)
    cols = (tile * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]

    # 2. Load the tokens' rows. Rows that are not data are zeros: they add nothing to a block.
    token = tl.load(order_ptr + rows, mask=live, other=0) // top_k
    x = tl.load(x_ptr + token.to(tl.int64)[:, None] * stride_xt + cols, mask=live[:, None] & (cols < H), other=0)

    # 3. Round along the 32 rows, store.
    if ROUND and WORDS:
        x = round_word_rows(x, E5M2, THRESH, HW)
    elif ROUND:
        x = round_rows(x, E5M2, THRESH, HW)
    value = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * H + cols, value, mask=keep[:, None] & (cols < H))


def gather_rows(
    x: Tensor,
    position: Tensor,
    offs: Tensor,
    weights: Tensor | None,
    elem_dtype: torch.dtype | None,
    scale_mode: str,
    out_dtype: torch.dtype,
    config: tuple[int, int, int] = ROWS_TILE,
) -> Tensor:
    """Launch. ``x (T, H)``, ``position (T, k)``, ``offs (G,)`` -> ``(M, H)``."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (t, h), m, g = x.shape, position.numel(), offs.shape[0]
    out = torch.empty((m, h), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_t, block_h, warps = config
    result, words = out, weights is None and in_words(x, out)
    if words:
        x, out, h, block_h = x.view(torch.int32), out.view(torch.int32), h // 2, block_h // 2
    block_h = min(block_h, max(32, triton.next_power_of_2(h)))
    _gather_rows_kernel[(cdiv(t, block_t) * cdiv(h, block_h),)](
        out,
        x,
        position,
        None if weights is None else weights.contiguous(),
        offs,
        t,
        h,
        m,
        g,
        position.shape[1],
        x.stride(0),
        G_POW2=triton.next_power_of_2(g),
        WEIGHTED=weights is not None,
        WORDS=words,
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        num_warps=warps,
        **rounding(elem_dtype, scale_mode, x.device),
    )
    return result


def gather_cols(
    x: Tensor,
    order: Tensor,
    top_k: int,
    offs: Tensor,
    elem_dtype: torch.dtype | None,
    scale_mode: str,
    out_dtype: torch.dtype,
    config: tuple[int, int, int] | None = None,
) -> Tensor:
    """Launch. ``x (T, H)``, ``order (M,)``, ``offs (G,)`` -> ``(M, H)``."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    h, m = x.shape[1], order.shape[0]
    out = torch.empty((m, h), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    result, words = out, in_words(x, out)
    block_h, warps, slab = config or (COLS_WORDS if words else COLS_TILE)
    if words:
        x, out, h, block_h, slab = x.view(torch.int32), out.view(torch.int32), h // 2, block_h // 2, slab // 2
    block_h = min(block_h, max(32, triton.next_power_of_2(h)))
    slab = max(slab // block_h, 1)
    table = unit_table(m, offs)
    units = table.shape[0]
    _gather_cols_kernel[(units * cdiv(cdiv(h, block_h), slab) * slab,)](
        out,
        x,
        order,
        table,
        h,
        m,
        units,
        top_k,
        x.stride(0),
        WORDS=words,
        BLOCK_H=block_h,
        SLAB=slab,
        num_warps=warps,
        **rounding(elem_dtype, scale_mode, x.device),
    )
    return result


def _case(
    stem: str, elem_dtype: torch.dtype | None, weighted: bool = False, dtype: torch.dtype = torch.bfloat16
) -> object:
    x = torch.zeros(64, 2048, dtype=dtype)
    position, offs = torch.zeros(64, 8, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    if stem == "rows":
        weights = torch.zeros(64, 8, dtype=torch.bfloat16) if weighted else None
        return gather_rows(x, position, offs, weights, elem_dtype, "rceil", torch.bfloat16)
    return gather_cols(x, position.view(-1), 8, offs, elem_dtype, "rceil", torch.bfloat16)


OFFLINE = [
    Case("rows", lambda: _case("rows", torch.float8_e4m3fn)),
    Case("rows, not rounded, weighted", lambda: _case("rows", None, True)),
    Case("cols", lambda: _case("cols", torch.float8_e4m3fn)),
    Case("rows, fp16", lambda: _case("rows", torch.float8_e4m3fn, dtype=torch.float16)),
    Case("cols, fp16", lambda: _case("cols", torch.float8_e4m3fn, dtype=torch.float16)),
]
