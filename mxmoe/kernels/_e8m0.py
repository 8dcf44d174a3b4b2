"""Scale and element arithmetic of MX blocks, shared by every kernel. Integer rules on fp32 bits: no log2, no exp2.

``EMAX`` and ``THRESH`` come from :class:`mxmoe.formats.ElemFormat`: one rule serves every scale mode.
Source: ``docs/numerics.md``.
"""

import triton
import triton.language as tl


@triton.jit
def scale_byte(amax, EMAX: tl.constexpr, THRESH: tl.constexpr):
    """Scale byte of a block from its largest magnitude (fp32, NaN kept): int32; 255 for Inf and NaN."""
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    byte = (bits >> 23) - EMAX + ((bits & 0x7FFFFF) > THRESH).to(tl.int32)
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    return tl.where(bits >= 0x7F800000, 255, byte)


@triton.jit
def inv_scale(byte):
    """2**(127 - byte) as fp32, exact for bytes 0..253 (finite data gives at most 247)."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """2**(byte - 127) as fp32: byte 0 is the subnormal 2**-127, byte 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_elem(y, E5M2: tl.constexpr, FMAX: tl.constexpr):
    """fp32 -> e4m3 or e5m2, clamped to the largest finite value first; NaN passes through the clamp."""
    y = tl.clamp(y, -FMAX, FMAX, propagate_nan=tl.PropagateNan.ALL)
    if E5M2:
        return y.to(tl.float8e5)
    else:
        return y.to(tl.float8e4nv)
