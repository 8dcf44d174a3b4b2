"""Scale layout: the launchers of all forms under one stem. Kernels: ``blocked_{experts,m_groups,k_groups}.py``."""

from .blocked_experts import from_blocked, from_blocked_experts, to_blocked, to_blocked_experts
from .blocked_k_groups import from_blocked_k_groups, to_blocked_k_groups
from .blocked_m_groups import from_blocked_m_groups, to_blocked_m_groups

__all__ = [
    "from_blocked",
    "from_blocked_experts",
    "from_blocked_k_groups",
    "from_blocked_m_groups",
    "to_blocked",
    "to_blocked_experts",
    "to_blocked_k_groups",
    "to_blocked_m_groups",
]
