"""Which rows of x a tile of a quantization kernel covers. Shared by the kernels whose blocks run along the rows.

    x (M, K)            units of UNIT rows (here 64)          rows padded to 32
    +-------+           +-------+ unit 0                      +-------+
 g0 | 40    |           | 40,24 |  24 rows of zeros           | 40,24 |
    +-------+           +-------+ unit 1                      +-------+
 g1 | 20    |   ---->   | 20,44 |                     ---->   | 20,12 |  a block without rows has no place here
    +-------+           +-------+ unit 2 = units of groups    +-------+
    | tail  |           | slack |                             | unused|
    +-------+           +-------+                             +-------+

Every group starts on a fresh unit, so a unit (the rows of a tile) lies in one group and one search serves it. Slack
units, behind the last group, take the tail rows of x and the unused rows of the padded result, in order: zeros are
written there. The grid has one unit more than the upper bound known without reading offs, ``(M + (UNIT-1)*G) // UNIT``:
then slack units reach all of both. Where there are no groups, M rows are one group and there is no slack.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0x7FFFFFFF)
"""End of the group of a slack unit."""

GRID_Y = 65535
"""The second dim of a CUDA grid ends here."""


def batch_grid(programs: int, batch: int) -> tuple[int, int, int]:
    """Grid of ``programs`` programs for each of ``batch`` matrices."""
    return programs, min(batch, GRID_Y), (batch + GRID_Y - 1) // GRID_Y


@triton.jit
def batch_index(B):
    """Matrix of this program, int64. Programs beyond the last of B matrices do the last one once more."""
    batch = tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)
    return tl.minimum(batch, B - 1)


@triton.jit
def _maximum_each(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _ends_and_sizes(offs_ptr, M, G, G_POW2: tl.constexpr):
    """Safe ends and sizes of all groups, as ``_groups.group_bounds``, with one scan."""
    g = tl.arange(0, G_POW2)
    ends = tl.load(offs_ptr + g, mask=g < G, other=0)
    starts = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g < G), other=0)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    starts = tl.minimum(tl.maximum(starts, 0), M)
    ends, starts = tl.associative_scan((ends, starts), 0, _maximum_each)
    return ends, tl.where(g < G, ends - starts, 0)


@triton.jit
def find_unit(unit, offs_ptr, M, G, G_POW2: tl.constexpr, UNIT: tl.constexpr):
    """Group that owns ``unit`` -> (start row, end row, first unit, end unit, first row in padding to 32), int32.

    A slack unit has end NONE; its start is the end of the last group and its first unit the units of all groups.
    """
    ends, sizes = _ends_and_sizes(offs_ptr, M, G, G_POW2)
    end_units = tl.cumsum((sizes + UNIT - 1) // UNIT, 0)
    before = end_units <= unit  # groups that lie wholly before the unit, empty ones with them
    start = tl.max(tl.where(before, ends, 0))
    end = tl.min(tl.where(before, NONE, ends))
    first_unit = tl.max(tl.where(before, end_units, 0))
    end_unit = tl.min(tl.where(before, NONE, end_units))
    if UNIT == 32:
        padded = first_unit * 32
    else:
        padded = tl.sum(tl.where(before, (sizes + 31) // 32 * 32, 0))
    return start, end, first_unit, end_unit, padded


@triton.jit
def block_rows(
    tile,
    offs_ptr,
    M,  # rows of x
    MP,  # rows of the padded result; M without groups
    G,
    G_POW2: tl.constexpr,
    GROUPED: tl.constexpr,
    NB: tl.constexpr,  # blocks of 32 rows of a tile
):
    """The NB blocks of ``tile`` -> (src, live_end, keep_end, dst, dst_end, first_unit, units).

    | result | shape | meaning |
    |---|---|---|
    | src | (NB,) | first row of the block in x |
    | live_end | scalar | rows of x below it are data, the others count as zero |
    | keep_end | scalar | rows of x below it are this tile's to write (results in x's own row order) |
    | dst | (NB,) | first row of the block in the padded result, a multiple of 32 |
    | dst_end | (NB,) | rows of the padded result below it are this block's to write |
    | first_unit, units | scalar | first unit of the tile's group and how many it has (slack: no bound) |
    """
    UNIT: tl.constexpr = NB * 32
    if GROUPED:
        start, end, first_unit, end_unit, padded = find_unit(tile, offs_ptr, M, G, G_POW2, UNIT)
        local = (tile - first_unit) * UNIT + 32 * tl.arange(0, NB)
        src = start + local
        dst = padded + local
        units = end_unit - first_unit
        slack = end == NONE
        live_end = tl.where(slack, 0, end)
        keep_end = tl.where(slack, M, end)
        # A block of the group's last unit without a row of its own has no place in the padded result either.
        dst_end = tl.where(src < end, MP, 0)
    else:
        src = tl.multiple_of(32 * (tile * NB + tl.arange(0, NB)), 32)
        dst = src
        live_end = M
        keep_end = M
        dst_end = MP + tl.zeros_like(src)
        first_unit = 0
        units = (M + UNIT - 1) // UNIT
    return src, live_end, keep_end, tl.multiple_of(dst, 32), dst_end, first_unit, units


@triton.jit
def aligned(size, ALIGNED: tl.constexpr):
    """``size``, seen as a multiple of 16 if ALIGNED: vectors need it, and token counts are unspecialized."""
    if ALIGNED:
        return size // 16 * 16
    else:
        return size


@triton.jit
def store_padded_ends(padded_offs_ptr, offs_ptr, M, G, G_POW2: tl.constexpr):
    """Group ends after each group is padded to 32 rows."""
    _, sizes = _ends_and_sizes(offs_ptr, M, G, G_POW2)
    g = tl.arange(0, G_POW2)
    tl.store(padded_offs_ptr + g, tl.cumsum((sizes + 31) // 32 * 32, 0), mask=g < G)
