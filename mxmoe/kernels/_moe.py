"""Shared by the layer kernels: rounding a tile to MXFP8 and back, and the 32 rows of a group that a program works on.

    rows (M,)           units of 32 rows; every group starts on a fresh one
    +------+
    | 40   | group 0    unit 0: rows 0..31, unit 1: rows 32..39
    +------+
    | 20   | group 1    unit 2: rows 40..59
    +------+
    | rest | no group   units 3, 4, ...: written as zeros
    +------+

Grid     the table of units: one program per 32 of them. It is made once per launch of a kernel that works on units: a
         search in every program costs a quarter of the instructions of a small tile.
Writes   ``(units, 2)`` int32: first row (its complement where the rows belong to no group), end of the group.
Traffic  8 bytes per unit.
Index    int32: fewer than 2**31 rows.
Source   ``mxmoe/reference/moe.py``; ``docs/numerics.md``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._e8m0 import _elem_byte_integer, constants, elem_value
from ._groups import group_bounds
from ._offline import Case

UNITS = 32  # units of one program


def rounding(elem_dtype: torch.dtype | None, scale_mode: str, device: torch.device) -> dict[str, object]:
    """Compile-time arguments of a rounding; ``elem_dtype`` None: not rounded."""
    fixed = torch.float8_e4m3fn if elem_dtype is None else elem_dtype
    return {"ROUND": elem_dtype is not None, **constants(fixed, scale_mode, device)}


# --- units -----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["M", "G", "units"])
def _units_kernel(
    units_ptr,  # (units, 2) int32
    offs_ptr,  # (G,) int32
    M,
    G,
    units,
    G_POW2: tl.constexpr,
    UNITS: tl.constexpr,
):
    _, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    unit_ends = tl.cumsum((sizes + 31) // 32, 0)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    done = unit_ends[None, :] <= unit[:, None]  # groups that lie wholly before the unit, empty ones with them
    before = tl.max(tl.where(done, unit_ends[None, :], 0), 1)
    start = tl.max(tl.where(done, ends[None, :], 0), 1) + 32 * (unit - before)
    end = tl.min(tl.where(done, M, ends[None, :]), 1)
    start = tl.where(unit < tl.max(unit_ends, 0), start, -1 - start)
    tl.store(units_ptr + 2 * unit, start, mask=unit < units)
    tl.store(units_ptr + 2 * unit + 1, end, mask=unit < units)


def unit_table(m: int, offs: Tensor) -> Tensor:
    """``(units, 2)``: enough units for all groups and every row behind the last one, whatever offs holds."""
    g = offs.shape[0]
    units = (m + 31 * g) // 32 + 1
    table = torch.empty((units, 2), dtype=torch.int32, device=offs.device)
    g_pow2 = triton.next_power_of_2(g)
    _units_kernel[(triton.cdiv(units, UNITS),)](table, offs, m, g, units, G_POW2=g_pow2, UNITS=UNITS, num_warps=4)
    return table


@triton.jit
def unit_rows(unit, units_ptr, M):
    """Rows of a unit -> (rows, live, keep), each ``(32,)``: indices, which hold data, which this program writes."""
    start = tl.load(units_ptr + 2 * unit)
    end = tl.load(units_ptr + 2 * unit + 1)
    rest = start < 0
    rows = tl.where(rest, -1 - start, start) + tl.arange(0, 32)
    keep = rows < tl.where(rest, M, end)
    return rows, keep & (rest == 0), keep


# --- rounding --------------------------------------------------------------------------------------------------------
@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax_bits(x, AXIS: tl.constexpr, HW: tl.constexpr):
    """fp32 bits of the largest magnitude along an axis; a NaN stays."""
    if HW:  # max.NaN with |x| as operand modifiers: one instruction per element instead of two
        return tl.reduce(tl.abs(x), AXIS, _nan_max).to(tl.int32, bitcast=True)
    else:
        return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def _block_powers(amax_bits, E5M2: tl.constexpr, THRESH: tl.constexpr):
    """2**(127 - byte) and 2**(byte - 127) of a block as fp32, without the byte; NaN and 2**-127 where it is 255 or 0.

    Adding 0x7FFFFF - THRESH carries into the exponent exactly where the mantissa is above THRESH.
    """
    EMAX: tl.constexpr = 15 if E5M2 else 8
    power = (amax_bits + (0x7FFFFF - THRESH)) & 0x7F800000
    scale = tl.maximum(power - (EMAX << 23), 0)
    factor = tl.where(amax_bits >= 0x7F800000, 0x7FC00000, (254 << 23) - scale)
    scale = tl.where(scale == 0, 0x00400000, scale)
    return factor.to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True)


@triton.jit
def _through_elem(y, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """Scaled fp32 values through the element type and back."""
    if HW:
        FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
        if THRESH > 0x600000:  # rules that round the scale down leave values beyond the largest one
            y = tl.clamp(y, -FMAX, FMAX, propagate_nan=tl.PropagateNan.ALL)
        if E5M2:
            return y.to(tl.float8e5).to(tl.float32)
        else:
            return y.to(tl.float8e4nv).to(tl.float32)
    else:
        return elem_value(_elem_byte_integer(y, E5M2), E5M2, HW)


@triton.jit
def round_last(x, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(A, B)`` in blocks of 32 along B -> fp32 ``(A, B)``."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    x3 = tl.reshape(x.to(tl.float32), (A, B // 32, 32))
    factor, scale = _block_powers(_amax_bits(x3, 2, HW), E5M2, THRESH)
    return tl.reshape(_through_elem(x3 * factor[:, :, None], E5M2, THRESH, HW) * scale[:, :, None], (A, B))


@triton.jit
def round_rows(x, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(32, B)`` in blocks of 32 along the rows -> fp32 ``(32, B)``."""
    x = x.to(tl.float32)
    factor, scale = _block_powers(_amax_bits(x, 0, HW), E5M2, THRESH)
    return _through_elem(x * factor[None, :], E5M2, THRESH, HW) * scale[None, :]


# --- activation ------------------------------------------------------------------------------------------------------
@triton.jit
def sigmoid(x, HW: tl.constexpr):
    """1 / (1 + exp(-x)) in fp32."""
    if HW:  # without the steps for subnormals, which 1 + exp(-x) does not have: 4 instructions instead of 12
        x *= -1.4426950408889634  # log2(e)
        e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], tl.float32, True, 1)
    else:
        return 1.0 / (1.0 + tl.exp(-x))


OFFLINE = [Case("units of 128 groups", lambda: unit_table(4096, torch.zeros(128, dtype=torch.int32)))]
