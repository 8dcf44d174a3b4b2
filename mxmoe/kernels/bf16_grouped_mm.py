"""Grouped GEMM in bf16: persistent, TMA-fed, for groups along the rows (fprop, dgrad) or the contraction (wgrad).

    M groups                                         K groups
              b[g]  (N, K)                              a (M, N)          b (M, K)
              +------+                                  +----+            +------+
     a (M, K) |      |        out (M, N)             g0 |    |         g0 |      |        out (G, N, K)
     +-----+  +------+        +-----+                   +----+            +------+        +------+
  g0 |     |           --->   |     | rows of g0     g1 |    |         g1 |      |  --->  | g0   | a_g0.T @ b_g0
     +-----+                  +-----+                   |    |            |      |        +------+
  g1 |     |                  |     | rows of g1        +----+            +------+        | g1   | a_g1.T @ b_g1
     +-----+                  +-----+                    tail: no group, not read         +------+
     tail: no group  --->     zeros

Grid     one program per SM; each walks output tiles t = pid, pid + programs, ... Tiles of one group are contiguous in
         t and ordered in bands of GROUP row tiles, so the tiles in flight share operand tiles in L2. The group of a
         tile is found from a prefix sum over offs that stays in registers.
Writes   every element of out exactly once: rows beyond offs[-1] and slices of empty groups are zeros, written here.
Traffic  operands: once per tile row or column, mostly from L2; out: written once. fp32 accumulation, one rounding.
Index    TMA boxes are bounded by hardware; pointer forms use int64.
Source   Triton tutorial 09 (persistent matmul); triton/tools/ragged_tma.py (bounds of a group, one descriptor for all).

Rows beyond the end of a group inside a row tile of M groups are the next group's: they are multiplied and not stored.
A contraction must not do that (0 x NaN is NaN): in K groups both operands read zeros beyond their group.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import device
from ._gemm import (
    Config,
    band_tile,
    desc,
    halves,
    programs,
    ragged_desc,
    ragged_load,
    store_rows,
    store_slice_halves,
    tma_ready,
)
from ._groups import group_bounds, last_end
from ._offline import Case


@triton.jit(do_not_specialize=["M", "G"])
def _bf16_mm_m_groups_kernel(
    out,  # (M, N): ragged descriptor if TMA_OUT, else pointer
    out_ptr,  # (M, N)
    a,  # (M, K): descriptor (BLOCK_M, BLOCK_K) if TMA, else pointer
    b,  # (G, N, K): descriptor (1, BLOCK_N, BLOCK_K), or of its transpose if B_ROWS, or pointer
    bias_ptr,  # (G, N)
    offs_ptr,  # (G,) int32, ends of rows
    M,
    N,
    K,
    G,
    stride_am,
    stride_bg,
    stride_bn,
    stride_bk,
    G_POW2: tl.constexpr,
    B_ROWS: tl.constexpr,  # b is stored (G, K, N): the contraction is the row dim
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,  # the tile is stored in two halves: half the shared memory
    FLATTEN: tl.constexpr,
):
    # 1. Tiles of every group, as a prefix sum.
    num_n = tl.cdiv(N, BLOCK_N)
    _, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    tile_ends = tl.cumsum(tl.cdiv(sizes, BLOCK_M), 0) * num_n
    total = tl.max(tile_ends, 0)
    programs = tl.num_programs(0)
    OUT_DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if FLATTEN:
        tl.assume(K > 0)  # or the fused loop gets a second copy of the epilogue

    for t in tl.range(tl.program_id(0), total, programs, flatten=FLATTEN):
        # 2. Which group, which tile of it. Ends and tile ends never decrease: selecting is a max or a min.
        done = tile_ends <= t
        g = tl.sum(done.to(tl.int32), 0)
        first = tl.max(tl.where(done, tile_ends, 0), 0)
        start = tl.max(tl.where(done, ends, 0), 0)
        size = tl.min(tl.where(done, M, ends), 0) - start
        tile_m, tile_n = band_tile(t - first, tl.cdiv(size, BLOCK_M), num_n, GROUP_M)
        row = tile_m * BLOCK_M
        m0 = start + row
        n0 = tile_n * BLOCK_N

        # 3. Contraction. Columns beyond K are zeros in both operands.
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if TMA:
            for k in range(0, K, BLOCK_K):
                a_tile = a.load([m0, k])
                if B_ROWS:
                    acc = tl.dot(a_tile, b.load([g, k, n0]).reshape(BLOCK_K, BLOCK_N), acc)
                else:
                    acc = tl.dot(a_tile, b.load([g, n0, k]).reshape(BLOCK_N, BLOCK_K).T, acc)
        else:
            rows = row + tl.arange(0, BLOCK_M)
            cols = n0 + tl.arange(0, BLOCK_N)
            kk = tl.arange(0, BLOCK_K)
            a_row = a + (start + rows).to(tl.int64)[:, None] * stride_am
            b_col = b + g.to(tl.int64) * stride_bg + cols.to(tl.int64)[None, :] * stride_bn
            for k in range(0, K, BLOCK_K):
                k_in = k + kk < K
                a_tile = tl.load(a_row + (k + kk)[None, :], mask=(rows < size)[:, None] & k_in[None, :], other=0.0)
                b_at = b_col + (k + kk).to(tl.int64)[:, None] * stride_bk
                b_tile = tl.load(b_at, mask=k_in[:, None] & (cols < N)[None, :], other=0.0)
                acc = tl.dot(a_tile, b_tile, acc)

        # 4. Bias in fp32, one rounding, store.
        if HAS_BIAS:
            cols = n0 + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + g.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if HALVES:
            left, right = halves(acc, BLOCK_M, BLOCK_N)
            store_rows(out, left.to(OUT_DTYPE), start, size, row, n0, N, TMA_OUT, BLOCK_M, BLOCK_N // 2)
            n1 = n0 + BLOCK_N // 2
            store_rows(out, right.to(OUT_DTYPE), start, size, row, n1, N, TMA_OUT, BLOCK_M, BLOCK_N // 2)
        else:
            store_rows(out, acc.to(OUT_DTYPE), start, size, row, n0, N, TMA_OUT, BLOCK_M, BLOCK_N)

    # 5. Rows that belong to no group: the same walk goes on over tiles of zeros.
    tail = last_end(offs_ptr, G, M, G_POW2)
    tail_tiles = tl.cdiv(M - tail, BLOCK_M) * num_n
    begin = tl.program_id(0) + tl.cdiv(tl.maximum(total - tl.program_id(0), 0), programs) * programs
    zeros = tl.zeros((BLOCK_M, BLOCK_N), OUT_DTYPE)
    for t in range(begin - total, tail_tiles, programs):
        row = (t // num_n) * BLOCK_M
        store_rows(out_ptr, zeros, tail, M - tail, row, (t % num_n) * BLOCK_N, N, False, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["M", "G"])
def _bf16_mm_k_groups_kernel(
    out,  # (G, N, K): descriptor if TMA_OUT, else pointer
    out_ptr,  # (G, N, K)
    a,  # (M, N): ragged descriptor (BLOCK_M, BLOCK_N) if TMA, else pointer
    b,  # (M, K): ragged descriptor (BLOCK_M, BLOCK_K) if TMA, else pointer
    offs_ptr,  # (G,) int32, ends of rows: the contraction
    M,
    N,
    K,
    G,
    stride_am,
    stride_bm,
    G_POW2: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of one step of the contraction
    GROUP_N: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    # 1. Every group has the same tiles; only the length of the contraction differs.
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    starts, _, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    index = tl.arange(0, G_POW2)
    per_group = num_n * num_k
    OUT_DTYPE: tl.constexpr = out_ptr.dtype.element_ty

    programs = tl.num_programs(0)
    pid = tl.program_id(0)

    if FLATTEN:
        # One loop over the steps of all tiles of this program, so that the loads of the next tile are in flight while
        # a tile is stored. (Triton fuses nested loops itself only where the inner length is the same for every tile.)
        tl.static_assert(TMA)
        tile0 = index * per_group
        mine = tl.cdiv(tl.maximum(tile0 + per_group - pid, 0), programs) - tl.cdiv(tl.maximum(tile0 - pid, 0), programs)
        total = tl.sum(tl.where(index < G, mine * tl.maximum(tl.cdiv(sizes, BLOCK_M), 1), 0), 0)
        t = pid - programs
        step = 0
        steps = 1
        start = 0
        size = 0
        g = 0
        n0 = 0
        k0 = 0
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for _ in range(total):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                t += programs
                g = t // per_group
                start = tl.sum(tl.where(index == g, starts, 0), 0)
                size = tl.sum(tl.where(index == g, sizes, 0), 0)
                steps = tl.maximum(tl.cdiv(size, BLOCK_M), 1)
                tile_n, tile_k = band_tile(t - g * per_group, num_n, num_k, GROUP_N)
                n0 = tile_n * BLOCK_N
                k0 = tile_k * BLOCK_K
            a_tile = ragged_load(a, start, size, step * BLOCK_M, n0, BLOCK_M, BLOCK_N)
            b_tile = ragged_load(b, start, size, step * BLOCK_M, k0, BLOCK_M, BLOCK_K)
            acc = tl.dot(a_tile.T, b_tile, acc)
            if step == steps - 1:
                store_slice_halves(out, acc, g, n0, k0, N, K, OUT_DTYPE, TMA_OUT, HALVES, BLOCK_N, BLOCK_K)
                acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    else:
        for t in tl.range(pid, G * per_group, programs):
            # 2. Which group, which tile of it.
            g = t // per_group
            start = tl.sum(tl.where(index == g, starts, 0), 0)
            size = tl.sum(tl.where(index == g, sizes, 0), 0)
            tile_n, tile_k = band_tile(t - g * per_group, num_n, num_k, GROUP_N)
            n0 = tile_n * BLOCK_N
            k0 = tile_k * BLOCK_K

            # 3. Contraction over the rows of the group. An empty group takes one step over nothing: zeros.
            steps = tl.maximum(tl.cdiv(size, BLOCK_M), 1)
            acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            if TMA:
                for step in range(steps):
                    a_tile = ragged_load(a, start, size, step * BLOCK_M, n0, BLOCK_M, BLOCK_N)
                    b_tile = ragged_load(b, start, size, step * BLOCK_M, k0, BLOCK_M, BLOCK_K)
                    acc = tl.dot(a_tile.T, b_tile, acc)
            else:
                r = tl.arange(0, BLOCK_M)
                n = n0 + tl.arange(0, BLOCK_N)
                k = k0 + tl.arange(0, BLOCK_K)
                for step in range(steps):
                    row = step * BLOCK_M + r
                    at = (start + row).to(tl.int64)
                    a_at = a + n[:, None] + at[None, :] * stride_am
                    b_at = b + k[None, :] + at[:, None] * stride_bm
                    a_tile = tl.load(a_at, mask=(n < N)[:, None] & (row < size)[None, :], other=0.0)
                    b_tile = tl.load(b_at, mask=(row < size)[:, None] & (k < K)[None, :], other=0.0)
                    acc = tl.dot(a_tile, b_tile, acc)

            # 4. One rounding, store.
            store_slice_halves(out, acc, g, n0, k0, N, K, OUT_DTYPE, TMA_OUT, HALVES, BLOCK_N, BLOCK_K)


# 227 KiB of shared memory hold four stages of a wide tile and half an output tile in 16 bits, or, for two programs on
# an SM, three stages of a square tile each: while one program stores, the other multiplies.
#
# H200, 2026-11-30, hot chip, random order, speed over torch._grouped_mm's, median of 5 pairs. The chip runs at its
# power limit: one dense cuBLAS product of the same FLOPs is in the last column, and little more than that can be had.
#
#     (M, N, K, G)              GEMM    wide, band 8   square, band 8 | 16 | 32    Gluon, band 8    dense
#     (16384, 2048, 7168, 8)    fprop      1.136        1.136 | 1.142 | 1.137          1.129        1.155
#                               dgrad      1.046        1.074 | 1.065 | 1.053          1.063        1.071
#                               wgrad      1.020        1.054 | 1.049 | 1.065          1.033        1.085
#     (131072, 2048, 7168, 8)   fprop      1.005        0.956 | 0.940 | 0.940          1.013        0.995
#                               dgrad      1.025        0.962 | 0.947 | 0.937          1.046        1.022
#                               wgrad      0.999        1.019 | 1.008 | 1.001          0.998        0.958
#     (16384, 8192, 5120, 8)    fprop      1.036        1.043 | 1.005 | 0.975          1.047        1.024
#                               dgrad      1.041        1.055 | 1.013 | 0.987          1.048        1.048
#                               wgrad      1.008        0.941 | 0.921 | 0.947          1.016        1.094
#     (131072, 1536, 2048, 128) fprop      1.097        1.125 | 1.141 | 1.123          1.118        1.203
#                               dgrad      1.093        1.116 | 1.124 | 1.115          1.114        1.167
#                               wgrad      1.074        1.151 | 1.144 | 1.153          1.082        1.298
#
# The rule below in another hot run of that day, rows in the same order (dense in parentheses): 1.17, 1.09, 1.09 (1.16,
# 1.09, 1.09); 1.03, 1.06, 1.02 (1.00, 1.03, 0.96); 1.07, 1.06, 1.04 (1.05, 1.05, 1.11); 1.16, 1.15, 1.18 (1.22, 1.18,
# 1.32).
#
# Lost against wide on a cool chip, 12 GEMMs: 256 x 128 (-7 to -26 %, median -15 %); nested loops instead of one flat
# loop (-10 to +1 %, median -2 %), with pointer stores as well (-14 to -2 %); bands of 32 (-6 to +2 %, median -3 %).
# Three stages and a whole output tile: no difference.
WIDE = Config(128, 256, 64, band=8, tma_out=True, halves=True, flatten=True, warps=8, stages=4)
SQUARE = Config(128, 128, 64, band=8, tma_out=True, halves=True, flatten=True, warps=4, stages=3, per_sm=2)
LARGE_GROUP = 2048
"""Rows per group up to which the square tile wins in M groups, and a wide band in K groups."""
LARGE_SLICE = 1 << 25
"""Elements of one group's output from which the square tile loses in K groups: it reads the operands twice as often."""
# sm_120: 99 KiB.
SMALL_CONFIG = Config(128, 128, 64, band=8, tma_out=True, halves=True, flatten=True, warps=8, stages=2)
# Strides that are no multiple of 16 bytes, and devices without TMA.
POINTER_CONFIG = Config(64, 128, 32, band=8, tma_out=False, halves=False, flatten=False, warps=8, stages=3)


def _m_groups_best(m: int, g: int) -> Config:
    """Configuration of M groups: by rows per group. A band no taller than a group has the tiles of one wave."""
    if m > LARGE_GROUP * g:
        return WIDE
    return replace(SQUARE, band=16) if 2 * m <= LARGE_GROUP * g else SQUARE


def _k_groups_best(m: int, n: int, k: int, g: int) -> Config:
    """Configuration of K groups: by the size of one group's output, then by rows per group."""
    if n * k >= LARGE_SLICE:
        return replace(WIDE, band=16)
    return SQUARE if m > LARGE_GROUP * g else replace(SQUARE, band=32)


def _gluon(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the warp-specialized kernel takes a call that would get the wide tile: 1 to 2 % faster on sm_90."""
    if device.capability(a.device) != (9, 0):
        return False
    from . import gluon_grouped_mm as gluon

    return gluon.supported(a, b, bias, out_dtype)


def _config(best: Config, where: torch.device, tma: bool, out_dtype: torch.dtype) -> Config:
    """Configuration for a device: static, by capability and output type."""
    if not tma:
        return POINTER_CONFIG
    major = device.capability(where)[0]
    if major == 12:
        return SMALL_CONFIG
    if out_dtype == torch.float32:  # the output tile takes twice the shared memory
        return replace(best, stages=2 if major == 10 else best.stages - 1)
    return best


def bf16_mm_m_groups(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype, config: Config | None = None
) -> Tensor:
    """Launch. ``a (M, K)``, ``b (G, N, K)`` with one of its last two dims contiguous, ``offs (G,)`` -> ``(M, N)``."""
    m, k = a.shape
    g, n, _ = b.shape
    if config is None and m > LARGE_GROUP * g and _gluon(a, b, bias, out_dtype):
        from . import gluon_grouped_mm as gluon

        return gluon.gluon_mm_m_groups(a, b, offs)
    out = a.new_empty((m, n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if g == 0:
        return out.zero_()
    if a.stride(-1) != 1:
        a = a.contiguous()
    b_rows = b.stride(-1) != 1
    if b_rows and b.stride(-2) != 1:
        b, b_rows = b.contiguous(), False
    stored = b.mT if b_rows else b
    tma = k > 0 and tma_ready(a, stored)
    c = config or _config(_m_groups_best(m, g), a.device, tma, out_dtype)
    tma_out = tma and c.tma_out and tma_ready(out)
    cols = c.cols // 2 if c.halves else c.cols
    b_block = (1, c.step, c.cols) if b_rows else (1, c.cols, c.step)
    _bf16_mm_m_groups_kernel[(programs(a.device, c.per_sm),)](
        ragged_desc(out, c.rows, cols) if tma_out else out,
        out,
        desc(a, c.rows, c.step) if tma else a,
        desc(stored, *b_block) if tma else b,
        out if bias is None else bias.contiguous(),
        offs,
        m,
        n,
        k,
        g,
        a.stride(0),
        b.stride(0),
        b.stride(1),
        b.stride(2),
        G_POW2=triton.next_power_of_2(g),
        B_ROWS=b_rows,
        HAS_BIAS=bias is not None,
        TMA=tma,
        TMA_OUT=tma_out,
        BLOCK_M=c.rows,
        BLOCK_N=c.cols,
        BLOCK_K=c.step,
        GROUP_M=c.band,
        HALVES=c.halves,
        FLATTEN=c.flatten and tma,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out


def bf16_mm_k_groups(
    a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype, config: Config | None = None
) -> Tensor:
    """Launch. ``a (M, N)``, ``b (M, K)``, ``offs (G,)`` ends along M -> ``(G, N, K)``; an empty group gives zeros."""
    m, n = a.shape
    k = b.size(1)
    g = offs.numel()
    if config is None and g > 0 and n * k >= LARGE_SLICE and _gluon(a, b, None, out_dtype):
        from . import gluon_grouped_mm as gluon

        return gluon.gluon_mm_k_groups(a, b, offs)
    out = a.new_empty((g, n, k), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if m == 0:
        return out.zero_()
    a = a if a.stride(-1) == 1 else a.contiguous()
    b = b if b.stride(-1) == 1 else b.contiguous()
    tma = tma_ready(a, b)
    c = config or _config(_k_groups_best(m, n, k, g), a.device, tma, out_dtype)
    tma_out = tma and c.tma_out and tma_ready(out)
    cols = c.cols // 2 if c.halves else c.cols
    _bf16_mm_k_groups_kernel[(programs(a.device, c.per_sm),)](
        desc(out, 1, c.rows, cols) if tma_out else out,
        out,
        ragged_desc(a, c.step, c.rows) if tma else a,
        ragged_desc(b, c.step, c.cols) if tma else b,
        offs,
        m,
        n,
        k,
        g,
        a.stride(0),
        b.stride(0),
        G_POW2=triton.next_power_of_2(g),
        TMA=tma,
        TMA_OUT=tma_out,
        BLOCK_N=c.rows,
        BLOCK_K=c.cols,
        BLOCK_M=c.step,
        GROUP_N=c.band,
        HALVES=c.halves,
        FLATTEN=c.flatten and tma,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out


def _example(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


_OFFS = torch.tensor([16, 48], dtype=torch.int32)
_WGMMA = {"cuda:90": r"wgmma\.mma_async\.\S*m64n(?:128|256)k16", "cuda:100": r"tcgen05\.mma", "cuda:120": r"mma\.sync"}
_CALLS = {
    "fprop": lambda: bf16_mm_m_groups(_example(64, 128), _example(2, 256, 128), _OFFS, None, torch.bfloat16),
    "fprop bias fp32": lambda: bf16_mm_m_groups(
        _example(64, 128), _example(2, 256, 128), _OFFS, _example(2, 256), torch.float32
    ),
    "dgrad": lambda: bf16_mm_m_groups(_example(64, 256), _example(2, 256, 128).mT, _OFFS, None, torch.bfloat16),
    "wgrad": lambda: bf16_mm_k_groups(_example(64, 256), _example(64, 128), _OFFS, torch.bfloat16),
    "wgrad fp32": lambda: bf16_mm_k_groups(_example(64, 256), _example(64, 128), _OFFS, torch.float32),
}
_WIDE_CALLS = {
    "wide fprop": lambda: bf16_mm_m_groups(_example(64, 128), _example(2, 256, 128), _OFFS, None, torch.bfloat16, WIDE),
    "wide wgrad": lambda: bf16_mm_k_groups(_example(64, 256), _example(64, 128), _OFFS, torch.bfloat16, WIDE),
}
_NO_ROOM = {"cuda:120": "227 KiB of shared memory: SMALL_CONFIG there", "hip:gfx950": "POINTER_CONFIG there"}
OFFLINE = [
    *(Case(name, call, expect=_WGMMA) for name, call in _CALLS.items()),
    *(Case(name, call, expect=_WGMMA, skip=_NO_ROOM) for name, call in _WIDE_CALLS.items()),
    Case("fprop odd", lambda: bf16_mm_m_groups(_example(64, 81), _example(2, 71, 81), _OFFS, None, torch.bfloat16)),
    Case("wgrad odd", lambda: bf16_mm_k_groups(_example(64, 71), _example(64, 81), _OFFS, torch.bfloat16)),
]
