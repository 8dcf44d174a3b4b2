"""Tokens to expert-sorted rows and back: ``route``, ``permute``, ``combine``. No host sync, deterministic.

    (T, k) expert ids  --route-->  offs (E,), order (M,), position (T, k)         M = T * k routed rows
    (T, H) tokens      --permute-->  (M, H) rows sorted by expert
    (M, H) rows        --combine-->  (T, H) weighted sum over a token's k rows

Ids outside ``[0, E)`` (expert parallelism marks "not on this rank" with E) sort behind ``offs[-1]``: they belong to no
group, their rows of every GEMM are zeros, and ``combine`` leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Where every (token, choice) pair lies once rows are sorted by expert.

    | field | shape | dtype | meaning |
    |---|---|---|---|
    | ``offs`` | ``(E,)`` | int32 | group ends of the sorted rows |
    | ``order`` | ``(M,)`` | int64 | sorted row -> pair, ``token * k + choice`` |
    | ``position`` | ``(T, k)`` | int64 | pair -> sorted row |
    """

    offs: Tensor
    order: Tensor
    position: Tensor

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.position.shape[1]


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort (token, choice) pairs by expert; pairs of one expert keep their token order.

    | name | shape | dtype |
    |---|---|---|
    | ``top_k_index`` | ``(T, k)`` | int64 or int32; ids outside ``[0, num_experts)`` belong to no expert |

    Returns: :class:`Routing`. Sync: none. Empty: T = 0 gives all-zero offs. Gradient: none.
    """
    ids = top_k_index.reshape(-1)
    ids = torch.where((ids < 0) | (ids > num_experts), num_experts, ids)
    sorted_ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=sorted_ids.dtype)
    offs = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=ids.device))
    return Routing(offs, order, position.view(top_k_index.shape))


def permute(x: Tensor, routing: Routing) -> Tensor:
    """Rows of ``x (T, H)`` repeated for each choice and sorted by expert: ``(M, H)``."""
    return x.index_select(0, routing.order // routing.top_k)


def combine(rows: Tensor, top_k_weights: Tensor, routing: Routing) -> Tensor:
    """Weighted sum of every token's rows: ``out[t] = sum_j top_k_weights[t, j] * rows[position[t, j]]``.

    | name | shape | dtype |
    |---|---|---|
    | ``rows`` | ``(M, H)`` sorted by expert | floating |
    | ``top_k_weights`` | ``(T, k)`` | floating |

    A fixed order of summation, no atomics: two runs give the same bits. Rows of pairs without an expert are left out,
    whatever they hold. Returns ``(T, H)`` in the promoted dtype. Gradient: to ``rows`` and ``top_k_weights``.
    """
    position = routing.position
    taken = rows.index_select(0, position.reshape(-1)).view(*position.shape, rows.shape[-1])
    owned = position < routing.offs[-1]
    taken = taken.masked_fill(~owned.unsqueeze(-1), 0.0)
    return (taken * top_k_weights.unsqueeze(-1)).sum(1)
