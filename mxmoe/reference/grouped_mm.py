"""Grouped GEMMs as a loop over groups, fp32 accumulation: the oracle. Any device; copies offs to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import groups


def _spans(offs: Tensor, total: int) -> list[tuple[int, int]]:
    ends = groups.safe_ends(offs, total).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def mm_m_groups(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """a ``(M, K)``, b ``(G, N, K)`` -> ``(M, N)``: rows of group g times ``b[g].T``; rows of no group are zero."""
    out = a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)
    for g, (start, end) in enumerate(_spans(offs, a.shape[0])):
        product = a[start:end].to(compute) @ b[g].to(compute).T
        if bias is not None:
            product = product + bias[g].to(compute)
        out[start:end] = product.to(out_dtype)
    return out


def mm_k_groups(
    a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype, compute: torch.dtype = torch.float32
) -> Tensor:
    """a ``(M, N)``, b ``(M, K)`` -> ``(G, N, K)``: per group ``a_g.T @ b_g``; an empty group gives zeros."""
    out = a.new_zeros(offs.numel(), a.shape[1], b.shape[1], dtype=out_dtype)
    for g, (start, end) in enumerate(_spans(offs, a.shape[0])):
        out[g] = (a[start:end].to(compute).T @ b[start:end].to(compute)).to(out_dtype)
    return out


def group_sum(x: Tensor, offs: Tensor) -> Tensor:
    """``(M, N)`` -> ``(G, N)`` fp32: sum over the rows of each group (the gradient of a bias)."""
    return torch.stack([x[start:end].float().sum(0) for start, end in _spans(offs, x.shape[0])])
