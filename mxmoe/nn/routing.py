"""Tokens to expert-sorted rows and back: ``route``, ``permute``, ``combine``. No host sync, deterministic.

    (T, k) expert ids  --route-->  offs (E,), order (M,), position (T, k)         M = T * k routed rows
    (T, H) tokens      --permute-->  (M, H) rows sorted by expert
    (M, H) rows        --combine-->  (T, H) weighted sum over a token's k rows

Ids outside ``[0, E)`` (expert parallelism marks "not on this rank" with E) sort behind ``offs[-1]``: they belong to no
group, their rows are zeros, and ``combine`` leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks
from ..ops import moe as _ops  # noqa: F401  (defines the ops)


@dataclass(frozen=True)
class Routing:
    """Where every slot, a (token, choice) pair, lies once rows are sorted by expert.

    | field | shape | dtype | meaning |
    |---|---|---|---|
    | ``offs`` | ``(E,)`` | int32 | group ends of the sorted rows |
    | ``order`` | ``(M,)`` | int32 | sorted row -> slot, ``token * k + choice`` |
    | ``position`` | ``(T, k)`` | int32 | slot -> sorted row |
    """

    offs: Tensor
    order: Tensor
    position: Tensor

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.position.shape[1]


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort slots by expert; slots of one expert keep their token order.

    | name | shape | dtype |
    |---|---|---|
    | ``top_k_index`` | ``(T, k)`` | int64 or int32; ids outside ``[0, num_experts)`` belong to no expert |

    Returns: :class:`Routing`. Raises: ``TypeError``, ``ValueError``. Sync: none. Empty: T = 0 gives all-zero offs.
    Gradient: none. Source: stable counting sort.
    """
    checks.top_k(top_k_index, None, None, None)
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | torch.SymInt):
        raise TypeError(f"num_experts must be an int, got {type(num_experts).__name__}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    return Routing(*torch.ops.mxmoe.moe_route(top_k_index, num_experts))


def permute(x: Tensor, routing: Routing) -> Tensor:
    """Rows of ``x (T, H)`` repeated for each choice and sorted by expert: ``(M, H)``.

    Raises: ``TypeError``, ``ValueError``. Sync: none. Empty: T = 0 gives ``(0, H)``. Gradient: to x, a sum in a fixed
    order.
    """
    _rows(x, "x", "T", routing.position.shape[0], routing)
    return torch.ops.mxmoe.moe_gather(x, None, routing.position, routing.offs)


def combine(rows: Tensor, top_k_weights: Tensor | None, routing: Routing) -> Tensor:
    """Weighted sum of every token's rows: ``out[t] = sum_j top_k_weights[t, j] * rows[position[t, j]]``.

    | name | shape | dtype |
    |---|---|---|
    | ``rows`` | ``(M, H)`` sorted by expert | floating |
    | ``top_k_weights`` | ``(T, k)`` or None (all ones) | floating |

    Summed in fp32 in a fixed order, no atomics: two runs give the same bits. Rows of slots without an expert are
    left out, whatever they hold. Returns: ``(T, H)``, dtype of rows. Raises: ``TypeError``, ``ValueError``.
    Sync: none. Gradient: to rows and weights.
    """
    _rows(rows, "rows", "M", routing.position.numel(), routing)
    checks.top_k(routing.position, top_k_weights, None, None)
    return torch.ops.mxmoe.moe_combine(rows, top_k_weights, routing.position, routing.offs)


def _rows(x: object, name: str, letter: str, length: int, routing: Routing) -> None:
    """A kernel reads as many rows as the routing says."""
    t = checks.tensor(x, name, dims=(2,))
    if t.shape[0] != length:
        raise ValueError(f"{name} must be ({letter}, H) with {letter} = {length}, got shape {tuple(t.shape)}")
    if t.device != routing.position.device:
        raise ValueError(f"{name} is on {t.device}, the routing is on {routing.position.device}")
