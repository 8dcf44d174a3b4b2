"""Sum of the rows of each group in fp32: the gradient of a bias.

    x (M, N)                       partial (CHUNKS, G, N) fp32             out (G, N)
    rows of group g, cut into  ->  one row per (chunk, group)   --sum-->   one row per group
    CHUNKS equal chunks

Grid     (column tiles, G, CHUNKS).
Writes   every element of partial; groups without rows get zeros.
Traffic  reads x once. The sum over CHUNKS keeps the order fixed: two runs are bit-equal (no atomics).
Index    int64 rows.
Source   ``mxmoe.reference.grouped_mm.group_sum``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._groups import one_group

MAX_CHUNKS = 16
ROWS = tl.constexpr(64)
COLS = tl.constexpr(128)


@triton.jit(do_not_specialize=["M"])
def _group_sum_kernel(
    partial_ptr,  # (CHUNKS, G, N) fp32
    x_ptr,  # (M, N)
    offs_ptr,  # (G,) int32
    M,
    N,
    G,
    stride_m,
    stride_n,
    G_POW2: tl.constexpr,
):
    # 1. Which columns, group and chunk of its rows are mine?
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    g = tl.program_id(1)
    chunk = tl.program_id(2)
    start, end = one_group(offs_ptr, g, G, M, G_POW2)
    per_chunk = tl.cdiv(tl.cdiv(end - start, tl.num_programs(2)), ROWS) * ROWS
    first = start + chunk * per_chunk
    last = tl.minimum(first + per_chunk, end)

    # 2. - 3. Add up blocks of rows; rows beyond the chunk count as zero.
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & (cols < N)[None, :]
        at = rows.to(tl.int64)[:, None] * stride_m + cols.to(tl.int64)[None, :] * stride_n
        acc += tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)

    # 4. One row of partial sums.
    out = partial_ptr + (chunk.to(tl.int64) * G + g) * N + cols
    tl.store(out, tl.sum(acc, 0), mask=cols < N)


def group_sum(x: Tensor, offs: Tensor) -> Tensor:
    """Launch. x ``(M, N)``, any strides -> ``(G, N)`` fp32."""
    m, n = x.shape
    g = offs.numel()
    chunks = max(1, min(MAX_CHUNKS, m // (g * ROWS.value)))
    partial = x.new_empty((chunks, g, n), dtype=torch.float32)
    if partial.numel():
        grid = (triton.cdiv(n, COLS.value), g, chunks)
        _group_sum_kernel[grid](partial, x, offs, m, n, g, x.stride(0), x.stride(1), G_POW2=triton.next_power_of_2(g))
    return partial.sum(0)
