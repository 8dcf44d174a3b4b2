"""The expert MLP of a Mixture-of-Experts layer on grouped GEMMs: one function for every storage form, one module.

x (T, H) -> route -> permute (M, H) -> GEMM -> gate -> GEMM -> combine (T, H)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import mxmoe

from .. import checks
from ..ops.grouped_mm import _recipe
from ..ops.moe import experts
from ..recipe import MXRecipe
from ..tensor import MXTensor
from .routing import combine, permute, route

GroupedMM = Callable[..., Tensor]
"""``(x (M, K), w (E, K, N), offs (E,), bias (E, N) or None) -> (M, N)``."""


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of all experts of one layer, as they are stored.

    | field | ``transposed=False`` | ``transposed=True`` |
    |---|---|---|
    | ``up`` (gate and up, or up alone) | ``(E, 2I, H)`` or ``(E, I, H)`` | ``(E, H, 2I)`` or ``(E, H, I)`` |
    | ``down`` | ``(E, H, I)`` | ``(E, I, H)`` |
    | ``up_bias``, ``down_bias`` | ``(E, 2I)``, ``(E, H)`` or None | the same |
    """

    up: Tensor | MXTensor
    down: Tensor | MXTensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    transposed: bool = False


def experts_forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    *,
    num_experts: int,
    activate: Callable[[Tensor], Tensor],
    grouped_mm: GroupedMM,
) -> Tensor:
    """Run every token through its experts: ``sum_j weight_j * down_j(activate(up_j(x)))``.

    | name | shape | dtype |
    |---|---|---|
    | ``x`` | ``(T, H)`` | bf16, fp16, fp32 |
    | ``top_k_index`` | ``(T, k)`` | int64, int32; ``num_experts`` or more: no expert on this rank |
    | ``top_k_weights`` | ``(T, k)`` | floating |

    Args: ``activate`` maps ``(M, 2I)`` or ``(M, I)`` to ``(M, I)``; ``grouped_mm`` computes the two GEMMs.
    Returns: ``(T, H)``, dtype of ``x``. Sync: none. Empty: T = 0 gives ``(0, H)`` with gradients. Gradient: to all.
    """

    def as_input(w: Tensor | MXTensor) -> Tensor | MXTensor:
        return w if weights.transposed else w.transpose(-2, -1)

    checks.tensor(x, "x", dims=(2,))
    checks.top_k(top_k_index, top_k_weights, x.shape[0], x.device)
    routing = route(top_k_index, num_experts)
    rows = permute(x, routing)
    hidden = activate(grouped_mm(rows, as_input(weights.up), routing.offs, weights.up_bias))
    rows = grouped_mm(hidden, as_input(weights.down), routing.offs, weights.down_bias)
    return combine(rows, top_k_weights, routing).to(x.dtype)


def swiglu_experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, weights: ExpertWeights, *, recipe: MXRecipe | None
) -> Tensor:
    """:func:`experts_forward` for ``silu(gate) * up`` without biases, as one op with every step fused that can be.

    The routing weight multiplies the activation instead of the result. Autocast: operands take the autocast dtype.
    """
    checks.tensor(x, "x", dims=(2,))
    checks.top_k(top_k_index, top_k_weights, x.shape[0], x.device)
    up, down = (w.mT if weights.transposed else w for w in (weights.up, weights.down))
    dtype = x.dtype
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        to = torch.get_autocast_dtype(x.device.type)
        x = x.to(to)
        up, down = (w.to(to) if isinstance(w, Tensor) else w for w in (up, down))
    return experts(x, top_k_index, top_k_weights, up, down, recipe=recipe).to(dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of concatenated halves ``(M, 2I)`` -> ``(M, I)``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


class Experts(nn.Module):
    """All experts of one layer, SwiGLU MLPs, in MXFP8. Parameters are plain ``nn.Parameter`` s in high precision.

    | parameter | shape |
    |---|---|
    | ``gate_up_proj`` | ``(E, 2I, H)``: gate rows, then up rows |
    | ``down_proj`` | ``(E, H, I)`` |

    The layer is one fused op. In a subclass that overrides ``_grouped_mm`` both GEMMs go through that method instead.
    Gradient: to the tokens, the routing weights and both parameters.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: MXRecipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.recipe = _recipe(recipe)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up_proj = weight(num_experts, 2 * intermediate_size, hidden_size)
        self.down_proj = weight(num_experts, hidden_size, intermediate_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ``+-1/sqrt(inputs)``, as ``nn.Linear``."""
        for w in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(max(w.shape[-1], 1))
            nn.init.uniform_(w, -bound, bound)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``x (T, H)``, ``top_k_index (T, k)``, ``top_k_weights (T, k)`` -> ``(T, H)``."""
        weights = ExpertWeights(self.gate_up_proj, self.down_proj)
        if type(self)._grouped_mm is Experts._grouped_mm:
            return swiglu_experts(x, top_k_index, top_k_weights, weights, recipe=self.recipe)
        return experts_forward(
            x,
            top_k_index,
            top_k_weights,
            weights,
            num_experts=self.num_experts,
            activate=swiglu,
            grouped_mm=self._grouped_mm,
        )

    def _grouped_mm(self, x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
        return mxmoe.grouped_mm(x, w, offs, bias=bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        sizes = f"experts={self.num_experts}, hidden={self.hidden_size}, intermediate={self.intermediate_size}"
        return f"{sizes}, {self.recipe.key}"
