"""Llama 4: its experts take every token for every expert, with rows of zeros where the router said no.

transformers computes ``routed_in = tokens * score`` for all experts, E * T rows of which T * k are not zero, and runs
them all. A row of zeros gives a row of zeros and gradients of zeros (no biases), so here only the others are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from ..nn.experts import ExpertWeights, swiglu_experts


class MXLlama4TextExperts(Llama4TextExperts):
    """``Llama4TextExperts`` on the MXFP8 layer; made by ``mxmoe.convert``, which changes the class of a module."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(E * T, H)``, expert by expert -> the same shape."""
        x = hidden_states.reshape(-1, self.hidden_size)
        rows = torch.arange(x.shape[0], device=x.device)
        expert = rows // max(x.shape[0] // self.num_experts, 1)
        routed = (x != 0).any(-1)  # a NaN is routed
        ids = torch.where(routed, expert, self.num_experts)[:, None]
        weights = ExpertWeights(self.gate_up_proj, self.down_proj, transposed=True)
        ones = torch.ones_like(ids, dtype=torch.float32)
        dtype = self.gate_up_proj.dtype
        out = swiglu_experts(x.to(dtype), ids, ones, weights, recipe=getattr(self, "mxmoe_recipe", None))
        return out.to(hidden_states.dtype)
