"""Device-side reading of ``offs``. Shared by every kernel that works on groups."""

import triton
import triton.language as tl


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def group_bounds(offs_ptr, G, total, G_POW2: tl.constexpr):
    """Starts, ends and sizes of all groups, each ``(G_POW2,)`` int32; safe for any content of offs.

    Ends are clamped to ``[0, total]`` and made non-decreasing. Entries at or beyond G have size 0.
    """
    g = tl.arange(0, G_POW2)
    ends = tl.load(offs_ptr + g, mask=g < G, other=0)
    starts = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g < G), other=0)
    ends = tl.associative_scan(tl.minimum(tl.maximum(ends, 0), total), 0, _maximum)
    starts = tl.associative_scan(tl.minimum(tl.maximum(starts, 0), total), 0, _maximum)
    return starts, ends, tl.where(g < G, ends - starts, 0)


@triton.jit
def one_group(offs_ptr, g, G, total, G_POW2: tl.constexpr):
    """Start and end of group ``g``, made safe like ``group_bounds``, without a scan."""
    i = tl.arange(0, G_POW2)
    ends = tl.load(offs_ptr + i, mask=i < G, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), total)
    return tl.max(tl.where(i < g, ends, 0)), tl.max(tl.where(i <= g, ends, 0))


@triton.jit
def last_end(offs_ptr, G, total, G_POW2: tl.constexpr):
    """End of the last group (rows beyond it belong to no group), made safe like ``group_bounds``."""
    g = tl.arange(0, G_POW2)
    ends = tl.load(offs_ptr + g, mask=g < G, other=0)
    return tl.max(tl.minimum(tl.maximum(ends, 0), total))
