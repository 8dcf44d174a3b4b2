"""Grouped GEMM on MXFP8 operands with ``tl.dot_scaled``, reading plain scales; M groups and K groups.

    M groups: values and scales along K               K groups: values and scales along the rows of a group
      a_q (M, K)  a_scale (M, K32)                      a_q (N, Mp)  a_scale (N, Mp/32)    contraction contiguous:
      b_q (G, N, K)  b_scale (G, N, K32)                b_q (K, Mp)  b_scale (K, Mp/32)    colwise qdata, transposed

                K                                                 g0      g1   (ends: multiples of 32)
            +--------+-+                                      +------+---------+....
       row  | values |s|   s: one byte per 32 values      row |      |         |    :  unused
            +--------+-+                                      +------+---------+....

Grid     one program per SM; tiles of one group contiguous in t, in bands of GROUP row tiles (as in bf16_grouped_mm).
Writes   every element of out exactly once: rows beyond offs[-1] and slices of empty groups are zeros, written here.
Traffic  1 + 1/32 byte per operand element and tile row or column, mostly from L2; out once. fp32 accumulation.
Index    TMA boxes are bounded by hardware; scales and pointer forms use int64.
Source   ``docs/layouts.md``; Triton ``tl.dot_scaled``. sm_100: tcgen05 block_scale; gfx950: v_mfma_scale; elsewhere the
         compiler expands to bf16 in the loop: correct, not fast (H200: 221 TFLOP/s, so ``dequant`` is the path there).

Scales outside a matrix read as byte 0 (2**-127) and values as 0: the product is 0. In K groups the last step of a group
masks values too, since the next group's may be NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK
from ._gemm import Config, band_tile, desc, programs, ragged_desc, store_rows, store_slice, tma_ready
from ._groups import group_bounds, last_end
from ._offline import Case

BLOCK32 = tl.constexpr(BLOCK)


@triton.jit
def _scales(scale_row, rows_in, block0, blocks, COUNT: tl.constexpr):
    """Scale bytes of COUNT blocks of 32 from block ``block0`` of each row; byte 0 outside."""
    c = block0 + tl.arange(0, COUNT)
    return tl.load(scale_row[:, None] + c[None, :], mask=rows_in[:, None] & (c < blocks)[None, :], other=0)


@triton.jit(do_not_specialize=["M", "G"])
def _mx_mm_m_groups_kernel(
    out,  # (M, N): ragged descriptor if TMA_OUT, else pointer
    out_ptr,  # (M, N)
    a,  # (M, K) fp8: descriptor if TMA, else pointer
    a_scale_ptr,  # (M, K32) uint8
    b,  # (G, N, K) fp8: descriptor if TMA, else pointer
    b_scale_ptr,  # (G, N, K32) uint8
    bias_ptr,  # (G, N)
    offs_ptr,  # (G,) int32, ends of rows
    M,
    N,
    K,
    G,
    stride_am,
    stride_asm,
    stride_bg,
    stride_bn,
    stride_bsg,
    stride_bsn,
    G_POW2: tl.constexpr,
    A_FORMAT: tl.constexpr,  # "e4m3" or "e5m2"
    B_FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # 1. Tiles of every group, as a prefix sum.
    num_n = tl.cdiv(N, BLOCK_N)
    _, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    tile_ends = tl.cumsum(tl.cdiv(sizes, BLOCK_M), 0) * num_n
    total = tl.max(tile_ends, 0)
    programs = tl.num_programs(0)
    blocks = tl.cdiv(K, BLOCK32)
    PER_STEP: tl.constexpr = BLOCK_K // BLOCK32
    OUT_DTYPE: tl.constexpr = out_ptr.dtype.element_ty

    for t in tl.range(tl.program_id(0), total, programs):
        # 2. Which group, which tile of it. Ends and tile ends never decrease: selecting is a max or a min.
        done = tile_ends <= t
        g = tl.sum(done.to(tl.int32), 0)
        first = tl.max(tl.where(done, tile_ends, 0), 0)
        start = tl.max(tl.where(done, ends, 0), 0)
        size = tl.min(tl.where(done, M, ends), 0) - start
        tile_m, tile_n = band_tile(t - first, tl.cdiv(size, BLOCK_M), num_n, GROUP_M)
        row = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        cols = n0 + tl.arange(0, BLOCK_N)
        rows_in = rows < size
        cols_in = cols < N
        a_scale_row = a_scale_ptr + (start + rows).to(tl.int64) * stride_asm
        b_scale_row = b_scale_ptr + g.to(tl.int64) * stride_bsg + cols.to(tl.int64) * stride_bsn

        # 3. Contraction. Values beyond K are zeros in both operands.
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if TMA:
                a_tile = a.load([start + row, k])
                b_tile = b.load([g, n0, k]).reshape(BLOCK_N, BLOCK_K)
            else:
                kk = k + tl.arange(0, BLOCK_K)
                a_at = a + (start + rows).to(tl.int64)[:, None] * stride_am + kk[None, :]
                b_at = b + g.to(tl.int64) * stride_bg + cols.to(tl.int64)[:, None] * stride_bn + kk[None, :]
                a_tile = tl.load(a_at, mask=rows_in[:, None] & (kk < K)[None, :], other=0.0)
                b_tile = tl.load(b_at, mask=cols_in[:, None] & (kk < K)[None, :], other=0.0)
            a_scale = _scales(a_scale_row, rows_in, k // BLOCK32, blocks, PER_STEP)
            b_scale = _scales(b_scale_row, cols_in, k // BLOCK32, blocks, PER_STEP)
            acc = tl.dot_scaled(a_tile, a_scale, A_FORMAT, b_tile.T, b_scale, B_FORMAT, acc)

        # 4. Bias in fp32, one rounding, store.
        if HAS_BIAS:
            bias = tl.load(bias_ptr + g.to(tl.int64) * N + cols, mask=cols_in, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        store_rows(out, acc.to(OUT_DTYPE), start, size, row, n0, N, TMA_OUT, BLOCK_M, BLOCK_N)

    # 5. Rows that belong to no group: the same walk goes on over tiles of zeros.
    tail = last_end(offs_ptr, G, M, G_POW2)
    tail_tiles = tl.cdiv(M - tail, BLOCK_M) * num_n
    begin = tl.program_id(0) + tl.cdiv(tl.maximum(total - tl.program_id(0), 0), programs) * programs
    zeros = tl.zeros((BLOCK_M, BLOCK_N), OUT_DTYPE)
    for t in range(begin - total, tail_tiles, programs):
        row = (t // num_n) * BLOCK_M
        store_rows(out_ptr, zeros, tail, M - tail, row, (t % num_n) * BLOCK_N, N, False, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["MP", "G"])
def _mx_mm_k_groups_kernel(
    out,  # (G, N, K): descriptor if TMA_OUT, else pointer
    out_ptr,  # (G, N, K)
    a,  # (N, Mp) fp8: descriptor if TMA, else unused
    a_ptr,  # (N, Mp)
    a_scale_ptr,  # (N, Mp/32) uint8
    b,  # (K, Mp) fp8: descriptor if TMA, else unused
    b_ptr,  # (K, Mp)
    b_scale_ptr,  # (K, Mp/32) uint8
    offs_ptr,  # (G,) int32, padded ends along the contraction, multiples of 32
    MP,
    N,
    K,
    G,
    stride_an,
    stride_asn,
    stride_bk,
    stride_bsk,
    G_POW2: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # step of the contraction
    GROUP_N: tl.constexpr,
):
    # 1. Every group has the same tiles; only the length of the contraction differs.
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    starts, ends, _ = group_bounds(offs_ptr, G, MP, G_POW2)
    index = tl.arange(0, G_POW2)
    per_group = num_n * num_k
    PER_STEP: tl.constexpr = BLOCK_M // BLOCK32
    OUT_DTYPE: tl.constexpr = out_ptr.dtype.element_ty

    for t in tl.range(tl.program_id(0), G * per_group, tl.num_programs(0)):
        # 2. Which group, which tile of it. Ends that are no multiple of 32 lose the block they cut.
        g = t // per_group
        start = tl.sum(tl.where(index == g, starts, 0), 0) // BLOCK32 * BLOCK32
        end = tl.sum(tl.where(index == g, ends, 0), 0) // BLOCK32 * BLOCK32
        tile_n, tile_k = band_tile(t - g * per_group, num_n, num_k, GROUP_N)
        n0 = tile_n * BLOCK_N
        k0 = tile_k * BLOCK_K
        n = n0 + tl.arange(0, BLOCK_N)
        k = k0 + tl.arange(0, BLOCK_K)
        n_in = n < N
        k_in = k < K
        a_row = a_ptr + n.to(tl.int64) * stride_an
        b_row = b_ptr + k.to(tl.int64) * stride_bk
        a_scale_row = a_scale_ptr + n.to(tl.int64) * stride_asn
        b_scale_row = b_scale_ptr + k.to(tl.int64) * stride_bsk
        last_block = end // BLOCK32

        # 3. Contraction: whole steps, then one masked step.
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        masked_from = start
        if TMA:
            masked_from = start + (end - start) // BLOCK_M * BLOCK_M
            for m in range(start, masked_from, BLOCK_M):
                a_scale = _scales(a_scale_row, n_in, m // BLOCK32, last_block, PER_STEP)
                b_scale = _scales(b_scale_row, k_in, m // BLOCK32, last_block, PER_STEP)
                acc = tl.dot_scaled(a.load([n0, m]), a_scale, A_FORMAT, b.load([k0, m]).T, b_scale, B_FORMAT, acc)
        for m in tl.range(masked_from, end, BLOCK_M, num_stages=1 if TMA else None):
            mm = m + tl.arange(0, BLOCK_M)
            a_tile = tl.load(a_row[:, None] + mm[None, :], mask=n_in[:, None] & (mm < end)[None, :], other=0.0)
            b_tile = tl.load(b_row[:, None] + mm[None, :], mask=k_in[:, None] & (mm < end)[None, :], other=0.0)
            a_scale = _scales(a_scale_row, n_in, m // BLOCK32, last_block, PER_STEP)
            b_scale = _scales(b_scale_row, k_in, m // BLOCK32, last_block, PER_STEP)
            acc = tl.dot_scaled(a_tile, a_scale, A_FORMAT, b_tile.T, b_scale, B_FORMAT, acc)

        # 4. One rounding, store.
        store_slice(out, acc.to(OUT_DTYPE), g, n0, k0, N, K, TMA_OUT, BLOCK_N, BLOCK_K)


# A step of 128 is what one 4-column tile of scales covers.
CONFIG = Config(128, 128, 128, band=8, tma_out=True, halves=False, flatten=False, warps=8, stages=3)
POINTER_CONFIG = Config(64, 64, 64, band=8, tma_out=False, halves=False, flatten=False, warps=8, stages=2)

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def mx_mm_m_groups(
    a_q: Tensor,
    a_scale: Tensor,
    b_q: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """Launch. ``a_q (M, K)``, ``b_q (G, N, K)``, uint8 scales ``(.., K32)``, all with a contiguous last dim."""
    m, k = a_q.shape
    g, n, _ = b_q.shape
    out = a_q.new_empty((m, n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    a_q, a_scale, b_q, b_scale = (t if t.stride(-1) == 1 else t.contiguous() for t in (a_q, a_scale, b_q, b_scale))
    tma = k > 0 and tma_ready(a_q, b_q)
    c = config or (CONFIG if tma else POINTER_CONFIG)
    tma_out = tma and c.tma_out and tma_ready(out)
    _mx_mm_m_groups_kernel[(programs(out.device, c.per_sm),)](
        ragged_desc(out, c.rows, c.cols) if tma_out else out,
        out,
        desc(a_q, c.rows, c.step) if tma else a_q,
        a_scale,
        desc(b_q, 1, c.cols, c.step) if tma else b_q,
        b_scale,
        out if bias is None else bias.contiguous(),
        offs,
        m,
        n,
        k,
        g,
        a_q.stride(0),
        a_scale.stride(0),
        b_q.stride(0),
        b_q.stride(1),
        b_scale.stride(0),
        b_scale.stride(1),
        G_POW2=triton.next_power_of_2(g),
        A_FORMAT=_FORMATS[a_q.dtype],
        B_FORMAT=_FORMATS[b_q.dtype],
        HAS_BIAS=bias is not None,
        TMA=tma,
        TMA_OUT=tma_out,
        BLOCK_M=c.rows,
        BLOCK_N=c.cols,
        BLOCK_K=c.step,
        GROUP_M=c.band,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out


def mx_mm_k_groups(
    a_q: Tensor,
    a_scale: Tensor,
    b_q: Tensor,
    b_scale: Tensor,
    padded_offs: Tensor,
    out_dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """Launch. ``a_q (N, Mp)``, ``b_q (K, Mp)``, uint8 scales ``(.., Mp/32)`` -> ``(G, N, K)``; empty groups give 0."""
    n, mp = a_q.shape
    k = b_q.size(0)
    g = padded_offs.numel()
    out = a_q.new_empty((g, n, k), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if mp == 0:
        return out.zero_()
    a_q, a_scale, b_q, b_scale = (t if t.stride(-1) == 1 else t.contiguous() for t in (a_q, a_scale, b_q, b_scale))
    tma = tma_ready(a_q, b_q)
    c = config or (CONFIG if tma else POINTER_CONFIG)
    tma_out = tma and c.tma_out and tma_ready(out)
    _mx_mm_k_groups_kernel[(programs(out.device, c.per_sm),)](
        desc(out, 1, c.rows, c.cols) if tma_out else out,
        out,
        desc(a_q, c.rows, c.step) if tma else a_q,
        a_q,
        a_scale,
        desc(b_q, c.cols, c.step) if tma else b_q,
        b_q,
        b_scale,
        padded_offs,
        mp,
        n,
        k,
        g,
        a_q.stride(0),
        a_scale.stride(0),
        b_q.stride(0),
        b_scale.stride(0),
        G_POW2=triton.next_power_of_2(g),
        A_FORMAT=_FORMATS[a_q.dtype],
        B_FORMAT=_FORMATS[b_q.dtype],
        TMA=tma,
        TMA_OUT=tma_out,
        BLOCK_N=c.rows,
        BLOCK_K=c.cols,
        BLOCK_M=c.step,
        GROUP_N=c.band,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return out


def _q(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(dtype)


def _s(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


_OFFS = torch.tensor([32, 96], dtype=torch.int32)
_BF16, _E5M2 = torch.bfloat16, torch.float8_e5m2
_EXPECT = {
    "cuda:90": r"wgmma\.mma_async\.\S*bf16",  # expanded in the loop
    "cuda:100": r"tcgen05\.mma\.\S*block_scale",
    "cuda:120": r"mma\.sync\S*block_scale",
    "hip:gfx950": r"v_mfma_scale_f32",
}
_CALLS = {
    "m_groups": lambda: mx_mm_m_groups(
        _q(128, 256), _s(128, 8), _q(2, 128, 256), _s(2, 128, 8), _OFFS, None, torch.bfloat16
    ),
    "m_groups bias e5m2": lambda: mx_mm_m_groups(
        _q(128, 256, dtype=_E5M2), _s(128, 8), _q(2, 128, 256), _s(2, 128, 8), _OFFS, _s(2, 128).to(_BF16), _BF16
    ),
    "k_groups": lambda: mx_mm_k_groups(_q(128, 96), _s(128, 3), _q(256, 96), _s(256, 3), _OFFS, torch.bfloat16),
}
OFFLINE = [Case(name, call, expect=_EXPECT, spills=16) for name, call in _CALLS.items()] + [
    Case(
        "m_groups odd",
        lambda: mx_mm_m_groups(_q(70, 40), _s(70, 2), _q(2, 71, 40), _s(2, 71, 2), _OFFS, None, _BF16),
        spills=512,  # 64-bit addresses of single bytes: correct, slow
    ),
]
