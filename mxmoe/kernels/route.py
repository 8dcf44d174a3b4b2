"""Sort (token, choice) slots by expert: a stable counting sort, no host sync, no atomics.

    ids (M,)   2 0 1 0 2 1 | 0 2 ...        row of a slot = slots of smaller experts
               program 0   | program 1                    + slots of its expert in front of the program
                                                          + slots of its expert in front of it in the program
    order (M,)     sorted row -> slot
    position (M,)  slot -> sorted row

Every program places SPAN slots and finds out by itself how many slots of each expert there are and how many lie in
front of its own: no program waits for another. Up to ``ONE_LAUNCH`` slots it counts all ids. Beyond, a first launch
counts chunks of them, and a program reads those counts and counts within its own chunk.

    counts (chunks, E_POW2)   e0 e1 e2
                     chunk 0   2  2  2      at most CHUNKS of them, whatever M
                     chunk 1   1  0  1

Grid     place: one program per SPAN slots. Count: one program per chunk of ``chunk`` slots, a multiple of SPAN.
Writes   every element of offs, order and position once. Slots with an id outside [0, E) follow the last expert's.
Traffic  8 bytes per slot written; ids once per program from L2, or twice in all and the counts once per program.
Index    int32: fewer than 2**31 slots.
Source   stable counting sort; ``mxmoe/reference/moe.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..shapes import cdiv
from ._offline import Case
from ._pdl import dependent_launch, early

# H200, 2026-12-01, us: 16384 x 8 slots of 128 | 32 experts 17.3 | 14.0, 1024 x 8 of 128 6.1, 64 x 8 of 128 3.1. At
# 16384 x 8: TILE 4096 22.0 | 14.0, 2048 29.9 | 14.0; SPAN 256 with TILE 4096 19.0 | 14.1, 64 37.3 | 21.6; eight warps
# 32.4. At 1024 x 8: one launch 11.1. The version before (three launches: chunks of 512 slots, one scanning program,
# one-hot tiles scanned slot by slot) took 95 | 24 at 16384 x 8.
ONE_LAUNCH = 2048  # slots that every program counts itself
CHUNKS = 64  # counting programs, at most
SPAN = 128  # slots that a program places: SPAN comparisons per slot
WARPS = 4
TILE = 8192  # elements of counts that a program reads at a time


@triton.jit
def _ids_of(ids_ptr, slots, last, E):
    """int32 ids, E where there is no expert of that number or no slot."""
    ids = tl.load(ids_ptr + slots, mask=slots < last, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit
def _histogram(ids, keep, E_POW2: tl.constexpr):
    return tl.histogram(tl.where(keep, ids, 0), E_POW2, mask=keep)


@triton.jit
def _count(ids_ptr, first, split, last, E, E_POW2: tl.constexpr, READ: tl.constexpr):
    """Slots of every expert among ``first .. last``, and among those in front of ``split``: ``(E_POW2,)`` each."""
    total = tl.zeros((E_POW2,), tl.int32)
    before = tl.zeros((E_POW2,), tl.int32)
    for slot in range(first, last, READ):
        slots = slot + tl.arange(0, READ)
        ids = _ids_of(ids_ptr, slots, last, E)
        count = _histogram(ids, ids < E, E_POW2)
        total += count
        if slot + READ <= split:
            before += count
        elif slot < split:
            before += _histogram(ids, (ids < E) & (slots < split), E_POW2)
    return total, before


@triton.jit
def _place(order_ptr, position_ptr, ids_ptr, first, M, E, total, before, E_POW2: tl.constexpr, SPAN: tl.constexpr):
    """Rows of slots ``first .. first + SPAN``. ``total``, ``before (E_POW2,)``: slots, and those in front of first."""
    next_row = tl.cumsum(total, 0) - total + before
    nobody = tl.sum(total, 0) + first - tl.sum(before, 0)  # next row of the slots without an expert
    i = tl.arange(0, SPAN)
    slots = first + i
    ids = _ids_of(ids_ptr, slots, M, E)
    same = (ids[:, None] == ids[None, :]) & (i[:, None] < i[None, :])
    rank = tl.sum(same.to(tl.int32), 0)  # down the columns: in registers, without shuffles
    row = rank + tl.where(ids < E, tl.gather(next_row, tl.minimum(ids, E - 1), 0), nobody)
    tl.store(position_ptr + slots, row, mask=slots < M)
    tl.store(order_ptr + row, slots, mask=slots < M)


@triton.jit(do_not_specialize=["M"])
def _route_kernel(
    offs_ptr,  # (E,) int32
    order_ptr,  # (M,) int32
    position_ptr,  # (M,) int32
    ids_ptr,  # (M,) int32 or int64
    M,
    E,
    E_POW2: tl.constexpr,
    READ: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * SPAN
    total, before = _count(ids_ptr, 0, first, M, E, E_POW2, READ)
    experts = tl.arange(0, E_POW2)
    if tl.program_id(0) == 0:
        tl.store(offs_ptr + experts, tl.cumsum(total, 0), mask=experts < E)
    _place(order_ptr, position_ptr, ids_ptr, first, M, E, total, before, E_POW2, SPAN)


@triton.jit(do_not_specialize=["M", "chunk"])
def _route_count_kernel(
    counts_ptr,  # (programs, E_POW2) int32
    ids_ptr,  # (M,) int32 or int64
    M,
    E,
    chunk,
    E_POW2: tl.constexpr,
    READ: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * chunk
    count, _ = _count(ids_ptr, first, first, tl.minimum(first + chunk, M), E, E_POW2, READ)
    tl.store(counts_ptr + tl.program_id(0) * E_POW2 + tl.arange(0, E_POW2), count)


@triton.jit(do_not_specialize=["M", "chunk", "chunks"])
def _route_place_kernel(
    offs_ptr,  # (E,) int32
    order_ptr,  # (M,) int32
    position_ptr,  # (M,) int32
    ids_ptr,  # (M,) int32 or int64
    counts_ptr,  # (chunks, E_POW2) int32
    M,
    E,
    chunk,
    chunks,
    E_POW2: tl.constexpr,
    READ: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * SPAN
    mine = first // chunk
    # Slots of my chunk in front of me: ids only, which were there before the counting started.
    before, _ = _count(ids_ptr, mine * chunk, first, first, E, E_POW2, READ)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    experts = tl.arange(0, E_POW2)
    total = tl.zeros((E_POW2,), tl.int32)
    for c in range(0, chunks, ROWS):
        at = c + tl.arange(0, ROWS)
        tile = tl.load(counts_ptr + at[:, None] * E_POW2 + experts[None, :], mask=(at < chunks)[:, None], other=0)
        total += tl.sum(tile, 0)
        before += tl.sum(tl.where((at < mine)[:, None], tile, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(offs_ptr + experts, tl.cumsum(total, 0), mask=experts < E)
    _place(order_ptr, position_ptr, ids_ptr, first, M, E, total, before, E_POW2, SPAN)


def route(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch. ``(T, k)`` ids -> offs ``(E,)``, order ``(M,)``, position ``(T, k)``, int32."""
    m = top_k_index.numel()
    device = top_k_index.device
    order = torch.empty(m, dtype=torch.int32, device=device)
    position = torch.empty(top_k_index.shape, dtype=torch.int32, device=device)
    if m == 0:
        return torch.zeros(num_experts, dtype=torch.int32, device=device), order, position
    offs = torch.empty(num_experts, dtype=torch.int32, device=device)
    ids = top_k_index.contiguous()
    e_pow2 = max(32, triton.next_power_of_2(num_experts))  # a warp counts 32 bins or more
    pdl = dependent_launch(device)
    programs = cdiv(m, SPAN)
    if m <= ONE_LAUNCH:
        read, warps = (1024, 4) if m <= 1024 else (4096, 8)
        _route_kernel[(programs,)](
            offs, order, position, ids, m, num_experts, E_POW2=e_pow2, READ=read, SPAN=SPAN, PDL=pdl, num_warps=warps
        )
        return offs, order, position
    chunk = SPAN * cdiv(programs, CHUNKS)
    chunks = cdiv(m, chunk)
    counts = torch.empty((chunks, e_pow2), dtype=torch.int32, device=device)
    _route_count_kernel[(chunks,)](counts, ids, m, num_experts, chunk, E_POW2=e_pow2, READ=2048, PDL=pdl, num_warps=8)
    _route_place_kernel[(programs,)](
        offs,
        order,
        position,
        ids,
        counts,
        m,
        num_experts,
        chunk,
        chunks,
        E_POW2=e_pow2,
        READ=1024,
        SPAN=SPAN,
        ROWS=max(1, min(CHUNKS, TILE // e_pow2)),
        PDL=pdl,
        num_warps=WARPS,
        **early(pdl),
    )
    return offs, order, position


OFFLINE = [
    Case("decode, 128 experts", lambda: route(torch.zeros(64, 8, dtype=torch.int64), 128)),
    Case("1024 tokens, 128 experts", lambda: route(torch.zeros(1024, 8, dtype=torch.int64), 128)),
    Case("128 experts", lambda: route(torch.zeros(2048, 8, dtype=torch.int64), 128)),
    Case("384 experts", lambda: route(torch.zeros(2048, 8, dtype=torch.int64), 384)),
]
