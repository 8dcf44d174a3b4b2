"""Addresses in the 128x4 blocked scale layout. Shared by every kernel that reads or writes blocked scales.

    one tile, 512 bytes: 128 rows x 4 columns, as 32-bit words (one word = the 4 columns of one row)

        logical word of row r = 32*a + b        stored at word 4*b + a
        a=0: rows   0.. 31                      word:  0   1   2   3 |  4   5   6   7 | ...
        a=1: rows  32.. 63             ---->    row:   0  32  64  96 |  1  33  65  97 | ...
        a=2: rows  64.. 95                             16 bytes: what one thread stores
        a=3: rows  96..127

How to write a blocked scale from a kernel of your own (all results are byte offsets, int64 where they can pass 2**31)

    one matrix (R, C), or one expert: ``scale_ptr + matrix_byte(row, col, cdiv(C, 4))``
    M groups (rows in groups):        ``scale_ptr + m_group_byte(row - start_g, col, first_tile_g, cdiv(C, 4))``
        starts, ends, sizes = group_bounds(offs_ptr, G, M, G_POW2);  first_tile = exclusive_sum(cdiv(sizes, 128))
    K groups (columns in groups):     ``scale_ptr + k_group_byte(row, col - start_g, first_tile_g, tiles_g, row_tiles)``
        tiles = cdiv(sizes, 4);  first_tile = exclusive_sum(tiles): both count column tiles, each group's own

The writer owes every byte: padding rows and columns of each tile, and the slack tiles behind the last group, are 0.

Source: cuBLAS manual, "1D block scaling factors layout"; ``docs/layouts.md``.
"""

import triton
import triton.language as tl

from mxmoe import formats

SF_ROWS = tl.constexpr(formats.SF_ROWS)
SF_COLS = tl.constexpr(formats.SF_COLS)
SF_TILE = tl.constexpr(formats.SF_TILE)


@triton.jit
def exclusive_sum(sizes):
    """Sum of all earlier entries of a 1-D tensor: first tile (row, column) of every group."""
    return tl.cumsum(sizes, 0) - sizes


@triton.jit
def tile_byte(r, c):
    """Byte of row ``r`` in [0, 128), column ``c`` in [0, 4) inside one tile."""
    return (r % 32) * 16 + (r // 32) * 4 + c


@triton.jit
def matrix_byte(row, col, col_tiles):
    """Byte of ``(row, col)`` in a blocked matrix that is ``col_tiles`` = ceil(C/4) tiles wide. int64."""
    tile = (row // SF_ROWS).to(tl.int64) * col_tiles + col // SF_COLS
    return tile * SF_TILE + tile_byte(row % SF_ROWS, col % SF_COLS)


@triton.jit
def m_group_byte(row, col, first_tile, col_tiles):
    """Byte of ``(row, col)`` in an M-group buffer. int64.

    ``row`` counts from the group's first row; ``first_tile``: row tiles of earlier groups; ``col_tiles`` = ceil(C/4).
    """
    tile = (first_tile + row // SF_ROWS).to(tl.int64) * col_tiles + col // SF_COLS
    return tile * SF_TILE + tile_byte(row % SF_ROWS, col % SF_COLS)


@triton.jit
def k_group_byte(row, col, first_tile, col_tiles, row_tiles):
    """Byte of ``(row, col)`` in a K-group buffer. int64.

    ``col`` counts from the group's first column; ``first_tile``: column tiles of all earlier groups; ``col_tiles``:
    column tiles of *this* group (its own tile-row stride, not the matrix's); ``row_tiles`` = ceil(R/128).
    """
    tile = first_tile.to(tl.int64) * row_tiles + (row // SF_ROWS).to(tl.int64) * col_tiles + col // SF_COLS
    return tile * SF_TILE + tile_byte(row % SF_ROWS, col % SF_COLS)
