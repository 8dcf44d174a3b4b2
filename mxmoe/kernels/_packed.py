"""Rounding to MXFP8 and back on 32-bit words of two bf16, in registers: the layer kernels' fast arithmetic.

    word (int32)   | odd column, bf16 | even column, bf16 |        x seen as (rows, columns / 2) int32

    block -> largest magnitude per half -> 2**(127 - byte), 2**(byte - 127) per half as bf16 (``word_powers``)
    y = x * 2**(127 - byte)             exact, or zero in the element type too
    p = max(power of two below |y|, smallest normal element)
    t = y + 24p;  t - 24p               rounds y to the element type: 24p has its last bit at p/8 (e5m2: 48p, p/4)
    result = (t - 24p) * 2**(byte - 127), with the sign of y

No fp8 value is ever made: 7 instructions for two elements, against 20 by way of fp32, e4m3 and fp16. Results are the
bytes of :func:`mxmoe.kernels._moe.round_rows` and ``round_last``: bf16 addition rounds to nearest even as the
conversion does, 24p/(p/8) = 192 is even, and every other step is exact. A NaN in a block makes its factor NaN.

``HW``: sm_90, which multiplies and adds bf16 in pairs. Elsewhere, and in the interpreter, the same words are taken
apart and rounded through fp32.

Source: ``docs/numerics.md``; PTX ISA, ``max.NaN.xorsign.abs``, ``fma.rn.bf16x2``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._moe import _through_elem


# --- words -----------------------------------------------------------------------------------------------------------
def in_words(*tensors: Tensor) -> bool:
    """Whether pairs of columns can be read as words: bf16, an even number of them, rows at multiples of 4 bytes."""
    return all(
        t.dtype == torch.bfloat16
        and t.shape[-1] % 2 == 0
        and t.data_ptr() % 4 == 0
        and all(s % 2 == 0 for s in t.stride()[:-1])
        for t in tensors
    )


@triton.jit
def even(w):
    """The even columns of words as fp32."""
    return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def odd(w):
    """The odd columns of words as fp32."""
    return (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack(low, high, HW: tl.constexpr):
    """fp32 of even and odd columns -> words of bf16, rounded to nearest even."""
    if HW:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)
    else:
        a = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        b = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        return a | (b << 16)


# --- largest magnitude -----------------------------------------------------------------------------------------------
@triton.jit
def _absmax(a, b):
    return tl.inline_asm_elementwise("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _magnitudes(a, b):
    """``_absmax`` by integers: bits of magnitudes are ordered like them, NaN on top."""
    low = tl.maximum(a & 0x7FFF, b & 0x7FFF)
    high = tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)
    return low | high


@triton.jit
def absmax(w, AXIS: tl.constexpr, HW: tl.constexpr):
    """Per half: the largest magnitude along an axis, NaN kept. With ``HW`` the sign bits mean nothing."""
    if HW:
        return tl.reduce(w, AXIS, _absmax)
    else:
        return tl.reduce(w, AXIS, _magnitudes)


@triton.jit
def absmax_of_both(w, HW: tl.constexpr):
    """Magnitudes of both halves -> the larger one in both."""
    swapped = (w << 16) | ((w >> 16) & 0xFFFF)
    if HW:
        return _absmax(w, swapped)
    else:
        return _magnitudes(w, swapped)


# --- powers of a block -----------------------------------------------------------------------------------------------
@triton.jit
def word_powers(amax, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """Words of two amax -> words of 2**(127 - byte) and of 2**(byte - 127), bf16; the first is NaN where byte is 255.

    Both halves at once: exponent fields never borrow from each other. Adding 0x7F - THRESH/2**16 carries into the
    exponent where the mantissa is above THRESH.
    """
    EMAX: tl.constexpr = ((15 if E5M2 else 8) << 7) * 0x10001
    bits = amax & 0x7FFF7FFF
    power = (bits + ((0x7F - (THRESH >> 16)) * 0x10001)) & 0x7F807F80
    scale = _max_halves(power, EMAX, HW) - EMAX
    bad = ((bits + 0x00800080) >> 15) & 0x00010001
    factor = (0x7F007F00 - scale) | (bad * 0x7FFF)
    return factor, _max_halves(scale, 0x00400040, HW)  # byte 0 is 2**-127, subnormal


@triton.jit
def _max_halves(a, B: tl.constexpr, HW: tl.constexpr):
    """Per half: the larger one, unsigned; the halves of ``a`` are below 0x8000."""
    if HW:
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, tl.full(a.shape, B, tl.int32)], tl.int32, True, 1
        )
    else:
        return tl.maximum(a & 0xFFFF, B & 0xFFFF) | (tl.maximum(a >> 16, B >> 16) << 16)


# --- rounding --------------------------------------------------------------------------------------------------------
@triton.jit
def _round(w, factor, scale, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """Words through the element type and back; ``factor`` and ``scale`` of ``word_powers``."""
    if HW:
        ASM: tl.constexpr = _text(E5M2, THRESH > 0x600000)
        return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [w, factor, scale], tl.int32, True, 1)
    else:
        low = _through_elem(even(w) * even(factor), E5M2, THRESH, HW) * even(scale)
        high = _through_elem(odd(w) * odd(factor), E5M2, THRESH, HW) * odd(scale)
        return pack(low, high, HW)


@triton.constexpr_function
def _text(e5m2, clamp):
    # 24 and 48; 2**-6 and 2**-14; 448 and 57344, as pairs of bf16.
    shift, normal, largest = ("42404240", "38803880", "47604760") if e5m2 else ("41C041C0", "3C803C80", "43E043E0")
    minus = f"{int(shift, 16) | 0x80008000:X}"
    text = "{ .reg .b32 y, p, t, s, c; mul.rn.bf16x2 y, $1, $2;"
    if clamp:  # rules that round the scale down leave values beyond the largest one
        text += f"mov.b32 c, 0x{largest}; min.NaN.bf16x2 y, y, c;"
        text += f"mov.b32 c, 0x{int(largest, 16) | 0x80008000:X}; max.NaN.bf16x2 y, y, c;"
    text += f"and.b32 p, y, 0x7F807F80; mov.b32 c, 0x{normal}; max.bf16x2 p, p, c;"
    text += f"mov.b32 c, 0x{shift}; fma.rn.bf16x2 t, p, c, y;"
    text += f"mov.b32 c, 0x{minus}; fma.rn.bf16x2 t, p, c, t;"
    return text + "and.b32 s, y, 0x80008000; or.b32 t, t, s; mul.rn.bf16x2 $0, t, $3; }"


@triton.jit
def round_word_rows(w, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(32, B)`` words in blocks of 32 along the rows -> words."""
    factor, scale = word_powers(absmax(w, 0, HW), E5M2, THRESH, HW)
    return _round(w, factor[None, :], scale[None, :], E5M2, THRESH, HW)


@triton.jit
def round_word_last(w, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(A, B)`` words in blocks of 16 words, 32 columns, along B -> words."""
    A: tl.constexpr = w.shape[0]
    B: tl.constexpr = w.shape[1]
    w3 = tl.reshape(w, (A, B // 16, 16))
    factor, scale = word_powers(absmax_of_both(absmax(w3, 2, HW), HW), E5M2, THRESH, HW)
    return tl.reshape(_round(w3, factor[:, :, None], scale[:, :, None], E5M2, THRESH, HW), (A, B))


@triton.jit
def round_word_tile(w, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(32, B)`` words with one scale for 32 rows x 16 words -> words."""
    B: tl.constexpr = w.shape[1]
    amax = absmax_of_both(absmax(tl.reshape(absmax(w, 0, HW), (B // 16, 16)), 1, HW), HW)
    amax = tl.reshape(tl.broadcast_to(amax[:, None], (B // 16, 16)), (B,))
    factor, scale = word_powers(amax, E5M2, THRESH, HW)
    return _round(w, factor[None, :], scale[None, :], E5M2, THRESH, HW)
