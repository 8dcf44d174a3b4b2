"""``MXRecipe``: how a layer is quantized. Frozen, hashable, passed by value; there is no global state."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Final

import torch

from .formats import BLOCK, ELEM_FORMATS, SCALE_MODES

BACKENDS: Final = ("auto", "native", "triton", "dequant", "reference")
PRECISIONS: Final = ("mxfp8", "bf16")

_CHOICES: Final[dict[str, tuple[object, ...]]] = {
    "elem_dtype": tuple(ELEM_FORMATS),
    "grad_elem_dtype": tuple(ELEM_FORMATS),
    "activations": PRECISIONS,
    "scale_mode": SCALE_MODES,
    "weight_block": ((1, BLOCK), (BLOCK, BLOCK)),
    "wgrad": PRECISIONS,
    "save": ("bf16", "mxfp8"),
    "backend": BACKENDS,
}
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in ELEM_FORMATS}


@dataclass(frozen=True, kw_only=True)
class MXRecipe:
    """What is quantized, how, and which backend computes it.

    | field | values | meaning |
    |---|---|---|
    | ``elem_dtype`` | float8_e4m3fn, float8_e5m2 | elements of activations and weights |
    | ``grad_elem_dtype`` | float8_e4m3fn, float8_e5m2 | elements of gradients |
    | ``activations`` | "mxfp8", "bf16" | "bf16": weight-only, activations and gradients stay as they are |
    | ``scale_mode`` | "rceil", "floor", "ceil", "even" | rounding of the block scale; "floor" clips up to 12.5 % |
    | ``weight_block`` | (1, 32), (32, 32) | (32, 32): one scale per tile, one copy of W serves fprop and dgrad |
    | ``wgrad`` | "mxfp8", "bf16" | precision of the weight-gradient GEMM |
    | ``save`` | "bf16", "mxfp8" | what backward keeps of x; "mxfp8" is about half the bytes |
    | ``backend`` | "auto", "native", "triton", "dequant", "reference" | see ``mxmoe.backends()`` |

    Raises: ``ValueError`` naming the field, the value found and the values allowed.
    """

    elem_dtype: torch.dtype = torch.float8_e4m3fn
    grad_elem_dtype: torch.dtype = torch.float8_e4m3fn
    activations: str = "mxfp8"
    scale_mode: str = "rceil"
    weight_block: tuple[int, int] = (1, BLOCK)
    wgrad: str = "mxfp8"
    save: str = "bf16"
    backend: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_block", _as_tuple(self.weight_block))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"MXRecipe({name}=...) must be one of {_names(choices)}, got {value!r}")
            # The choice itself: 32.0, True or a member of a str enum are equal to it but print otherwise in the key.
            object.__setattr__(self, name, choices[choices.index(value)])
        if self.save == "mxfp8" and (self.wgrad == "bf16" or self.activations == "bf16"):
            raise ValueError(
                f'MXRecipe(save="mxfp8") keeps only the MXFP8 form of x, but wgrad={self.wgrad!r} with '
                f'activations={self.activations!r} needs it in bf16: use save="bf16"'
            )
        object.__setattr__(self, "_key", _key(self))

    def replace(self, **changes: object) -> MXRecipe:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def key(self) -> str:
        """The recipe as one line of text: what ops and logs carry. ``from_key`` reads it back."""
        return self._key  # type: ignore[attr-defined, no-any-return]

    @staticmethod
    def from_key(key: str) -> MXRecipe:
        """Inverse of ``key``. Fields that are left out have their defaults. ``ValueError`` for anything else."""
        return _from_key(key)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _names(choices: tuple[object, ...]) -> str:
    return ", ".join(repr(c) if not isinstance(c, torch.dtype) else str(c) for c in choices)


def _key(recipe: MXRecipe) -> str:
    parts = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, tuple):
            value = f"{value[0]}x{value[1]}"
        parts.append(f"{field.name}={value}")
    return ",".join(parts)


@functools.cache
def _from_key(key: str) -> MXRecipe:
    if not isinstance(key, str):
        raise TypeError(f"the key of an MXRecipe is text, got {type(key).__name__}")
    fields: dict[str, object] = {}
    try:
        for part in key.split(","):
            name, _, value = part.partition("=")
            if name not in _CHOICES or name in fields:
                raise ValueError(f"{name!r} is {'given twice' if name in fields else 'no field'}")
            if name == "weight_block":
                fields[name] = tuple(int(size) for size in value.split("x"))
            else:
                fields[name] = _DTYPES.get(value, value)
        return MXRecipe(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(
            f"not the key of an MXRecipe: {key!r} ({error}). A key is field=value, joined by commas: {MXRecipe().key!r}"
        ) from None
