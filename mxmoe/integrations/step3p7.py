"""Step 3.7: experts in the common layout, but without the decorator that asks the transformers registry."""

from __future__ import annotations

from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from .huggingface import mxmoe_experts_forward


class MXStep3p7Experts(Step3p7Experts):
    """``Step3p7Experts`` on MXFP8 GEMMs; made by ``mxmoe.convert``, which changes the class of a module."""

    has_gate = True
    has_bias = False
    is_transposed = False
    is_concatenated = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As every experts module of transformers."""
        return mxmoe_experts_forward(self, hidden_states, top_k_index, top_k_weights)
