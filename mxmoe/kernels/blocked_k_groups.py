"""Scale layout of K groups: logical (R, C) scales with groups along the columns <-> blocked layout, group by group.

    logical scale, row-major               blocked scale, in column tiles t of 4 columns; n_g = ceil(c_g / 4) of group g

       0     offs[0]   offs[1]    C        t: 0 .. n_0        n_0 .. n_0 + n_1          .. total = (C + 3*G) // 4
       +---------+---------+------+           +---------------+----------------------+-------+
     R | group 0 | group 1 | tail |  ---->    | row tile 0    | row tile 0           | slack |   n_g tiles per row
       |         |         |      |           | row tile 1 .. | row tile 1 ..        |       |   512 B per tile
       +---------+---------+------+           +---------------+----------------------+-------+   one by one in memory

A group is padded to 4 columns and 128 rows with zero bytes; its tile-row stride is its own n_g, not the matrix's.
The slack behind the last group is treated as one more group, of no columns: it comes out zero.

Grid     parallel: (row tile, chunk of CB column tiles), chunks fastest; total is known without reading offs.
         A program finds the group of its first tile and walks on through the groups that its chunk touches.
         naive: (row tile, group), groups fastest, slack included; a program loops over its group, CB tiles at a time.
Writes   every output byte exactly once, so the buffer may come from torch.empty.
Traffic  1 byte read and 1 byte written per scale, plus padding.
Words    If all groups begin at multiples of 4 columns, tile t holds word t of each row, whatever its group. The
         parallel form loads that before it knows the groups, which hides the latency of reading offs, and stores the
         block group by group: only the address differs. If some group begins elsewhere, words are cut out of the two
         aligned words around them (UNIT 16 and 4), or put together from bytes (UNIT 1: columns, strides or address do
         not divide by 4).
Index    int64 for addresses; rows, columns and tiles are int32.
Source   cuBLAS manual, "1D block scaling factors layout"; ``docs/layouts.md``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxmoe import shapes

from ._groups import group_bounds
from ._launch import Launcher, grid2, pow2
from ._tile_words import load_pieces, load_tiles, load_vectors, load_words, store_pieces, store_tiles, unit_bytes
from ._tiles import exclusive_sum

# (CB, num_warps, maxnreg); num_warps <= CB/4 keeps the transpose in registers, see _tile_words.
# H200, 2026-11-30, 8 groups at multiples of 4, warm L2, us at (8192, 4096) (2048, 4096) (8192, 512); a clone takes
# 17.2, 3.35, 2.27. (16, 4): 19.4, 4.1, 3.0. With 48 registers (2048, 4096) takes
# 3.8, but offs that are not multiples of 4 take 52.4 instead of 50.5 at 128 groups. (32, 8) with 56: 19.3, 4.5, and not
# among the best six at 512 columns.
# A chunk that spans groups stays one load. Sent through the general path, as most chunks were at (8192, 512), it cost
# 7.2 there and 20.3 at (8192, 4096).
PARALLEL = (16, 4, None)
# 39.8 us at (8192, 4096), 4.1 at (2048, 512); (32, 8): 43.5, 4.0; (16, 4): 45.3, 4.3.
NAIVE = (64, 8, None)
INVERSE = (16, 4, None)  # not swept


@triton.jit
def _pick(values, mine):
    return tl.sum(tl.where(mine, values, 0))


@triton.jit
def _move(
    out_ptr,
    scale_ptr,  # row 0 of the row tile
    rows,  # rows from there to the end of the matrix
    stride_row,  # in units
    stride_col,
    row_tile,
    row_tiles,
    t0,  # tile of the block's first word, first .. or before
    t,  # tiles t .. last - 1 are moved
    last,
    start,  # columns of the group
    size,
    first,  # column tiles of the group
    tiles,
    CB: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Move tiles ``t .. last - 1`` of one group, whatever its alignment."""
    col = start + 4 * (t0 - first)
    end = start + size - col
    if UNIT >= 4:
        skip = start % 4
        ptr = scale_ptr + (col - skip)
        block = load_words(ptr, rows, stride_row * (UNIT // 4), skip, t - t0, end + skip, CB, True)
    else:
        ptr = scale_ptr + col.to(tl.int64) * stride_col
        block = load_pieces(ptr, rows, stride_row, stride_col, t - t0, end, CB, 1)
    tile = first.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * tiles + (t0 - first)
    store_tiles(out_ptr, tile, block, t - t0, last - t0, CB)


@triton.jit(do_not_specialize=["R", "cols", "G", "stride_row", "stride_col", "row_tiles", "total"])
def to_blocked_k_groups_kernel(
    out_ptr,  # (row_tiles * total * 512,) uint8
    scale_ptr,  # (R, C) uint8
    offs_ptr,  # (G,) int32, end column of each group
    R,
    cols,  # C, in units
    G,
    stride_row,  # in units
    stride_col,
    row_tiles,
    total,  # column tiles of the buffer
    G_POW2: tl.constexpr,  # G rounded up to a power of two: one compile per power, not per G
    CB: tl.constexpr,
    UNIT: tl.constexpr,
    PARALLEL: tl.constexpr,
):
    # 1. Which row tile, and which chunk (parallel) or group (naive), is mine?
    part = tl.program_id(0)
    row_tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if row_tile >= row_tiles:
        return
    rows = R - row_tile * 128
    scale_ptr += (row_tile * 128).to(tl.int64) * (stride_row.to(tl.int64) * UNIT)

    # 2., 3., 4. Coordinates, load, store. Outside the group or the matrix is padding, and padding is zero.
    if PARALLEL:
        t0 = part * CB
        t = t0
        last = tl.minimum(t0 + CB, total)
        if UNIT == 16:
            # Loads that wait for nothing; meanwhile, offs. A vector of 32 reduces in one instruction (redux), one of 8
            # in three shuffles.
            block = load_vectors(scale_ptr + t0 * 4, rows, stride_row, cols * 4 - t0, CB)
            WIDTH: tl.constexpr = 32 if G_POW2 < 32 else G_POW2
            i = tl.arange(0, WIDTH)
            ends_of = tl.load(offs_ptr + i, mask=i < G, other=0)
            ends_of = tl.minimum(tl.maximum(ends_of, 0), cols * UNIT)
            if tl.max(ends_of & 3) == 0:
                # Word t belongs to the first group that ends behind it, and that group starts where an earlier one
                # ended last: no prefix sum. Behind the last group is the slack.
                words_to = ends_of >> 2
                all_words = tl.max(words_to)
                while t < last:
                    g = tl.min(tl.where(words_to > t, i, WIDTH))
                    begin = tl.max(tl.where(i < g, words_to, 0))
                    end = tl.where(t < all_words, tl.max(tl.where(i == g, words_to, 0)), total)
                    to = tl.minimum(end, last)
                    at = begin.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * (end - begin) + (t0 - begin)
                    store_tiles(out_ptr, at, tl.where(t < all_words, block, 0), t - t0, to - t0, CB)
                    t = to
        if t < last:
            starts, ends, sizes = group_bounds(offs_ptr, G, cols * UNIT, G_POW2)
            tiles = tl.cdiv(sizes, 4)
            firsts = exclusive_sum(tiles)
            used = tl.sum(tiles)
            while t < last:
                mine = (firsts <= t) & (t < firsts + tiles)  # nowhere true: the slack
                start = _pick(starts, mine)
                size = _pick(sizes, mine)
                first = tl.where(t < used, _pick(firsts, mine), used)
                n = tl.where(t < used, tl.cdiv(size, 4), total - used)
                stop = tl.minimum(first + n, last)
                _move(
                    out_ptr, scale_ptr, rows, stride_row, stride_col, row_tile, row_tiles,
                    t0, t, stop, start, size, first, n, CB, UNIT,
                )  # fmt: skip
                t = stop
    else:
        starts, ends, sizes = group_bounds(offs_ptr, G, cols * UNIT, G_POW2)
        tiles = tl.cdiv(sizes, 4)
        firsts = exclusive_sum(tiles)
        used = tl.sum(tiles)
        mine = tl.arange(0, G_POW2) == part  # group G, of size 0, is the slack
        start = _pick(starts, mine)
        size = _pick(sizes, mine)
        first = tl.where(part < G, _pick(firsts, mine), used)
        n = tl.where(part < G, tl.cdiv(size, 4), total - used)
        for t in range(first, first + n, CB):
            _move(
                out_ptr, scale_ptr, rows, stride_row, stride_col, row_tile, row_tiles,
                t, t, tl.minimum(t + CB, first + n), start, size, first, n, CB, UNIT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["R", "C", "G", "row_tiles", "total"])
def from_blocked_k_groups_kernel(
    scale_ptr,  # (R, C) uint8, contiguous
    blocked_ptr,  # (row_tiles * total * 512,) uint8
    offs_ptr,  # (G,) int32
    R,
    C,
    G,
    row_tiles,
    total,  # column tiles of the output at most: the groups', and those of the columns behind the last group
    G_POW2: tl.constexpr,
    CB: tl.constexpr,
    UNIT: tl.constexpr,
):
    # 1. Which row tile and which chunk of column tiles is mine?
    t0 = tl.program_id(0) * CB
    row_tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if row_tile >= row_tiles:
        return
    rows = R - row_tile * 128
    scale_ptr += (row_tile * 128).to(tl.int64) * C

    # 2. Coordinates: the groups, in columns and in tiles; the columns behind the last one are one more group.
    starts, ends, sizes = group_bounds(offs_ptr, G, C, G_POW2)
    tiles = tl.cdiv(sizes, 4)
    firsts = exclusive_sum(tiles)
    used = tl.sum(tiles)
    covered = tl.max(ends)

    # 3., 4. Load tiles (there are none behind the last group: zero), store what lies inside the group.
    t = t0
    last = tl.minimum(t0 + CB, used + tl.cdiv(C - covered, 4))
    while t < last:
        mine = (firsts <= t) & (t < firsts + tiles)
        start = tl.where(t < used, _pick(starts, mine), covered)
        size = tl.where(t < used, _pick(sizes, mine), C - covered)
        first = tl.where(t < used, _pick(firsts, mine), used)
        n = tl.cdiv(size, 4)
        stop = tl.minimum(first + n, last)
        tile = first.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * n + (t0 - first)
        block = load_tiles(blocked_ptr, tile, t - t0, tl.where(t < used, stop - t0, 0), CB)
        col = start + 4 * (t0 - first)
        end = start + size - col
        if UNIT >= 4:
            if (start % 4 == 0) & (size % 4 == 0):
                store_pieces(scale_ptr + col, block, rows, C // 4, 1, t - t0, stop - t0, end, CB, 4)
            else:
                store_pieces(scale_ptr + col, block, rows, C, 1, t - t0, stop - t0, end, CB, 1)
        else:
            store_pieces(scale_ptr + col, block, rows, C, 1, t - t0, stop - t0, end, CB, 1)
        t = stop


_launch_to = Launcher(to_blocked_k_groups_kernel)
_launch_from = Launcher(from_blocked_k_groups_kernel)


def to_blocked_k_groups(scale: Tensor, offs: Tensor, method: str) -> Tensor:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract."""
    rows, cols = scale.shape
    groups = offs.shape[0]
    shape = shapes.blocked_k_groups(rows, cols, groups)
    out = torch.empty(shape, dtype=torch.uint8, device=scale.device)
    row_tiles, total = shape[0] // 128, shape[1] // 4
    if row_tiles * total:
        unit = unit_bytes(scale, cols)
        unit = unit if unit >= 4 else 1  # the groups need not begin at multiples of 2
        parallel = method == "parallel"
        cb, warps, maxnreg = PARALLEL if parallel else NAIVE
        stride_row, stride_col = scale.stride()
        _launch_to(
            grid2(-(-total // cb) if parallel else groups + 1, row_tiles),
            (out, scale, offs),
            (rows, cols // unit, groups, stride_row // unit, stride_col, row_tiles, total),
            (pow2(groups), cb, unit, parallel),
            warps,
            maxnreg,
        )
    return out


def from_blocked_k_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Launch the inverse. Logical columns behind the last group are 0."""
    groups = offs.shape[0]
    scale = torch.empty((rows, cols), dtype=torch.uint8, device=blocked.device)
    if rows * cols:
        row_tiles = shapes.cdiv(rows, 128)
        total = shapes.blocked_k_groups(rows, cols, groups + 1)[1] // 4
        cb, warps, maxnreg = INVERSE
        _launch_from(
            grid2(-(-total // cb), row_tiles),
            (scale, blocked.contiguous(), offs),
            (rows, cols, groups, row_tiles, total),
            (pow2(groups), cb, unit_bytes(scale, cols)),
            warps,
            maxnreg,
        )
    return scale
