"""Pieces shared by the grouped GEMM kernels: tile order, descriptors bounded by a group, stores, configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import device

# A ragged descriptor sees rows [start, start + size) of a matrix as a tensor of its own. Two leading dims of stride
# 2**34 - s and s (s: the row stride, in elements) and a row dim of 2**30: the address is base + (start + row) * s
# modulo 2**64, and the hardware bound 2**30 falls on start + size.
RAGGED_ROWS = tl.constexpr(1 << 30)
_RAGGED_DIM = 0x7FFF0000
_TMA_ALIGN = 16  # bytes


@triton.jit
def ragged_load(desc, start, size, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows ``row ..`` of the group at ``start``; zeros beyond ``size``."""
    box = desc.load([RAGGED_ROWS, start + size, RAGGED_ROWS - size + row, col])
    return box.reshape(ROWS, COLS)


@triton.jit
def ragged_store(desc, start, size, row, col, tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows ``row ..`` of the group at ``start``; nothing is written beyond ``size``."""
    desc.store([RAGGED_ROWS, start + size, RAGGED_ROWS - size + row, col], tile.reshape(1, 1, ROWS, COLS))


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Left and right half of a tile."""
    return tile.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1).split()


@triton.jit
def band_tile(t, rows, cols, GROUP: tl.constexpr):
    """Tile ``t`` of a ``rows x cols`` grid, walked column by column in bands of GROUP row tiles."""
    band = t // (GROUP * cols)
    first = band * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = t - first * cols
    return first + within % height, within // height


@triton.jit
def store_rows(out, tile, start, size, row, n0, N, TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store a tile of ``out (M, N)`` at row ``row`` of the group at ``start``."""
    if TMA:
        ragged_store(out, start, size, row, n0, tile, ROWS, COLS)
    else:
        r = row + tl.arange(0, ROWS)
        c = n0 + tl.arange(0, COLS)
        at = (start + r).to(tl.int64)[:, None] * N + c[None, :]
        tl.store(out + at, tile, mask=(r < size)[:, None] & (c < N)[None, :])


@triton.jit
def store_slice(out, tile, g, n0, k0, N, K, TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store a tile of ``out (G, N, K)``."""
    if TMA:
        out.store([g, n0, k0], tile.reshape(1, ROWS, COLS))
    else:
        r = n0 + tl.arange(0, ROWS)
        c = k0 + tl.arange(0, COLS)
        at = (g.to(tl.int64) * N + r)[:, None] * K + c[None, :]
        tl.store(out + at, tile, mask=(r < N)[:, None] & (c < K)[None, :])


@triton.jit
def store_slice_halves(
    out,
    acc,
    g,
    n0,
    k0,
    N,
    K,
    DTYPE: tl.constexpr,
    TMA: tl.constexpr,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Round and store a tile of ``out (G, N, K)``, whole or in two halves."""
    if HALVES:
        left, right = halves(acc, ROWS, COLS)
        store_slice(out, left.to(DTYPE), g, n0, k0, N, K, TMA, ROWS, COLS // 2)
        store_slice(out, right.to(DTYPE), g, n0, k0 + COLS // 2, N, K, TMA, ROWS, COLS // 2)
    else:
        store_slice(out, acc.to(DTYPE), g, n0, k0, N, K, TMA, ROWS, COLS)


@dataclass(frozen=True)
class Config:
    """Tile of the output, step of the contraction, and how the tile is stored."""

    rows: int
    cols: int
    step: int
    band: int
    tma_out: bool
    halves: bool
    flatten: bool
    warps: int
    stages: int
    per_sm: int = 1  # programs on one SM


def programs(where: torch.device, per_sm: int) -> int:
    """Size of the persistent grid; at least two, so that the walk is exercised in the interpreter."""
    return max(device.sm_count(where), 2) * per_sm


def _has_tma(where: torch.device) -> bool:
    """sm_90 and later; the interpreter knows descriptors as well. Not ROCm, whose capability reads (0, 0)."""
    return device.capability(where) >= (9, 0) or (where.type == "cpu" and triton.knobs.runtime.interpret)


def _tma_strides(t: Tensor) -> list[int]:
    """Strides in elements; that of a dim of size 1 is never used and may hold anything, so it gets a valid value."""
    step = _TMA_ALIGN * -(-t.size(-1) // _TMA_ALIGN)
    outer = [s if n > 1 else step for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True)]
    return [*outer, 1 if t.size(-1) == 1 else t.stride(-1)]


def tma_ready(*tensors: Tensor) -> bool:
    """The device has TMA; base and strides are multiples of 16 bytes and the last dim is contiguous, as it requires."""
    if not _has_tma(tensors[0].device):
        return False
    for t in tensors:
        size = t.element_size()
        *outer, last = _tma_strides(t)
        if last != 1 or t.data_ptr() % _TMA_ALIGN or t.size(0) >= RAGGED_ROWS.value:
            return False
        if any(s <= 0 or s * size % _TMA_ALIGN or s >= 1 << 33 for s in outer):
            return False
    return True


def desc(t: Tensor, *block: int) -> TensorDescriptor:
    """Host-side TMA descriptor of a tensor for which ``tma_ready`` holds."""
    return TensorDescriptor(t, list(t.shape), _tma_strides(t), list(block))


def ragged_desc(t: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Descriptor for ``ragged_load`` and ``ragged_store`` of a matrix."""
    s = _tma_strides(t)[0]
    shape = [_RAGGED_DIM, _RAGGED_DIM, RAGGED_ROWS.value, t.size(1)]
    return TensorDescriptor(t, shape, [2**34 - s, s, s, 1], [1, 1, rows, cols])
