"""Expert-sorted rows back to tokens: a weighted sum over each token's k rows, gathered, in a fixed order.

    rows (M, H)                        out (T, H)
    +-------+  position[t, 0]
    |       | ---------------\\        +-------+
    +-------+                 +--->    |  t    |  sum over j of weights[t, j] * rows[position[t, j]], in fp32
    |       | ---------------/         +-------+
    +-------+  position[t, 1]

Grid     (token tiles * column tiles), columns fastest; the gradient of the weights: one program per token tile.
Writes   every element of out once. Rows at or beyond offs[-1] are left out, whatever they hold.
Traffic  2 bytes read per routed element, 2 written per element of out. No atomics: two runs give the same bits.
Index    int64 for rows.
Source   ``mxmoe/reference/moe.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..shapes import cdiv
from ._groups import last_end
from ._offline import Case
from ._pdl import dependent_launch, early

TILE = (2, 1024, 4)  # (BLOCK_T, BLOCK_H, num_warps)
# Up to this many elements of out, TILE has fewer programs than four for each multiprocessor of an H200 (reasoned).
FEW = 1 << 20
FEW_TILE = (1, 256, 1)
GRAD_TILE = (4, 512, 4)


@triton.jit(do_not_specialize=["T", "M", "G"])
def _combine_kernel(
    out_ptr,  # (T, H), contiguous
    rows_ptr,  # (M, H), last stride 1
    position_ptr,  # (T, k) int32
    weights_ptr,  # (T, k), or None
    offs_ptr,  # (G,) int32
    T,
    H,
    M,
    G,
    stride_rm,
    G_POW2: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if PDL:
        gdc_wait()
    # 1. Which tokens and columns are mine?
    col_tiles = tl.cdiv(H, BLOCK_H)
    tokens = (tl.program_id(0) // col_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = ((tl.program_id(0) % col_tiles) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    end = last_end(offs_ptr, G, M, G_POW2)

    # 2. Sum, choices ascending. Unrolled: the k loads are in flight together.
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = tokens * TOP_K + j
        row = tl.load(position_ptr + slot, mask=tokens < T, other=M)
        taken = ((row >= 0) & (row < end))[:, None] & (cols < H)
        value = tl.load(rows_ptr + row.to(tl.int64)[:, None] * stride_rm + cols, mask=taken, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + slot, mask=tokens < T, other=0.0).to(tl.float32)[:, None]
            value = tl.where(taken, value, 0.0)  # an infinite weight of a row that is left out
        acc += value

    # 3. One rounding, store.
    at = out_ptr + tokens.to(tl.int64)[:, None] * H + cols
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & (cols < H))


@triton.jit(do_not_specialize=["T", "M", "G"])
def _combine_weights_grad_kernel(
    out_ptr,  # (T, k) fp32
    grad_ptr,  # (T, H), last stride 1
    rows_ptr,  # (M, H), last stride 1
    position_ptr,  # (T, k) int32
    offs_ptr,  # (G,) int32
    T,
    H,
    M,
    G,
    top_k,
    stride_gt,
    stride_rm,
    G_POW2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    end = last_end(offs_ptr, G, M, G_POW2)
    grad_row = grad_ptr + tokens.to(tl.int64)[:, None] * stride_gt
    for j in range(top_k):
        slot = tokens * top_k + j
        row = tl.load(position_ptr + slot, mask=tokens < T, other=M)
        taken = (row >= 0) & (row < end)
        acc = tl.zeros((BLOCK_T,), tl.float32)
        for h in range(0, H, BLOCK_H):
            cols = (h + tl.arange(0, BLOCK_H))[None, :]
            mask = taken[:, None] & (cols < H)
            value = tl.load(rows_ptr + row.to(tl.int64)[:, None] * stride_rm + cols, mask=mask, other=0.0)
            grad = tl.load(grad_row + cols, mask=mask, other=0.0)
            acc += tl.sum(value.to(tl.float32) * grad.to(tl.float32), 1)
        tl.store(out_ptr + slot, acc, mask=tokens < T)


def combine(
    rows: Tensor,
    position: Tensor,
    offs: Tensor,
    weights: Tensor | None,
    out_dtype: torch.dtype,
    config: tuple[int, int, int] | None = None,
    after_chain: bool = False,
) -> Tensor:
    """Launch. ``rows (M, H)``, ``position (T, k)``, ``offs (G,)``, ``weights (T, k)`` or None -> ``(T, H)``.

    ``after_chain``: start while the kernel in front still runs; it keeps the rules of ``_pdl.py``.
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    (t, k), (m, h), g = position.shape, rows.shape, offs.shape[0]
    out = torch.empty((t, h), dtype=out_dtype, device=rows.device)
    if out.numel() == 0:
        return out
    block_t, block_h, warps = config or (FEW_TILE if t * h <= FEW else TILE)
    block_h = min(block_h, triton.next_power_of_2(h))
    pdl = after_chain and dependent_launch(rows.device)
    _combine_kernel[(cdiv(t, block_t) * cdiv(h, block_h),)](
        out,
        rows,
        position,
        None if weights is None else weights.contiguous(),
        offs,
        t,
        h,
        m,
        g,
        rows.stride(0),
        G_POW2=triton.next_power_of_2(g),
        TOP_K=k,
        WEIGHTED=weights is not None,
        PDL=pdl,
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        num_warps=warps,
        **early(pdl),
    )
    return out


def combine_weights_grad(
    grad: Tensor, rows: Tensor, position: Tensor, offs: Tensor, config: tuple[int, int, int] = GRAD_TILE
) -> Tensor:
    """Launch. ``grad (T, H)``, ``rows (M, H)``, ``position (T, k)``, ``offs (G,)`` -> fp32 ``(T, k)``."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    (t, k), (m, h), g = position.shape, rows.shape, offs.shape[0]
    out = torch.empty((t, k), dtype=torch.float32, device=rows.device)
    if out.numel() == 0:
        return out
    block_t, block_h, warps = config
    _combine_weights_grad_kernel[(cdiv(t, block_t),)](
        out,
        grad,
        rows,
        position,
        offs,
        t,
        h,
        m,
        g,
        k,
        grad.stride(0),
        rows.stride(0),
        G_POW2=triton.next_power_of_2(g),
        BLOCK_T=block_t,
        BLOCK_H=min(block_h, triton.next_power_of_2(max(h, 1))),
        num_warps=warps,
    )
    return out


def _case(weighted: bool) -> object:
    rows = torch.zeros(512, 2048, dtype=torch.bfloat16)
    position, offs = torch.zeros(64, 8, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    weights = torch.zeros(64, 8, dtype=torch.bfloat16) if weighted else None
    return combine(rows, position, offs, weights, torch.bfloat16, after_chain=True)


OFFLINE = [
    Case("sum", lambda: _case(False)),
    Case("weighted", lambda: _case(True)),
    Case(
        "gradient of the weights",
        lambda: combine_weights_grad(
            torch.zeros(64, 2048, dtype=torch.bfloat16),
            torch.zeros(512, 2048, dtype=torch.bfloat16),
            torch.zeros(64, 8, dtype=torch.int32),
            torch.zeros(128, dtype=torch.int32),
        ),
    ),
]
