"""The 128x4 blocked scale layout in plain PyTorch: pad, cut into tiles, reorder. Scales are uint8.

    tile (128 rows, 4 columns) = (4, 32, 4) as (a, b, c), row = 32*a + b   --permute-->   (b, a, c): byte 16*b + 4*a + c

Source: cuBLAS manual, "1D block scaling factors layout"; ``docs/layouts.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .. import shapes
from ..groups import safe_ends


def to_blocked(scale: Tensor) -> Tensor:
    """``(R, C)`` -> ``(128*ceil(R/128), 4*ceil(C/4))``, zero padding."""
    rows, cols = scale.shape
    padded_rows, padded_cols = shapes.blocked(rows, cols)
    padded = functional.pad(scale, (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = padded.view(padded_rows // 128, 4, 32, padded_cols // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_cols)


def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of ``to_blocked``: ``(rows, cols)``."""
    padded_rows, padded_cols = shapes.blocked(rows, cols)
    tiles = blocked.reshape(padded_rows // 128, padded_cols // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_cols)[:rows, :cols].clone()


def to_blocked_experts(scale: Tensor) -> Tensor:
    """``(G, R, C)`` -> ``(G, bytes)``, each expert on its own."""
    out = scale.new_zeros(shapes.blocked_experts(*scale.shape))
    for expert, one in zip(out, scale, strict=True):
        expert.copy_(to_blocked(one).flatten())
    return out


def from_blocked_experts(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of ``to_blocked_experts``: ``(G, rows, cols)``."""
    scale = blocked.new_empty((blocked.shape[0], rows, cols))
    for expert, one in zip(scale, blocked, strict=True):
        expert.copy_(from_blocked(one, rows, cols))
    return scale


def to_blocked_m_groups(scale: Tensor, offs: Tensor, method: str = "parallel") -> Tensor:
    """Groups of rows, each a blocked matrix, one behind the other; the rest of the buffer is zero."""
    out = scale.new_zeros(shapes.blocked_m_groups(scale.shape[0], scale.shape[1], offs.shape[0]))
    _put(out, [to_blocked(scale[start:end]) for start, end in _spans(offs, scale.shape[0])])
    return out


def from_blocked_m_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of ``to_blocked_m_groups``; rows behind the last group are zero."""
    scale, at = blocked.new_zeros((rows, cols)), 0
    for start, end in _spans(offs, rows):
        r, c = shapes.blocked(end - start, cols)
        scale[start:end] = from_blocked(blocked.flatten()[at : at + r * c], end - start, cols)
        at += r * c
    return scale


def to_blocked_k_groups(scale: Tensor, offs: Tensor, method: str = "parallel") -> Tensor:
    """Groups of columns, each a blocked matrix, one behind the other; the rest of the buffer is zero."""
    out = scale.new_zeros(shapes.blocked_k_groups(scale.shape[0], scale.shape[1], offs.shape[0]))
    _put(out, [to_blocked(scale[:, start:end]) for start, end in _spans(offs, scale.shape[1])])
    return out


def from_blocked_k_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of ``to_blocked_k_groups``; columns behind the last group are zero."""
    scale, at = blocked.new_zeros((rows, cols)), 0
    for start, end in _spans(offs, cols):
        r, c = shapes.blocked(rows, end - start)
        scale[:, start:end] = from_blocked(blocked.flatten()[at : at + r * c], rows, end - start)
        at += r * c
    return scale


def _spans(offs: Tensor, total: int) -> list[tuple[int, int]]:
    """Start and end of every group."""
    ends: list[int] = safe_ends(offs, total).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _put(out: Tensor, parts: list[Tensor]) -> None:
    flat = torch.cat([part.flatten() for part in parts])
    out.view(-1)[: flat.numel()] = flat
