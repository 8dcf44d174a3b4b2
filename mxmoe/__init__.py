"""MXFP8 Mixture-of-Experts grouped GEMMs on PyTorch and Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import autograd as _autograd  # noqa: F401  (registers the gradients)
from .checks import debug_offs
from .observe import observe
from .ops.bf16_grouped_mm import bf16_grouped_mm
from .ops.blocked import (
    from_blocked,
    from_blocked_experts,
    from_blocked_k_groups,
    from_blocked_m_groups,
    to_blocked,
    to_blocked_experts,
    to_blocked_k_groups,
    to_blocked_m_groups,
)
from .ops.grouped_mm import explain, grouped_mm, scaled_grouped_mm
from .ops.quantize import dequantize, fake_quantize, quantize, quantize_both
from .ops.select import backends
from .recipe import MXRecipe
from .tensor import MXTensor

# Not lazy: importing a submodule named like a function would put the module in the function's place. It needs no
# transformers until it is called.
from .convert import ConversionReport, convert, revert  # isort: skip

if TYPE_CHECKING:
    from .checkpoint import load_checkpoint, save_checkpoint
    from .serving import quantize_experts

__version__ = "0.1.0"

_LAZY = {  # these import transformers or safetensors only when they are used
    "quantize_experts": "serving",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
}

__all__ = [
    "ConversionReport",
    "MXRecipe",
    "MXTensor",
    "backends",
    "bf16_grouped_mm",
    "convert",
    "debug_offs",
    "dequantize",
    "explain",
    "fake_quantize",
    "from_blocked",
    "from_blocked_experts",
    "from_blocked_k_groups",
    "from_blocked_m_groups",
    "grouped_mm",
    "load_checkpoint",
    "observe",
    "quantize",
    "quantize_both",
    "quantize_experts",
    "revert",
    "save_checkpoint",
    "scaled_grouped_mm",
    "to_blocked",
    "to_blocked_experts",
    "to_blocked_k_groups",
    "to_blocked_m_groups",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
