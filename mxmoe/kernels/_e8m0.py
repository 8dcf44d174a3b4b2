"""Scale and element arithmetic of MX blocks, shared by every kernel. Integer rules on fp32 bits: no log2, no exp2.

``EMAX`` and ``THRESH`` come from :class:`mxmoe.formats.ElemFormat`: one rule serves every scale mode.

The largest magnitude of a block is taken on the integer bits of |x|: their order is the order of the magnitudes, with
Inf and NaN on top, so nothing is lost where ``tl.max`` on floats drops NaN. A block with byte 255 gets a NaN as factor,
which turns its 32 elements into NaN without a select per element.

``HW``: convert with the instruction of sm_90+ (``cvt.rn.satfinite``). Elsewhere (sm_80 has none, sm_89 rounds twice)
and in the interpreter an integer rule gives the same bytes.

Source: ``docs/numerics.md``.
"""

import torch
import triton
import triton.language as tl

from .. import device as devices
from ..formats import elem_format


def constants(elem_dtype: torch.dtype, scale_mode: str, device: torch.device) -> dict[str, object]:
    """The compile-time arguments ``E5M2``, ``THRESH`` and ``HW`` of a quantizing kernel."""
    fmt = elem_format(elem_dtype)
    return {
        "E5M2": elem_dtype == torch.float8_e5m2,
        "THRESH": fmt.threshold(scale_mode),
        "HW": hardware_cast(device),
    }


def hardware_cast(device: torch.device) -> bool:
    """Whether the fp8 conversion instructions of ``device`` round fp32 once."""
    return devices.capability(device) >= (9, 0)  # by the module: offline compilation replaces it


@triton.jit
def scale_byte(amax, EMAX: tl.constexpr, THRESH: tl.constexpr):
    """Scale byte of a block from its largest magnitude (fp32, NaN kept): int32; 255 for Inf and NaN."""
    return scale_byte_of_bits(amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF, EMAX, THRESH)


@triton.jit
def scale_byte_of_bits(bits, EMAX: tl.constexpr, THRESH: tl.constexpr):
    """``scale_byte`` from the fp32 bits of the largest magnitude."""
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


# --- tiles -----------------------------------------------------------------------------------------------------------
@triton.jit
def abs_bits(x):
    """fp32 bits of |x|, int32: ordered like the magnitudes, NaN on top."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scale(amax_bits, E5M2: tl.constexpr, THRESH: tl.constexpr):
    """Scale byte (int32) of every block, and the factor 2**(127 - byte) of its elements: NaN where the byte is 255."""
    EMAX: tl.constexpr = 15 if E5M2 else 8
    byte = scale_byte_of_bits(amax_bits, EMAX, THRESH)
    bits = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    return byte, bits.to(tl.float32, bitcast=True)


@triton.jit
def _elem_byte_integer(y, E5M2: tl.constexpr):
    """fp32 -> e4m3 or e5m2 bits, saturating, nearest even, by integer arithmetic; any NaN becomes 0x7F."""
    DROP: tl.constexpr = 21 if E5M2 else 20  # mantissa bits that go
    REBIAS: tl.constexpr = (112 << 2) if E5M2 else (120 << 3)
    LARGEST: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000  # 57344, 448
    SMALLEST: tl.constexpr = 0x38800000 if E5M2 else 0x3C800000  # 2**-14, 2**-6: the smallest normal values
    STEP: tl.constexpr = 128.0 if E5M2 else 16384.0  # one ulp of it is the subnormal step, 2**-16 or 2**-9
    bits = y.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    c = tl.minimum(a, LARGEST)
    normal = ((c + ((1 << (DROP - 1)) - 1) + ((c >> DROP) & 1)) >> DROP) - REBIAS
    subnormal = (c.to(tl.float32, bitcast=True) + STEP).to(tl.int32, bitcast=True) & 0xFF
    byte = tl.where(c < SMALLEST, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(a > 0x7F800000, 0x7F, byte).to(tl.uint8)


@triton.jit
def elem_byte(y, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """Scaled fp32 values -> element bits, uint8. NaN gives 0x7F.

    Only rules that round the scale down ("floor", "even": a threshold above 1.75) leave values beyond the largest one.
    """
    if HW:
        FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
        if THRESH > 0x600000:
            y = tl.clamp(y, -FMAX, FMAX, propagate_nan=tl.PropagateNan.ALL)
        if E5M2:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _elem_byte_integer(y, E5M2)


@triton.jit
def elem_value(q, E5M2: tl.constexpr, HW: tl.constexpr):
    """Element bits (uint8) -> fp32, exact."""
    if HW:
        if E5M2:
            return q.to(tl.float8e5, bitcast=True).to(tl.float32)
        else:
            return q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        SHIFT: tl.constexpr = 21 if E5M2 else 20
        UNBIAS: tl.constexpr = 2.0**112 if E5M2 else 2.0**120
        b = q.to(tl.int32)
        # The element's exponent field lies at fp32's: subnormals come out right as well.
        value = ((b & 0x7F) << SHIFT).to(tl.float32, bitcast=True) * UNBIAS
        if E5M2:
            special = tl.where((b & 0x7F) == 0x7C, 0x7F800000, 0x7FC00000)
            bits = tl.where((b & 0x7F) >= 0x7C, special, value.to(tl.int32, bitcast=True))
        else:
            bits = tl.where((b & 0x7F) == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True))
        return (bits | ((b & 0x80) << 24)).to(tl.float32, bitcast=True)


# How a tile is cut into blocks of 32: along its last dim, along its middle dim of 32, or both. All return element bytes
# in the shape of the tile and one scale byte (int32) per block.
@triton.jit
def quantize_last(x, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(A, B)`` -> uint8 ``(A, B)``, int32 ``(A, B/32)``."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    x3 = tl.reshape(x, (A, B // 32, 32)).to(tl.float32)
    byte, factor = block_scale(tl.max(abs_bits(x3), 2), E5M2, THRESH)
    q = elem_byte(x3 * factor[:, :, None], E5M2, THRESH, HW)
    return tl.reshape(q, (A, B)), byte


@triton.jit
def quantize_middle(x3, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """``(A, 32, C)`` -> uint8 ``(A, 32, C)``, int32 ``(A, C)``."""
    x3 = x3.to(tl.float32)
    byte, factor = block_scale(tl.max(abs_bits(x3), 1), E5M2, THRESH)
    return elem_byte(x3 * factor[:, None, :], E5M2, THRESH, HW), byte


@triton.jit
def quantize_tile(x3, E5M2: tl.constexpr, THRESH: tl.constexpr, HW: tl.constexpr):
    """One scale per 32x32 tile: ``(A, 32, C)`` -> uint8 ``(A, 32, C)``, int32 ``(A, C/32)``."""
    A: tl.constexpr = x3.shape[0]
    C: tl.constexpr = x3.shape[2]
    x4 = tl.reshape(x3, (A, 32, C // 32, 32)).to(tl.float32)
    byte, factor = block_scale(tl.max(tl.max(abs_bits(x4), 3), 1), E5M2, THRESH)
    q = elem_byte(x4 * factor[:, None, :, None], E5M2, THRESH, HW)
    return tl.reshape(q, (A, 32, C)), byte
