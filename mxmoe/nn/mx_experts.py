"""The expert MLP of a layer whose weights are MXFP8 already: serving. No master weights, no gradient to the weights.

x (T, H) -> route -> gate/up (+ SwiGLU, one launch) -> down -> combine (T, H)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import mxmoe

from .. import checks
from ..formats import BLOCK
from ..ops.decode import pack_weight
from ..ops.quantize import plain_scale
from ..recipe import MXRecipe
from ..tensor import MXTensor, check, make
from .routing import combine, permute, route


@dataclass(frozen=True)
class ServingWeight:
    """The weight of all experts of one projection, ``(E, N, K)`` with the contraction last.

    | field | shape | dtype | meaning |
    |---|---|---|---|
    | ``qdata`` | ``(E, N, K)`` | float8_e4m3fn | |
    | ``scale`` | ``(E, N, ceil(K/32))`` | uint8 | plain |
    | ``packed``, ``top`` | | uint8 | ``mxmoe.ops.decode.pack_weight``: lets kernels use fp16; None: they do without |
    """

    qdata: Tensor
    scale: Tensor
    packed: Tensor | None = None
    top: Tensor | None = None

    @classmethod
    def of(cls, weight: MXTensor, *, pack: bool = True) -> ServingWeight:
        """The weight of an :class:`MXTensor` ``(E, N, K)`` whose blocks lie along its last dim, in either layout.

        Args: ``pack``: look at every byte once, for the faster kernels.
        Raises: ``TypeError``, ``ValueError``. Sync: none.
        """
        if not isinstance(weight, MXTensor):
            raise TypeError(f"weight must be an MXTensor (mxmoe.quantize makes one), got {type(weight).__name__}")
        check(weight, "weight")
        if weight.ndim != 3:
            raise ValueError(f"weight must be (experts, N, K), got {tuple(weight.shape)}")
        if weight.block == "colwise":
            raise ValueError(
                "weight is quantized along its rows (colwise), and the contraction is its last dim: "
                'quantize(..., block="rowwise"), or pass its .mT if it is (experts, K, N)'
            )
        scale = plain_scale(weight)
        if weight.block == "square":
            scale = scale.repeat_interleave(BLOCK, -2)[:, : weight.shape[1]]
        qdata, scale = weight.qdata.detach().contiguous(), scale.contiguous()
        return cls(qdata, scale, *(pack_weight(qdata, scale) if pack else (None, None)))

    def as_mx(self, dtype: torch.dtype) -> MXTensor:
        """The same bytes as an :class:`MXTensor`."""
        shape = self.qdata.shape
        return make(self.qdata, self.scale, block="rowwise", layout="plain", shape=shape, orig_dtype=dtype)


def mx_experts_forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: ServingWeight,
    down: ServingWeight,
    *,
    num_experts: int,
    activate: Callable[[Tensor], Tensor] | None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    recipe: MXRecipe,
) -> Tensor:
    """Run every token through its experts.

    | name | shape | dtype |
    |---|---|---|
    | ``x`` | ``(T, H)`` | bf16, fp16, fp32 |
    | ``top_k_index`` | ``(T, k)`` | int64, int32; ``num_experts`` or more: no expert on this rank |
    | ``top_k_weights`` | ``(T, k)`` | floating |

    Args: ``activate`` maps ``(M, 2I)`` or ``(M, I)`` to ``(M, I)``; None: SwiGLU of gate rows followed by up rows,
    fused with the up projection.
    Returns: ``(T, H)``, dtype of ``x``. Raises: ``TypeError``, ``ValueError`` for operands that do not fit.
    Sync: none. Empty: T = 0 gives ``(0, H)``. Gradient: to ``x`` and ``top_k_weights``, through the rounded weights.
    """
    checks.tensor(x, "x", dims=(2,))
    checks.top_k(top_k_index, top_k_weights, x.shape[0], x.device)
    for name, w, b in (("up", up, up_bias), ("down", down, down_bias)):
        if w.qdata.shape[0] != num_experts:
            raise ValueError(f"{name} holds {w.qdata.shape[0]} experts, num_experts is {num_experts}")
        if b is not None:
            checks.bias(b, num_experts, w.qdata.shape[1], x.device, f"{name}_bias")
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, top_k_weights))
    if activate is None and up_bias is None and down_bias is None and not needs_grad:
        out: Tensor = torch.ops.mxmoe.mx_experts(
            x,
            top_k_index,
            top_k_weights,
            up.qdata,
            up.scale,
            up.packed,
            up.top,
            down.qdata,
            down.scale,
            down.packed,
            down.top,
            recipe.key,
        )
        return out

    def product(rows: Tensor, w: ServingWeight, bias: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and rows.requires_grad:
            return mxmoe.grouped_mm(rows, w.as_mx(x.dtype).mT, routing.offs, bias=bias, recipe=recipe)
        out: Tensor = torch.ops.mxmoe.mx_decode_m_groups(
            rows, None, w.qdata, w.scale, w.packed, w.top, routing.offs, bias, x.dtype, recipe.key
        )
        return out

    def swiglu(gate_up: Tensor) -> Tensor:
        gate, value = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value

    routing = route(top_k_index, num_experts)
    hidden = (activate or swiglu)(product(permute(x, routing), up, up_bias))
    return combine(product(hidden.to(x.dtype), down, down_bias), top_k_weights, routing).to(x.dtype)
