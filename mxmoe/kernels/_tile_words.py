"""Moving scales between row-major order and 128x4 tiles, four columns (one 32-bit word) at a time.

    row-major, as loaded: row = 32*a + b, word = 4*wc + wi          tiles, as stored: word 4*b + a of tile 4*wc + wi

         word: 0 1 2 3 | 4 5 6 7 | ..              thread (wc, b) owns 4 words in each of the rows b, b+32, b+64, b+96:
    b    [ 16 bytes ]                                  4 loads of 16 bytes along wi, one per row
    b+32 [ 16 bytes ]                                  4 stores of 16 bytes along a, one per tile
    b+64 [ 16 bytes ]                              Loaded or stored, a word is in the same thread: the transpose only
    b+96 [ 16 bytes ]                              renames registers. No shuffle, no shared memory (read in the PTX).

Every block of words here has the shape ``(CB/4, 32, 4, 4)`` = (wc, b, wi, a): ``CB`` tiles side by side. With
num_warps <= CB/4 the compiler gives (wc, b) to threads and (wi, a) to registers; it orders equal dims by their index,
which is why wc comes first.

``UNIT``: bytes one access moves, from ``unit_bytes``: 16 or 4 where the launcher proved the alignment, 2 or 1 where it
did not. Row strides and column counts are passed in units, so the compiler sees that they divide.
"""

import triton
import triton.language as tl
from torch import Tensor


def unit_bytes(t: Tensor, cols: int) -> int:
    """Bytes one access of a row-major matrix of ``cols`` columns may move: 16, 4, 2 or 1."""
    strides = t.stride()
    if strides[-1] != 1:
        return 1
    bits = cols | t.data_ptr()
    for stride in strides[:-1]:
        bits |= stride
    return 16 if bits % 16 == 0 else 4 if bits % 4 == 0 else 2 if bits % 2 == 0 else 1


@triton.jit
def load_vectors(scale_ptr, rows, stride_row, words, CB: tl.constexpr):
    """UNIT 16: a block of words from ``scale_ptr``, 0 beyond ``rows`` rows or ``words`` words."""
    ptr = scale_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    r = tl.arange(0, 32)[:, None, None] + 32 * tl.arange(0, 4)[None, :, None]
    w = tl.arange(0, CB)[None, None, :]
    ptr = ptr + r.to(tl.int64) * (stride_row.to(tl.int64) * 4) + w
    block = tl.load(ptr, mask=(r < rows) & (w < words), other=0)
    return tl.permute(tl.reshape(block, (32, 4, CB // 4, 4)), (2, 0, 3, 1))


@triton.jit
def store_vectors(scale_ptr, block, rows, stride_row, words, CB: tl.constexpr):
    """UNIT 16: inverse of ``load_vectors``; nothing is written beyond ``rows`` and ``words``."""
    ptr = scale_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    r = tl.arange(0, 32)[:, None, None] + 32 * tl.arange(0, 4)[None, :, None]
    w = tl.arange(0, CB)[None, None, :]
    ptr = ptr + r.to(tl.int64) * (stride_row.to(tl.int64) * 4) + w
    block = tl.reshape(tl.permute(block, (1, 3, 0, 2)), (32, 4, CB))
    tl.store(ptr, block, mask=(r < rows) & (w < words))


@triton.jit
def _join(x0, x1, x2, x3):
    """Four (wc, b, a) -> one block (wc, b, wi, a)."""
    both = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.permute(tl.reshape(both, (x0.shape[0], 32, 4, 4)), (0, 1, 3, 2))


@triton.jit
def _split(block, CB: tl.constexpr):
    """Inverse of ``_join``."""
    both = tl.reshape(tl.permute(block, (0, 1, 3, 2)), (CB // 4, 32, 4, 2, 2))
    even, odd = tl.split(both)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def load_words(scale_ptr, rows, stride_row, skip, first, end, CB: tl.constexpr, CUT: tl.constexpr):
    """UNIT 4, any first byte: word w of the block is bytes ``skip + 4*w ..`` of the row at ``scale_ptr``.

    ``CUT``: ``skip`` in [0, 4) or ``end`` % 4 is not 0, so each word is cut out of the two aligned words around it.
    ``first``: words before it are not read; ``end``: bytes of the row that exist, those beyond are 0. Aligned words
    that hold no byte before ``end`` are not read.
    """
    ptr = scale_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    r = tl.arange(0, 32)[None, :, None] + 32 * tl.arange(0, 4)[None, None, :]
    w = 4 * tl.arange(0, CB // 4)[:, None, None]
    ptr = ptr + r.to(tl.int64) * stride_row.to(tl.int64) + w
    inside = r < rows
    x0 = tl.load(ptr, mask=inside & (w >= first) & (4 * w < end), other=0)
    x1 = tl.load(ptr + 1, mask=inside & (w + 1 >= first) & (4 * w + 4 < end), other=0)
    x2 = tl.load(ptr + 2, mask=inside & (w + 2 >= first) & (4 * w + 8 < end), other=0)
    x3 = tl.load(ptr + 3, mask=inside & (w + 3 >= first) & (4 * w + 12 < end), other=0)
    if CUT:
        x4 = tl.load(ptr + 4, mask=inside & (w + 4 >= first) & (4 * w + 16 < end) & (skip > 0), other=0)
        left = end - skip - 4 * w
        x0 = _cut(x0, x1, skip, left)
        x1 = _cut(x1, x2, skip, left - 4)
        x2 = _cut(x2, x3, skip, left - 8)
        x3 = _cut(x3, x4, skip, left - 12)
    return _join(x0, x1, x2, x3)


@triton.jit
def _cut(low, high, skip, left):
    """Bytes ``skip .. skip+3`` of two words; those at or beyond ``left`` are 0."""
    shift = (8 * skip).to(tl.uint32)
    word = (low >> shift) | ((high << 1) << (31 - shift))  # one shift by 32 would be undefined
    drop = (8 * (4 - tl.minimum(tl.maximum(left, 1), 4))).to(tl.uint32)
    return tl.where(left > 0, (word << drop) >> drop, 0)


@triton.jit
def load_pieces(scale_ptr, rows, stride_row, stride_col, first, end, CB: tl.constexpr, UNIT: tl.constexpr):
    """UNIT 2 or 1: words put together from 2-byte or 1-byte loads; ``first`` and ``end`` as in ``load_words``."""
    r = tl.arange(0, 32)[None, :, None] + 32 * tl.arange(0, 4)[None, None, :]
    w = 4 * tl.arange(0, CB // 4)[:, None, None]
    ptr = scale_ptr
    if UNIT == 2:
        ptr = scale_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    ptr = ptr + r.to(tl.int64) * stride_row.to(tl.int64)
    x0 = _load_word(ptr, r < rows, stride_col, w, first, end, UNIT)
    x1 = _load_word(ptr, r < rows, stride_col, w + 1, first, end, UNIT)
    x2 = _load_word(ptr, r < rows, stride_col, w + 2, first, end, UNIT)
    x3 = _load_word(ptr, r < rows, stride_col, w + 3, first, end, UNIT)
    return _join(x0, x1, x2, x3)


@triton.jit
def _load_word(ptr, inside, stride_col, w, first, end, UNIT: tl.constexpr):
    PIECES: tl.constexpr = 4 // UNIT
    inside = inside & (w >= first)
    word = tl.load(ptr + (w * PIECES).to(tl.int64) * stride_col, mask=inside & (4 * w < end), other=0).to(tl.uint32)
    for i in tl.static_range(1, PIECES):
        at = (w * PIECES + i).to(tl.int64) * stride_col
        piece = tl.load(ptr + at, mask=inside & (4 * w + i * UNIT < end), other=0).to(tl.uint32)
        word |= piece << (8 * UNIT * i)
    return word


@triton.jit
def store_pieces(
    scale_ptr, block, rows, stride_row, stride_col, first, last, end, CB: tl.constexpr, UNIT: tl.constexpr
):
    """UNIT 4, 2 or 1: words ``first .. last - 1`` of a block to a row-major matrix, no byte at or beyond ``end``."""
    r = tl.arange(0, 32)[None, :, None] + 32 * tl.arange(0, 4)[None, None, :]
    w = 4 * tl.arange(0, CB // 4)[:, None, None]
    ptr = scale_ptr
    if UNIT == 2:
        ptr = scale_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    if UNIT == 4:
        ptr = scale_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    ptr = ptr + r.to(tl.int64) * stride_row.to(tl.int64)
    x0, x1, x2, x3 = _split(block, CB)
    _store_word(ptr, x0, r < rows, stride_col, w, first, last, end, UNIT)
    _store_word(ptr, x1, r < rows, stride_col, w + 1, first, last, end, UNIT)
    _store_word(ptr, x2, r < rows, stride_col, w + 2, first, last, end, UNIT)
    _store_word(ptr, x3, r < rows, stride_col, w + 3, first, last, end, UNIT)


@triton.jit
def _store_word(ptr, word, inside, stride_col, w, first, last, end, UNIT: tl.constexpr):
    PIECES: tl.constexpr = 4 // UNIT
    inside = inside & (w >= first) & (w < last)
    for i in tl.static_range(PIECES):
        at = (w * PIECES + i).to(tl.int64) * stride_col
        piece = (word >> (8 * UNIT * i)).to(ptr.dtype.element_ty)
        tl.store(ptr + at, piece, mask=inside & (4 * w + i * UNIT < end))


@triton.jit
def skip_words(scale_ptr, word, stride_col, UNIT: tl.constexpr):
    """Address of word column ``word``. stride_col is 1 if UNIT > 1, which the compiler cannot know."""
    if UNIT == 1:
        ptr = scale_ptr + word.to(tl.int64) * 4 * stride_col
    else:
        ptr = scale_ptr + word * 4
    return ptr


@triton.jit
def units_left(cols, word, UNIT: tl.constexpr):
    """Units of a row from word column ``word`` on; ``word`` is a multiple of 4."""
    if UNIT == 16:
        left = cols - word // 4
    else:
        left = cols - word * (4 // UNIT)
    return left


@triton.jit
def load_matrix(scale_ptr, rows, stride_row, stride_col, cols, CB: tl.constexpr, UNIT: tl.constexpr):
    """A block whose rows start at ``scale_ptr``; ``cols`` (in units) exist from there, the rest is 0."""
    if UNIT == 16:
        block = load_vectors(scale_ptr, rows, stride_row, cols * 4, CB)
    elif UNIT == 4:
        block = load_words(scale_ptr, rows, stride_row, 0, 0, cols * 4, CB, False)
    else:
        block = load_pieces(scale_ptr, rows, stride_row, stride_col, 0, cols * UNIT, CB, UNIT)
    return block


@triton.jit
def store_matrix(scale_ptr, block, rows, stride_row, stride_col, cols, CB: tl.constexpr, UNIT: tl.constexpr):
    """Inverse of ``load_matrix``."""
    if UNIT == 16:
        store_vectors(scale_ptr, block, rows, stride_row, cols * 4, CB)
    else:
        store_pieces(scale_ptr, block, rows, stride_row, stride_col, 0, CB, cols * UNIT, CB, UNIT)


@triton.jit
def store_tiles(out_ptr, tile, block, first, last, CB: tl.constexpr):
    """Words ``first .. last - 1`` of a block become whole tiles; ``tile`` (int64) is where word 0 would go."""
    b = tl.arange(0, 32)[None, :, None, None]
    w = 4 * tl.arange(0, CB // 4)[:, None, None, None] + tl.arange(0, 4)[None, None, :, None]
    a = tl.arange(0, 4)[None, None, None, :]
    ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + tile * 128
    tl.store(ptr + (w * 128 + b * 4 + a), block, mask=(w >= first) & (w < last))


@triton.jit
def load_tiles(blocked_ptr, tile, first, last, CB: tl.constexpr):
    """Inverse of ``store_tiles``; 0 outside ``first .. last - 1``."""
    b = tl.arange(0, 32)[None, :, None, None]
    w = 4 * tl.arange(0, CB // 4)[:, None, None, None] + tl.arange(0, 4)[None, None, :, None]
    a = tl.arange(0, 4)[None, None, None, :]
    ptr = blocked_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + tile * 128
    return tl.load(ptr + (w * 128 + b * 4 + a), mask=(w >= first) & (w < last), other=0)
