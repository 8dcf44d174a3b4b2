"""What the decode kernel must know about a weight before it may expand it to 16 bits: found once, when it is loaded.

Plain PyTorch, any device, expert by expert: one expert's bytes are the working memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import shapes
from ..formats import BLOCK, SCALE_NAN

# (lowest, highest) power of two that leaves every element exact in fp16: 2**-9 * 2**-15 = 2**-24, 448 * 2**7 < 65504, and
# likewise 2**-16 * 2**-8, 57344 * 2**0.
WINDOW = {torch.float8_e4m3fn: (-15, 7), torch.float8_e5m2: (-8, 0)}


def pack_weight(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents of every block relative to the largest of its row, in the order in which the kernel reads them.

    | name | shape | dtype |
    |---|---|---|
    | ``qdata`` | ``(G, N, K)`` | e4m3, e5m2 |
    | ``scale`` | ``(G, N, ceil(K/32))`` | uint8 |
    | returns: packed | ``(G, ceil(K/128), N, 4)`` | uint8: high byte of the fp16 2**e |
    | returns: top | ``(G, N)`` | uint8: largest scale byte among non-zero blocks; 255: the row is not exact |

    A block of zeros has no exponent and fits anywhere. A NaN (element or scale) makes its row inexact: such rows are
    expanded the general way. Sync: none.
    """
    low, high = WINDOW[qdata.dtype]
    groups, n, k = qdata.shape
    words = shapes.cdiv(k, 4 * BLOCK)
    packed = scale.new_zeros((groups, words, n, 4))
    top = scale.new_empty((groups, n))
    for g in range(groups):
        blocks = torch.nn.functional.pad(qdata[g].view(torch.uint8), (0, -k % BLOCK)).unflatten(-1, (-1, BLOCK))
        magnitude = blocks & 0x7F
        zero = magnitude.amax(-1) == 0
        # The largest finite magnitude byte: above it lie the NaNs of e4m3, and the Infs and NaNs of e5m2.
        finite = 0x7E if qdata.dtype == torch.float8_e4m3fn else 0x7B
        broken = ((magnitude > finite).any(-1) | (scale[g] == SCALE_NAN)).any(-1)
        byte = scale[g].to(torch.int32).masked_fill(zero, -1)
        row_top = byte.amax(-1).clamp(min=0)
        e = torch.where(zero, low, byte - row_top[:, None] + high)
        exact = (e >= low).all(-1) & ~broken
        top[g] = torch.where(exact, row_top, SCALE_NAN)
        e = e.clamp(min=low)
        field = torch.where(e == -15, 2, (e + 15) << 2)  # 2**-15 is a subnormal
        field = torch.nn.functional.pad(field.to(torch.uint8), (0, 4 * words - field.shape[-1]))
        packed[g] = field.unflatten(-1, (words, 4)).transpose(0, 1)
    return packed, top
