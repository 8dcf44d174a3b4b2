"""Shared by the layer kernels: rounding a tile to MXFP8 and back, and the 32 rows of a group that a program works on.

    rows (M,)           units of 32 rows; every group starts on a fresh one
    +------+
    | 40   | group 0    unit 0: rows 0..31, unit 1: rows 32..39
    +------+
    | 20   | group 1    unit 2: rows 40..59
    +------+
    | rest | no group   units 3, 4, ...: written as zeros
    +------+
"""

import torch
import triton
import triton.language as tl

from ._e8m0 import constants, elem_value, quantize_last, quantize_middle, scale_value
from ._groups import group_bounds


def unit_count(m: int, groups: int) -> int:
    """Programs that cover all units and every row behind the last group, whatever offs holds."""
    return (m + 31 * groups) // 32 + 1


def rounding(elem_dtype: torch.dtype | None, scale_mode: str, device: torch.device) -> dict[str, object]:
    """Compile-time arguments of a rounding; ``elem_dtype`` None: not rounded."""
    fixed = torch.float8_e4m3fn if elem_dtype is None else elem_dtype
    return {"ROUND": elem_dtype is not None, **constants(fixed, scale_mode, device)}


@triton.jit
def unit_rows(unit, offs_ptr, M, G, G_POW2: tl.constexpr):
    """Rows of a unit -> (rows, live, keep), each ``(32,)``: indices, which hold data, which this program writes."""
    starts, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    unit_ends = tl.cumsum((sizes + 31) // 32, 0)
    done = unit_ends <= unit  # groups that lie wholly before the unit, empty ones with them
    units = tl.max(tl.where(done, unit_ends, 0), 0)
    start = tl.max(tl.where(done, ends, 0), 0)
    end = tl.min(tl.where(done, M, ends), 0)
    rest = unit >= tl.max(unit_ends, 0)
    rows = start + 32 * (unit - units) + tl.arange(0, 32)
    keep = rows < tl.where(rest, M, end)
    return rows, keep & (rest == 0), keep


@triton.jit
def round_last(x, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(A, B)`` in blocks of 32 along B -> fp32 ``(A, B)``."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    q, byte = quantize_last(x, E5M2, THRESH, HW)
    value = tl.reshape(elem_value(q, E5M2, HW), (A, B // 32, 32)) * scale_value(byte)[:, :, None]
    return tl.reshape(value, (A, B))


@triton.jit
def round_rows(x, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(32, B)`` in blocks of 32 along the rows -> fp32 ``(32, B)``."""
    B: tl.constexpr = x.shape[1]
    q, byte = quantize_middle(tl.reshape(x, (1, 32, B)), E5M2, THRESH, HW)
    return tl.reshape(elem_value(q, E5M2, HW) * scale_value(byte)[:, None, :], (32, B))
