"""The stages of an expert layer between its GEMMs, in plain PyTorch: the specification of the layer kernels.

Letters: T tokens, k choices per token, M = T * k routed rows, E experts, H hidden, I intermediate.
A *slot* is one (token, choice) pair, ``token * k + choice``. ``order (M,)`` maps sorted rows to slots, ``position
(T, k)`` maps slots to sorted rows. Rows at or beyond ``offs[-1]`` belong to no expert here: zeros everywhere.
An ``elem_dtype`` of None means: not rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from .. import groups
from .quantize import fake_quantize


def route(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(T, k)`` expert ids -> offs ``(E,)``, order ``(M,)``, position ``(T, k)``, all int32; stable."""
    ids = top_k_index.reshape(-1)
    ids = torch.where((ids < 0) | (ids > num_experts), num_experts, ids)
    sorted_ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=sorted_ids.dtype)
    offs = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    rows = torch.arange(order.shape[0], device=ids.device, dtype=torch.int32)
    position = torch.empty_like(rows).scatter_(0, order, rows)
    return offs, order.to(torch.int32), position.view(top_k_index.shape)


def _live(offs: Tensor, m: int) -> Tensor:
    """Which of the M rows belong to an expert, bool ``(M, 1)``."""
    end = groups.safe_ends(offs, m)[-1]
    return (torch.arange(m, device=offs.device) < end)[:, None]


def _round(
    x: Tensor, block: str, offs: Tensor, elem_dtype: torch.dtype | None, scale_mode: str, out_dtype: torch.dtype
) -> Tensor:
    if elem_dtype is None:
        return torch.where(_live(offs, x.shape[0]), x, x.new_zeros(())).to(out_dtype)
    return fake_quantize(x, block, offs, elem_dtype, scale_mode, out_dtype)


def gather_rows(
    x: Tensor,
    position: Tensor,
    offs: Tensor,
    weights: Tensor | None,
    elem_dtype: torch.dtype | None,
    scale_mode: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``x (T, H)`` rounded along H -> ``(M, H)`` sorted by expert; times ``weights (T, k)`` afterwards, if given."""
    m = position.numel()
    rounded = x if elem_dtype is None else fake_quantize(x, "rowwise", None, elem_dtype, scale_mode, torch.float32)
    rows = rounded.float().repeat_interleave(position.shape[1], 0)
    if weights is not None:
        rows = rows * weights.reshape(-1, 1).float()
    out = torch.zeros(m, x.shape[1], device=x.device).index_copy_(0, position.reshape(-1).long(), rows)
    return torch.where(_live(offs, m), out, out.new_zeros(())).to(out_dtype)


def gather_cols(
    x: Tensor,
    order: Tensor,
    top_k: int,
    offs: Tensor,
    elem_dtype: torch.dtype | None,
    scale_mode: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``x (T, H)`` sorted by expert ``(M, H)``, rounded along the rows of each group."""
    rows = x.index_select(0, order.long() // top_k)
    return _round(rows, "colwise", offs, elem_dtype, scale_mode, out_dtype)


def _halves(gate_up: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up in fp32, and the routing weight of every row ``(M, 1)``."""
    gate, up = gate_up.float().chunk(2, -1)
    return gate, up, weights.reshape(-1)[order.long()].float()[:, None]


def swiglu_rows(
    gate_up: Tensor,
    weights: Tensor,
    order: Tensor,
    offs: Tensor,
    elem_dtype: torch.dtype | None,
    scale_mode: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``weight * silu(gate) * up``: ``(M, 2I)`` -> ``(M, I)``, computed in fp32, rounded along I.

    Before it is rounded to MXFP8 it has the dtype of gate_up, as it would have as a tensor of its own: fused or not,
    the bytes are the same.
    """
    gate, up, w = _halves(gate_up, weights, order)
    hidden = (silu(gate) * up * w).to(gate_up.dtype)
    return _round(hidden, "rowwise", offs, elem_dtype, scale_mode, out_dtype)


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Backward of :func:`swiglu_rows`; None where ``want`` says no. Rounded from the dtype of gate_up, as there.

    ``grad (M, I)`` -> gradient of gate_up rounded along 2I ``(M, 2I)``; the same rounded along the rows of each group;
    ``weight * silu(gate) * up`` rounded along the rows of each group ``(M, I)``; gradient of the weights ``(T, k)``.
    """
    gate, up, w = _halves(gate_up, weights, order)
    live = _live(offs, gate.shape[0])
    g = torch.where(live, grad.float(), 0.0)
    sigmoid = torch.sigmoid(gate)
    activated = gate * sigmoid
    d = g * w
    d_gate = d * up * (sigmoid + activated * (1 - sigmoid))
    d_gate_up = torch.cat([d_gate, d * activated], -1).to(gate_up.dtype)
    row = col = hidden = d_weights = None
    if want[0]:
        row = _round(d_gate_up, "rowwise", offs, row_dtype, scale_mode, out_dtype)
    if want[1]:
        col = _round(d_gate_up, "colwise", offs, col_dtype, scale_mode, out_dtype)
    if want[2]:
        hidden = (activated * up * w).to(gate_up.dtype)
        hidden = _round(hidden, "colwise", offs, hidden_dtype, scale_mode, out_dtype)
    if want[3]:
        per_row = torch.where(live[:, 0], (g * activated * up).sum(-1), 0.0)
        d_weights = torch.zeros_like(per_row).index_copy_(0, order.long(), per_row).view(weights.shape)
    return row, col, hidden, d_weights


def combine(rows: Tensor, position: Tensor, offs: Tensor, weights: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``out[t] = sum_j weights[t, j] * rows[position[t, j]]`` in fp32, j ascending: ``(M, H)`` -> ``(T, H)``."""
    t, k = position.shape
    end = groups.safe_ends(offs, rows.shape[0])[-1]
    out = torch.zeros(t, rows.shape[1], device=rows.device)
    for j in range(k):
        taken = rows.index_select(0, position[:, j].long()).float()
        if weights is not None:
            taken = taken * weights[:, j, None].float()
        out = out + torch.where((position[:, j] < end)[:, None], taken, 0.0)
    return out.to(out_dtype)


def combine_weights_grad(grad: Tensor, rows: Tensor, position: Tensor, offs: Tensor) -> Tensor:
    """Gradient of :func:`combine` to its weights: ``<grad[t], rows[position[t, j]]>``, fp32 ``(T, k)``."""
    end = groups.safe_ends(offs, rows.shape[0])[-1]
    taken = rows.index_select(0, position.reshape(-1).long()).float().view(*position.shape, rows.shape[1])
    products = (taken * grad.float()[:, None]).sum(-1)
    return torch.where(position < end, products, 0.0)
