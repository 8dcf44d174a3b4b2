"""Scale layout of experts: logical (G, R, C) scales <-> blocked layout, each expert a matrix of its own.

    logical scale, per expert                        blocked scale, per expert: 128*ceil(R/128) * 4*ceil(C/4) bytes
              C                                                ceil(C/4) tiles of 512 B
        +-----------+                                row tile  +---+---+---+
     R  |           |                  ---->                0  | 0 | 1 | 2 |   padded to 128 rows and 4 columns
        |           |                                       1  | 3 | 4 | 5 |   with zero bytes
        +-----------+                                          +---+---+---+

Grid     (expert, row tile, chunk of CB column tiles), chunks fastest. One matrix is one expert.
Writes   every output byte exactly once, so the buffer may come from torch.empty.
Traffic  1 byte read and 1 byte written per scale, plus padding.
Index    int64 for addresses.
Source   cuBLAS manual, "1D block scaling factors layout"; ``docs/layouts.md``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxmoe import shapes

from ._launch import Launcher, grid2
from ._tile_words import load_matrix, load_tiles, skip_words, store_matrix, store_tiles, unit_bytes, units_left

# (CB, num_warps, maxnreg); num_warps <= CB/4 keeps the transpose in registers, see _tile_words.
# H200, 2026-11-30, warm / cold L2, us at (32, 2048, 224) (128, 1536, 64); a clone takes 6.3 / 8.8, 5.0 / 7.8.
# (16, 2): 6.7 / 10.1, 4.9 / 8.1; (16, 4): 7.2 / 10.4, 5.0 / 8.2; (64, 8): 7.2 / 10.1 at the first.
CONFIG = (16, 2, None)


@triton.jit(
    do_not_specialize=["R", "cols", "stride_expert", "stride_row", "stride_col", "row_tiles", "tile_rows", "col_tiles"],
)  # fmt: skip
def blocked_experts_kernel(
    blocked_ptr,  # (G, row_tiles * col_tiles * 512) uint8
    scale_ptr,  # (G, R, C) uint8
    R,
    cols,  # C, in units
    stride_expert,  # in units
    stride_row,  # in units
    stride_col,
    row_tiles,
    tile_rows,  # G * row_tiles
    col_tiles,
    CB: tl.constexpr,
    UNIT: tl.constexpr,
    INVERSE: tl.constexpr,  # blocked -> logical
):
    # 1. Which expert, row tile and chunk of columns is mine?
    word = tl.program_id(0) * CB
    tile_row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)  # counted over all experts
    expert = tile_row // row_tiles
    row = tile_row % row_tiles * 128
    if tile_row >= tile_rows:
        return

    # 2. Coordinates.
    start = expert.to(tl.int64) * stride_expert + row.to(tl.int64) * stride_row
    scale_ptr = skip_words(scale_ptr + start * UNIT, word, stride_col, UNIT)
    left = units_left(cols, word, UNIT)
    tile = tile_row.to(tl.int64) * col_tiles + word

    # 3. Load: outside the matrix is padding, and padding is zero. 4. Store.
    if INVERSE:
        block = load_tiles(blocked_ptr, tile, 0, col_tiles - word, CB)
        store_matrix(scale_ptr, block, R - row, stride_row, stride_col, left, CB, UNIT)
    else:
        block = load_matrix(scale_ptr, R - row, stride_row, stride_col, left, CB, UNIT)
        store_tiles(blocked_ptr, tile, block, 0, col_tiles - word, CB)


_launch_kernel = Launcher(blocked_experts_kernel)


def to_blocked_experts(scale: Tensor) -> Tensor:
    """Launch. Arguments are already checked by ``mxmoe.ops``; see there for the contract."""
    out = torch.empty(shapes.blocked_experts(*scale.shape), dtype=torch.uint8, device=scale.device)
    _launch(out, scale, inverse=False)
    return out


def from_blocked_experts(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Launch the inverse."""
    scale = torch.empty((blocked.shape[0], rows, cols), dtype=torch.uint8, device=blocked.device)
    _launch(blocked.contiguous(), scale, inverse=True)
    return scale


def to_blocked(scale: Tensor) -> Tensor:
    """Launch: one matrix."""
    out = torch.empty(shapes.blocked(*scale.shape), dtype=torch.uint8, device=scale.device)
    _launch(out, scale[None], inverse=False)
    return out


def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Launch the inverse: one matrix."""
    scale = torch.empty((rows, cols), dtype=torch.uint8, device=blocked.device)
    _launch(blocked.contiguous(), scale[None], inverse=True)
    return scale


def _launch(blocked: Tensor, scale: Tensor, inverse: bool) -> None:
    experts, rows, cols = scale.shape
    row_tiles, col_tiles = shapes.cdiv(rows, 128), shapes.cdiv(cols, 4)
    if experts * row_tiles * col_tiles:
        unit = unit_bytes(scale, cols)
        cb, warps, maxnreg = CONFIG
        strides = (scale.stride(0) // unit, scale.stride(1) // unit, scale.stride(2))
        _launch_kernel(
            grid2(-(-col_tiles // cb), experts * row_tiles),
            (blocked, scale),
            (rows, cols // unit, *strides, row_tiles, experts * row_tiles, col_tiles),
            (cb, unit, inverse),
            warps,
            maxnreg,
        )
