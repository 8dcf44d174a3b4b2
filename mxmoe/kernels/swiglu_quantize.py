"""SwiGLU and its backward, rounded to MXFP8 in the same pass: ``weight * silu(gate) * up``, one routing weight per row.

    forward                                       backward, 32 rows of a group at a time
      gate_up (M, 2I)         out (M, I)            gate_up (M, 2I), grad (M, I)
      gate      up             BLOCK_I              -> gradient of gate_up, rounded along the row   (M, 2I) for dgrad
     +----+    +----+         +-------+             -> the same, rounded along the 32 rows           (M, 2I) for wgrad
     |    |    |    |  ---->  | round |             -> weight * silu(gate) * up, along the 32 rows   (M, I)  for wgrad
     +----+    +----+         +-------+             -> gradient of the weight of every row

Results have the dtype of gate_up before they are rounded: the same bytes as if the two steps were apart.
The routing weight is applied here, before the down projection, instead of to its result: the same sum, but backward
then needs neither the result (M, H) nor its gradient per row, and combine is a plain sum.

Grid     forward: (row tiles * column tiles); backward: one program per unit of 32 rows walks the columns, so the
         gradient of a row's weight is summed in one place, in a fixed order.
Writes   every element of every result once; rows at or beyond offs[-1] are zeros.
Traffic  forward: 4 bytes read, 2 written per element of out. backward, all of it: 6 read, 10 written per element.
Index    int64 for rows.
Source   ``mxmoe/reference/moe.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import cdiv
from ._groups import last_end
from ._moe import round_last, round_rows, rounding, sigmoid, unit_rows, unit_table
from ._offline import Case
from ._packed import even, in_words, odd, pack, round_word_last, round_word_rows

FORWARD_TILE = (8, 256, 4)  # (BLOCK_M, BLOCK_I, num_warps)
BACKWARD_TILE = (64, 4)  # (BLOCK_I, num_warps), any dtype
# bf16 layers, in words of two columns: (words of a column tile, num_warps). H200, 2026-12-01, TB/s at 131072 x 1536 |
# 131072 x 4096: 3.63 | 3.78; (64, 8) 3.14 | 3.25, (32, 4) 3.10 | 3.12, (16, 1) less. Programs of two kinds side by
# side, 8 rows x 128 words for the row results, 32 x 64 for the others, the second read from the L2: 2.98 | 3.11; as two
# launches 2.78 | 2.86. In fp32, values one by one: 2.41 | 2.42.
BACKWARD_WORDS = (64, 4)


@triton.jit(do_not_specialize=["M", "G"])
def _swiglu_rows_kernel(
    out_ptr,  # (M, I), contiguous
    gate_up_ptr,  # (M, 2I), last stride 1
    weights_ptr,  # (T, k) as slots
    order_ptr,  # (M,) int32
    offs_ptr,  # (G,) int32
    M,
    I,  # noqa: E741
    G,
    stride_gm,
    G_POW2: tl.constexpr,
    ROUND: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    # 1. Which rows and columns are mine?
    col_tiles = tl.cdiv(I, BLOCK_I)
    rows = (tl.program_id(0) // col_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = ((tl.program_id(0) % col_tiles) * BLOCK_I + tl.arange(0, BLOCK_I))[None, :]
    live = rows < last_end(offs_ptr, G, M, G_POW2)
    inside = live[:, None] & (cols < I)

    # 2. Load. Rows without an expert and columns beyond I are zeros.
    row = rows.to(tl.int64)[:, None]
    gate = tl.load(gate_up_ptr + row * stride_gm + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_gm + I + cols, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(order_ptr + rows, mask=live, other=0)
    weight = tl.load(weights_ptr + slot, mask=live, other=0.0).to(tl.float32)

    # 3. Round, store.
    h = (gate * sigmoid(gate, HW) * up * weight[:, None]).to(gate_up_ptr.dtype.element_ty)
    if ROUND:
        h = round_last(h, E5M2, THRESH, HW)
    tl.store(out_ptr + row * I + cols, h.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < I))


@triton.jit(do_not_specialize=["M"])
def _swiglu_backward_kernel(
    row_ptr,  # (M, 2I): gradient of gate_up, rounded along the row
    col_ptr,  # (M, 2I): the same, rounded along the rows of each group
    hidden_ptr,  # (M, I): weight * silu(gate) * up, rounded along the rows of each group
    d_weights_ptr,  # (T, k) as slots, fp32
    gate_up_ptr,  # (M, 2I), last stride 1
    grad_ptr,  # (M, I), last stride 1
    weights_ptr,  # (T, k) as slots
    order_ptr,  # (M,) int32
    units_ptr,  # (units, 2) int32
    M,
    I,  # noqa: E741
    stride_gm,
    stride_dm,
    WANT_ROW: tl.constexpr,
    WANT_COL: tl.constexpr,
    WANT_HIDDEN: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    ROUND_ROW: tl.constexpr,
    ROUND_COL: tl.constexpr,
    ROUND_HIDDEN: tl.constexpr,
    GRAD_E5M2: tl.constexpr,
    GRAD_THRESH: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    # 1. Which 32 rows of which group? Behind the last group: rows without an expert.
    rows, live, keep = unit_rows(tl.program_id(0), units_ptr, M)
    slot = tl.load(order_ptr + rows, mask=keep, other=0)
    weight = tl.load(weights_ptr + slot, mask=live, other=0.0).to(tl.float32)[:, None]

    # 2. Coordinates.
    row = rows.to(tl.int64)[:, None]
    gate_row = gate_up_ptr + row * stride_gm
    grad_row = grad_ptr + row * stride_dm
    d_weight = tl.zeros((32,), tl.float32)

    for i in range(0, I, BLOCK_I):
        # 3. Load: what is not data is zero, and so is everything computed from it.
        cols = (i + tl.arange(0, BLOCK_I))[None, :]
        inside = live[:, None] & (cols < I)
        write = keep[:, None] & (cols < I)
        gate = tl.load(gate_row + cols, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_row + I + cols, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_row + cols, mask=inside, other=0.0).to(tl.float32)
        sig = sigmoid(gate, HW)
        activated = gate * sig
        product = activated * up
        if WANT_WEIGHTS:
            d_weight += tl.sum(grad * product, 1)

        # 4. Round each result, store it.
        if WANT_HIDDEN:
            hidden = (product * weight).to(gate_up_ptr.dtype.element_ty)
            if ROUND_HIDDEN:
                hidden = round_rows(hidden, E5M2, THRESH, HW)
            tl.store(hidden_ptr + row * I + cols, hidden.to(hidden_ptr.dtype.element_ty), mask=write)
        if WANT_ROW or WANT_COL:
            d = grad * weight
            d_up = (d * activated).to(gate_up_ptr.dtype.element_ty)
            d_gate = (d * up * (sig + activated * (1.0 - sig))).to(gate_up_ptr.dtype.element_ty)
            at = row * (2 * I) + cols
            if WANT_ROW:
                r_gate, r_up = d_gate, d_up
                if ROUND_ROW:
                    r_gate = round_last(d_gate, GRAD_E5M2, GRAD_THRESH, HW)
                    r_up = round_last(d_up, GRAD_E5M2, GRAD_THRESH, HW)
                tl.store(row_ptr + at, r_gate.to(row_ptr.dtype.element_ty), mask=write)
                tl.store(row_ptr + at + I, r_up.to(row_ptr.dtype.element_ty), mask=write)
            if WANT_COL:
                c_gate, c_up = d_gate, d_up
                if ROUND_COL:
                    c_gate = round_rows(d_gate, GRAD_E5M2, GRAD_THRESH, HW)
                    c_up = round_rows(d_up, GRAD_E5M2, GRAD_THRESH, HW)
                tl.store(col_ptr + at, c_gate.to(col_ptr.dtype.element_ty), mask=write)
                tl.store(col_ptr + at + I, c_up.to(col_ptr.dtype.element_ty), mask=write)

    if WANT_WEIGHTS:
        tl.store(d_weights_ptr + slot, d_weight, mask=keep)


# --- backward on words of two bf16 -----------------------------------------------------------------------------------
@triton.jit
def _gradients(gate, up, grad, weight, HW: tl.constexpr):
    """fp32 -> gradient of gate, gradient of up, weighted activation, the same without its weight."""
    sig = sigmoid(gate, HW)
    activated = gate * sig
    product = activated * up
    d = grad * weight
    return d * up * tl.fma(activated, 1.0 - sig, sig), d * activated, product * weight, product


@triton.jit(do_not_specialize=["M"])
def _swiglu_backward_words_kernel(
    row_ptr,  # (M, I) words: gradient of gate_up, rounded along the row
    col_ptr,  # (M, I) words: the same, rounded along the rows of each group
    hidden_ptr,  # (M, I/2) words: weight * silu(gate) * up, rounded along the rows of each group
    d_weights_ptr,  # (T, k) as slots, fp32
    gate_up_ptr,  # (M, I) words, contiguous
    grad_ptr,  # (M, I/2) words, contiguous
    weights_ptr,  # (T, k) as slots
    order_ptr,  # (M,) int32
    units_ptr,  # (units, 2) int32
    M,
    IW: tl.constexpr,  # I/2
    WANT_ROW: tl.constexpr,
    WANT_COL: tl.constexpr,
    WANT_HIDDEN: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    ROUND_ROW: tl.constexpr,
    ROUND_COL: tl.constexpr,
    ROUND_HIDDEN: tl.constexpr,
    GRAD_E5M2: tl.constexpr,
    GRAD_THRESH: tl.constexpr,
    E5M2: tl.constexpr,
    THRESH: tl.constexpr,
    HW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 1. Which 32 rows of which group? Behind the last group: rows without an expert.
    unit = tl.program_id(0)
    start = tl.load(units_ptr + 2 * unit)
    end = tl.load(units_ptr + 2 * unit + 1)
    rest = start < 0
    start = tl.where(rest, -1 - start, start)
    r = tl.arange(0, 32)
    keep = r < tl.where(rest, M, end) - start
    live = keep & (rest == 0)
    slot = tl.load(order_ptr + start + r, mask=keep, other=0)
    weight = tl.load(weights_ptr + slot, mask=live, other=0.0).to(tl.float32)[:, None]

    # 2. Coordinates, columns first: with IW known, what a row adds to an address is part of the instruction.
    first = start.to(tl.int64)
    wide = r[:, None] * (2 * IW)
    narrow = r[:, None] * IW
    gate_at = gate_up_ptr + first * (2 * IW)
    grad_at = grad_ptr + first * IW
    d_weight = tl.zeros((32,), tl.float32)

    for i in range(0, IW, BLOCK):
        # 3. Load: what is not data is zero, and so is everything computed from it.
        cols = i + tl.arange(0, BLOCK)
        inside, write = live[:, None], keep[:, None]
        if IW % BLOCK:
            inside = inside & (cols < IW)[None, :]
            write = write & (cols < IW)[None, :]
        cols = cols[None, :]
        gate_w = tl.load((gate_at + cols) + wide, mask=inside, other=0)
        up_w = tl.load((gate_at + IW + cols) + wide, mask=inside, other=0)
        grad_w = tl.load((grad_at + cols) + narrow, mask=inside, other=0)

        grad = even(grad_w)
        d_gate0, d_up0, hidden0, product = _gradients(even(gate_w), even(up_w), grad, weight, HW)
        dot = grad * product
        grad = odd(grad_w)
        d_gate1, d_up1, hidden1, product = _gradients(odd(gate_w), odd(up_w), grad, weight, HW)
        if WANT_WEIGHTS:  # fma by name: with other results wanted, the compiler might choose otherwise
            d_weight += tl.sum(tl.fma(grad, product, dot), 1)

        # 4. Round each result, store it.
        if WANT_HIDDEN:
            hidden = pack(hidden0, hidden1, HW)
            if ROUND_HIDDEN:
                hidden = round_word_rows(hidden, E5M2, THRESH, HW)
            tl.store((hidden_ptr + first * IW + cols) + narrow, hidden, mask=write)
        if WANT_ROW or WANT_COL:
            d_gate = pack(d_gate0, d_gate1, HW)
            d_up = pack(d_up0, d_up1, HW)
        if WANT_ROW:
            r_gate, r_up = d_gate, d_up
            if ROUND_ROW:
                r_gate = round_word_last(d_gate, GRAD_E5M2, GRAD_THRESH, HW)
                r_up = round_word_last(d_up, GRAD_E5M2, GRAD_THRESH, HW)
            row_at = row_ptr + first * (2 * IW)
            tl.store((row_at + cols) + wide, r_gate, mask=write)
            tl.store((row_at + IW + cols) + wide, r_up, mask=write)
        if WANT_COL:
            if ROUND_COL:
                d_gate = round_word_rows(d_gate, GRAD_E5M2, GRAD_THRESH, HW)
                d_up = round_word_rows(d_up, GRAD_E5M2, GRAD_THRESH, HW)
            col_at = col_ptr + first * (2 * IW)
            tl.store((col_at + cols) + wide, d_gate, mask=write)
            tl.store((col_at + IW + cols) + wide, d_up, mask=write)

    if WANT_WEIGHTS:
        tl.store(d_weights_ptr + slot, d_weight, mask=keep)


def swiglu_rows(
    gate_up: Tensor,
    weights: Tensor,
    order: Tensor,
    offs: Tensor,
    elem_dtype: torch.dtype | None,
    scale_mode: str,
    out_dtype: torch.dtype,
    config: tuple[int, int, int] = FORWARD_TILE,
) -> Tensor:
    """Launch. ``gate_up (M, 2I)``, ``weights (T, k)``, ``order (M,)``, ``offs (G,)`` -> ``(M, I)``."""
    m, i, g = gate_up.shape[0], gate_up.shape[1] // 2, offs.shape[0]
    out = torch.empty((m, i), dtype=out_dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block_m, block_i, warps = config
    block_i = min(block_i, max(32, triton.next_power_of_2(i)))
    _swiglu_rows_kernel[(cdiv(m, block_m) * cdiv(i, block_i),)](
        out,
        gate_up,
        weights.contiguous(),
        order,
        offs,
        m,
        i,
        g,
        gate_up.stride(0),
        G_POW2=triton.next_power_of_2(g),
        BLOCK_M=block_m,
        BLOCK_I=block_i,
        num_warps=warps,
        **rounding(elem_dtype, scale_mode, gate_up.device),
    )
    return out


def swiglu_backward(
    gate_up: Tensor,
    grad: Tensor,
    weights: Tensor,
    order: Tensor,
    offs: Tensor,
    row_dtype: torch.dtype | None,
    col_dtype: torch.dtype | None,
    hidden_dtype: torch.dtype | None,
    scale_mode: str,
    out_dtype: torch.dtype,
    want: tuple[bool, bool, bool, bool],
    config: tuple[int, int] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Launch. Results as in the reference; None where ``want`` says no. A gradient that is rounded in neither direction
    is written once and returned twice."""
    m, i = gate_up.shape[0], gate_up.shape[1] // 2
    device = gate_up.device
    want_row, want_col, want_hidden, want_weights = want
    shared = want_row and want_col and row_dtype is None and col_dtype is None

    def result(wanted: bool, *shape: int) -> Tensor | None:
        return torch.empty(shape, dtype=out_dtype, device=device) if wanted else None

    row = result(want_row, m, 2 * i)
    col = result(want_col and not shared, m, 2 * i)
    hidden = result(want_hidden, m, i)
    d_weights = torch.empty(weights.shape, dtype=torch.float32, device=device) if want_weights else None
    if m * i:
        grads = rounding(row_dtype or col_dtype, scale_mode, device)
        hiddens = rounding(hidden_dtype, scale_mode, device)
        grad = grad.contiguous()
        table = unit_table(m, offs)
        want = (want_row, want_col and not shared, want_hidden, want_weights)
        fixed = {
            "ROUND_ROW": row_dtype is not None,
            "ROUND_COL": col_dtype is not None,
            "ROUND_HIDDEN": hidden_dtype is not None,
            "GRAD_E5M2": grads["E5M2"],
            "GRAD_THRESH": grads["THRESH"],
            "E5M2": hiddens["E5M2"],
            "THRESH": hiddens["THRESH"],
            "HW": hiddens["HW"],
        }
        results, data = (row, col, hidden, d_weights), (weights.contiguous(), order, table)
        words = out_dtype == torch.bfloat16 and _whole_words(gate_up, grad)
        block_i, warps = config or (BACKWARD_WORDS if words else BACKWARD_TILE)
        if words:
            in_words = [t if t is None or t.dtype != torch.bfloat16 else t.view(torch.int32) for t in results]
            _swiglu_backward_words_kernel[(table.shape[0],)](
                *in_words,
                gate_up.view(torch.int32),
                grad.view(torch.int32),
                *data,
                m,
                i // 2,
                *want,
                **fixed,
                BLOCK=min(block_i, max(16, triton.next_power_of_2(i // 2))),
                num_warps=warps,
            )
        else:
            _swiglu_backward_kernel[(table.shape[0],)](
                *results,
                gate_up,
                grad,
                *data,
                m,
                i,
                gate_up.stride(0),
                grad.stride(0),
                *want,
                **fixed,
                BLOCK_I=min(block_i, max(32, triton.next_power_of_2(i))),
                num_warps=warps,
            )
    elif d_weights is not None:
        d_weights.zero_()
    return row, row if shared else col, hidden, d_weights


def _whole_words(gate_up: Tensor, grad: Tensor) -> bool:
    """Whether the kernel on words takes them: whole blocks, rows behind each other from multiples of 16 bytes on."""
    if grad.shape[1] % 32 or not in_words(gate_up, grad):
        return False
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (gate_up, grad))


def _case(
    backward: bool, rounded: bool = True, want: tuple[bool, ...] = (True,) * 4, dtype: torch.dtype = torch.bfloat16
) -> object:
    gate_up = torch.zeros(512, 1536, dtype=dtype)
    weights, order = torch.zeros(64, 8, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.int32)
    offs, elem = torch.zeros(128, dtype=torch.int32), torch.float8_e4m3fn if rounded else None
    if not backward:
        return swiglu_rows(gate_up, weights, order, offs, elem, "rceil", torch.bfloat16)
    grad = gate_up[:, :768].contiguous()
    dtypes = (elem, elem, elem)
    return swiglu_backward(gate_up, grad, weights, order, offs, *dtypes, "rceil", torch.bfloat16, want)  # type: ignore[arg-type]


OFFLINE = [
    Case("forward", lambda: _case(False)),
    Case("backward", lambda: _case(True), spills=16),
    Case("backward, not rounded", lambda: _case(True, False)),
    Case("backward, frozen weights", lambda: _case(True, True, (True, False, False, True))),
    Case("backward, fp16", lambda: _case(True, dtype=torch.float16), spills=16),
]
