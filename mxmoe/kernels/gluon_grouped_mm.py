"""Grouped GEMM in bf16 for sm_90 in Gluon: one warp loads, two warpgroups multiply, tile after tile.

                 ring of STAGES tiles in shared memory
    producer     +------+------+------+------+       consumer(s)
    (1 warp)     | a, b | a, b | a, b | a, b |       wgmma, one step behind the wait
     TMA  --->   +------+------+------+------+  ---> accumulators -> rounded -> shared memory -> TMA store
      ^            full[i]: bytes have landed          |
      +------------empty[i]: every consumer is done----+

    coop       one consumer of 8 warps: 128 x 256, each warpgroup 64 x 256
    split      two consumers of 4 warps share a tile: 64 x 256 each; one stores while the other still multiplies
    pingpong   two consumers of 4 warps take tiles in turn: one stores while the other multiplies

Grid     one program per SM; each walks output tiles t = pid, pid + programs, ... Tiles of one group are contiguous in
         t and ordered in bands of BAND row tiles, so the tiles in flight share operand tiles in L2. t only grows, so
         every partition finds its group by walking offs once.
Writes   every element of out exactly once: rows beyond offs[-1] and slices of empty groups are zeros, written here.
Traffic  operands: once per tile row or column, mostly from L2; out: written once. fp32 accumulation, one rounding.
Index    TMA boxes are bounded by hardware; the pointer form (rows of no group) uses int64.
Source   Gluon tutorials 05 (wgmma), 06 to 08 (persistence, warp specialization); CUTLASS sm90 warp-specialized
         cooperative and pingpong kernels for the division of labour; ``_gemm.py`` for descriptors bounded by a group.

Rows beyond the end of a group inside a row tile of M groups are the next group's: they are multiplied and not stored.
A contraction must not do that (0 x NaN is NaN): in K groups both operands read zeros beyond their group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import device
from ._gemm import _RAGGED_DIM, RAGGED_ROWS, _tma_strides, tma_ready

_RAGGED = gl.constexpr(RAGGED_ROWS.value)
COOP, SPLIT, PINGPONG = 0, 1, 2
_SPLIT = gl.constexpr(SPLIT)
_PINGPONG = gl.constexpr(PINGPONG)


class Config(NamedTuple):
    """Output tile of a program (of a consumer if ``mode`` is PINGPONG), contraction step, division of labour."""

    mode: int = COOP
    rows: int = 128
    cols: int = 256
    step: int = 64
    stages: int = 4
    band: int = 16
    pieces: int = 4  # a tile is stored in column pieces ...
    buffers: int = 2  # ... through so many buffers per consumer
    producer_regs: int = 40
    skew: int = 0  # SPLIT: the second consumer starts a tile this many steps after the first


CONFIG = Config()


# --- which tile ------------------------------------------------------------------------------------------------------
@gluon.jit
def _seek(offs_ptr, t, g, start, end, first, stop, M, G, ROW_TILES, num_c, BLOCK_R: gl.constexpr, KG: gl.constexpr):
    """Advance (group, its rows, its tiles [first, stop)) until it holds tile ``t`` or g == G. Safe for any offs."""
    while (t >= stop) & (g < G):
        g += 1
        e = gl.load(offs_ptr + g, mask=g < G, other=0)
        start = end
        end = gl.maximum(end, gl.minimum(e, M))
        first = stop
        if KG:
            stop += ROW_TILES * num_c
        else:
            stop += (end - start + (BLOCK_R - 1)) // BLOCK_R * num_c
    return g, start, end, first, stop


@gluon.jit
def _band_tile(t, rows, cols, BAND: gl.constexpr):
    band = t // (BAND * cols)
    first = band * BAND
    height = gl.minimum(rows - first, BAND)
    within = t - first * cols
    return first + within % height, within // height


@gluon.jit
def _tile(t, start, end, first, R, num_r, num_c, L, BLOCK_R: gl.constexpr, BLOCK_C: gl.constexpr,
          BLOCK_L: gl.constexpr, BAND: gl.constexpr, KG: gl.constexpr):  # fmt: skip
    """Row and column of a tile inside its group, and steps of its contraction."""
    size = end - start
    if KG:
        tile_r, tile_c = _band_tile(t - first, num_r, num_c, BAND)
        steps = (size + (BLOCK_L - 1)) // BLOCK_L
    else:
        tile_r, tile_c = _band_tile(t - first, (size + (BLOCK_R - 1)) // BLOCK_R, num_c, BAND)
        steps = (L + (BLOCK_L - 1)) // BLOCK_L
    return tile_r * BLOCK_R, tile_c * BLOCK_C, steps


# --- partitions ------------------------------------------------------------------------------------------------------
@gluon.jit
def _producer(
    a, b, a_bufs, b_bufs, full, empty, offs_ptr, M, R, C, L, G,
    KG: gl.constexpr, B_ROWS: gl.constexpr, MODE: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_C: gl.constexpr,
    BLOCK_L: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if MODE == _SPLIT else 1
    ROWS: gl.constexpr = BLOCK_R // PARTS
    BYTES: gl.constexpr = (BLOCK_R + BLOCK_C) * BLOCK_L * 2
    num_c = (C + (BLOCK_C - 1)) // BLOCK_C
    num_r = (R + (BLOCK_R - 1)) // BLOCK_R
    programs = gl.num_programs(0)
    t = gl.program_id(0)
    it = t * 0
    g, start, end, first, stop = _seek(offs_ptr, t, it - 1, it, it, it, it, M, G, num_r, num_c, BLOCK_R, KG)
    while g < G:
        row, col, steps = _tile(t, start, end, first, R, num_r, num_c, L, BLOCK_R, BLOCK_C, BLOCK_L, BAND, KG)
        for i in range(steps):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            l0 = i * BLOCK_L
            for j in gl.static_range(PARTS):
                if KG:
                    at = [_RAGGED, end, _RAGGED - (end - start) + l0, row + j * ROWS]
                else:
                    at = [start + row + j * ROWS, l0]
                tma.async_copy_global_to_shared(a, at, bar, a_bufs.index(slot * PARTS + j))
            if KG:
                at_b = [_RAGGED, end, _RAGGED - (end - start) + l0, col]
            elif B_ROWS:
                at_b = [g, l0, col]
            else:
                at_b = [g, col, l0]
            tma.async_copy_global_to_shared(b, at_b, bar, b_bufs.index(slot))
            it += 1
        t += programs
        g, start, end, first, stop = _seek(offs_ptr, t, g, start, end, first, stop, M, G, num_r, num_c, BLOCK_R, KG)


@gluon.jit
def _halves(x, ROWS: gl.constexpr, COLS: gl.constexpr, WARPS: gl.constexpr):
    """Left and right half of an accumulator: registers only."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLS // 2, 16])
    left, right = x.reshape([ROWS, 2, COLS // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _store_piece(out, acc, c_bufs, buf: gl.constexpr, g, start, end, row, col,
                 KG: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], out.dtype)
    c_buf = c_bufs.index(buf)
    tma.store_wait(BUFFERS - 1)
    c_buf._reinterpret(out.dtype, [ROWS, COLS], LAYOUT).store(acc.to(out.dtype))
    fence_async_shared()
    if KG:
        tma.async_copy_shared_to_global(out, [g, row, col], c_buf)
    else:
        tma.async_copy_shared_to_global(out, [_RAGGED, end, _RAGGED - (end - start) + row, col], c_buf)


@gluon.jit
def _store_tile(out, acc, c_bufs, g, start, end, row, col, KG: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
                WARPS: gl.constexpr, PIECES: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    P: gl.constexpr = COLS // PIECES
    if PIECES == 1:
        _store_piece(out, acc, c_bufs, 0, g, start, end, row, col, KG, ROWS, P, BUFFERS)
    else:
        left, right = _halves(acc, ROWS, COLS, WARPS)
        if PIECES == 2:
            _store_piece(out, left, c_bufs, 0, g, start, end, row, col, KG, ROWS, P, BUFFERS)
            _store_piece(out, right, c_bufs, 1 % BUFFERS, g, start, end, row, col + P, KG, ROWS, P, BUFFERS)
        else:
            gl.static_assert(PIECES == 4)
            x0, x1 = _halves(left, ROWS, COLS // 2, WARPS)
            x2, x3 = _halves(right, ROWS, COLS // 2, WARPS)
            _store_piece(out, x0, c_bufs, 0, g, start, end, row, col, KG, ROWS, P, BUFFERS)
            _store_piece(out, x1, c_bufs, 1 % BUFFERS, g, start, end, row, col + P, KG, ROWS, P, BUFFERS)
            _store_piece(out, x2, c_bufs, 2 % BUFFERS, g, start, end, row, col + 2 * P, KG, ROWS, P, BUFFERS)
            _store_piece(out, x3, c_bufs, 3 % BUFFERS, g, start, end, row, col + 3 * P, KG, ROWS, P, BUFFERS)


@gluon.jit
def _consumer(
    out, out_ptr, a_bufs, b_bufs, c_bufs, full, empty, skew_bar, offs_ptr, M, R, C, L, G,
    WHICH: gl.constexpr, KG: gl.constexpr, B_ROWS: gl.constexpr, MODE: gl.constexpr, BLOCK_R: gl.constexpr,
    BLOCK_C: gl.constexpr, BLOCK_L: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, WARPS: gl.constexpr,
    PIECES: gl.constexpr, BUFFERS: gl.constexpr, SKEW: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if MODE == _SPLIT else 1
    ROWS: gl.constexpr = BLOCK_R // PARTS
    PART: gl.constexpr = WHICH if MODE == _SPLIT else 0
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_C, 16])
    # Tiles as they lie in shared memory, without the leading dims of their boxes.
    A_SHAPE: gl.constexpr = [BLOCK_L, ROWS] if KG else [ROWS, BLOCK_L]
    B_SHAPE: gl.constexpr = [BLOCK_L, BLOCK_C] if KG or B_ROWS else [BLOCK_C, BLOCK_L]
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_SHAPE, a_bufs.dtype)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_SHAPE, a_bufs.dtype)
    num_c = (C + (BLOCK_C - 1)) // BLOCK_C
    num_r = (R + (BLOCK_R - 1)) // BLOCK_R
    programs = gl.num_programs(0)
    t = gl.program_id(0)
    it = t * 0
    turn = t * 0
    delays = t * 0
    g, start, end, first, stop = _seek(offs_ptr, t, it - 1, it, it, it, it, M, G, num_r, num_c, BLOCK_R, KG)
    while g < G:
        row, col, steps = _tile(t, start, end, first, R, num_r, num_c, L, BLOCK_R, BLOCK_C, BLOCK_L, BAND, KG)
        if MODE == _PINGPONG:
            mine = (turn & 1) == WHICH
        else:
            mine = turn >= 0
        if mine:
            acc = gl.zeros([ROWS, BLOCK_C], gl.float32, ACC)
            # Tiles of at least STAGES + 1 steps only: then no consumer can be a whole tile ahead of the other.
            delay = (steps > STAGES).to(gl.int32)
            if SKEW > 0 and WHICH == 1:
                mbarrier.wait(skew_bar, delays & 1, pred=delay != 0)
            for i in range(steps):
                at = it + i
                slot = at % STAGES
                mbarrier.wait(full.index(slot), (at // STAGES) & 1)
                x = a_bufs.index(slot * PARTS + PART)._reinterpret(a_bufs.dtype, A_SHAPE, A_LAYOUT)
                y = b_bufs.index(slot)._reinterpret(a_bufs.dtype, B_SHAPE, B_LAYOUT)
                if KG:
                    x = x.permute((1, 0))
                if not (KG or B_ROWS):
                    y = y.permute((1, 0))
                acc = warpgroup_mma(x, y, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                # The step before is done: its slot is free.
                mbarrier.arrive(empty.index((at + (STAGES - 1)) % STAGES), count=1, pred=i > 0)
                if SKEW > 0 and WHICH == 0:
                    mbarrier.arrive(skew_bar, count=1, pred=(i == SKEW) & (delay != 0))
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((it + steps + (STAGES - 1)) % STAGES), count=1, pred=steps > 0)
            delays += delay
            _store_tile(
                out, acc, c_bufs, g, start, end, row + PART * ROWS, col, KG, ROWS, BLOCK_C, WARPS, PIECES, BUFFERS
            )
        it += steps
        turn += 1
        t += programs
        g, start, end, first, stop = _seek(offs_ptr, t, g, start, end, first, stop, M, G, num_r, num_c, BLOCK_R, KG)
    tma.store_wait(0)

    # Rows that belong to no group: the same walk goes on over tiles of zeros.
    if not KG and WHICH == 0:
        ZERO: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
        r = gl.arange(0, 32, layout=gl.SliceLayout(1, ZERO))
        c = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, ZERO))
        zeros = gl.zeros([32, BLOCK_C], out.dtype, ZERO)
        u = t - stop
        while u < (M - end + 31) // 32 * num_c:
            at_r = end + u // num_c * 32 + r
            at_c = u % num_c * BLOCK_C + c
            at_p = out_ptr + (at_r.to(gl.int64)[:, None] * C + at_c[None, :])
            gl.store(at_p, zeros, mask=(at_r < M)[:, None] & (at_c < C)[None, :])
            u += programs


@gluon.jit(do_not_specialize=["M", "R", "G"])
def _grouped_mm_kernel(
    out,  # M groups: ragged descriptor of (M, C), box (1, 1, rows, cols/PIECES); K groups: of (G, R, C)
    out_ptr,
    a,  # M groups: (M, L); K groups: ragged, (M, R)
    b,  # M groups: (G, C, L), or (G, L, C) if B_ROWS; K groups: ragged, (M, C)
    offs_ptr,  # (G,) int32, ends of rows
    M,  # rows of a
    R,  # K groups: rows of a slice of out
    C,  # columns of out
    L,  # M groups: contraction
    G,
    KG: gl.constexpr,
    B_ROWS: gl.constexpr,
    MODE: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    PIECES: gl.constexpr,
    BUFFERS: gl.constexpr,
    SKEW: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    num_warps: gl.constexpr,
):
    PARTS: gl.constexpr = 2 if MODE == _SPLIT else 1
    CONSUMERS: gl.constexpr = 1 if num_warps == 8 else 2
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES * PARTS] + a.block_type.shape, a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    c0 = gl.allocate_shared_memory(out.dtype, [BUFFERS] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    skew_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    mbarrier.init(skew_bar, count=1)
    fence_async_shared()

    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consumer, (out, out_ptr, a_bufs, b_bufs, c0, full, empty, skew_bar, offs_ptr, M, R, C, L, G,
                             0, KG, B_ROWS, MODE, BLOCK_R, BLOCK_C, BLOCK_L, STAGES, BAND, 8, PIECES, BUFFERS, SKEW)),
                (_producer, (a, b, a_bufs, b_bufs, full, empty, offs_ptr, M, R, C, L, G,
                             KG, B_ROWS, MODE, BLOCK_R, BLOCK_C, BLOCK_L, STAGES, BAND)),
            ],
            [1],
            [PRODUCER_REGS],
        )  # fmt: skip
    else:
        c1 = gl.allocate_shared_memory(out.dtype, [BUFFERS] + out.block_type.shape, out.layout)
        gl.warp_specialize(
            [
                (_consumer, (out, out_ptr, a_bufs, b_bufs, c0, full, empty, skew_bar, offs_ptr, M, R, C, L, G,
                             0, KG, B_ROWS, MODE, BLOCK_R, BLOCK_C, BLOCK_L, STAGES, BAND, 4, PIECES, BUFFERS, SKEW)),
                (_consumer, (out, out_ptr, a_bufs, b_bufs, c1, full, empty, skew_bar, offs_ptr, M, R, C, L, G,
                             1, KG, B_ROWS, MODE, BLOCK_R, BLOCK_C, BLOCK_L, STAGES, BAND, 4, PIECES, BUFFERS, SKEW)),
                (_producer, (a, b, a_bufs, b_bufs, full, empty, offs_ptr, M, R, C, L, G,
                             KG, B_ROWS, MODE, BLOCK_R, BLOCK_C, BLOCK_L, STAGES, BAND)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )  # fmt: skip


# --- launchers -------------------------------------------------------------------------------------------------------
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_MAX_REGS = 168  # of a thread at launch: 12 warps; the warps then trade them


def _desc(t: Tensor, *block: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[t.dtype])
    return TensorDescriptor(t, list(t.shape), _tma_strides(t), list(block), layout)


def _ragged_desc(t: Tensor, rows: int, cols: int) -> TensorDescriptor:
    s = _tma_strides(t)[0]
    shape = [_RAGGED_DIM, _RAGGED_DIM, RAGGED_ROWS.value, t.size(1)]
    block = [1, 1, rows, cols]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[t.dtype])
    return TensorDescriptor(t, shape, [2**34 - s, s, s, 1], block, layout)


def _launch(out: Tensor, a: Tensor, b: Tensor, offs: Tensor, kg: bool, b_rows: bool, c: Config) -> None:
    m = a.size(0)
    cols = out.size(-1)
    pieces, buffers = c.pieces, c.buffers
    if out.dtype == torch.float32:  # the same shared memory
        pieces, buffers = 4, max(1, buffers // 2 * pieces // 4)
    part = c.rows // 2 if c.mode == SPLIT else c.rows
    warps = 8 if c.mode == COOP else 4
    if kg:
        out_desc = _desc(out, 1, part, c.cols // pieces)
        a_desc, b_desc = _ragged_desc(a, c.step, part), _ragged_desc(b, c.step, c.cols)
        b_rows = True
    else:
        out_desc = _ragged_desc(out, part, c.cols // pieces)
        a_desc = _desc(a, part, c.step)
        b_desc = _desc(b.mT, 1, c.step, c.cols) if b_rows else _desc(b, 1, c.cols, c.step)
    consumer_regs = (_MAX_REGS * 12 - c.producer_regs * 4) // 8 // 8 * 8
    _grouped_mm_kernel[(device.sm_count(a.device),)](
        out_desc,
        out,
        a_desc,
        b_desc,
        offs,
        m,
        out.size(-2),
        cols,
        0 if kg else a.size(1),
        offs.numel(),
        KG=kg,
        B_ROWS=b_rows,
        MODE=c.mode,
        BLOCK_R=c.rows,
        BLOCK_C=c.cols,
        BLOCK_L=c.step,
        STAGES=c.stages,
        BAND=c.band,
        PIECES=pieces,
        BUFFERS=buffers,
        SKEW=c.skew,
        PRODUCER_REGS=c.producer_regs,
        CONSUMER_REGS=consumer_regs,
        num_warps=warps,
        maxnreg=_MAX_REGS,
    )


def supported(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
) -> bool:
    """Whether the launchers of this module take the call; for both kinds of groups (3-D ``b``: M groups).

    bf16 operands that TMA can read, an output that TMA can write, no bias, sm_90. Sizes, strides, dtypes only.
    """
    if capability is not None and capability[0] != 9:
        return False
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or bias is not None or out_dtype not in _DTYPES:
        return False
    if not a.numel() or not b.numel() or not offs.numel() or not offs.is_contiguous() or a.stride(-1) != 1:
        return False
    cols = b.size(1)
    if b.ndim == 3 and b.stride(-1) != 1:
        b = b.mT
    size = torch.empty((), dtype=out_dtype).element_size()
    return tma_ready(a, b) and cols * size % 16 == 0 and a.size(0) < RAGGED_ROWS.value


def bf16_mm_m_groups(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype, config: Config = CONFIG
) -> Tensor:
    """Launch. ``a (M, K)``, ``b (G, N, K)`` with one of its last two dims contiguous, ``offs (G,)`` -> ``(M, N)``."""
    del bias  # ``supported`` says no
    out = a.new_empty((a.size(0), b.size(1)), dtype=out_dtype)
    _launch(out, a, b, offs, False, b.stride(-1) != 1, config)
    return out


def bf16_mm_k_groups(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype, config: Config = CONFIG) -> Tensor:
    """Launch. ``a (M, N)``, ``b (M, K)``, ``offs (G,)`` ends along M -> ``(G, N, K)``; an empty group gives zeros."""
    out = a.new_empty((offs.numel(), a.size(1), b.size(1)), dtype=out_dtype)
    _launch(out, a, b, offs, True, True, config)
    return out
