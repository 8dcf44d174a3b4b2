"""Grouped GEMM in bf16 for sm_90 in Gluon: one warp loads, two warpgroups multiply, each on its own half of a tile.

                 ring of STAGES slots in shared memory
    producer     +------+------+------+------+       consumer 0: rows   0 ..  63 of a 128 x 256 tile
    (1 warp)     | a, b | a, b | a, b | a, b |       consumer 1: rows  64 .. 127
     TMA  --->   +------+------+------+------+  ---> wgmma, one step behind the wait; round; TMA store in two pieces
      ^            full[i]: bytes have landed          |
      +------------empty[i]: both consumers are done---+

The consumers wait for no one but the producer: while one stores its half, the other may still multiply.

Grid     one program per SM; each walks output tiles t = pid, pid + programs, ... Tiles of one group are contiguous in
         t and ordered in bands of BAND row tiles, so the tiles in flight share operand tiles in L2. t only grows, so
         every partition finds its group by walking offs once.
Writes   every element of out exactly once: rows beyond offs[-1] and slices of empty groups are zeros, written here.
Traffic  operands: once per tile row or column, mostly from L2; out: written once. fp32 accumulation, one rounding.
Index    TMA boxes are bounded by hardware; the pointer form (rows of no group) uses int64.
Source   Gluon tutorials 05 (wgmma), 06 to 08 (persistence, warp specialization); CUTLASS sm90 warp-specialized
         cooperative kernel for the division of labour; ``_gemm.py`` for descriptors bounded by a group.

Both consumers wait for every slot of the ring, also where their half of a tile is beyond the group: a barrier tells
only the parity of its phase, and one who skipped a phase would take old data for new.

Rows beyond the end of a group inside a row tile of M groups are the next group's: they are multiplied and not stored.
A contraction must not do that (0 x NaN is NaN): in K groups both operands read zeros beyond their group.
"""

from __future__ import annotations

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
from ._offline import Case

_RAGGED = gl.constexpr(RAGGED_ROWS.value)
_ROWS = gl.constexpr(64)  # of a consumer: one warpgroup
_CONSUMERS = gl.constexpr(2)

ROWS, COLS, STEP, STAGES, BAND, PIECES = 128, 256, 64, 4, 8, 2
CONSUMER_REGS, LAUNCH_REGS = 232, 168  # of a thread: LAUNCH_REGS for 12 warps, which then trade them
PRODUCER_REGS = gl.constexpr(24)


# --- which tile ------------------------------------------------------------------------------------------------------
@gluon.jit
def _end(offs_ptr, g, G, start, M):
    """End of group ``g`` that starts at ``start``; in bounds whatever offs holds."""
    end = gl.load(offs_ptr + gl.minimum(g, G - 1))
    return gl.maximum(gl.minimum(end, M), start)


@gluon.jit
def _band_tile(t, rows, cols, BAND: gl.constexpr):
    """Tile ``t`` of a ``rows x cols`` grid, walked column by column in bands of BAND row tiles."""
    band = t // (BAND * cols)
    first = band * BAND
    height = gl.minimum(rows - first, BAND)
    within = t - first * cols
    return first + within % height, within // height


# --- stores ----------------------------------------------------------------------------------------------------------
@gluon.jit
def _store_piece(out, buf, piece, at0, at1, at2, at3, K_GROUPS: gl.constexpr):
    tma.store_wait(0)
    box = buf.reshape([piece.shape[0], piece.shape[1]])
    gl.thread_barrier()
    box.store(piece)
    fence_async_shared()
    gl.thread_barrier()
    if K_GROUPS:
        tma.async_copy_shared_to_global(out, [at0, at1, at2], buf)
    else:
        tma.async_copy_shared_to_global(out, [at0, at1, at2, at3], buf)


@gluon.jit
def _store(out, buf, acc, at, COLS: gl.constexpr, K_GROUPS: gl.constexpr):
    """Round and store 64 rows in two pieces through one buffer."""
    HALF: gl.constexpr = COLS // 2
    left, right = acc.to(gl.bfloat16).reshape([_ROWS, 2, HALF]).permute([0, 2, 1]).split()
    if K_GROUPS:
        _store_piece(out, buf, left, at[0], at[1], at[2], 0, True)
        _store_piece(out, buf, right, at[0], at[1], at[2] + HALF, 0, True)
    else:
        _store_piece(out, buf, left, at[0], at[1], at[2], at[3], False)
        _store_piece(out, buf, right, at[0], at[1], at[2], at[3] + HALF, False)


# --- M groups --------------------------------------------------------------------------------------------------------
@gluon.jit
def _m_producer(
    a, b, a_bufs, b_bufs, full, empty, offs_ptr, M, N, K, G, B_ROWS: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    num_n = gl.cdiv(N, COLS)
    steps = gl.cdiv(K, STEP)
    t = gl.program_id(0)
    it = 0
    g = 0
    start = 0
    first = 0  # tiles of the groups before g
    end = _end(offs_ptr, 0, G, 0, M)
    while g < G:
        num_m = gl.cdiv(end - start, ROWS)
        if t < first + num_m * num_n:
            tile_m, tile_n = _band_tile(t - first, num_m, num_n, BAND)
            m0 = start + tile_m * ROWS
            n0 = tile_n * COLS
            for k in range(steps):
                slot = it % STAGES
                mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
                bar = full.index(slot)
                mbarrier.expect(bar, (ROWS + COLS) * STEP * 2)
                for c in gl.static_range(_CONSUMERS):
                    at = [m0 + c * _ROWS, k * STEP]
                    tma.async_copy_global_to_shared(a, at, bar, a_bufs.index(slot * _CONSUMERS + c))
                if B_ROWS:
                    tma.async_copy_global_to_shared(b, [g, k * STEP, n0], bar, b_bufs.index(slot))
                else:
                    tma.async_copy_global_to_shared(b, [g, n0, k * STEP], bar, b_bufs.index(slot))
                it += 1
            t += gl.num_programs(0)
        else:
            first += num_m * num_n
            start = end
            g += 1
            end = _end(offs_ptr, g, G, start, M)


@gluon.jit
def _m_consumer(
    out, a_bufs, b_bufs, o_bufs, full, empty, offs_ptr, M, N, K, G, WHICH: gl.constexpr, B_ROWS: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    num_n = gl.cdiv(N, COLS)
    steps = gl.cdiv(K, STEP)
    t = gl.program_id(0)
    it = 0
    g = 0
    start = 0
    first = 0
    end = _end(offs_ptr, 0, G, 0, M)
    acc = gl.zeros((_ROWS, COLS), gl.float32, ACC)
    while g < G:
        size = end - start
        num_m = gl.cdiv(size, ROWS)
        if t < first + num_m * num_n:
            tile_m, tile_n = _band_tile(t - first, num_m, num_n, BAND)
            row = tile_m * ROWS + WHICH * _ROWS
            if row < size:
                for k in range(steps):
                    slot = it % STAGES
                    mbarrier.wait(full.index(slot), (it // STAGES) & 1)
                    x = a_bufs.index(slot * _CONSUMERS + WHICH)
                    if B_ROWS:
                        y = b_bufs.index(slot).reshape([STEP, COLS])
                    else:
                        y = b_bufs.index(slot).reshape([COLS, STEP]).permute([1, 0])
                    token = warpgroup_mma(x, y, acc, use_acc=k > 0, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[token])
                    # The step before is done: its slot is free.
                    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=k > 0)
                    it += 1
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
                at = [_RAGGED, end, _RAGGED - size + row, tile_n * COLS]
                _store(out, o_bufs.index(WHICH), acc, at, COLS, False)
            else:
                for _ in range(steps):
                    slot = it % STAGES
                    mbarrier.wait(full.index(slot), (it // STAGES) & 1)
                    mbarrier.arrive(empty.index(slot))
                    it += 1
            t += gl.num_programs(0)
        else:
            first += num_m * num_n
            start = end
            g += 1
            end = _end(offs_ptr, g, G, start, M)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "G"])
def _gluon_mm_m_groups_kernel(
    out,  # (M, N): ragged descriptor, box (1, 1, 64, COLS / 2)
    out_ptr,
    a,  # (M, K): descriptor, box (64, STEP)
    b,  # (G, N, K): descriptor, box (1, COLS, STEP); or of its transpose if B_ROWS
    offs_ptr,  # (G,) int32, ends of rows
    M,
    N,
    K,
    G,
    B_ROWS: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
):
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES * _CONSUMERS] + a.block_type.shape, a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    o_bufs = gl.allocate_shared_memory(out.dtype, [_CONSUMERS] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), _CONSUMERS)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_m_consumer, (out, a_bufs, b_bufs, o_bufs, full, empty, offs_ptr, M, N, K, G,
                           0, B_ROWS, ROWS, COLS, STEP, STAGES, BAND)),
            (_m_consumer, (out, a_bufs, b_bufs, o_bufs, full, empty, offs_ptr, M, N, K, G,
                           1, B_ROWS, ROWS, COLS, STEP, STAGES, BAND)),
            (_m_producer, (a, b, a_bufs, b_bufs, full, empty, offs_ptr, M, N, K, G,
                           B_ROWS, ROWS, COLS, STEP, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip

    # Rows that belong to no group.
    last = 0
    for g in range(G):
        last = _end(offs_ptr, g, G, last, M)
    FLAT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    CHUNK: gl.constexpr = 1024
    begin = last.to(gl.int64) * N
    stop = M.to(gl.int64) * N
    zeros = gl.zeros([CHUNK], gl.bfloat16, FLAT)
    at = begin // CHUNK * CHUNK + gl.program_id(0).to(gl.int64) * CHUNK
    while at < stop:
        offset = at + gl.arange(0, CHUNK, layout=FLAT)
        gl.store(out_ptr + offset, zeros, mask=(offset >= begin) & (offset < stop))
        at += gl.num_programs(0).to(gl.int64) * CHUNK


# --- K groups --------------------------------------------------------------------------------------------------------
@gluon.jit
def _k_producer(
    a, b, a_bufs, b_bufs, full, empty, offs_ptr, M, N, K, G,
    ROWS: gl.constexpr, COLS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    num_n = gl.cdiv(N, ROWS)
    num_k = gl.cdiv(K, COLS)
    per_group = num_n * num_k
    t = gl.program_id(0)
    it = 0
    g = 0
    start = 0
    end = _end(offs_ptr, 0, G, 0, M)
    while t < G * per_group:
        while g < t // per_group:
            start = end
            g += 1
            end = _end(offs_ptr, g, G, start, M)
        size = end - start
        tile_n, tile_k = _band_tile(t - g * per_group, num_n, num_k, BAND)
        for step in range(gl.cdiv(size, STEP)):
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (ROWS + COLS) * STEP * 2)
            row = _RAGGED - size + step * STEP
            for c in gl.static_range(_CONSUMERS):
                at = [_RAGGED, end, row, tile_n * ROWS + c * _ROWS]
                tma.async_copy_global_to_shared(a, at, bar, a_bufs.index(slot * _CONSUMERS + c))
            tma.async_copy_global_to_shared(b, [_RAGGED, end, row, tile_k * COLS], bar, b_bufs.index(slot))
            it += 1
        t += gl.num_programs(0)


@gluon.jit
def _k_consumer(
    out, a_bufs, b_bufs, o_bufs, full, empty, offs_ptr, M, N, K, G, WHICH: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    num_n = gl.cdiv(N, ROWS)
    num_k = gl.cdiv(K, COLS)
    per_group = num_n * num_k
    t = gl.program_id(0)
    it = 0
    g = 0
    start = 0
    end = _end(offs_ptr, 0, G, 0, M)
    while t < G * per_group:
        while g < t // per_group:
            start = end
            g += 1
            end = _end(offs_ptr, g, G, start, M)
        steps = gl.cdiv(end - start, STEP)
        tile_n, tile_k = _band_tile(t - g * per_group, num_n, num_k, BAND)
        acc = gl.zeros((_ROWS, COLS), gl.float32, ACC)
        if steps > 0:
            for step in range(steps):
                slot = it % STAGES
                mbarrier.wait(full.index(slot), (it // STAGES) & 1)
                x = a_bufs.index(slot * _CONSUMERS + WHICH).reshape([STEP, _ROWS]).permute([1, 0])
                y = b_bufs.index(slot).reshape([STEP, COLS])
                token = warpgroup_mma(x, y, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[token])
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), pred=step > 0)
                it += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES))
        _store(out, o_bufs.index(WHICH), acc, [g, tile_n * ROWS + WHICH * _ROWS, tile_k * COLS], COLS, True)
        t += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "G"])
def _gluon_mm_k_groups_kernel(
    out,  # (G, N, K): descriptor, box (1, 64, COLS / 2)
    a,  # (M, N): ragged descriptor, box (1, 1, STEP, 64)
    b,  # (M, K): ragged descriptor, box (1, 1, STEP, COLS)
    offs_ptr,  # (G,) int32, ends of rows: the contraction
    M,
    N,
    K,
    G,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
):
    a_bufs = gl.allocate_shared_memory(a.dtype, [STAGES * _CONSUMERS] + a.block_type.shape, a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    o_bufs = gl.allocate_shared_memory(out.dtype, [_CONSUMERS] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), _CONSUMERS)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_k_consumer, (out, a_bufs, b_bufs, o_bufs, full, empty, offs_ptr, M, N, K, G,
                           0, ROWS, COLS, STEP, STAGES, BAND)),
            (_k_consumer, (out, a_bufs, b_bufs, o_bufs, full, empty, offs_ptr, M, N, K, G,
                           1, ROWS, COLS, STEP, STAGES, BAND)),
            (_k_producer, (a, b, a_bufs, b_bufs, full, empty, offs_ptr, M, N, K, G,
                           ROWS, COLS, STEP, STAGES, BAND)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


# --- launchers -------------------------------------------------------------------------------------------------------
def _desc(t: Tensor, block: list[int], shape: list[int] | None = None, strides: list[int] | None = None):  # type: ignore[no-untyped-def]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(t, shape or list(t.shape), strides or _tma_strides(t), block, layout)


def _ragged_desc(t: Tensor, rows: int, cols: int):  # type: ignore[no-untyped-def]
    s = _tma_strides(t)[0]
    return _desc(t, [1, 1, rows, cols], [_RAGGED_DIM, _RAGGED_DIM, RAGGED_ROWS.value, t.size(1)], [2**34 - s, s, s, 1])


_CONSTEXPRS = {"ROWS": ROWS, "COLS": COLS, "STEP": STEP, "STAGES": STAGES, "CONSUMER_REGS": CONSUMER_REGS}


def supported(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the launchers of this module take the call; for both kinds of groups (3-D ``b``: M groups).

    bf16 operands and a bf16 output whose rows start at multiples of 16 bytes, no bias, sm_90. Looks at no value.
    """
    if device.capability(a.device) != (9, 0) or bias is not None:
        return False
    if not a.dtype == b.dtype == out_dtype == torch.bfloat16 or not (a.numel() and b.numel()):
        return False
    stored = b.mT if b.ndim == 3 and b.stride(-1) != 1 else b
    return b.size(1) % 8 == 0 and tma_ready(a, stored)


def gluon_mm_m_groups(a: Tensor, b: Tensor, offs: Tensor, band: int = BAND) -> Tensor:
    """Launch. ``a (M, K)``, ``b (G, N, K)`` with one of its last two dims contiguous, ``offs (G,)`` -> ``(M, N)``."""
    (m, k), (g, n, _) = a.shape, b.shape
    out = a.new_empty((m, n))
    b_rows = b.stride(-1) != 1
    b_desc = _desc(b.mT, [1, STEP, COLS]) if b_rows else _desc(b, [1, COLS, STEP])
    _gluon_mm_m_groups_kernel[(device.sm_count(a.device),)](
        _ragged_desc(out, ROWS // 2, COLS // PIECES),
        out,
        _desc(a, [ROWS // 2, STEP]),
        b_desc,
        offs,
        m,
        n,
        k,
        g,
        B_ROWS=b_rows,
        BAND=band,
        **_CONSTEXPRS,
        num_warps=4,
        maxnreg=LAUNCH_REGS,
    )
    return out


def gluon_mm_k_groups(a: Tensor, b: Tensor, offs: Tensor, band: int = BAND) -> Tensor:
    """Launch. ``a (M, N)``, ``b (M, K)``, ``offs (G,)`` ends along M -> ``(G, N, K)``; an empty group gives zeros."""
    (m, n), k, g = a.shape, b.size(1), offs.numel()
    out = a.new_empty((g, n, k))
    _gluon_mm_k_groups_kernel[(device.sm_count(a.device),)](
        _desc(out, [1, ROWS // 2, COLS // PIECES]),
        _ragged_desc(a, STEP, ROWS // 2),
        _ragged_desc(b, STEP, COLS),
        offs,
        m,
        n,
        k,
        g,
        BAND=band,
        **_CONSTEXPRS,
        num_warps=4,
        maxnreg=LAUNCH_REGS,
    )
    return out


def _example(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


_OFFS = torch.tensor([16, 48], dtype=torch.int32)
_OTHERS = dict.fromkeys(("cuda:100", "cuda:120", "hip:gfx950"), "wgmma: sm_90 only")
_WGMMA = {"cuda:90": r"wgmma\.mma_async\.\S*m64n256k16"}
_CALLS = {
    "fprop": lambda: gluon_mm_m_groups(_example(64, 128), _example(2, 256, 128), _OFFS),
    "dgrad": lambda: gluon_mm_m_groups(_example(64, 256), _example(2, 256, 128).mT, _OFFS),
    "wgrad": lambda: gluon_mm_k_groups(_example(64, 256), _example(64, 128), _OFFS),
}
OFFLINE = [Case(name, call, expect=_WGMMA, skip=_OTHERS) for name, call in _CALLS.items()]
