"""Register-tile arithmetic of the Gluon quantizers: 32-bit words of two values, one tile of words per program.

Plain Triton leaves the ownership of a tile to the compiler; these kernels fix it, so that nothing passes through shared
memory. A word is two neighbouring columns (``x`` read as int32). One thread owns ``4*TR`` rows x ``TW`` words:

             columns ->      8 columns = 16 bytes = one load
            +----------------+----------------+ ...       LC = 32 / LR lanes of a warp side by side
      4*TR  | lane 0         | lane 1         |
      rows  | words w0..w3:  |                |           w_i holds rows i, i+4, i+8, ... of the tile:
            | rows 4r+i      |                |           four tensors (rows/4, words), so that four rows of a column
            +----------------+----------------+ ...       become one output word inside one thread
            | lane LC        |                |
      ...                                                 LR lanes of a warp below each other

* |max| runs on words (``max.NaN.xorsign.abs``): Inf and NaN survive, two values per instruction.
* bf16: the inverse scale is a bf16 power of two and the product is exact, two values per instruction. (Results below
  2**-126 round, but both element types are zero there.) fp16 goes through fp32: 2**32 does not fit.
* ``cvt.rn.satfinite`` clamps to the largest finite value and turns NaN into 0x7F: a block that holds a NaN or an Inf
  gets the inverse scale NaN, and all its elements become 0x7F without a select.

Source: ``docs/numerics.md``, ``docs/layouts.md``; PTX ISA, ``max``, ``mul``, ``cvt``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxmoe.formats import BLOCK, SF_ROWS, elem_format
from mxmoe.shapes import cdiv

TILE_ROWS = SF_ROWS
"""Rows of a program's tile, in every configuration: four blocks, one row tile of the blocked layout."""

LOAD_BYTES = 16
MAX_GROUPS = 1024  # each lane holds groups / 32 of several arrays: more spill, and the plain form takes them
MIN_CAPABILITY = 9  # cvt to e4m3x2 from sm_89, bf16x2 products from sm_90
INT32_MAX = 2**31 - 1


class Config(NamedTuple):
    """How a program's tile lies on its threads: ``4*TR*LR*WR`` rows x ``2*TW*(32/LR)*(W/WR)`` columns."""

    TR: int = 4  # rows/4 of a thread
    TW: int = 4  # words of a thread: 4 = one 16-byte load
    LR: int = 8  # lanes down the rows
    WR: int = 1  # warps down the rows
    W: int = 4  # warps
    SR: int = 1  # row tiles of a program, whose plain colwise scale bytes are stored together
    SC: int = 1  # column tiles of a program, whose plain rowwise scale bytes are stored together; not both above 1
    BAND: int = 8  # programs down the rows in a band, see ``tile_order``
    CBAND: int = 8  # programs across the columns in a band
    LOAD: str = ""  # cache modifiers and eviction policy
    EVICT: str = ""
    STORE: str = ""
    maxnreg: int | None = None  # registers of a thread at most

    @property
    def rows(self) -> int:
        return 4 * self.TR * self.LR * self.WR

    @property
    def cols(self) -> int:
        return 2 * self.TW * (32 // self.LR) * (self.W // self.WR)


# --- layouts: all of them give every thread the same elements --------------------------------------------------------
@gluon.constexpr_function
def words_layout(TR, TW, LR, WR, W):
    """(rows/4, words) of one ``w_i``."""
    return gl.BlockedLayout([TR, TW], [LR, 32 // LR], [WR, W // WR], [1, 0])


@gluon.constexpr_function
def down_layout(TR, TW, LR, WR, W):
    """(rows/4, words) like ``words_layout``, registers down the rows first: a column store takes 4*TR bytes at once."""

    def bases(*sizes):  # (extent, dim, step) -> one basis per bit
        out = []
        for extent, dim, step in sizes:
            while extent > 1:
                out.append([step, 0] if dim == 0 else [0, step])
                step, extent = step * 2, extent // 2
        return out

    LC, WC = 32 // LR, W // WR
    return gl.DistributedLinearLayout(
        reg_bases=bases((TR, 0, 1), (TW, 1, 1)),
        lane_bases=bases((LC, 1, TW), (LR, 0, TR)),
        warp_bases=bases((WC, 1, TW * LC), (WR, 0, TR * LR)),
        block_bases=[],
        shape=[TR * LR * WR, TW * LC * WC],
    )


@gluon.constexpr_function
def row_blocks_layout(TR, TW, LR, WR, W):
    """(row blocks, 8, words): dim 1 spans the 32 rows of one colwise block."""
    return gl.BlockedLayout([1, TR, TW], [LR * TR // 8, 8 // TR, 32 // LR], [WR, 1, W // WR], [2, 1, 0])


@gluon.constexpr_function
def col_blocks_layout(TR, TW, LR, WR, W, span):
    """(rows/4, column blocks, span): dim 2 spans the 32 columns of one rowwise block, ``TW`` words per lane."""
    lanes = 16 // TW
    return gl.BlockedLayout([TR, 1, span], [LR, 32 // LR // lanes, lanes], [WR, W // WR, 1], [2, 1, 0])


@gluon.constexpr_function
def thread_words_layout(TR, TW, LR, WR, W):
    """(rows/4, words/TW, TW): dim 2 is what one lane holds of a row."""
    return gl.BlockedLayout([TR, 1, TW], [LR, 32 // LR, 1], [WR, W // WR, 1], [2, 1, 0])


@gluon.constexpr_function
def groups_layout(G_POW2, W):
    """(G_POW2,) over the lanes of a warp, the same in every warp: scans and sums need no shared memory."""
    return gl.BlockedLayout([max(1, G_POW2 // 32)], [32], [W], [0])


# --- packed arithmetic -----------------------------------------------------------------------------------------------
@gluon.jit
def _absmax_bf16(a, b):
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _absmax_fp16(a, b):
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def absmax(a, b, FP16: gl.constexpr):
    """Per half: max(|a|, |b|), NaN kept. The sign bits of the result mean nothing."""
    if FP16:
        return _absmax_fp16(a, b)
    else:
        return _absmax_bf16(a, b)


@gluon.jit
def reduce_absmax(x, axis: gl.constexpr, FP16: gl.constexpr):
    """``absmax`` along an axis."""
    if FP16:
        return gl.reduce(x, axis, _absmax_fp16)
    else:
        return gl.reduce(x, axis, _absmax_bf16)


@gluon.jit
def fold_rows(a, b, FP16: gl.constexpr):
    """Row maxima as words (even columns, odd columns) of two rows -> one word (row of a, row of b)."""
    even = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )
    odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )
    return absmax(even, odd, FP16)


@gluon.constexpr_function
def _both_halves(value):
    return value << 16 | value


@gluon.constexpr_function
def _round_term(thresh):
    """Added to bf16 bits, carries into the exponent iff mantissa > thresh (its low 16 bits are never needed)."""
    return 0x7F - (thresh >> 16)


@gluon.jit
def _scale_half_fp16(half, EMAX: gl.constexpr, THRESH: gl.constexpr):
    """fp16 bits of an amax in the low half of a word -> (byte, fp32 bits of 2**(127-byte) or NaN)."""
    bits = (half & 0x7FFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
    byte = (bits >> 23) - EMAX + ((bits & 0x7FFFFF) > THRESH).to(gl.int32)
    byte = gl.maximum(byte, 0)
    bad = bits >= 0x7F800000
    return gl.where(bad, 255, byte), gl.where(bad, 0x7FC00000, (254 - byte) << 23)


@gluon.jit
def scale_words(amax, EMAX: gl.constexpr, THRESH: gl.constexpr, FP16: gl.constexpr):
    """Words of two amax -> (two scale bytes, one per half; multiplier of the low half; of the high half).

    bf16: both multipliers are one and the same word, two bf16. fp16: each is the bits of an fp32.
    """
    if FP16:
        low, low_inv = _scale_half_fp16(amax, EMAX, THRESH)
        high, high_inv = _scale_half_fp16(amax >> 16, EMAX, THRESH)
        return low | (high << 16), low_inv, high_inv
    else:
        bits = amax & 0x7FFF7FFF
        byte = ((bits + _both_halves(_round_term(THRESH))) >> 7) & 0x01FF01FF
        byte = gl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;",
            "=r,r,r",
            [byte, gl.full_like(byte, _both_halves(EMAX))],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        byte = byte - _both_halves(EMAX)
        bad = ((bits + 0x00800080) >> 15) & 0x00010001
        inv = (0x7F007F00 - (byte << 7)) | (bad * 0x7FFF)
        return byte | (bad * 0xFF), inv, inv


@gluon.jit
def split_multiplier(inv_low, inv_high, FP16: gl.constexpr):
    """Multipliers of ``scale_words`` -> the multiplier of the first and of the second row, for whole words."""
    if FP16:
        return inv_low, inv_high
    else:
        return (inv_low & 0xFFFF) * 0x00010001, ((inv_low >> 16) & 0xFFFF) * 0x00010001


@gluon.constexpr_function
def _scaled_pair(word, scale_low, scale_high, low, high, fp16):
    """PTX: word of two values -> two scaled fp32 in registers ``low`` and ``high``."""
    if fp16:
        return (
            f"mov.b32 {{s0, s1}}, {word}; cvt.f32.f16 {low}, s0; cvt.f32.f16 {high}, s1;"
            f"mul.f32 {low}, {low}, {scale_low}; mul.f32 {high}, {high}, {scale_high};"
        )
    return f"mul.rn.bf16x2 t, {word}, {scale_low};shl.b32 {low}, t, 16; and.b32 {high}, t, 0xffff0000;"


@gluon.constexpr_function
def _col_asm(e5m2, fp16):
    """Four rows of a word -> the four bytes of its low column ($0) and of its high column ($1)."""
    cvt = "cvt.rn.satfinite.e5m2x2.f32" if e5m2 else "cvt.rn.satfinite.e4m3x2.f32"
    text = "{ .reg .b32 t, l<4>, h<4>; .reg .b16 s0, s1, p<4>;"
    for i in range(4):
        text += _scaled_pair(f"${2 + i}", "$6", "$7", f"l{i}", f"h{i}", fp16)
    text += f"{cvt} p0, l1, l0; {cvt} p1, l3, l2; {cvt} p2, h1, h0; {cvt} p3, h3, h2;"
    return text + "mov.b32 $0, {p0, p1}; mov.b32 $1, {p2, p3}; }"


@gluon.constexpr_function
def _row_asm(e5m2, fp16):
    """Two neighbouring words of a row (pack=2) -> four bytes."""
    cvt = "cvt.rn.satfinite.e5m2x2.f32" if e5m2 else "cvt.rn.satfinite.e4m3x2.f32"
    text = "{ .reg .b32 t, l<2>, h<2>; .reg .b16 s0, s1, p<2>;"
    for i in range(2):
        text += _scaled_pair(f"${1 + i}", f"${3 + i}", f"${3 + i}", f"l{i}", f"h{i}", fp16)
    return text + f"{cvt} p0, h0, l0; {cvt} p1, h1, l1; mov.b32 $0, {{p0, p1}}; }}"


@gluon.jit
def quantize_cols(w0, w1, w2, w3, inv_low, inv_high, E5M2: gl.constexpr, FP16: gl.constexpr):
    """Words of rows 4r .. 4r+3 -> int32 of four bytes: (even columns, odd columns)."""
    return gl.inline_asm_elementwise(
        _col_asm(E5M2, FP16),
        "=r,=r,r,r,r,r,r,r",
        [w0, w1, w2, w3, inv_low, inv_high],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def quantize_row(w, inv, E5M2: gl.constexpr, FP16: gl.constexpr):
    """Words of a row -> int16 of two bytes each."""
    return gl.inline_asm_elementwise(_row_asm(E5M2, FP16), "=r,r,r,r,r", [w, inv], dtype=gl.int16, is_pure=True, pack=2)


# --- which tile am I -------------------------------------------------------------------------------------------------
@gluon.jit
def hidden_zero(i):
    """0 for a loop counter below 65536, which the compiler does not see.

    Added to the strides in a loop over tiles, it keeps their multiples out of registers from one tile to the next.
    """
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 16;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tile_order(pid, row_tiles, col_tiles, BAND: gl.constexpr, CBAND: gl.constexpr):
    """Program id -> (row tile, column tile): bands of CBAND column tiles, each walked from the first row to the last.

    Inside a band: BAND row tiles x CBAND column tiles at a time, down the rows first. Programs that run together then
    write long runs of every column, and the plain scale bytes of a column meet in the L2 before they go to memory.
    """
    wide = gl.minimum(col_tiles, CBAND)
    band = pid // (wide * row_tiles)
    inside = pid % (wide * row_tiles)
    width = gl.minimum(col_tiles - band * wide, wide)
    high = gl.minimum(row_tiles, BAND)
    step = inside // (high * width)
    inside = inside % (high * width)
    height = gl.minimum(row_tiles - step * high, high)
    return step * high + inside % height, band * wide + inside // height


@gluon.jit
def _max(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def group_blocks(
    offs_ptr, padded_ptr, t, G, M, write_padded, BLOCKED: gl.constexpr, G_POW2: gl.constexpr, W: gl.constexpr
):
    """The four blocks of 32 rows of tile ``t`` of the result, in which every group is padded to 32 rows.

    Returns ``(row, down, live, owed, search)``: first source row of the first block; source rows from there to the
    first rows of the other three; source rows of each block; source rows of each that are owed a rowwise result (the
    same, but behind the last group, where the blocks walk the rows of no group, none of them is live); BLOCKED: what
    ``block_places`` goes on with, once the loads of the tile are under way. A tile may hold parts of several groups.
    Safe for any content of offs.
    """
    LG: gl.constexpr = groups_layout(G_POW2, W)
    g = gl.arange(0, G_POW2, layout=LG)
    end = gl.load(offs_ptr + g, mask=g < G, other=0)
    start = gl.load(offs_ptr + g - 1, mask=(g > 0) & (g < G), other=0)
    end = gl.associative_scan(gl.minimum(gl.maximum(end, 0), M), 0, _max)
    start = gl.associative_scan(gl.minimum(gl.maximum(start, 0), M), 0, _max)
    size = gl.where(g < G, end - start, 0)
    padded = (size + 31) // 32 * 32
    padded_end = gl.associative_scan(padded, 0, _add)
    padded_start = padded_end - padded
    if write_padded:
        gl.store(padded_ptr + g, padded_end, mask=g < G)

    shift = start - padded_start
    used = gl.max(end, 0)
    padded_used = gl.max(padded_end, 0)
    p = t * 128
    row0, left0, owed0 = _block_rows(p, padded_end, shift, end, used, padded_used, M)
    row1, left1, owed1 = _block_rows(p + 32, padded_end, shift, end, used, padded_used, M)
    row2, left2, owed2 = _block_rows(p + 64, padded_end, shift, end, used, padded_used, M)
    row3, left3, owed3 = _block_rows(p + 96, padded_end, shift, end, used, padded_used, M)
    down = (row1 - row0, row2 - row0, row3 - row0)
    live = (gl.minimum(left0, 32), gl.minimum(left1, 32), gl.minimum(left2, 32), gl.minimum(left3, 32))
    owed = (owed0, owed1, owed2, owed3)
    if BLOCKED:
        return row0, down, live, owed, (padded_end, padded_start, (size + 127) // 128, left0, left1, left2, left3)
    else:
        return row0, down, live, owed, 0


@gluon.jit
def _block_rows(p, padded_end, shift, end, used, padded_used, M):
    """Row ``p`` of the result: its source row, rows of its group from there (0: none), owed rows, at most 32.

    Everything that a group has rises or falls with the group: the first one that ends behind ``p`` has the extreme.
    """
    behind = padded_end > p
    row = p + gl.max(gl.where(behind, shift, -(2**31)), 0)
    left = gl.min(gl.where(behind, end, M), 0) - row
    tail = p >= padded_used
    row = gl.where(tail, gl.minimum(used + (p - padded_used), M), row)
    return row, gl.where(tail, 0, left), gl.minimum(gl.where(tail, M - row, left), 32)


@gluon.jit
def block_places(t, search):
    """Where the blocked scales of the four blocks go, ``(first, tiles, index, extra)`` of four each, and how many
    128-row tiles all groups have. ``search``: of ``group_blocks``. See ``_block_place``."""
    padded_end, padded_start, tiles, left0, left1, left2, left3 = search
    tile_end = gl.associative_scan(tiles, 0, _add)
    tile_start = tile_end - tiles
    p = t * 128
    first0, tiles0, index0, extra0 = _block_place(p, padded_start, padded_end, tile_start, left0)
    first1, tiles1, index1, extra1 = _block_place(p + 32, padded_start, padded_end, tile_start, left1)
    first2, tiles2, index2, extra2 = _block_place(p + 64, padded_start, padded_end, tile_start, left2)
    first3, tiles3, index3, extra3 = _block_place(p + 96, padded_start, padded_end, tile_start, left3)
    place = (
        (first0, first1, first2, first3),
        (tiles0, tiles1, tiles2, tiles3),
        (index0, index1, index2, index3),
        (extra0, extra1, extra2, extra3),
    )
    return place, gl.max(tile_end, 0)


@gluon.jit
def places(t, search, PLACED: gl.constexpr):
    """``block_places`` if PLACED."""
    if PLACED:
        return block_places(t, search)
    else:
        return 0, 0


@gluon.jit
def _block_place(p, padded_start, padded_end, tile_start, left):
    """Row ``p`` of the result: first 128-row tile and tiles of its group; block inside the group, -1 behind the last
    group; blocks that its tile lacks after it, if it is the last of its group."""
    behind = padded_end > p
    big: gl.constexpr = 2**31 - 1
    first = gl.min(gl.where(behind, tile_start, big), 0)
    inside = p - gl.min(gl.where(behind, padded_start, big), 0)
    live = left > 0
    index = inside // 32
    extra = gl.where(live & (left <= 32), 3 - index % 4, 0)
    return gl.where(live, first, 0), (inside + left + 127) // 128, gl.where(live, index, -1), extra


@gluon.jit
def all_equal(v, value):
    return (v[0] == value) & (v[1] == value) & (v[2] == value) & (v[3] == value)


@gluon.jit
def of_block(b, v0, v1, v2, v3):
    return gl.where(b < 2, gl.where(b == 0, v0, v1), gl.where(b == 2, v2, v3))


@gluon.jit
def source_rows(r4, down, counts, GROUPED: gl.constexpr):
    """Rows 4*r4 of a tile: rows from its first source row, and how many are there from this one on.

    Without groups the rows follow each other, ``counts`` of them.
    """
    if GROUPED:
        b = r4 // 8
        inside = r4 % 8 * 4
        row = of_block(b, 0, down[0], down[1], down[2]) + inside
        return row, of_block(b, counts[0], counts[1], counts[2], counts[3]) - inside
    else:
        return r4 * 4, counts - r4 * 4


@gluon.jit
def zero_tiles(s_ptr, first, end, W: gl.constexpr):
    """Zero the 512-byte tiles ``first .. end - 1``; all programs share the work."""
    at = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [W], [0]))
    word_ptr = s_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    for tile in range(first + gl.program_id(0), end, gl.num_programs(0)):
        gl.store(word_ptr + (tile.to(gl.int64) * 128 + at), gl.zeros_like(at))


# --- load ------------------------------------------------------------------------------------------------------------
@gluon.jit
def load_words(
    x_ptr, down, rows, cols, ld8, MASKED: gl.constexpr, GROUPED: gl.constexpr, TR: gl.constexpr, TW: gl.constexpr,
    LR: gl.constexpr, WR: gl.constexpr, W: gl.constexpr, CACHE: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """Words w0..w3 of a tile whose first value is at ``x_ptr``; ``rows`` and ``cols`` of it exist, the rest is 0.

    ``down`` and ``rows``: see ``source_rows``. ``ld8``: row stride in units of 16 bytes, so that the compiler sees the
    alignment of every row. ``cols`` is in words and a multiple of 4.
    """
    L: gl.constexpr = words_layout(TR, TW, LR, WR, W)
    r4 = gl.arange(0, TR * LR * WR, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, TW * (32 // LR) * (W // WR), layout=gl.SliceLayout(0, L))[None, :]
    word_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    row, left = source_rows(r4, down, rows, GROUPED)
    at = word_ptr + (row * (ld8 * 4) + c)
    step = ld8 * 4
    if MASKED:
        inside = c < cols
        w0 = gl.load(at, mask=(left > 0) & inside, other=0, cache_modifier=CACHE, eviction_policy=EVICT)
        w1 = gl.load(at + step, mask=(left > 1) & inside, other=0, cache_modifier=CACHE, eviction_policy=EVICT)
        w2 = gl.load(at + step * 2, mask=(left > 2) & inside, other=0, cache_modifier=CACHE, eviction_policy=EVICT)
        w3 = gl.load(at + step * 3, mask=(left > 3) & inside, other=0, cache_modifier=CACHE, eviction_policy=EVICT)
    else:
        w0 = gl.load(at, cache_modifier=CACHE, eviction_policy=EVICT)
        w1 = gl.load(at + step, cache_modifier=CACHE, eviction_policy=EVICT)
        w2 = gl.load(at + step * 2, cache_modifier=CACHE, eviction_policy=EVICT)
        w3 = gl.load(at + step * 3, cache_modifier=CACHE, eviction_policy=EVICT)
    return w0, w1, w2, w3


# --- columns ---------------------------------------------------------------------------------------------------------
@gluon.jit
def _col_scale_base(first, tiles, index, sf_row_tiles, col):
    """Byte of block ``index`` of a group, column ``col // 128 * 128``, in the blocked K-group layout."""
    tile = first.to(gl.int64) * sf_row_tiles + (col // 128) * tiles + index // 4
    return tile * 512 + index % 4


@gluon.jit
def _row_scale_base(first, index, sf_row_tiles, col):
    """Byte of row 0 of block ``index`` of a group, column ``col // 128 * 128``, in the blocked M-group layout."""
    tile = (first + index // 4).to(gl.int64) * sf_row_tiles + col // 128
    return tile * 512 + index % 4 * 4


@gluon.jit
def _store_col_scales(
    s_ptr, byte, out_rows16, col, cols, scale_ld, place, sf_row_tiles, sf_slots, MASKED: gl.constexpr,
    GROUPED: gl.constexpr, BLOCKED: gl.constexpr, R4: gl.constexpr, KW: gl.constexpr,
):  # fmt: skip
    LB: gl.constexpr = byte.type.layout
    b = gl.arange(0, R4 // 8, layout=gl.SliceLayout(1, LB))[:, None]
    k = 2 * gl.arange(0, KW, layout=gl.SliceLayout(0, LB))[None, :]
    low = (byte & 0xFF).to(gl.uint8)
    high = ((byte >> 16) & 0xFF).to(gl.uint8)
    if BLOCKED:
        kk = k + col % 128
        sf = (kk % 32) * 16 + (kk % 128) // 32 * 4
        keep_s = k < sf_row_tiles * 128 - col
        if GROUPED:
            first, tiles, index, _ = place
            base0 = _col_scale_base(first[0], tiles[0], index[0], sf_row_tiles, col)
            base1 = _col_scale_base(first[1], tiles[1], index[1], sf_row_tiles, col)
            base2 = _col_scale_base(first[2], tiles[2], index[2], sf_row_tiles, col)
            base3 = _col_scale_base(first[3], tiles[3], index[3], sf_row_tiles, col)
            sf += (kk // 128) * (of_block(b, tiles[0], tiles[1], tiles[2], tiles[3]) * 512)
            at_s = s_ptr + (of_block(b, base0, base1, base2, base3) + sf)
            keep_s = keep_s & (of_block(b, index[0], index[1], index[2], index[3]) >= 0)
        else:
            at_s = s_ptr + ((col // 128).to(gl.int64) * (sf_slots * 512) + ((kk // 128) * (sf_slots * 512) + sf + b))
        if MASKED:
            gl.store(at_s, low, mask=keep_s)
            gl.store(at_s + 16, high, mask=keep_s)
        else:
            gl.store(at_s, low)
            gl.store(at_s + 16, high)
    else:
        at_s = s_ptr + (k * scale_ld + b)
        if MASKED:
            keep_s = (2 * b < out_rows16) & (k < cols)
            gl.store(at_s, low, mask=keep_s)
            gl.store(at_s + scale_ld, high, mask=keep_s)
        else:
            gl.store(at_s, low)
            gl.store(at_s + scale_ld, high)


@gluon.jit
def zero_missing_cols(s_ptr, place, sf_row_tiles, col, BK: gl.constexpr, W: gl.constexpr):
    """Zero the scale bytes of blocks that the last 128 rows of a group lack: BK columns of a K-group layout."""
    k = gl.arange(0, BK, layout=gl.BlockedLayout([1], [32], [W], [0]))
    kk = k + col % 128
    sf = (kk % 32) * 16 + (kk % 128) // 32 * 4
    zero = gl.zeros_like(k).to(gl.uint8)
    first, tiles, index, extra = place
    for b in gl.static_range(4):
        if extra[b] > 0:
            at = s_ptr + (_col_scale_base(first[b], tiles[b], index[b], sf_row_tiles, col) + sf)
            at += (kk // 128) * (tiles[b] * 512)
            for i in gl.static_range(1, 4):
                gl.store(at + i, zero, mask=(k < sf_row_tiles * 128 - col) & (i <= extra[b]))


@gluon.jit
def zero_missing_rows(s_ptr, place, sf_row_tiles, col, NKB: gl.constexpr, W: gl.constexpr):
    """Zero the scale bytes of rows that the last 128 rows of a group lack: NKB blocks of an M-group layout."""
    L: gl.constexpr = gl.BlockedLayout([1, NKB], [32, 1], [W, 1], [1, 0])
    at_row = gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
    kb = gl.arange(0, NKB, layout=gl.SliceLayout(0, L))[None, :]
    kk = kb
    if NKB % 4 != 0:  # see _store_row_scales
        kk = kb + col // 32 % 4
    i = at_row // 32
    sf = at_row % 32 * 16 + i * 4 + (kk // 4 * 512 + kk % 4)
    zero = gl.zeros_like(sf).to(gl.uint8)
    first, _, index, extra = place
    for b in gl.static_range(4):
        if extra[b] > 0:
            at = s_ptr + (_row_scale_base(first[b], index[b], sf_row_tiles, col) + sf)
            gl.store(at, zero, mask=(kb < sf_row_tiles * 4 - col // 32) & (i > 0) & (i <= extra[b]))


@gluon.jit
def store_cols(
    q_ptr, s_ptr, stash, w0, w1, w2, w3, ld16, out_rows16, col, cols, scale_ld, place, sf_row_tiles, sf_slots,
    MASKED: gl.constexpr, STASH: gl.constexpr, GROUPED: gl.constexpr, BLOCKED: gl.constexpr, EMAX: gl.constexpr,
    THRESH: gl.constexpr, E5M2: gl.constexpr, FP16: gl.constexpr, TR: gl.constexpr, TW: gl.constexpr,
    LR: gl.constexpr, WR: gl.constexpr, W: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    """Quantize a tile in blocks of 32 rows and store it column-major, and its scale bytes.

    ``q_ptr``: byte of the tile's first value; ``ld16``: column stride in units of 16 bytes; ``out_rows16``: rows to
    store in units of 16; ``col``: first column; ``cols``: columns to store. Plain scale: ``s_ptr`` at its first byte,
    ``scale_ld`` bytes from column to column. Blocked: ``s_ptr`` at the tile of row tile and column 0 (of the matrix, in
    groups), ``sf_row_tiles`` = ceil(K/128), ``sf_slots`` tiles from 128 columns to the next, ``place`` of a group's.
    STASH: the scale bytes go to shared memory, (row blocks, words), for ``flush_cols``.
    """
    R4: gl.constexpr = TR * LR * WR
    KW: gl.constexpr = TW * (32 // LR) * (W // WR)
    L3: gl.constexpr = row_blocks_layout(TR, TW, LR, WR, W)
    LS: gl.constexpr = down_layout(TR, TW, LR, WR, W)
    amax = absmax(absmax(w0, w1, FP16), absmax(w2, w3, FP16), FP16)
    amax = gl.convert_layout(amax.reshape([R4 // 8, 8, KW]), L3, assert_trivial=True)
    byte, inv_low, inv_high = scale_words(reduce_absmax(amax, 1, FP16), EMAX, THRESH, FP16)
    even, odd = quantize_cols(
        gl.convert_layout(w0.reshape([R4 // 8, 8, KW]), L3, assert_trivial=True),
        gl.convert_layout(w1.reshape([R4 // 8, 8, KW]), L3, assert_trivial=True),
        gl.convert_layout(w2.reshape([R4 // 8, 8, KW]), L3, assert_trivial=True),
        gl.convert_layout(w3.reshape([R4 // 8, 8, KW]), L3, assert_trivial=True),
        gl.expand_dims(inv_low, 1),
        gl.expand_dims(inv_high, 1),
        E5M2,
        FP16,
    )
    even = gl.convert_layout(even.reshape([R4, KW]), LS)
    odd = gl.convert_layout(odd.reshape([R4, KW]), LS)
    r4 = gl.arange(0, R4, layout=gl.SliceLayout(1, LS))[:, None]
    c = gl.arange(0, KW, layout=gl.SliceLayout(0, LS))[None, :]
    at = q_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (c * (ld16 * 8) + r4)
    if MASKED:
        keep = (r4 < out_rows16 * 4) & (2 * c < cols)
        gl.store(at, even, mask=keep, cache_modifier=CACHE)
        gl.store(at + ld16 * 4, odd, mask=keep, cache_modifier=CACHE)
    else:
        gl.store(at, even, cache_modifier=CACHE)
        gl.store(at + ld16 * 4, odd, cache_modifier=CACHE)

    if STASH:
        stash.store(byte)
    else:
        _store_col_scales(
            s_ptr,
            byte,
            out_rows16,
            col,
            cols,
            scale_ld,
            place,
            sf_row_tiles,
            sf_slots,
            MASKED,
            GROUPED,
            BLOCKED,
            R4,
            KW,
        )


@gluon.jit
def _whole(stash, shape: gl.constexpr):
    """All tiles of a stash as one array: the layout of an array of tiles is that of a tile."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return stash._reinterpret(gl.int32, shape, shared)


@gluon.jit
def flush_cols(
    s_ptr, stash, blocks, cols, scale_ld, ALIGNED: gl.constexpr, SR: gl.constexpr, KW: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Store the stashed scale bytes of SR row tiles: 4*SR neighbouring bytes of a column at once.

    ``s_ptr``: first byte; ``blocks``, ``cols``: what to store. ALIGNED: every column starts on a word.
    """
    if ALIGNED:
        LF: gl.constexpr = gl.BlockedLayout([1, 4, 1], [SR, 1, 32 // SR], [1, 1, W], [1, 0, 2])
    else:
        LF: gl.constexpr = gl.BlockedLayout([1, 1, 1], [SR, 4, 8 // SR], [1, 1, W], [1, 0, 2])
    tile = gl.expand_dims(gl.arange(0, SR, layout=gl.SliceLayout(1, gl.SliceLayout(2, LF)))[:, None], 2)
    b = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LF)))[None, :], 2)
    k = 2 * gl.expand_dims(gl.arange(0, KW, layout=gl.SliceLayout(0, gl.SliceLayout(1, LF)))[None, :], 1)
    byte = _whole(stash, [SR, 4, KW]).load(LF)
    at = s_ptr + (k * scale_ld + (tile * 4 + b))
    keep = (tile * 4 + b < blocks) & (k < cols)
    gl.store(at, (byte & 0xFF).to(gl.uint8), mask=keep)
    gl.store(at + scale_ld, ((byte >> 16) & 0xFF).to(gl.uint8), mask=keep)


# --- rows ------------------------------------------------------------------------------------------------------------
@gluon.jit
def _lane_amax(
    w, TR: gl.constexpr, TW: gl.constexpr, LR: gl.constexpr, WR: gl.constexpr, W: gl.constexpr, FP16: gl.constexpr
):
    """Per row and lane: absmax of the words a lane holds. (rows/4, words/TW), no shuffles."""
    R4: gl.constexpr = TR * LR * WR
    LANES: gl.constexpr = (32 // LR) * (W // WR)
    w = gl.convert_layout(w.reshape([R4, LANES, TW]), thread_words_layout(TR, TW, LR, WR, W), assert_trivial=True)
    return reduce_absmax(w, 2, FP16)


@gluon.jit
def _row_scales(
    m0, m1, TR: gl.constexpr, TW: gl.constexpr, LR: gl.constexpr, WR: gl.constexpr, W: gl.constexpr,
    EMAX: gl.constexpr, THRESH: gl.constexpr, FP16: gl.constexpr,
):  # fmt: skip
    """Lane maxima of two rows -> scale words (halves: the two rows) and multipliers, (rows/4, column blocks)."""
    R4: gl.constexpr = TR * LR * WR
    NKB: gl.constexpr = TW * (32 // LR) * (W // WR) // 16
    LL: gl.constexpr = col_blocks_layout(TR, TW, LR, WR, W, 1)
    both = fold_rows(m0, m1, FP16)
    both = gl.convert_layout(both.reshape([R4, NKB, 16 // TW]), LL, assert_trivial=True)
    both = reduce_absmax(both, 2, FP16)
    both = gl.convert_layout(both, gl.SliceLayout(2, col_blocks_layout(TR, TW, LR, WR, W, TW)), assert_trivial=True)
    return scale_words(both, EMAX, THRESH, FP16)


@gluon.jit
def _store_row(
    at, w, inv, keep, MASKED: gl.constexpr, E5M2: gl.constexpr, FP16: gl.constexpr, TR: gl.constexpr,
    TW: gl.constexpr, LR: gl.constexpr, WR: gl.constexpr, W: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    R4: gl.constexpr = TR * LR * WR
    KW: gl.constexpr = TW * (32 // LR) * (W // WR)
    w3 = gl.convert_layout(w.reshape([R4, KW // 16, 16]), col_blocks_layout(TR, TW, LR, WR, W, TW), assert_trivial=True)
    q = quantize_row(w3, gl.expand_dims(inv, 2), E5M2, FP16).reshape([R4, KW])
    q = gl.convert_layout(q, words_layout(TR, TW, LR, WR, W), assert_trivial=True)
    if MASKED:
        gl.store(at, q, mask=keep, cache_modifier=CACHE)
    else:
        gl.store(at, q, cache_modifier=CACHE)


@gluon.jit
def _store_row_scales(
    s_ptr, word, down, rows, col, scale_ld, place, sf_row_tiles, MASKED: gl.constexpr, GROUPED: gl.constexpr,
    BLOCKED: gl.constexpr, R4: gl.constexpr, NKB: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    # The scale bytes of a row sit in different lanes: gathered in one thread they are one store of NKB bytes.
    LB: gl.constexpr = gl.BlockedLayout([1, NKB], [32, 1], [W, 1], [1, 0])
    word = gl.convert_layout(word, LB)
    r4s = gl.arange(0, R4, layout=gl.SliceLayout(1, LB))[:, None]
    r, left = source_rows(r4s, down, rows, GROUPED)
    kb = gl.arange(0, NKB, layout=gl.SliceLayout(0, LB))[None, :]
    kk = kb
    if NKB % 4 != 0:  # else the tile starts a scale tile, and the compiler sees four bytes side by side
        kk = kb + col // 32 % 4
    if BLOCKED:
        keep_s = kb < sf_row_tiles * 4 - col // 32
        sf = kk // 4 * 512 + kk % 4
        if GROUPED:
            first, _, index, _ = place
            b = r4s // 8
            base0 = _row_scale_base(first[0], index[0], sf_row_tiles, col)
            base1 = _row_scale_base(first[1], index[1], sf_row_tiles, col)
            base2 = _row_scale_base(first[2], index[2], sf_row_tiles, col)
            base3 = _row_scale_base(first[3], index[3], sf_row_tiles, col)
            at_s = s_ptr + (of_block(b, base0, base1, base2, base3) + (r4s % 8 * 64 + sf))
            keep_s = keep_s & (of_block(b, index[0], index[1], index[2], index[3]) >= 0)
        else:
            at_s = s_ptr + (col // 128 * 512 + (r4s % 8 * 64 + r4s // 8 * 4 + sf))
        for i in gl.static_range(4):
            part = ((word >> (8 * i)) & 0xFF).to(gl.uint8)
            if MASKED:
                gl.store(at_s + 16 * i, part, mask=keep_s)
            else:
                gl.store(at_s + 16 * i, part)
    else:
        at_s = s_ptr + (r * scale_ld + kb)
        for i in gl.static_range(4):
            part = ((word >> (8 * i)) & 0xFF).to(gl.uint8)
            if MASKED:
                gl.store(at_s + scale_ld * i, part, mask=(left > i) & (kb < scale_ld - col // 32))
            else:
                gl.store(at_s + scale_ld * i, part)


@gluon.jit
def store_rows(
    q_ptr, s_ptr, stash, w0, w1, w2, w3, ld8, down, rows, col, cols, scale_ld, place, sf_row_tiles,
    MASKED: gl.constexpr, STASH: gl.constexpr, GROUPED: gl.constexpr, BLOCKED: gl.constexpr, EMAX: gl.constexpr,
    THRESH: gl.constexpr, E5M2: gl.constexpr, FP16: gl.constexpr, TR: gl.constexpr, TW: gl.constexpr,
    LR: gl.constexpr, WR: gl.constexpr, W: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    """Quantize a tile in blocks of 32 columns and store it row-major, and its scale bytes.

    ``q_ptr``: byte of the tile's first value; ``ld8``: row stride in units of 8 bytes; ``down``, ``rows``: see
    ``source_rows``; ``col``: first column; ``rows``, ``cols``: what to store. Plain scale: ``s_ptr`` at its first byte,
    ``scale_ld`` bytes from row to row. Blocked: ``s_ptr`` at the tile of row tile and column 0 (of the matrix, in
    groups), ``sf_row_tiles`` = ceil(K/128), ``place`` of a group's. STASH: the scale bytes go to shared memory,
    (rows/4, column blocks) words of four rows, for ``flush_rows``.
    """
    R4: gl.constexpr = TR * LR * WR
    KW: gl.constexpr = TW * (32 // LR) * (W // WR)
    NKB: gl.constexpr = KW // 16
    L: gl.constexpr = words_layout(TR, TW, LR, WR, W)
    byte01, low01, high01 = _row_scales(
        _lane_amax(w0, TR, TW, LR, WR, W, FP16), _lane_amax(w1, TR, TW, LR, WR, W, FP16),
        TR, TW, LR, WR, W, EMAX, THRESH, FP16,
    )  # fmt: skip
    byte23, low23, high23 = _row_scales(
        _lane_amax(w2, TR, TW, LR, WR, W, FP16), _lane_amax(w3, TR, TW, LR, WR, W, FP16),
        TR, TW, LR, WR, W, EMAX, THRESH, FP16,
    )  # fmt: skip
    inv0, inv1 = split_multiplier(low01, high01, FP16)
    inv2, inv3 = split_multiplier(low23, high23, FP16)
    r4 = gl.arange(0, R4, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, KW, layout=gl.SliceLayout(0, L))[None, :]
    row, left = source_rows(r4, down, rows, GROUPED)
    at = q_ptr.to(gl.pointer_type(gl.int16), bitcast=True) + (row * (ld8 * 4) + c)
    step = ld8 * 4
    inside = c < cols // 8 * 4
    _store_row(at, w0, inv0, (left > 0) & inside, MASKED, E5M2, FP16, TR, TW, LR, WR, W, CACHE)
    _store_row(at + step, w1, inv1, (left > 1) & inside, MASKED, E5M2, FP16, TR, TW, LR, WR, W, CACHE)
    _store_row(at + step * 2, w2, inv2, (left > 2) & inside, MASKED, E5M2, FP16, TR, TW, LR, WR, W, CACHE)
    _store_row(at + step * 3, w3, inv3, (left > 3) & inside, MASKED, E5M2, FP16, TR, TW, LR, WR, W, CACHE)

    word = (byte01 & 0xFF) | ((byte01 >> 8) & 0xFF00) | ((byte23 & 0xFF) << 16) | ((byte23 & 0xFF0000) << 8)
    if STASH:
        stash.store(word)
    else:
        _store_row_scales(
            s_ptr, word, down, rows, col, scale_ld, place, sf_row_tiles, MASKED, GROUPED, BLOCKED, R4, NKB, W
        )


@gluon.jit
def flush_rows(
    s_ptr, stash, down, rows, scale_cols, scale_ld, GROUPED: gl.constexpr, SC: gl.constexpr, R4: gl.constexpr,
    NKB: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Store the stashed scale bytes of SC column tiles: SC*NKB neighbouring bytes of a row at once."""
    LF: gl.constexpr = gl.BlockedLayout([1, 1, NKB], [SC, 32 // SC, 1], [1, W, 1], [2, 0, 1])
    tile = gl.expand_dims(gl.arange(0, SC, layout=gl.SliceLayout(1, gl.SliceLayout(2, LF)))[:, None], 2)
    r4 = gl.expand_dims(gl.arange(0, R4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LF)))[None, :], 2)
    kb = gl.expand_dims(gl.arange(0, NKB, layout=gl.SliceLayout(0, gl.SliceLayout(1, LF)))[None, :], 1)
    word = _whole(stash, [SC, R4, NKB]).load(LF)
    row, left = source_rows(r4, down, rows, GROUPED)
    at = s_ptr + (row * scale_ld + (tile * NKB + kb))
    inside = tile * NKB + kb < scale_cols
    for i in gl.static_range(4):
        part = ((word >> (8 * i)) & 0xFF).to(gl.uint8)
        gl.store(at + scale_ld * i, part, mask=(left > i) & inside)


# --- what the launchers share ----------------------------------------------------------------------------------------
def supported_input(x: Tensor, offs: Tensor | None, capability: tuple[int, int] | None = None) -> bool:
    """Whether the Gluon kernels take ``x``: dtype, strides, sizes and alignment only.

    ``capability`` is that of the device, passed in by the caller (None: not asked here).
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or x.ndim not in (2, 3) or x.numel() == 0:
        return False
    if capability is not None and capability[0] < MIN_CAPABILITY:
        return False
    m, k = x.shape[-2:]
    size = x.element_size()
    if x.stride(-1) != 1 or any(s * size % LOAD_BYTES for s in x.stride()[:-1]) or x.stride(-2) < 0:
        return False
    if k * size % LOAD_BYTES or x.data_ptr() % LOAD_BYTES:
        return False
    if offs is None:
        if m % LOAD_BYTES:  # a column of the result must start on a 16-byte boundary
            return False
    elif x.ndim != 2 or not 0 < offs.numel() <= MAX_GROUPS or not offs.is_contiguous():
        return False
    # Inside a tile, offsets are int32: 128 rows of x, 256 columns of a column-major result.
    groups = 1 if offs is None else offs.numel()
    return 128 * x.stride(-2) <= INT32_MAX and 256 * (m + 31 * groups) <= INT32_MAX


def constants(elem_dtype: torch.dtype, scale_mode: str) -> dict[str, int | bool]:
    """Compile-time constants of an element type and a scale mode."""
    fmt = elem_format(elem_dtype)
    return {"EMAX": fmt.emax, "THRESH": fmt.threshold(scale_mode), "E5M2": elem_dtype == torch.float8_e5m2}


def group_slots(offs: Tensor | None) -> int:
    """``G_POW2``: groups rounded up to a power of two, and to a whole warp.

    A whole warp reduces with ``redux``, whose result the compiler knows to be the same in all lanes; else it guards
    every shuffle behind the branch on a tile's size (4032 instructions instead of 2704 in ``both``, triton 3.6).
    """
    return 1 if offs is None else max(32, next_power_of_2(offs.numel()))


def row_tile_count(m: int, offs: Tensor | None) -> int:
    """Row tiles of 128 of a result in which every group adds its padding to 32: an upper bound, no look at offs."""
    return cdiv(m + (0 if offs is None else (BLOCK - 1) * offs.numel()), TILE_ROWS)
