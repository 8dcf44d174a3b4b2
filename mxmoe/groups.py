"""Arithmetic on ``offs``: int32 ``(G,)`` cumulative group ends. Device-side, no host sync, tolerant of bad values.

``offs`` values cannot be checked without a sync. So every function first makes them safe: clamped to ``[0, total]`` and
non-decreasing. A wrong offs gives wrong groups, never an access out of bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import BLOCK


def safe_ends(offs: Tensor, total: int) -> Tensor:
    """Ends clamped to ``[0, total]`` and made non-decreasing, int32 ``(G,)``."""
    ends = offs.clamp(0, total).to(torch.int32)
    if ends.numel() == 0:
        return ends
    return torch.cummax(ends, 0).values


def starts(ends: Tensor) -> Tensor:
    """First index of every group, int32 ``(G,)``."""
    return torch.cat([ends.new_zeros(1), ends[:-1]])


def sizes(ends: Tensor) -> Tensor:
    """Group sizes, int32 ``(G,)``."""
    return ends - starts(ends)


def padded_ends(ends: Tensor, multiple: int = BLOCK) -> Tensor:
    """Group ends after each group is padded to a multiple of ``multiple``, int32 ``(G,)``."""
    padded = (sizes(ends) + multiple - 1) // multiple * multiple
    return torch.cumsum(padded, 0, dtype=torch.int32)


def group_of(ends: Tensor, total: int) -> Tensor:
    """Group of every index ``0 .. total-1``; G for those at or beyond the last end. int64 ``(total,)``."""
    index = torch.arange(total, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends, index, right=True)


def even_ends(groups: int, size: int, device: torch.device) -> Tensor:
    """Ends of ``groups`` groups of equal ``size``: a batch seen as groups."""
    return torch.arange(1, groups + 1, device=device, dtype=torch.int32) * size
