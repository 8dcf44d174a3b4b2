"""Zero what a GEMM left unwritten: rows that belong to no group, slices of groups without tokens.

    out (M, N)                       out (G, N, K)
    +-----------+                    g0 (tokens)      untouched
    | groups    |  untouched         g1 (no tokens)   zeros
    +-----------+  offs[-1]          g2 (tokens)      untouched
    | no group  |  zeros
    +-----------+

Grid     zero_tail_rows: 2 programs per SM, each walks chunks of the tail. zero_empty_groups: (G, 8 per group at most).
Writes   only what must be zero; a program that finds nothing to do costs one read of offs (4*G bytes).
Traffic  the zeros. No tail and no empty group: about one launch, 2 us.
Index    int64.
Source   ``docs/layouts.md``: ``torch._scaled_grouped_mm`` writes neither.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import device
from ._groups import group_bounds, last_end
from ._offline import Case

CHUNK = tl.constexpr(4096)  # elements one program zeroes in one step
WARPS = 4


@triton.jit(do_not_specialize=["M", "G"])
def _zero_tail_rows_kernel(
    out_ptr,  # (M, N), contiguous
    offs_ptr,  # (G,) int32
    M,
    N,
    G,
    G_POW2: tl.constexpr,
):
    begin = last_end(offs_ptr, G, M, G_POW2).to(tl.int64) * N
    end = M.to(tl.int64) * N
    zeros = tl.zeros((CHUNK,), out_ptr.dtype.element_ty)
    step = tl.num_programs(0).to(tl.int64) * CHUNK
    first = begin // CHUNK * CHUNK + tl.program_id(0).to(tl.int64) * CHUNK  # chunks start at aligned addresses
    for at in tl.range(first, end, step):
        i = at + tl.arange(0, CHUNK)
        tl.store(out_ptr + i, zeros, mask=(i >= begin) & (i < end))


@triton.jit(do_not_specialize=["TOTAL", "G"])
def _zero_empty_groups_kernel(
    out_ptr,  # (G, N * K), contiguous
    offs_ptr,  # (G,) int32
    TOTAL,  # rows or columns that offs may reach
    SLICE,  # N * K
    G,
    G_POW2: tl.constexpr,
):
    g = tl.program_id(0)
    _, _, sizes = group_bounds(offs_ptr, G, TOTAL, G_POW2)
    size = tl.sum(tl.where(tl.arange(0, G_POW2) == g, sizes, 0), 0)
    if size == 0:
        base = out_ptr + g.to(tl.int64) * SLICE
        zeros = tl.zeros((CHUNK,), out_ptr.dtype.element_ty)
        first = tl.program_id(1).to(tl.int64) * CHUNK
        for at in tl.range(first, SLICE, tl.num_programs(1).to(tl.int64) * CHUNK):
            i = at + tl.arange(0, CHUNK)
            tl.store(base + i, zeros, mask=i < SLICE)


def zero_tail_rows(out: Tensor, offs: Tensor) -> Tensor:
    """Launch. Zero the rows of ``out (M, N)``, contiguous, at or beyond the last group end; returns ``out``."""
    m, n = out.shape
    g = offs.numel()
    if out.numel():
        grid = (min(2 * device.sm_count(out.device), triton.cdiv(out.numel(), CHUNK.value) + 1),)
        _zero_tail_rows_kernel[grid](out, offs, m, n, g, G_POW2=triton.next_power_of_2(g), num_warps=WARPS)
    return out


def zero_empty_groups(out: Tensor, offs: Tensor, total: int) -> Tensor:
    """Launch. Zero the slices of ``out (G, N, K)``, contiguous, of groups without rows; ``offs`` is within total."""
    g, n, k = out.shape
    if out.numel():
        grid = (g, min(8, triton.cdiv(n * k, CHUNK.value)))
        _zero_empty_groups_kernel[grid](out, offs, total, n * k, g, G_POW2=triton.next_power_of_2(g), num_warps=WARPS)
    return out


_OFFS = torch.tensor([16, 48], dtype=torch.int32)
OFFLINE = [
    Case(
        "rows",
        lambda: zero_tail_rows(torch.zeros(64, 128, dtype=torch.bfloat16), _OFFS),
        expect={"cuda:90": r"st\.global\.v4\.b32", "cuda:100": r"st\.global\.v[48]\.b32"},
    ),
    Case(
        "groups",
        lambda: zero_empty_groups(torch.zeros(2, 128, 128, dtype=torch.bfloat16), _OFFS, 64),
        expect={"cuda:90": r"st\.global\.v4\.b32", "cuda:100": r"st\.global\.v[48]\.b32"},
    ),
]
