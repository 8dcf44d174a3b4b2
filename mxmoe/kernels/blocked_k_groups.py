"""draft"""
import triton
import triton.language as tl
from torch import Tensor
from mxmoe import shapes
from ._groups import group_bounds
from ._tiles import exclusive_sum
from ._tile_words import *

@triton.jit
def _pick(values, mine):
    return tl.sum(tl.where(mine, values, 0))

@triton.jit(do_not_specialize=["R", "cols", "G", "stride_row", "stride_col", "row_tiles", "total"])
def _parallel_kernel(out_ptr, scale_ptr, offs_ptr, R, cols, G, stride_row, stride_col, row_tiles, total,
                     G_POW2: tl.constexpr, CB: tl.constexpr, VEC: tl.constexpr):
    chunks = tl.cdiv(total, CB)
    pid = tl.program_id(0)
    row_tile = pid // chunks
    t0 = (pid % chunks) * CB
    r = block_rows()
    w = block_words(CB)
    row = row_tile * 128 + r
    if VEC > 0:
        ahead = load_words(scale_ptr, row, stride_row, t0 + w, (row < R) & (t0 + w < cols * VEC), VEC)
        C = cols * VEC * 4
    else:
        C = cols
    starts, ends, sizes = group_bounds(offs_ptr, G, C, G_POW2)
    tiles = tl.cdiv(sizes, 4)
    first = exclusive_sum(tiles)
    used = tl.sum(tiles)
    t = t0
    last = tl.minimum(t0 + CB, total)
    while t < last:
        mine = (first <= t) & (t < first + tiles)
        start = _pick(starts, mine)
        size = _pick(sizes, mine)
        f = tl.where(t < used, _pick(first, mine), used)
        n = tl.where(t < used, tl.cdiv(size, 4), total - used)
        seg = tl.minimum(f + n, last)
        tile = f.to(tl.int64) * row_tiles + row_tile.to(tl.int64) * n + (t0 - f)
        valid = size - 4 * (t0 + w - f)
        mask = (row < R) & (t0 + w >= t)
        if VEC > 0:
            if (start == 4 * f) & (size % 4 == 0) & (t < used):
                store_tiles(out_ptr, tile, ahead, t - t0, seg - t0, CB)
            else:
                words = load_shifted(scale_ptr, row, stride_row, start + 4 * (t0 + w - f), valid, mask, VEC)
                store_tiles(out_ptr, tile, words, t - t0, seg - t0, CB)
        else:
            words = load_bytes(scale_ptr, row, stride_row, stride_col, start + 4 * (t0 + w - f), valid, mask)
            store_tiles(out_ptr, tile, words, t - t0, seg - t0, CB)
        t = seg
