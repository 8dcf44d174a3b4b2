"""Modules: the experts of a layer and a whole MoE layer, plain ``nn.Module`` s on :func:`mxmoe.grouped_mm`."""

from .experts import Experts
from .moe import MoE
from .routing import Routing, combine, permute, route

__all__ = ["Experts", "MoE", "Routing", "combine", "permute", "route"]
