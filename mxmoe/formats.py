"""MXFP8 number formats: element types, scale rules and their constants. Pure data, no tensors.

An MX block is 32 values that share one e8m0 scale. Scale byte ``b`` means ``2**(b - 127)``; 255 is NaN and 0 is
``2**-127`` (not zero). Every scale mode is one integer rule on the fp32 bits of the block's largest magnitude:

    byte = clamp(exponent - emax + (mantissa > threshold), 0, 254)

Source: OCP Microscaling Formats (MX) 1.0; ``docs/numerics.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

BLOCK: Final = 32
"""Values that share one scale."""

SCALE_DTYPE: Final = torch.float8_e8m0fnu
SCALE_BIAS: Final = 127
SCALE_NAN: Final = 255
ELEM_NAN: Final = 0x7F
"""Element byte of a block that holds a NaN or an Inf (a NaN in e4m3 and in e5m2)."""

SF_ROWS: Final = 128
SF_COLS: Final = 4
SF_TILE: Final = SF_ROWS * SF_COLS
"""One tile of the blocked scale layout: 128 rows x 4 columns = 512 bytes."""

SCALE_MODES: Final = ("rceil", "floor", "ceil", "even")
BLOCKS: Final = ("rowwise", "colwise", "square")
LAYOUTS: Final = ("plain", "blocked")


@dataclass(frozen=True)
class ElemFormat:
    """An 8-bit element type of an MX block."""

    name: str
    dtype: torch.dtype
    emax: int  # exponent of the largest normal value
    max: float  # largest finite value, 1.75 * 2**emax for both types
    mantissa_bits: int

    def threshold(self, scale_mode: str) -> int:
        """Mantissa above which the scale exponent of ``scale_mode`` is rounded up (0x7FFFFF: never)."""
        match scale_mode:
            case "rceil":
                return 0x600000  # mantissa of 448 and of 57344: 1.75
            case "floor":
                return 0x7FFFFF
            case "ceil":
                return 0
            case "even":  # amax is first rounded to the element's mantissa: halfway below the next power of two
                return 0x7FFFFF - (1 << (22 - self.mantissa_bits))
            case _:
                raise ValueError(f"scale_mode must be one of {SCALE_MODES}, got {scale_mode!r}")


E4M3: Final = ElemFormat("e4m3", torch.float8_e4m3fn, emax=8, max=448.0, mantissa_bits=3)
E5M2: Final = ElemFormat("e5m2", torch.float8_e5m2, emax=15, max=57344.0, mantissa_bits=2)

ELEM_FORMATS: Final = {E4M3.dtype: E4M3, E5M2.dtype: E5M2}
INPUT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def elem_format(dtype: torch.dtype) -> ElemFormat:
    """The :class:`ElemFormat` of an element dtype; ``ValueError`` names what is expected."""
    fmt = ELEM_FORMATS.get(dtype)
    if fmt is None:
        raise ValueError(f"elem_dtype must be one of {[str(d) for d in ELEM_FORMATS]}, got {dtype}")
    return fmt
