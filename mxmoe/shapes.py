"""Every output shape and stride of the package, as pure functions of sizes.

Launcher, reference, fake implementation and test call these; nothing else computes an output shape. All functions work
on ``int`` and on symbolic ``SymInt`` alike. Letters: M rows, K columns, G groups, R x C a scale matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

from .formats import BLOCK, SF_COLS, SF_ROWS


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    """Smallest multiple of ``b`` that is at least ``a``."""
    return cdiv(a, b) * b


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def column_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last two dims are stored transposed (``t.mT`` is contiguous)."""
    *lead, rows, cols = shape
    outer = row_major([*lead, cols, rows])
    return (*outer[:-2], outer[-1], outer[-2])


def is_transposed(strides: Sequence[int]) -> bool:
    """Whether a matrix (the last two dims) is stored transposed: ``t.mT`` is row-major."""
    return bool(strides[-1] != 1 and strides[-2] == 1)


# --- quantized tensors: (qdata shape, scale shape), plain scale layout -----------------------------------------------
def rowwise(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(..., M, K)`` -> qdata ``(..., M, K)``, scale ``(..., M, ceil(K/32))``; both row-major."""
    *lead, k = shape
    return (*lead, k), (*lead, cdiv(k, BLOCK))


def colwise(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(..., M, K)`` -> qdata ``(..., M, K)``, scale ``(..., ceil(M/32), K)``; both column-major."""
    *lead, m, k = shape
    return (*lead, m, k), (*lead, cdiv(m, BLOCK), k)


def padded_rows(m: int, groups: int) -> int:
    """Mp: rows that M rows in ``groups`` groups take when each group is padded to 32; known without reading offs."""
    return BLOCK * ((m + (BLOCK - 1) * groups) // BLOCK)


def colwise_groups(m: int, k: int, groups: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """``(M, K)`` in groups -> qdata ``(Mp, K)``, scale ``(Mp/32, K)``; both column-major."""
    mp = padded_rows(m, groups)
    return (mp, k), (mp // BLOCK, k)


def square(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(..., M, K)`` -> qdata ``(..., M, K)``, scale ``(..., ceil(M/32), ceil(K/32))``."""
    *lead, m, k = shape
    return (*lead, m, k), (*lead, cdiv(m, BLOCK), cdiv(k, BLOCK))


# --- blocked scale layout (bytes) ------------------------------------------------------------------------------------
def blocked(rows: int, cols: int) -> tuple[int, int]:
    """One matrix ``(R, C)`` -> ``(128*ceil(R/128), 4*ceil(C/4))``."""
    return round_up(rows, SF_ROWS), round_up(cols, SF_COLS)


def blocked_m_groups(m: int, cols: int, groups: int) -> tuple[int, int]:
    """``(M, C)`` in row groups -> ``(128*((M + 127*G)//128), 4*ceil(C/4))``: an upper bound, slack is zero."""
    return SF_ROWS * ((m + (SF_ROWS - 1) * groups) // SF_ROWS), round_up(cols, SF_COLS)


def blocked_k_groups(rows: int, cols: int, groups: int) -> tuple[int, int]:
    """``(R, C)`` in column groups -> ``(128*ceil(R/128), 4*((C + 3*G)//4))``: an upper bound, slack is zero."""
    return round_up(rows, SF_ROWS), SF_COLS * ((cols + (SF_COLS - 1) * groups) // SF_COLS)


def blocked_experts(experts: int, rows: int, cols: int) -> tuple[int, int]:
    """``(G, R, C)`` -> ``(G, 128*ceil(R/128) * 4*ceil(C/4))``, each expert on its own."""
    r, c = blocked(rows, cols)
    return experts, r * c


def rowwise_blocked_scale(shape: Sequence[int], groups: int | None) -> tuple[int, int]:
    """Blocked scale of a rowwise tensor: M groups, one matrix (``groups`` None), or experts for 3-D."""
    if len(shape) == 3:
        g, m, k = shape
        return blocked_experts(g, m, cdiv(k, BLOCK))
    m, k = shape
    if groups is None:
        return blocked(m, cdiv(k, BLOCK))
    return blocked_m_groups(m, cdiv(k, BLOCK), groups)


def colwise_blocked_scale(shape: Sequence[int], groups: int | None) -> tuple[int, int]:
    """Blocked scale of a colwise tensor: that of ``scale.mT``, rows = K, columns = blocks of 32 rows."""
    if len(shape) == 3:
        g, m, k = shape
        return blocked_experts(g, k, cdiv(m, BLOCK))
    m, k = shape
    if groups is None:
        return blocked(k, cdiv(m, BLOCK))
    return blocked_k_groups(k, padded_rows(m, groups) // BLOCK, groups)
