"""Which backend computes a GEMM, and why: a static rule on device, recipe and sizes. Never on values (no sync)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from .. import device as devices
from ..formats import BLOCK
from ..recipe import MXRecipe

OPERATIONS: Final = ("fprop", "dgrad", "wgrad")
_IMPLEMENTED: Final = ("reference", "dequant", "triton", "native")
_DEVICES: Final = ("cpu", "cuda", "meta")  # meta: shapes only


@dataclass(frozen=True)
class Choice:
    """A backend and the reason it was chosen, or (``available`` False) the reason it cannot be."""

    backend: str
    reason: str
    available: bool = True


def _native(device: torch.device, recipe: MXRecipe, n: int, k: int) -> str | None:
    """Why ``native`` cannot run; None if it can."""
    if not devices.has_mxfp8_tensor_cores(device):
        return f"needs MXFP8 tensor cores (sm_100); this tensor is on {devices.name(device)}"
    if recipe.activations == "bf16":
        return 'multiplies MXFP8 by MXFP8 only: activations="bf16" runs on dequant'
    for dtype in (recipe.elem_dtype, recipe.grad_elem_dtype):
        if dtype != torch.float8_e4m3fn:
            return f"takes float8_e4m3fn only, the recipe has {str(dtype).removeprefix('torch.')}"
    for letter, size in (("N", n), ("K", k)):
        if size % BLOCK:
            return f"needs N and K to be multiples of {BLOCK}, got {letter}={size}: pad that dim or use dequant"
    return None


def _triton(device: torch.device, recipe: MXRecipe, n: int, k: int) -> str | None:
    """Why the ``triton`` backend cannot run; None if it can."""
    if device.type != "cuda":
        return f"needs a GPU; this tensor is on {devices.name(device)}"
    if torch.version.hip is None and devices.capability(device) < (8, 9):
        return f"needs fp8 conversion instructions (sm_89); this tensor is on {devices.name(device)}"
    if recipe.activations == "bf16":
        return 'multiplies MXFP8 by MXFP8 only: activations="bf16" runs on dequant'
    return None


def _dequant(device: torch.device, recipe: MXRecipe, n: int, k: int) -> str | None:
    """Why ``dequant`` cannot run; None if it can."""
    if device.type not in _DEVICES:
        return _reference(device, recipe, n, k)
    if device.type == "cuda" and torch.version.hip is None and devices.capability(device) < (8, 0):
        return f"needs bf16 tensor cores (sm_80); this tensor is on {devices.name(device)}"
    return None


def _reference(device: torch.device, recipe: MXRecipe, n: int, k: int) -> str | None:
    """Why ``reference`` cannot run; None if it can."""
    if device.type not in _DEVICES:
        return f"runs on cpu and cuda; this tensor is on {devices.name(device)}"
    return None


_RULES = {"reference": _reference, "dequant": _dequant, "triton": _triton, "native": _native}


def availability(backend: str, device: torch.device, recipe: MXRecipe, n: int, k: int) -> Choice:
    """Whether ``backend`` can run this GEMM, with the reason if it cannot."""
    why = _RULES[backend](device, recipe, n, k)
    return Choice(backend, why or "asked for", available=why is None)


def choose(device: torch.device, recipe: MXRecipe, n: int, k: int) -> Choice:
    """The backend of one grouped GEMM with N outputs and contraction K.

    ``auto``: native on sm_100 where its contract holds; dequant (exact expansion, bf16 GEMM) elsewhere.
    Raises: ``RuntimeError`` if the recipe names a backend that cannot run, with the reason and what to do.
    """
    if recipe.backend == "auto":
        native = availability("native", device, recipe, n, k)
        if native.available:
            return Choice("native", f"auto: {devices.name(device)} has MXFP8 tensor cores")
        dequant = availability("dequant", device, recipe, n, k)
        if dequant.available:
            return Choice("dequant", f"auto: native {native.reason}")
        reference = availability("reference", device, recipe, n, k)
        if not reference.available:
            raise RuntimeError(f"every backend {reference.reason}")
        return Choice("reference", f"auto: dequant {dequant.reason}")
    choice = availability(recipe.backend, device, recipe, n, k)
    if not choice.available:
        raise RuntimeError(f'backend="{recipe.backend}" {choice.reason}; backend="auto" picks one that runs here')
    return choice


class BackendTable(list[tuple[str, str, bool, str]]):
    """Rows of (backend, operation, available, reason); prints as a table."""

    def __str__(self) -> str:
        rows = [
            ("backend", "operation", "available", "reason"),
            *((b, o, "yes" if a else "no", r) for b, o, a, r in self),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows)


def backends(device: torch.device | str | None = None) -> BackendTable:
    """The table of backend x operation on a device, with the reason where one is unavailable.

    | argument | type | meaning |
    |---|---|---|
    | ``device`` | torch.device, str, None | None: the current GPU if there is one, else the CPU |
    | returns | list of (backend, operation, available, reason) | prints as a table |

    Raises: ``RuntimeError`` for a device string torch does not know or a GPU that is not here. Sync: none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(f"there is no device {where} on this machine: torch sees {torch.cuda.device_count()} GPUs")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    table = BackendTable()
    for backend in _IMPLEMENTED:
        choice = availability(backend, where, MXRecipe(), BLOCK, BLOCK)
        for operation in OPERATIONS:
            reason = "" if choice.available else choice.reason
            table.append((backend, operation, choice.available, reason))
    return table
