"""Grouped GEMM in bf16: ops for M groups and K groups, their backward op, and ``mxmoe.bf16_grouped_mm``.

m_groups: a ``(M, K)`` times b ``(G, N, K)`` -> ``(M, N)``. k_groups: a ``(M, N)``, b ``(M, K)`` -> ``(G, N, K)``.
The ``dequant`` backend uses the same two functions on operands that were rounded to MXFP8 before.

Which implementation runs is a static rule on the device (``results/`` has the figures): our kernel on Hopper and where
torch's grouped GEMM cannot take the strides; torch's on sm_100 and sm_80, whose tile shapes we have not measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks, device, groups, shapes
from ..reference import grouped_mm as loop
from ._impl import impl

_ALIGN = 16
_BF16 = torch.bfloat16


# --- which implementation --------------------------------------------------------------------------------------------
def _torch_takes(t: Tensor) -> bool:
    """torch._grouped_mm takes t: bf16, one of the last two dims contiguous, other strides multiples of 16 bytes."""
    if t.dtype != _BF16 or t.numel() == 0 or t.data_ptr() % _ALIGN:
        return False
    *outer, rows, cols = t.stride()
    step, length = (cols, t.shape[-2]) if rows == 1 else (rows, t.shape[-1])
    if 1 not in (rows, cols) or step < length:
        return False
    return all(s * t.element_size() % _ALIGN == 0 and s > 0 for s in (*outer, step))


def _use_torch(out_dtype: torch.dtype, *operands: Tensor) -> bool:
    major = device.capability(operands[0].device)[0]
    return major in (8, 10) and out_dtype == _BF16 and all(_torch_takes(t) for t in operands)


def mm_m_groups(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, K)``, b ``(G, N, K)`` -> ``(M, N)``; rows of no group are zero. Operands bf16 on CUDA, any on a CPU."""
    if not a.is_cuda:
        return loop.mm_m_groups(a, b, offs, bias, out_dtype)
    from ..kernels.bf16_grouped_mm import bf16_mm_m_groups
    from ..kernels.zero_tail import zero_tail_rows

    if bias is None and _use_torch(out_dtype, a, b):
        ends = groups.safe_ends(offs, a.shape[0])
        out: Tensor = zero_tail_rows(torch._grouped_mm(a, b.mT, offs=ends), ends)
    else:
        out = bf16_mm_m_groups(a, b, offs, bias, out_dtype)
    return out


def mm_k_groups(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a ``(M, N)``, b ``(M, K)`` -> ``(G, N, K)``; an empty group gives zeros."""
    if not a.is_cuda:
        return loop.mm_k_groups(a, b, offs, out_dtype)
    from ..kernels.bf16_grouped_mm import bf16_mm_k_groups

    if _use_torch(out_dtype, a, b):
        return torch._grouped_mm(a.t(), b, offs=groups.safe_ends(offs, a.shape[0]))
    out: Tensor = bf16_mm_k_groups(a, b, offs, out_dtype)
    return out


# --- ops -------------------------------------------------------------------------------------------------------------
@torch.library.custom_op("mxmoe::bf16_mm_m_groups", mutates_args=(), device_types=("cpu", "cuda"))
def _m_groups(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return mm_m_groups(a, b, offs, bias, out_dtype)


@_m_groups.register_fake
def _(a, b, offs, bias, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxmoe::bf16_mm_m_groups_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _m_groups_backward(
    grad: Tensor, a: Tensor | None, b: Tensor, offs: Tensor, need_a: bool, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """da, db, dbias; empty where not needed: da without ``need_a``, db without ``a``, dbias without its dtype."""
    da, db, dbias = (grad.new_empty(0, dtype=_BF16) for _ in range(3))
    rows = grad.to(_BF16)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if need_a:
        da = mm_m_groups(rows, b.mT, offs, None, _BF16)
    if a is not None:
        a = a if a.stride(-1) == 1 else a.contiguous()
        if shapes.is_transposed(b.stride()):
            db = mm_k_groups(a, rows, offs, _BF16).mT
        else:
            db = mm_k_groups(rows, a, offs, _BF16)
    if bias_dtype is not None:
        dbias = impl(grad.device).group_sum(grad, offs).to(bias_dtype)
    return da, db, dbias


@_m_groups_backward.register_fake
def _(grad, a, b, offs, need_a, bias_dtype):  # type: ignore[no-untyped-def]
    da, db, dbias = (grad.new_empty(0, dtype=_BF16) for _ in range(3))
    if need_a:
        da = grad.new_empty((grad.shape[0], b.shape[2]), dtype=_BF16)
    if a is not None:
        g, n, k = b.shape
        transposed = shapes.is_transposed(b.stride())
        db = grad.new_empty((g, k, n), dtype=_BF16).mT if transposed else grad.new_empty((g, n, k), dtype=_BF16)
    if bias_dtype is not None:
        dbias = grad.new_empty((b.shape[0], b.shape[1]), dtype=bias_dtype)
    return da, db, dbias


@torch.library.custom_op("mxmoe::bf16_mm_k_groups", mutates_args=(), device_types=("cpu", "cuda"))
def _k_groups(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    a, b = (t if t.stride(-1) == 1 else t.contiguous() for t in (a, b))
    return mm_k_groups(a, b, offs, out_dtype)


@_k_groups.register_fake
def _(a, b, offs, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty((offs.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype)


# --- public ----------------------------------------------------------------------------------------------------------
def _operand(t: object, name: str) -> Tensor:
    t = checks.tensor(t, name, dims=(2, 3))
    device_type = "cpu" if t.is_meta else t.device.type  # autocast knows no meta device
    if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == _BF16:
        t = t.to(_BF16)
    if t.dtype != _BF16:
        raise TypeError(
            f"{name} must be bfloat16, got {str(t.dtype).removeprefix('torch.')}: cast it, or use a bfloat16 autocast"
        )
    return t


def _contracts(x: Tensor, w: Tensor, x_dim: int, w_dim: int) -> None:
    if x.shape[x_dim] != w.shape[w_dim]:
        raise ValueError(
            f"x {tuple(x.shape)} and w {tuple(w.shape)} do not contract: x has {x.shape[x_dim]} in dim {x_dim}, w has "
            f"{w.shape[w_dim]} in dim {w_dim} (w is (G, K, N): for a parameter (G, N, K) pass w.transpose(-2, -1))"
        )


def bf16_grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply groups of x with their own matrix of w, in bf16 with fp32 accumulation and one rounding.

    | x | w | offs | returns | use |
    |---|---|---|---|---|
    | ``(M, K)`` | ``(G, K, N)`` | ends along M | ``(M, N)`` | forward, dgrad |
    | ``(N, M)`` | ``(M, K)`` | ends along M, the contraction | ``(G, N, K)`` | wgrad |
    | ``(G, M, K)`` | ``(G, K, N)`` | None | ``(G, M, N)`` | dense batch |
    | ``(G, M, K)`` | ``(K, N)`` | ends along N | ``(M, N)`` | the mirror of the first |

    | argument | shape | dtype | notes |
    |---|---|---|---|
    | ``x``, ``w`` | as above | bf16 | any strides; fastest where rows start at multiples of 16 bytes |
    | ``offs`` | ``(G,)`` | int32, int64 | cumulative group ends; any sizes, zero included; G up to 512 and beyond |
    | ``bias`` | ``(G, N)`` | bf16, fp16, fp32 | added in fp32 to the rows of its group; first and third form |
    | ``out_dtype`` | | bf16, fp16, fp32 | default bf16 |

    Raises: ``TypeError`` / ``ValueError`` naming the argument, the value and what is expected, also under fake tensors.
    Sync: none on a GPU; capturable in a CUDA graph, new offs count on replay. Empty: rows at or beyond ``offs[-1]`` are
    zero, in the result and in dX; an empty group gives an exactly zero dW. NaN in one group stays in it.
    Gradient: x, w, bias (bias: fp32 sums). Source: ``torch.nn.functional.grouped_mm``, of which this is a drop-in.
    """
    x, w = _operand(x, "x"), _operand(w, "w")
    if x.device != w.device:
        raise ValueError(f"x is on {x.device}, w is on {w.device}: both must be on one device")
    dtype = checks.out_dtype(out_dtype, _BF16)
    form = (x.ndim, w.ndim)
    if form == (3, 3) and offs is not None:
        raise ValueError("offs must be None for a 3-D x and a 3-D w: every batch entry is one group")
    if form != (3, 3) and offs is None:
        raise ValueError(f"offs is required for a {x.ndim}-D x and a {w.ndim}-D w: int32 (G,) cumulative group ends")
    if bias is not None and form in ((2, 2), (3, 2)):
        raise ValueError("bias is defined for a 3-D w only: it is (G, N), one row per group")
    ops = torch.ops.mxmoe
    match form:
        case (2, 3):
            _contracts(x, w, 1, 1)
            ends = checks.offs(offs, "offs", x.device, w.shape[0], total=x.shape[0])
            bias = None if bias is None else checks.bias(bias, w.shape[0], w.shape[2], x.device)
            out: Tensor = ops.bf16_mm_m_groups(x, w.mT, ends, bias, dtype)
        case (2, 2):
            _contracts(x, w, 1, 0)
            ends = checks.offs(offs, "offs", x.device, total=w.shape[0])
            out = ops.bf16_mm_k_groups(x.t(), w, ends, dtype)
        case (3, 3):
            _contracts(x, w, 2, 1)
            if x.shape[0] != w.shape[0]:
                raise ValueError(
                    f"x {tuple(x.shape)} and w {tuple(w.shape)} differ in dim 0: {x.shape[0]}, {w.shape[0]}"
                )
            g, m, k = x.shape
            bias = None if bias is None else checks.bias(bias, g, w.shape[2], x.device)
            ends = groups.even_ends(g, m, x.device)
            flat = ops.bf16_mm_m_groups(x.reshape(g * m, k), w.mT, ends, bias, dtype)
            out = flat.view(g, m, w.shape[2])
        case _:
            _contracts(x, w, 2, 0)
            ends = checks.offs(offs, "offs", x.device, x.shape[0], total=w.shape[1])
            out = ops.bf16_mm_m_groups(w.t(), x, ends, None, dtype).t().contiguous()
    return out
