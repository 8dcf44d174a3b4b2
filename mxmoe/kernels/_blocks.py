"""Which rows of x a tile of a quantization kernel covers. Shared by the kernels whose blocks run along the rows.

    x (M, K)            padded rows, in units of 32 (or 128, for blocked scales)
    +-------+           +-------+ unit 0
 g0 | 40    |           | 32    |
    |       |           | 8, 24 |  <- rows beyond the end of the group: zeros
    +-------+   ---->   +-------+ unit 2
 g1 | 20    |           | 20,12 |
    +-------+           +-------+ unit 3 = all units of the groups
    | tail  |           | slack |  <- units behind the last group take the tail rows of x, in order: zeros are written there
    +-------+           +-------+

Every group starts on a fresh unit, so a unit lies in one group. The grid has one unit more than the upper bound known
without reading offs, ``(M + (UNIT - 1) * G) // UNIT``: then slack units reach every tail row of x and every unused row of
the padded result. Where there are no groups, M rows are one group and there is no slack.
"""

import triton
import triton.language as tl

from ._groups import group_bounds

NONE = tl.constexpr(0x7FFFFFFF)
"""End of the group of a slack unit."""


@triton.jit
def find_unit(unit, offs_ptr, M, G, G_POW2: tl.constexpr, UNIT: tl.constexpr, AXIS: tl.constexpr):
    """Group that owns ``unit`` -> (start row, end row, first unit, end unit, first row in padding to 32), int32.

    A slack unit has end NONE; its start is the end of the last group and its first unit the units of all groups.
    ``unit``: a scalar with AXIS 0, or ``(N, 1)`` with AXIS 1; the results are scalars or ``(N,)``.
    """
    _, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    end_units = tl.cumsum((sizes + UNIT - 1) // UNIT, 0)
    before = end_units <= unit  # groups that lie wholly before the unit, empty ones with them
    start = tl.max(tl.where(before, ends, 0), AXIS)
    end = tl.min(tl.where(before, NONE, ends), AXIS)
    first_unit = tl.max(tl.where(before, end_units, 0), AXIS)
    end_unit = tl.min(tl.where(before, NONE, end_units), AXIS)
    if UNIT == 32:
        padded = first_unit * 32
    else:
        padded = tl.sum(tl.where(before, (sizes + 31) // 32 * 32, 0), AXIS)
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
    BLOCKED: tl.constexpr,  # units of 128 rows: a tile is one unit
    NB: tl.constexpr,  # blocks of 32 rows of a tile; 4 if BLOCKED
):
    """The NB blocks of ``tile`` -> (src, live_end, keep_end, dst, dst_end, first_unit, units).

    | result | shape | meaning |
    |---|---|---|
    | src | (NB,) | first row of the block in x |
    | live_end | (NB,) | rows of x below it are data, the others count as zero |
    | keep_end | (NB,) | rows of x below it are this block's to write (results in x's own row order) |
    | dst | (NB,) | first row of the block in the padded result, a multiple of 32 |
    | dst_end | (NB,) | rows of the padded result below it are this block's to write |
    | first_unit, units | scalar | first 128-row unit of the group and how many it has (BLOCKED only) |
    """
    i = tl.arange(0, NB)
    first_unit = 0
    units = 0
    if GROUPED:
        if BLOCKED:
            start, end, first_unit, end_unit, padded = find_unit(tile, offs_ptr, M, G, G_POW2, 128, 0)
            local = (tile - first_unit) * 128 + 32 * i
            src = start + local
            dst = padded + local
            units = end_unit - first_unit
            slack = end + tl.zeros_like(i) == NONE
            live_end = tl.where(slack, 0, end)
            # A block of the group's last unit that has no row has no place in the padded result either.
            dst_end = tl.where(slack | (src < end), MP, 0)
        else:
            block = tile * NB + i
            start, end, first, _, _ = find_unit(block[:, None], offs_ptr, M, G, G_POW2, 32, 1)
            src = start + 32 * (block - first)
            dst = 32 * block
            slack = end == NONE
            live_end = tl.where(slack, 0, end)
            dst_end = MP + tl.zeros_like(i)
        keep_end = tl.where(slack, M, end)
    else:
        src = 32 * (tile * NB + i)
        dst = src
        live_end = M + tl.zeros_like(i)
        keep_end = live_end
        dst_end = live_end
        units = (M + 127) // 128
    return src, live_end, keep_end, tl.multiple_of(dst, 32), dst_end, first_unit, units


@triton.jit
def store_padded_ends(padded_offs_ptr, offs_ptr, M, G, G_POW2: tl.constexpr):
    """Group ends after each group is padded to 32 rows."""
    _, _, sizes = group_bounds(offs_ptr, G, M, G_POW2)
    g = tl.arange(0, G_POW2)
    tl.store(padded_offs_ptr + g, tl.cumsum((sizes + 31) // 32 * 32, 0), mask=g < G)
