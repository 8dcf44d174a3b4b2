"""``torch._scaled_grouped_mm`` with MXFP8 operands, on a CPU: reads the blocked bytes and asserts its whole contract.

Written from the tables of ``docs/layouts.md`` alone: it shares no helper with the package. Everything that the real op
leaves unwritten is NaN here.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def _tile_byte(row: Tensor, col: Tensor) -> Tensor:
    """Byte of (row, col) inside its 128 x 4 tile."""
    return (row % 32) * 16 + ((row % 128) // 32) * 4 + col % 4


def _read_scales(flat: Tensor, base: int, rows: int, cols: int, tiles_per_row: int) -> Tensor:
    """Logical scales ``(rows, cols)`` of one matrix that starts at byte ``base``, as fp32 factors."""
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    at = base + ((r // 128) * tiles_per_row + c // 4) * 512 + _tile_byte(r, c)
    byte = flat[at].double()
    return torch.where(byte == 255, torch.nan, torch.exp2(byte - 127)).float()


def _assert_padding(flat: Tensor, base: int, rows: int, cols: int, tiles_per_row: int) -> None:
    """Padding rows and columns of a matrix's tiles are zero bytes: 0xFF there would be NaN."""
    r, c = torch.arange(-(-rows // 128) * 128)[:, None], torch.arange(4 * tiles_per_row)[None, :]
    at = base + ((r // 128) * tiles_per_row + c // 4) * 512 + _tile_byte(r, c)
    outside = (r >= rows) | (c >= cols)
    assert (flat[at][outside] == 0).all(), "padding of a scale tile is not zero"


def _values(q: Tensor, factors: Tensor) -> Tensor:
    return q.float() * factors.repeat_interleave(32, -1)[..., : q.shape[-1]]


def _row_major(t: Tensor, name: str) -> None:
    assert t.stride(-1) == 1, f"{name} must be row-major, strides {t.stride()}"
    assert t.stride(-2) % 16 == 0, f"{name}: rows must start at multiples of 16 bytes, stride {t.stride(-2)}"
    assert t.stride(-2) >= t.shape[-1], f"{name}: overlapping rows"


def _column_major(t: Tensor, name: str) -> None:
    assert t.stride(-2) == 1, f"{name} must be column-major, strides {t.stride()}"
    assert t.stride(-1) % 16 == 0, f"{name}: columns must start at multiples of 16 bytes, stride {t.stride(-1)}"
    assert t.stride(-1) >= t.shape[-2], f"{name}: overlapping columns"


class NativeEmulator:
    """Stands in for the op; ``calls`` counts what ran ("m_groups", "k_groups")."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        assert a.dtype == b.dtype == E4M3, f"e4m3 only, got {a.dtype}, {b.dtype}"
        assert scale_a.dtype == scale_b.dtype == E8M0, "scales must be float8_e8m0fnu"
        assert bias is None, "bias is rejected"
        assert scale_result is None
        assert out_dtype in (None, torch.bfloat16), f"only bfloat16 results, got {out_dtype}"
        assert offs is not None
        assert offs.dtype == torch.int32
        assert offs.ndim == 1
        assert a.ndim == 2, "a is 2-D in both forms"
        _row_major(a, "a")
        return (
            self._m_groups(a, b, scale_a, scale_b, offs)
            if b.ndim == 3
            else self._k_groups(a, b, scale_a, scale_b, offs)
        )

    def _m_groups(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
        self.calls.append("m_groups")
        (m, k), (g, k2, n) = a.shape, b.shape
        assert k == k2
        assert offs.shape == (g,)
        assert k % 32 == 0, f"K={k} is not a multiple of 32: the op would not say so"
        assert k % 16 == 0
        assert n % 16 == 0
        _column_major(b, "b")
        assert b.stride(0) % 16 == 0
        k32, tiles = k // 32, -(-(k // 32) // 4)
        rows_bound = 128 * ((m + 127 * g) // 128)
        assert scale_a.shape == (rows_bound, 4 * tiles), f"scale_a {tuple(scale_a.shape)}"
        assert scale_b.shape == (g, 128 * -(-n // 128) * 4 * tiles), f"scale_b {tuple(scale_b.shape)}"
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        flat_a, flat_b = scale_a.view(torch.uint8).flatten(), scale_b.view(torch.uint8)
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)  # rows beyond offs[-1] stay unwritten
        start, row_tiles = 0, 0
        for i, end in enumerate(offs.tolist()):
            assert start <= end <= m, f"offs must not decrease nor pass M={m}: {offs.tolist()}"
            size = end - start
            base = row_tiles * tiles * 512
            _assert_padding(flat_a, base, size, k32, tiles)
            _assert_padding(flat_b[i], 0, n, k32, tiles)
            left = _values(a[start:end], _read_scales(flat_a, base, size, k32, tiles))
            right = _values(b[i].t(), _read_scales(flat_b[i], 0, n, k32, tiles))
            if size:
                out[start:end] = (left @ right.t()).bfloat16()
            start, row_tiles = end, row_tiles + -(-size // 128)
        assert (flat_a[row_tiles * tiles * 512 :] == 0).all(), "slack of scale_a is not zero"
        return out

    def _k_groups(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
        self.calls.append("k_groups")
        (n, mp), (mp2, k), g = a.shape, b.shape, offs.shape[0]
        assert mp == mp2
        assert n % 16 == 0
        assert k % 16 == 0
        assert mp % 16 == 0
        _column_major(b, "b")
        columns = 4 * ((mp // 32 + 3 * g) // 4)
        for name, scale, rows in (("scale_a", scale_a, n), ("scale_b", scale_b, k)):
            assert scale.shape == (128 * -(-rows // 128), columns), f"{name} {tuple(scale.shape)}"
            assert scale.is_contiguous()
        flat_a, flat_b = scale_a.view(torch.uint8).flatten(), scale_b.view(torch.uint8).flatten()
        out = torch.full((g, n, k), torch.nan, dtype=torch.bfloat16)  # an empty group's slice stays unwritten
        start, base_a, base_b = 0, 0, 0
        for i, end in enumerate(offs.tolist()):
            assert start <= end <= mp, f"offs must not decrease nor pass Mp={mp}: {offs.tolist()}"
            assert (end - start) % 32 == 0, f"group {i} has {end - start} rows: no multiple of 32 (device assert)"
            blocks = (end - start) // 32
            tiles = -(-blocks // 4)  # of this group, not of the whole matrix
            _assert_padding(flat_a, base_a, n, blocks, tiles)
            _assert_padding(flat_b, base_b, k, blocks, tiles)
            if blocks:
                left = _values(a[:, start:end], _read_scales(flat_a, base_a, n, blocks, tiles))
                right = _values(b[start:end].t(), _read_scales(flat_b, base_b, k, blocks, tiles))
                out[i] = (left @ right.t()).bfloat16()
            start = end
            base_a += -(-n // 128) * tiles * 512
            base_b += -(-k // 128) * tiles * 512
        assert (flat_a[base_a:] == 0).all(), "slack of scale_a is not zero"
        assert (flat_b[base_b:] == 0).all(), "slack of scale_b is not zero"
        return out
