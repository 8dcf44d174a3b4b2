"""Checks of user input: one place, eager and fake alike, before anything is launched.

Errors name the argument, the value found and what to do.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .formats import BLOCKS, INPUT_DTYPES, LAYOUTS, SCALE_MODES, elem_format

_DTYPE_NAMES = ", ".join(str(d).removeprefix("torch.") for d in INPUT_DTYPES)
_INT32_MAX = 2**31 - 1


def local(t: Tensor, name: str) -> None:
    """Refuse a DTensor."""
    if hasattr(t, "_local_tensor") and hasattr(t, "placements"):
        raise TypeError(
            f"{name} is a DTensor with placements {t.placements}: grouped GEMMs work on local tensors, pass "
            f"{name}.to_local() (expert parallelism: the local experts; sharded K is exact only if K / world is a "
            "multiple of 32)"
        )


def tensor(t: object, name: str, dims: tuple[int, ...] | None = None) -> Tensor:
    """A local floating-point tensor of one of ``dims`` dims, outside of derivatives the ops do not have."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    local(t, name)
    if t.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {t.layout}")
    if t.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name} must be {_DTYPE_NAMES}, got {str(t.dtype).removeprefix('torch.')}")
    if dims is not None and t.ndim not in dims:
        wanted = " or ".join(f"{d}-D" for d in dims)
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(t.shape)}")
    derivative(t, name)
    return t


def derivative(t: Tensor, name: str) -> None:
    """Refuse forward-mode AD, which would drop the tangent of ``t``, and torch.func.grad, which custom ops cannot do.

    vmap needs nothing: torch runs the ops entry by entry.
    """
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise NotImplementedError(f"{name} has a tangent: mxmoe has reverse-mode gradients only, no forward-mode AD")
    if torch._C._are_functorch_transforms_active():
        levels = torch._C._functorch.get_interpreter_stack() or ()
        if any(level.key() == torch._C._functorch.TransformType.Grad for level in levels):
            raise NotImplementedError(
                f"{name} came to mxmoe inside torch.func.grad (or vjp, jacrev, hessian), which cannot differentiate "
                "custom ops: use loss.backward() or torch.autograd.grad (torch.func.functional_call works with both)"
            )


def offs(value: object, name: str, device: torch.device, groups: int | None = None, total: int | None = None) -> Tensor:
    """Group ends as an int32 tensor ``(G,)`` on ``device``; int64 is clamped and cast.

    Contents need a sync: with ``total``, the rows there are, they are checked under ``MXMOE_DEBUG=1`` (``debug_offs``).
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be an int32 tensor of group ends on {device}, got {type(value).__name__}")
    local(value, name)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (int64 is cast), got {str(value.dtype).removeprefix('torch.')}")
    if value.ndim != 1:
        raise ValueError(f"{name} must be 1-D (G,), got shape {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(
            f"{name} is on {value.device}, the operands are on {device}: move it with {name}.to({str(device)!r})"
        )
    if value.shape[0] == 0:
        raise ValueError(f"{name} is empty: it needs one end per group (at least one group)")
    if groups is not None and value.shape[0] != groups:
        hint = ""
        if value.shape[0] == groups + 1:
            hint = f" ({name} holds cumulative ends without a leading zero: drop the first entry if it is 0)"
        raise ValueError(f"{name} has {value.shape[0]} entries, expected {groups}: one cumulative end per group{hint}")
    if total is not None:
        maybe_debug_offs(value, total, name)
    if value.dtype == torch.int32:
        # contiguous() alone would take 1 us of every call
        return value if value.is_contiguous() else value.contiguous()
    return value.clamp(0, _INT32_MAX).to(torch.int32).contiguous()  # cast alone, 2**32 + 5 would be a valid end


def top_k(index: object, weights: object, tokens: int | None, device: torch.device | None) -> None:
    """Expert ids ``(T, k)``, int32 or int64, and their weights (None: none are needed), both on ``device``."""
    if not isinstance(index, Tensor):
        raise TypeError(f"top_k_index must be an int64 or int32 tensor, got {type(index).__name__}")
    local(index, "top_k_index")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_k_index must be int64 or int32, got {str(index.dtype).removeprefix('torch.')}")
    if index.ndim != 2 or (tokens is not None and index.shape[0] != tokens):
        wanted = "" if tokens is None else f" with T = {tokens}"
        raise ValueError(f"top_k_index must be (T, k){wanted}, got shape {tuple(index.shape)}")
    if device is not None and index.device != device:
        raise ValueError(f"top_k_index is on {index.device}, the tokens are on {device}")
    if weights is not None:
        _top_k_weights(weights, index.shape, index.device)


def _top_k_weights(weights: object, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(weights, Tensor):
        raise TypeError(f"top_k_weights must be a torch.Tensor, got {type(weights).__name__}")
    local(weights, "top_k_weights")
    derivative(weights, "top_k_weights")
    if not weights.is_floating_point():
        raise TypeError(f"top_k_weights must be floating, got {str(weights.dtype).removeprefix('torch.')}")
    if weights.shape != shape:
        raise ValueError(f"top_k_weights must be (T, k) = {tuple(shape)}, got shape {tuple(weights.shape)}")
    if weights.device != device:
        raise ValueError(f"top_k_weights are on {weights.device}, the routing is on {device}")


def debug_offs(value: Tensor, total: int, name: str = "offs") -> None:
    """Check the contents of group ends: non-decreasing, within ``[0, total]``. Names the first bad entry.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | ``value`` | ``(G,)`` | int32, int64 | cumulative group ends |
    | ``total`` | | int | rows (or columns) there are |
    | ``name`` | | str | what messages call it |

    Opt-in: call it yourself, or set ``MXMOE_DEBUG=1`` to have every call do so. Sync: one device-to-host copy.
    Raises: ``TypeError`` for another dtype, ``ValueError`` for another number of dims or the first bad entry.
    """
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        found = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor of group ends, got {found}")
    if value.ndim != 1:
        raise ValueError(f"{name} must be 1-D (G,), got shape {tuple(value.shape)}")
    previous = 0
    for i, end in enumerate(value.tolist()):
        if end < previous:
            hint = " (are these group sizes? offs holds cumulative ends: sizes.cumsum(0))" if i else ""
            raise ValueError(f"{name}[{i}] = {end} is smaller than the end before it, {previous}{hint}")
        if end > total:
            raise ValueError(f"{name}[{i}] = {end} lies beyond the {total} rows there are")
        previous = end


def maybe_debug_offs(value: Tensor, total: int, name: str = "offs") -> None:
    """``debug_offs`` if ``MXMOE_DEBUG=1`` and values exist (not while compiling or faking)."""
    if torch.compiler.is_compiling() or os.environ.get("MXMOE_DEBUG") != "1":
        return
    if isinstance(value, torch._subclasses.FakeTensor) or value.device.type == "meta":
        return
    debug_offs(value, int(total), name)


def maybe_debug_equal(value: Tensor, other: Tensor, name: str, other_name: str) -> None:
    """Under ``MXMOE_DEBUG=1``: two sets of group ends that must be equal are."""
    if torch.compiler.is_compiling() or os.environ.get("MXMOE_DEBUG") != "1":
        return
    if isinstance(value, torch._subclasses.FakeTensor) or value.device.type == "meta":
        return
    if not torch.equal(value.to(other.dtype), other):
        raise ValueError(f"{name} {value.tolist()} and {other_name} {other.tolist()} must be the same group ends")


def block(value: str) -> str:
    """ "rowwise", "colwise" or "square"."""
    if value not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS}, got {value!r}")
    return value


def layout(value: str) -> str:
    """ "plain" or "blocked"."""
    if value not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {value!r}")
    return value


def scale_mode(value: str) -> str:
    """A scale mode of :mod:`mxmoe.formats`."""
    if value not in SCALE_MODES:
        raise ValueError(f"scale_mode must be one of {SCALE_MODES}, got {value!r}")
    return value


def elem_dtype(value: torch.dtype) -> torch.dtype:
    """float8_e4m3fn or float8_e5m2."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"elem_dtype must be a torch.dtype, got {type(value).__name__}")
    return elem_format(value).dtype


def out_dtype(value: torch.dtype | None, default: torch.dtype, name: str = "out_dtype") -> torch.dtype:
    """A floating-point result dtype."""
    if value is None:
        return default
    if value not in INPUT_DTYPES:
        raise TypeError(f"{name} must be one of {_DTYPE_NAMES} or None, got {value}")
    return value


def value_dtype(value: torch.dtype, name: str) -> torch.dtype:
    """A floating-point dtype of expanded values; there is no default."""
    if value not in INPUT_DTYPES:
        raise TypeError(f"{name} must be one of {_DTYPE_NAMES}, got {value}")
    return value


def bias(value: object, groups: int, n: int, device: torch.device, name: str = "bias") -> Tensor:
    """``(G, N)`` bias, one row per group."""
    b = tensor(value, name)
    if tuple(b.shape) != (groups, n):
        raise ValueError(f"{name} must have shape (G, N) = ({groups}, {n}): one row per group; got {tuple(b.shape)}")
    if b.device != device:
        raise ValueError(f"{name} is on {b.device}, the operands are on {device}")
    return b
