"""Moving scales between row-major order and 128x4 tiles, four columns (one 32-bit word) at a time.

    row-major words, as loaded: (a, b, w)          tile words, as stored: (wi, b, wc, a)
    row = 32*a + b, word column w = 4*wc + wi      word 4*b + a of tile 4*wc + wi

         w: 0 1 2 3 | 4 5 6 7 | ..                 thread (b, wc) owns 4 words in each of 4 rows b, b+32, b+64, b+96:
    b    [ 16 bytes ]                                  4 loads of 16 bytes along w
    b+32 [ 16 bytes ]                                  4 stores of 16 bytes along a, one per tile
    b+64 [ 16 bytes ]                              The two orders differ only in which register is which: with
    b+96 [ 16 bytes ]                              num_warps <= CB/4 no shuffle and no shared memory (seen in the PTX).

``CB``: words (tiles) per block, a power of two >= 4. ``VEC``: what the launcher knows about alignment, in words per
load: 4, 2 or 1; 0: nothing, so bytes are gathered one by one (any strides). See ``vec_words``.
"""

import triton
import triton.language as tl
from torch import Tensor


def vec_words(t: Tensor, cols: int) -> int:
    """Words that one load or store may move: 4, 2 or 1 (columns, row stride and address all divide), else 0: bytes."""
    if t.stride(-1) != 1:
        return 0
    bits = cols | t.data_ptr()
    for stride in t.stride()[:-1]:
        bits |= stride
    if bits % 4:
        return 0
    return 4 if bits % 16 == 0 else 2 if bits % 8 == 0 else 1


@triton.jit
def block_rows():
    """Row in [0, 128) of every element of a block (b, a, w): (32, 4, 1)."""
    return tl.arange(0, 32)[:, None, None] + tl.arange(0, 4)[None, :, None] * 32


@triton.jit
def block_words(CB: tl.constexpr):
    """Word column in [0, CB) of every element of a block (b, a, w): (1, 1, CB)."""
    return tl.arange(0, CB)[None, None, :]


@triton.jit
def load_words(scale_ptr, row, stride_row, word, mask, VEC: tl.constexpr):
    """Aligned words; ``stride_row`` in units of VEC words, so that the compiler sees the alignment."""
    ptr = scale_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    return tl.load(ptr + row.to(tl.int64) * (stride_row.to(tl.int64) * VEC) + word, mask=mask, other=0)


@triton.jit
def load_shifted(scale_ptr, row, stride_row, col, valid, mask, VEC: tl.constexpr):
    """Words that start at any byte ``col`` of an aligned row: two aligned words, shifted together.

    ``valid``: bytes of the word that exist (0..4); the others come out 0 and are never read beyond the word they share.
    """
    word = col // 4
    shift = ((col % 4) * 8).to(tl.uint32)
    low = load_words(scale_ptr, row, stride_row, word, mask & (valid > 0), VEC)
    high = load_words(scale_ptr, row, stride_row, word + 1, mask & (col % 4 + valid > 4), VEC)
    both = (low >> shift) | ((high << 1) << (31 - shift))  # shift 0: high << 32 is undefined in one step
    keep = tl.where(valid >= 4, 0xFFFFFFFF, (1 << (tl.maximum(valid, 0) * 8).to(tl.uint32)) - 1).to(tl.uint32)
    return both & keep


@triton.jit
def load_bytes(scale_ptr, row, stride_row, stride_col, col, valid, mask):
    """Words gathered from four bytes each, any strides."""
    ptr = scale_ptr + row.to(tl.int64) * stride_row + col.to(tl.int64) * stride_col
    words = tl.load(ptr, mask=mask & (valid > 0), other=0).to(tl.uint32)
    for i in tl.static_range(1, 4):
        byte = tl.load(ptr + i * stride_col, mask=mask & (valid > i), other=0).to(tl.uint32)
        words |= byte << (8 * i)
    return words


@triton.jit
def store_tiles(out_ptr, tile, words, first, last, CB: tl.constexpr):
    """Store the words (a, b, w) as tiles ``tile + first .. tile + last - 1``; ``tile`` is int64, that of w = 0."""
    words = tl.permute(tl.reshape(words, (32, 4, CB // 4, 4)), (2, 0, 3, 1))
    b = tl.arange(0, 32)[None, :, None, None]
    w = tl.arange(0, CB // 4)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, :, None]
    a = tl.arange(0, 4)[None, None, None, :]
    ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + tile * 128
    tl.store(ptr + (w * 128 + b * 4 + a), words, mask=(w >= first) & (w < last))


@triton.jit
def load_tiles(blocked_ptr, tile, first, last, CB: tl.constexpr):
    """Inverse of ``store_tiles``: words (a, b, w) of tiles ``tile + first .. tile + last - 1``, 0 elsewhere."""
    b = tl.arange(0, 32)[None, :, None, None]
    w = tl.arange(0, CB // 4)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, :, None]
    a = tl.arange(0, 4)[None, None, None, :]
    ptr = blocked_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + tile * 128
    words = tl.load(ptr + (w * 128 + b * 4 + a), mask=(w >= first) & (w < last), other=0)
    return tl.reshape(tl.permute(words, (1, 3, 0, 2)), (32, 4, CB))
