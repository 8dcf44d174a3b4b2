"""Scale layout: plain e8m0 scales <-> the 128x4 blocked layout that MXFP8 tensor cores read. ``docs/layouts.md``.

    one matrix          to_blocked            from_blocked
    groups of rows      to_blocked_m_groups   from_blocked_m_groups     forward, dgrad
    groups of columns   to_blocked_k_groups   from_blocked_k_groups     wgrad
    experts             to_blocked_experts    from_blocked_experts      weights

The ops move uint8: float8_e8m0fnu does not survive op boundaries under torch.compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from .. import checks, shapes
from ..formats import SCALE_DTYPE
from ..reference import blocked as _reference

Method = Literal["parallel", "naive"]
METHODS = ("parallel", "naive")


# --- ops -------------------------------------------------------------------------------------------------------------
@functools.cache
def _kernels() -> ModuleType:
    from ..kernels import blocked

    return blocked


def _define(signature: str, fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Define an op ``mxmoe::name``: reference on a CPU, Triton launcher on CUDA, and the shape of the result.

    The layers below ``torch.library.custom_op``: that adds autograd and aliasing checks, which bytes do not need and
    which take 10 of the 25 us that a call may cost the host.
    """
    name = signature.partition("(")[0]
    torch.library.define(f"mxmoe::{name}", signature.removeprefix(name), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"mxmoe::{name}", "cpu")(getattr(_reference, name))
    torch.library.impl(f"mxmoe::{name}", "cuda")(lambda *args: getattr(_kernels(), name)(*args))
    torch.library.register_fake(f"mxmoe::{name}")(fake)
    op: Callable[..., Tensor] = getattr(torch.ops.mxmoe, name).default
    return op


_to_blocked = _define(
    "to_blocked(Tensor scale) -> Tensor",
    lambda scale: scale.new_empty(shapes.blocked(*scale.shape)),
)
_from_blocked = _define(
    "from_blocked(Tensor blocked, SymInt rows, SymInt cols) -> Tensor",
    lambda blocked, rows, cols: blocked.new_empty((rows, cols)),
)
_to_blocked_experts = _define(
    "to_blocked_experts(Tensor scale) -> Tensor",
    lambda scale: scale.new_empty(shapes.blocked_experts(*scale.shape)),
)
_from_blocked_experts = _define(
    "from_blocked_experts(Tensor blocked, SymInt rows, SymInt cols) -> Tensor",
    lambda blocked, rows, cols: blocked.new_empty((blocked.shape[0], rows, cols)),
)
_to_blocked_m_groups = _define(
    "to_blocked_m_groups(Tensor scale, Tensor offs, str method) -> Tensor",
    lambda scale, offs, method: scale.new_empty(shapes.blocked_m_groups(scale.shape[0], scale.shape[1], offs.shape[0])),
)
_from_blocked_m_groups = _define(
    "from_blocked_m_groups(Tensor blocked, Tensor offs, SymInt rows, SymInt cols) -> Tensor",
    lambda blocked, offs, rows, cols: blocked.new_empty((rows, cols)),
)
_to_blocked_k_groups = _define(
    "to_blocked_k_groups(Tensor scale, Tensor offs, str method) -> Tensor",
    lambda scale, offs, method: scale.new_empty(shapes.blocked_k_groups(scale.shape[0], scale.shape[1], offs.shape[0])),
)
_from_blocked_k_groups = _define(
    "from_blocked_k_groups(Tensor blocked, Tensor offs, SymInt rows, SymInt cols) -> Tensor",
    lambda blocked, offs, rows, cols: blocked.new_empty((rows, cols)),
)


# --- checks ----------------------------------------------------------------------------------------------------------
def _check_scale(value: Tensor, name: str, ndim: int, letters: str) -> Tensor:
    """A uint8 view of a scale tensor of ``ndim`` dims."""
    _check_tensor(value, name)
    if value.ndim != ndim:
        raise ValueError(f"{name} must be {ndim}-D {letters}, got shape {tuple(value.shape)}")
    if value.dtype == torch.uint8:
        return value
    if value.dtype == SCALE_DTYPE:
        return value.view(torch.uint8)
    raise TypeError(f"{name} must be float8_e8m0fnu or uint8, got {str(value.dtype).removeprefix('torch.')}")


def _check_blocked(value: Tensor, shape: tuple[int, ...], rows: int, cols: int, what: str) -> Tensor:
    """A uint8 view, of shape ``shape``, of a blocked buffer; a flat buffer of as many bytes will do."""
    if value.dtype not in (torch.uint8, SCALE_DTYPE):
        raise TypeError(f"blocked must be float8_e8m0fnu or uint8, got {str(value.dtype).removeprefix('torch.')}")
    fits = value.numel() == _product(shape) if value.ndim == 1 else tuple(value.shape) == shape
    if not fits:  # the text is built here only: formatting a size makes torch.compile treat it as a constant
        raise ValueError(
            f"blocked must have shape {shape} (or be flat with as many bytes), the blocked form of {what} of "
            f"(rows, cols) = ({rows}, {cols}); got {tuple(value.shape)}"
        )
    return (value if value.dtype == torch.uint8 else value.view(torch.uint8)).reshape(shape)


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    checks.local(value, name)


def _check_size(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")


def _like(result: Tensor, dtype: torch.dtype) -> Tensor:
    return result if dtype == torch.uint8 else result.view(dtype)


# --- public functions ------------------------------------------------------------------------------------------------
def to_blocked(scale: Tensor) -> Tensor:
    """Rearrange the scales of one matrix into the 128x4 blocked layout.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``scale`` | ``(R, C)`` | float8_e8m0fnu or uint8 | any |
    | result | ``(128*ceil(R/128), 4*ceil(C/4))`` | as ``scale`` | contiguous; its bytes are the tiles, in order |

    Padding is byte 0, always written.

    Raises: ``TypeError`` for another dtype, ``ValueError`` for another number of dims.
    Sync: none. Empty: R = 0 or C = 0 gives an empty result. Gradient: none.
    Source: cuBLAS manual, "1D block scaling factors layout"; ``docs/layouts.md``.
    """
    data = _check_scale(scale, "scale", 2, "(R, C)")
    return _like(_to_blocked(data), scale.dtype)


def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Rearrange one blocked matrix back into plain row-major scales, without the padding.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``blocked`` | ``(128*ceil(rows/128), 4*ceil(cols/4))``, or flat | float8_e8m0fnu or uint8 | any |
    | result | ``(rows, cols)`` | as ``blocked`` | contiguous |

    Raises: ``TypeError`` for another dtype, ``ValueError`` for a shape that does not belong to ``rows`` and ``cols``.
    Sync: none. Empty: rows = 0 or cols = 0 gives an empty result. Gradient: none.
    Source: inverse of ``to_blocked``.
    """
    _check_size(rows, "rows")
    _check_size(cols, "cols")
    _check_tensor(blocked, "blocked")
    data = _check_blocked(blocked, shapes.blocked(rows, cols), rows, cols, "one matrix")
    return _like(_from_blocked(data, rows, cols), blocked.dtype)


def to_blocked_experts(scale: Tensor) -> Tensor:
    """Rearrange the scales of stacked expert weights into the blocked layout, each expert on its own.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``scale`` | ``(G, R, C)`` | float8_e8m0fnu or uint8 | any |
    | result | ``(G, 128*ceil(R/128) * 4*ceil(C/4))`` | as ``scale`` | contiguous |

    Raises: ``TypeError`` for another dtype, ``ValueError`` for another number of dims.
    Sync: none. Empty: G, R or C = 0 gives an empty result. Gradient: none.
    Source: scale_b of ``torch._scaled_grouped_mm``, 2-D x 3-D; ``docs/layouts.md``.
    """
    data = _check_scale(scale, "scale", 3, "(G, R, C)")
    return _like(_to_blocked_experts(data), scale.dtype)


def from_blocked_experts(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Rearrange blocked expert scales back into plain ``(G, rows, cols)``.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``blocked`` | ``(G, 128*ceil(rows/128) * 4*ceil(cols/4))`` | float8_e8m0fnu or uint8 | any |
    | result | ``(G, rows, cols)`` | as ``blocked`` | contiguous |

    Raises: ``TypeError`` for another dtype, ``ValueError`` for a shape that does not belong to ``rows`` and ``cols``.
    Sync: none. Empty: an empty result. Gradient: none. Source: inverse of ``to_blocked_experts``.
    """
    _check_size(rows, "rows")
    _check_size(cols, "cols")
    data = _check_scale(blocked, "blocked", 2, "(G, bytes of one expert)")
    shape = shapes.blocked_experts(data.shape[0], rows, cols)
    data = _check_blocked(data, shape, rows, cols, "experts")
    return _like(_from_blocked_experts(data, rows, cols), blocked.dtype)


def to_blocked_m_groups(scale: Tensor, offs: Tensor, *, method: Method = "parallel") -> Tensor:
    """Rearrange scales whose rows form groups into the blocked layout, group by group.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``scale`` | ``(M, C)`` | float8_e8m0fnu or uint8 | any; fastest if C and the row stride are multiples of 16 |
    | ``offs`` | ``(G,)``, row ends | int32 (int64 is cast) | any sizes, empty groups, ``offs[-1] < M`` |
    | result | ``(128*((M + 127*G)//128), 4*ceil(C/4))`` | as ``scale`` | contiguous |

    Each group is padded to 128 rows and starts on a fresh row tile; padding, and the slack behind the last group, is
    byte 0. ``method`` changes speed only: "parallel" has a program per row tile and column chunk, "naive" 64 per
    group and column chunk.

    Raises: ``TypeError``, ``ValueError`` naming the argument, the value found and what is expected.
    Sync: none; offs that decrease or exceed M give wrong groups, never an access out of bounds.
    Empty: M = 0 gives a buffer of zeros. Gradient: none.
    Source: scale_a of ``torch._scaled_grouped_mm``, 2-D x 3-D; ``docs/layouts.md``.
    """
    data = _check_scale(scale, "scale", 2, "(M, C)")
    offs = checks.offs(offs, "offs", data.device, total=data.shape[0])
    _check_method(method)
    return _like(_to_blocked_m_groups(data, offs, method), scale.dtype)


def from_blocked_m_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Rearrange an M-group buffer back into plain ``(rows, cols)`` scales.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``blocked`` | ``(128*((rows + 127*G)//128), 4*ceil(cols/4))``, or flat | float8_e8m0fnu or uint8 | any |
    | ``offs`` | ``(G,)``, row ends | int32 (int64 is cast) | as given to ``to_blocked_m_groups`` |
    | result | ``(rows, cols)`` | as ``blocked`` | contiguous; rows at or beyond ``offs[-1]`` are 0 |

    Raises: ``TypeError``, ``ValueError`` naming the argument, the value found and what is expected.
    Sync: none. Empty: an empty result. Gradient: none. Source: inverse of ``to_blocked_m_groups``.
    """
    _check_size(rows, "rows")
    _check_size(cols, "cols")
    _check_tensor(blocked, "blocked")
    offs = checks.offs(offs, "offs", blocked.device)
    shape = shapes.blocked_m_groups(rows, cols, offs.shape[0])
    data = _check_blocked(blocked, shape, rows, cols, "row groups")
    return _like(_from_blocked_m_groups(data, offs, rows, cols), blocked.dtype)


def to_blocked_k_groups(scale: Tensor, offs: Tensor, *, method: Method = "parallel") -> Tensor:
    """Rearrange scales whose columns form groups (groups along the contraction) into the blocked layout.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``scale`` | ``(R, C)`` | float8_e8m0fnu or uint8 | any; fastest if C and the row stride are multiples of 16 |
    | ``offs`` | ``(G,)``, ends in scale *columns* (tokens / 32) | int32 (int64 is cast) | any; best: multiples of 4 |
    | result | ``(128*ceil(R/128), 4*((C + 3*G)//4))`` | as ``scale`` | contiguous |

    Each group is padded to 4 columns and 128 rows, and is a blocked matrix of its own: inside it a row of tiles is
    ``ceil(c_g/4)`` tiles long. Padding, and the slack behind the last group, is byte 0. ``method`` changes speed only:
    "parallel" has a program per row tile and column chunk, "naive" one per group and row tile.

    Raises: ``TypeError``, ``ValueError`` naming the argument, the value found and what is expected.
    Sync: none; offs that decrease or exceed C give wrong groups, never an access out of bounds.
    Empty: R = 0 gives an empty result, C = 0 a buffer of zeros. Gradient: none.
    Source: scale_a and scale_b of ``torch._scaled_grouped_mm``, 2-D x 2-D; ``docs/layouts.md``.
    """
    data = _check_scale(scale, "scale", 2, "(R, C)")
    offs = checks.offs(offs, "offs", data.device, total=data.shape[1])
    _check_method(method)
    return _like(_to_blocked_k_groups(data, offs, method), scale.dtype)


def from_blocked_k_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Rearrange a K-group buffer back into plain ``(rows, cols)`` scales.

    | name | shape | dtype | stride or divisibility |
    |---|---|---|---|
    | ``blocked`` | ``(128*ceil(rows/128), 4*((cols + 3*G)//4))``, or flat | float8_e8m0fnu or uint8 | any |
    | ``offs`` | ``(G,)``, ends in scale columns | int32 (int64 is cast) | as given to ``to_blocked_k_groups`` |
    | result | ``(rows, cols)`` | as ``blocked`` | contiguous; columns at or beyond ``offs[-1]`` are 0 |

    Raises: ``TypeError``, ``ValueError`` naming the argument, the value found and what is expected.
    Sync: none. Empty: an empty result. Gradient: none. Source: inverse of ``to_blocked_k_groups``.
    """
    _check_size(rows, "rows")
    _check_size(cols, "cols")
    _check_tensor(blocked, "blocked")
    offs = checks.offs(offs, "offs", blocked.device)
    shape = shapes.blocked_k_groups(rows, cols, offs.shape[0])
    data = _check_blocked(blocked, shape, rows, cols, "column groups")
    return _like(_from_blocked_k_groups(data, offs, rows, cols), blocked.dtype)
