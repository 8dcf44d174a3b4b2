"""Sort (token, choice) slots by expert: a stable counting sort, no host sync, no atomics.

    ids (M,)   2 0 1 0 2 1 | 0 2 ...        counts (programs, E)      offs (E,)
               program 0   | program 1      e0 e1 e2
                                             2  2  2   program 0      ends of the columns' sums
                                             1  0  1   program 1
    order (M,)     sorted row -> slot       first row of an expert + slots of it in earlier programs + rank in mine
    position (M,)  slot -> sorted row

Grid     count and place: one program per SPAN slots; scan: one program. One program for everything up to SPAN slots.
Writes   every element of offs, order and position once. Slots with an id outside [0, E) follow the last expert's.
Traffic  the ids twice, 8 bytes per slot written.
Index    int32: fewer than 2**31 slots.
Source   stable counting sort; ``mxmoe/reference/moe.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import cdiv
from ._offline import Case

TILE = 8192  # (slots of a chunk) x (experts, a power of two): one int32 tile in registers
SPAN = 512  # slots of a program
WARPS = 4
SCAN_WARPS = 8


@triton.jit
def _expert_tile(ids_ptr, slots, M, E, E_POW2: tl.constexpr):
    """One-hot int32 ``(slots, E_POW2)``; a row of zeros where the slot has no expert."""
    ids = tl.load(ids_ptr + slots, mask=slots < M, other=-1)
    ids = tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)
    return (ids[:, None] == tl.arange(0, E_POW2)[None, :]).to(tl.int32)


@triton.jit
def _count(ids_ptr, first, last, M, E, E_POW2: tl.constexpr, CHUNK: tl.constexpr):
    """Slots of every expert among ``first .. last``."""
    count = tl.zeros((E_POW2,), tl.int32)
    for slot in range(first, last, CHUNK):
        count += tl.sum(_expert_tile(ids_ptr, slot + tl.arange(0, CHUNK), M, E, E_POW2), 0)
    return count


@triton.jit
def _place(
    order_ptr, position_ptr, ids_ptr, first, last, M, E, next_row, owned, total,
    E_POW2: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Give slots ``first .. last`` their rows. ``next_row (E_POW2,)``: first free row of every expert; ``owned``: slots
    with an expert before ``first``; ``total``: all of them."""
    for slot in range(first, last, CHUNK):
        slots = slot + tl.arange(0, CHUNK)
        tile = _expert_tile(ids_ptr, slots, M, E, E_POW2)
        has = tl.sum(tile, 1)
        rank = tl.cumsum(tile, 0) - tile
        row = tl.sum(tile * (rank + next_row[None, :]), 1)
        before = owned + tl.cumsum(has, 0) - has
        row = tl.where(has > 0, row, total + slots - before)
        tl.store(position_ptr + slots, row, mask=slots < M)
        tl.store(order_ptr + row, slots, mask=slots < M)
        next_row += tl.sum(tile, 0)
        owned += tl.sum(has, 0)


@triton.jit(do_not_specialize=["M"])
def _route_one_kernel(
    offs_ptr,  # (E,) int32
    order_ptr,  # (M,) int32
    position_ptr,  # (M,) int32
    ids_ptr,  # (M,) int32 or int64
    M,
    E,
    E_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    experts = tl.arange(0, E_POW2)
    count = _count(ids_ptr, 0, M, M, E, E_POW2, CHUNK)
    ends = tl.cumsum(count, 0)
    tl.store(offs_ptr + experts, ends, mask=experts < E)
    none = tl.zeros((), tl.int32)
    _place(order_ptr, position_ptr, ids_ptr, 0, M, M, E, ends - count, none, tl.sum(count, 0), E_POW2, CHUNK)


@triton.jit(do_not_specialize=["M"])
def _route_count_kernel(
    counts_ptr,  # (programs, E + 1) int32
    ids_ptr,  # (M,) int32 or int64
    M,
    E,
    E_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):
    p = tl.program_id(0)
    first = p * SPAN
    count = _count(ids_ptr, first, tl.minimum(first + SPAN, M), M, E, E_POW2, CHUNK)
    experts = tl.arange(0, E_POW2)
    tl.store(counts_ptr + p * (E + 1) + experts, count, mask=experts < E)


@triton.jit(do_not_specialize=["P"])
def _route_scan_kernel(
    offs_ptr,  # (E,) int32
    counts_ptr,  # (P, E + 1) int32: counts in, first free rows out; last column: slots with an expert before program p
    P,
    E,
    E_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    experts = tl.arange(0, E_POW2)
    total = tl.zeros((E_POW2,), tl.int32)
    for p in range(0, P, CHUNK):
        programs = p + tl.arange(0, CHUNK)
        at = programs[:, None] * (E + 1) + experts[None, :]
        total += tl.sum(tl.load(counts_ptr + at, mask=(programs < P)[:, None] & (experts < E)[None, :], other=0), 0)
    ends = tl.cumsum(total, 0)
    tl.store(offs_ptr + experts, ends, mask=experts < E)
    next_row = ends - total
    owned = tl.zeros((), tl.int32)
    for p in range(0, P, CHUNK):
        programs = p + tl.arange(0, CHUNK)
        at = programs[:, None] * (E + 1) + experts[None, :]
        mask = (programs < P)[:, None] & (experts < E)[None, :]
        count = tl.load(counts_ptr + at, mask=mask, other=0)
        slots = tl.sum(count, 1)
        tl.store(counts_ptr + programs * (E + 1) + E, owned + tl.cumsum(slots, 0) - slots, mask=programs < P)
        tl.store(counts_ptr + at, next_row[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        next_row += tl.sum(count, 0)
        owned += tl.sum(slots, 0)


@triton.jit(do_not_specialize=["M"])
def _route_place_kernel(
    order_ptr,  # (M,) int32
    position_ptr,  # (M,) int32
    ids_ptr,  # (M,) int32 or int64
    counts_ptr,  # (programs, E + 1) int32, as the scan left it
    offs_ptr,  # (E,) int32
    M,
    E,
    E_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):
    p = tl.program_id(0)
    first = p * SPAN
    experts = tl.arange(0, E_POW2)
    next_row = tl.load(counts_ptr + p * (E + 1) + experts, mask=experts < E, other=0)
    owned = tl.load(counts_ptr + p * (E + 1) + E)
    total = tl.load(offs_ptr + E - 1)
    last = tl.minimum(first + SPAN, M)
    _place(order_ptr, position_ptr, ids_ptr, first, last, M, E, next_row, owned, total, E_POW2, CHUNK)


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
    e_pow2 = triton.next_power_of_2(num_experts)
    chunk = max(16, min(SPAN, TILE // e_pow2))
    tile = {"E_POW2": e_pow2, "CHUNK": chunk}
    if m <= SPAN:
        _route_one_kernel[(1,)](offs, order, position, ids, m, num_experts, **tile, num_warps=WARPS)
        return offs, order, position
    programs = cdiv(m, SPAN)
    counts = torch.empty((programs, num_experts + 1), dtype=torch.int32, device=device)
    _route_count_kernel[(programs,)](counts, ids, m, num_experts, SPAN=SPAN, **tile, num_warps=WARPS)
    _route_scan_kernel[(1,)](offs, counts, programs, num_experts, **tile, num_warps=SCAN_WARPS)
    slots = {"SPAN": SPAN, "num_warps": WARPS}
    _route_place_kernel[(programs,)](order, position, ids, counts, offs, m, num_experts, **slots, **tile)
    return offs, order, position


OFFLINE = [
    Case("128 experts", lambda: route(torch.zeros(2048, 8, dtype=torch.int64), 128)),
    Case("decode, 128 experts", lambda: route(torch.zeros(64, 8, dtype=torch.int64), 128)),
    Case("384 experts", lambda: route(torch.zeros(2048, 8, dtype=torch.int64), 384)),
]
