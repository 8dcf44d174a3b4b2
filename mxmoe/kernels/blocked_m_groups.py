"""Scale layout of M groups: logical (M, C) scales with groups along the rows <-> blocked layout, group by group.

    logical scale, row-major               blocked scale, row tile by row tile
                   C                                       ceil(C/4) tiles
        +---------------------+                      +---------------------+
     g0 | rows 0 .. offs[0)   |            row tile 0| group 0             |  512 B per tile; a group starts on a fresh
        +---------------------+   ---->             1|   padded to 128 rows|  row tile; padding rows and columns are 0
     g1 | rows offs[0] ..     |                     2| group 1 ..          |
        +---------------------+                      +---------------------+
        | tail                |                      | slack: 0            |  (M + 127*G) // 128 row tiles
        +---------------------+                      +---------------------+

Grid     parallel: (row tile, chunk of CB column tiles), chunks fastest; every program finds its group.
         naive: (group, slice, chunk), slack included; a program loops over the row tiles of its group, SLICES apart.
Writes   every output byte exactly once, so the buffer may come from torch.empty.
Traffic  1 byte read and 1 byte written per scale, plus padding.
Index    int64 for addresses: M * C passes 2**31 at M = 1M, C = 2048.
Source   cuBLAS manual, "1D block scaling factors layout"; ``docs/layouts.md``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxmoe import shapes

from ._groups import group_bounds
from ._launch import Launcher, grid2, pow2
from ._tile_words import load_matrix, load_tiles, skip_words, store_matrix, store_tiles, unit_bytes, units_left
from ._tiles import exclusive_sum

# (CB, num_warps, maxnreg); num_warps <= CB/4 keeps the transpose in registers, see _tile_words.
# H200, 2026-11-30, 8 groups, warm L2, us at (131072, 224) (131072, 64) (131072, 160); a clone takes 15.5, 3.35, 10.7.
# (16, 4): 18.4, 3.9, 12.0; (16, 2): 18.6, 4.0, 12.3; (8, 2): 18.6, 4.3, 11.7; (32, 8): 18.7, 5.0. Three scans instead
# of one in find_row_tile, and a flat grid that is divided, took the same time: the bytes decide, not the lookup.
# 128 groups write 6 % more bytes in all (padding and slack) and take 20.0.
PARALLEL = (16, 4, None)
# (16, 2): 19.5 us at 8 groups, 35 at 128; (16, 4): 19.3, 45; (8, 2): 19.7, 45; (32, 4): 21.1, 37.
NAIVE = (16, 2, None)
# The naive form's programs per group and chunk. With one, the loop over a large group took 213 us.
SLICES = 64
INVERSE = (16, 4, None)  # not swept


@triton.jit
def _pick(values, mine):
    return tl.sum(tl.where(mine, values, 0))


@triton.jit
def find_row_tile(offs_ptr, tile, G, M, G_POW2: tl.constexpr):
    """Start and end row of the group of row tile ``tile``, and the group's first row tile. Slack: end <= start.

    The same groups as ``group_bounds`` at half the cost: one scan, and reductions over 32 lanes (one instruction each,
    where 8 lanes take three shuffles). Only offs that decrease somewhere need the two scans that make them safe.
    """
    WIDTH: tl.constexpr = 32 if G_POW2 < 32 else G_POW2
    g = tl.arange(0, WIDTH)
    ends = tl.load(offs_ptr + g, mask=g < G, other=0)
    starts = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g < G), other=0)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    starts = tl.minimum(tl.maximum(starts, 0), M)
    if tl.max(tl.where(g < G, starts - ends, 0)) > 0:
        starts, ends, _ = group_bounds(offs_ptr, G, M, WIDTH)
    tiles = tl.where(g < G, (ends - starts + 127) >> 7, 0)
    behind = tl.cumsum(tiles, 0)
    before = behind <= tile
    start = tl.max(tl.where(before & (g < G), ends, 0))
    first = tl.max(tl.where(before, behind, 0))
    end = tl.max(tl.where((behind > tile) & (behind - tiles <= tile), ends, 0))
    return start, end, first


@triton.jit(do_not_specialize=["M", "cols", "G", "stride_row", "stride_col", "row_tiles", "col_tiles"])
def to_blocked_m_groups_kernel(
    out_ptr,  # (row_tiles * col_tiles * 512,) uint8
    scale_ptr,  # (M, C) uint8
    offs_ptr,  # (G,) int32, end row of each group
    M,
    cols,  # C, in units
    G,
    stride_row,  # in units
    stride_col,
    row_tiles,
    col_tiles,
    G_POW2: tl.constexpr,  # G rounded up to a power of two: one compile per power, not per G
    CB: tl.constexpr,
    UNIT: tl.constexpr,
    PARALLEL: tl.constexpr,
):
    # 1. Which chunk of columns, and which row tile (parallel) or slice of which group (naive), is mine?
    word = tl.program_id(0) * CB
    scale_ptr = skip_words(scale_ptr, word, stride_col, UNIT)
    left = units_left(cols, word, UNIT)

    # 2. Coordinates; 3. load: outside the group or the matrix is padding, and padding is zero; 4. store whole tiles.
    if PARALLEL:
        part = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        if part >= row_tiles:
            return
        start, end, first = find_row_tile(offs_ptr, part, G, M, G_POW2)
        row = start + (part - first) * 128
        at = row.to(tl.int64) * (stride_row.to(tl.int64) * UNIT)
        block = load_matrix(scale_ptr + at, end - row, stride_row, stride_col, left, CB, UNIT)
        store_tiles(out_ptr, part.to(tl.int64) * col_tiles + word, block, 0, col_tiles - word, CB)
    else:
        g = tl.program_id(2)
        starts, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
        tiles = tl.cdiv(sizes, 128)
        firsts = exclusive_sum(tiles)
        mine = tl.arange(0, G_POW2) == g  # group G, of size 0, is the slack
        size = _pick(sizes, mine)
        used = tl.sum(tiles)
        first = tl.where(g < G, _pick(firsts, mine), used)
        n = tl.where(g < G, tl.cdiv(size, 128), row_tiles - used)
        start = _pick(starts, mine)
        for i in range(tl.program_id(1), n, tl.num_programs(1)):
            at = (start + i * 128).to(tl.int64) * (stride_row.to(tl.int64) * UNIT)
            block = load_matrix(scale_ptr + at, size - i * 128, stride_row, stride_col, left, CB, UNIT)
            store_tiles(out_ptr, (first + i).to(tl.int64) * col_tiles + word, block, 0, col_tiles - word, CB)


@triton.jit(do_not_specialize=["M", "cols", "G", "col_tiles"])
def from_blocked_m_groups_kernel(
    scale_ptr,  # (M, C) uint8, contiguous
    blocked_ptr,  # (row_tiles * col_tiles * 512,) uint8
    offs_ptr,  # (G,) int32
    M,
    cols,  # C, in units
    G,
    col_tiles,
    G_POW2: tl.constexpr,
    CB: tl.constexpr,
    UNIT: tl.constexpr,
):
    # 1. Which row tile and which chunk of columns is mine?
    word = tl.program_id(0) * CB
    row_tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    starts, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    tiles = tl.cdiv(sizes, 128)
    firsts = exclusive_sum(tiles)
    used = tl.sum(tiles)
    covered = tl.max(ends)

    # 2. Coordinates; the rows behind the last group are one more group, without tiles.
    mine = (firsts <= row_tile) & (row_tile < firsts + tiles)
    row = (row_tile - tl.where(row_tile < used, _pick(firsts, mine), used)) * 128
    rows = tl.where(row_tile < used, _pick(sizes, mine), M - covered) - row
    start = (tl.where(row_tile < used, _pick(starts, mine), covered) + row).to(tl.int64) * (cols * UNIT)

    # 3. Load tiles; behind the last group is nothing, so zero. 4. Store what lies inside the group.
    last = tl.where(row_tile < used, col_tiles - word, 0)
    block = load_tiles(blocked_ptr, row_tile.to(tl.int64) * col_tiles + word, 0, last, CB)
    store_matrix(scale_ptr + start + word * 4, block, rows, cols, 1, units_left(cols, word, UNIT), CB, UNIT)


_launch_to = Launcher(to_blocked_m_groups_kernel)
_launch_from = Launcher(from_blocked_m_groups_kernel)


def to_blocked_m_groups(scale: Tensor, offs: Tensor, method: str) -> Tensor:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract."""
    m, cols = scale.shape
    groups = offs.shape[0]
    shape = shapes.blocked_m_groups(m, cols, groups)
    out = torch.empty(shape, dtype=torch.uint8, device=scale.device)
    row_tiles, col_tiles = shape[0] // 128, shape[1] // 4
    if row_tiles * col_tiles:
        unit = unit_bytes(scale, cols)
        parallel = method == "parallel"
        cb, warps, maxnreg = PARALLEL if parallel else NAIVE
        stride_row, stride_col = scale.stride()
        _launch_to(
            grid2(-(-col_tiles // cb), row_tiles) if parallel else (-(-col_tiles // cb), SLICES, groups + 1),
            (out, scale, offs),
            (m, cols // unit, groups, stride_row // unit, stride_col, row_tiles, col_tiles),
            (pow2(groups), cb, unit, parallel),
            warps,
            maxnreg,
        )
    return out


def from_blocked_m_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Launch the inverse. Logical rows behind the last group are 0."""
    groups = offs.shape[0]
    scale = torch.empty((rows, cols), dtype=torch.uint8, device=blocked.device)
    if rows * cols:
        # One tile more per group than the buffer has at most: the rows behind the last group need some, too.
        row_tiles = shapes.blocked_m_groups(rows, cols, groups + 1)[0] // 128
        col_tiles = shapes.cdiv(cols, 4)
        unit = unit_bytes(scale, cols)
        cb, warps, maxnreg = INVERSE
        _launch_from(
            grid2(-(-col_tiles // cb), row_tiles),
            (scale, blocked.contiguous(), offs),
            (rows, cols // unit, groups, col_tiles),
            (pow2(groups), cb, unit),
            warps,
            maxnreg,
        )
    return scale
