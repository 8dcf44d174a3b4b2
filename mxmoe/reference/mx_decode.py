"""Few tokens against MXFP8 weights, in plain PyTorch: what the decode kernels compute, and what they must know first.

Any device, expert by expert: one expert's values are the working memory, and only experts with tokens are expanded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from .. import groups, shapes
from ..formats import BLOCK, SCALE_NAN
from .quantize import dequantize, fake_quantize

# (lowest, highest) power of two that leaves every element exact in fp16: 2**-9 * 2**-15 = 2**-24, 448 * 2**7 < 65504,
# and likewise 2**-16 * 2**-8, 57344 * 2**0.
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
    experts, n, k = qdata.shape
    words = shapes.cdiv(k, 4 * BLOCK)
    packed = scale.new_zeros((experts, words, n, 4))
    top = scale.new_empty((experts, n))
    for g in range(experts):
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


def _tokens(
    x: Tensor, x_scale: Tensor | None, index: Tensor | None, top_k: int, quantize: tuple[torch.dtype, str] | None
) -> Tensor:
    """The values that are multiplied, one row per routed row. Tokens that are not rounded stay as they are."""
    if x_scale is not None:
        x = dequantize(x, x_scale, "rowwise", None, None, x.shape[0], torch.float32)
    elif quantize is not None:
        x = fake_quantize(x, "rowwise", None, *quantize, torch.float32)
    return x if index is None else x.index_select(0, index.long() // top_k)


def _used(w: Tensor, w_scale: Tensor, offs: Tensor, rows: int) -> Iterator[tuple[slice, int, Tensor]]:
    """(rows of the group, group, its weights in fp32) of every group that has rows: the others are never expanded."""
    start = 0
    for g, end in enumerate(groups.safe_ends(offs, rows).tolist()):
        if end > start:
            values = dequantize(w[g], w_scale[g], "rowwise", None, None, w.shape[1], torch.float32)
            yield slice(start, end), g, values
        start = end


def mx_decode_m_groups(
    x: Tensor,
    x_scale: Tensor | None,
    index: Tensor | None,
    top_k: int,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    quantize: tuple[torch.dtype, str] | None,
) -> Tensor:
    """``x (M, K)`` times MXFP8 ``w (G, N, K)`` -> ``(M, N)``; rows of no group are zero. Copies offs to the host."""
    x = _tokens(x, x_scale, index, top_k, quantize)
    out = x.new_zeros((x.shape[0], w.shape[1]), dtype=out_dtype)
    for rows, g, values in _used(w, w_scale, offs, x.shape[0]):
        product = x[rows].float() @ values.T
        out[rows] = (product if bias is None else product + bias[g].float()).to(out_dtype)
    return out


def mx_decode_swiglu(
    x: Tensor,
    x_scale: Tensor | None,
    index: Tensor | None,
    top_k: int,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    weights: Tensor | None,
    order: Tensor | None,
    out_dtype: torch.dtype,
    quantize: tuple[torch.dtype, str] | None,
) -> Tensor:
    """``weight * silu(x @ gate.T) * (x @ up.T)`` with MXFP8 ``w (G, 2I, K)``, gate rows then up rows -> ``(M, I)``."""
    x = _tokens(x, x_scale, index, top_k, quantize)
    out = x.new_zeros((x.shape[0], w.shape[1] // 2), dtype=out_dtype)
    for rows, _, values in _used(w, w_scale, offs, x.shape[0]):
        gate, up = (x[rows].float() @ values.T).chunk(2, -1)
        hidden = silu(gate) * up
        if weights is not None and order is not None:
            hidden = hidden * weights.reshape(-1)[order[rows].long()].float()[:, None]
        out[rows] = hidden.to(out_dtype)
    return out
