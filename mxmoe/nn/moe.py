"""A whole Mixture-of-Experts layer in plain PyTorch: a softmax router and MXFP8 experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..recipe import MXRecipe
from .experts import Experts


class MoE(nn.Module):
    """Top-k router (kept in high precision) and :class:`Experts`. ``(..., H)`` -> ``(..., H)``.

    Args: ``norm_topk``: the k routing weights of a token are divided by their sum.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        *,
        norm_topk: bool = True,
        recipe: MXRecipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must lie in [1, num_experts = {num_experts}], got {top_k}")
        self.top_k = top_k
        self.norm_topk = norm_topk
        self.router = nn.Linear(hidden_size, num_experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, recipe=recipe, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Route, run the experts, combine."""
        tokens = x.reshape(-1, x.shape[-1])
        scores = torch.softmax(self.router(tokens).float(), dim=-1)
        top_k_weights, top_k_index = scores.topk(self.top_k, dim=-1)
        if self.norm_topk:
            top_k_weights = top_k_weights / top_k_weights.sum(-1, keepdim=True)
        return self.experts(tokens, top_k_index, top_k_weights.to(tokens.dtype)).view(x.shape)
