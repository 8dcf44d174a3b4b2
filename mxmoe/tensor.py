"""``MXTensor``: quantized values and their scales, a frozen dataclass registered as a pytree."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import shapes
from .checks import derivative
from .formats import ELEM_FORMATS, SCALE_DTYPE

_TRANSPOSED_BLOCK = {"rowwise": "colwise", "colwise": "rowwise", "square": "square"}


@dataclass(frozen=True, eq=False)
class MXTensor:
    """A quantized tensor: e4m3 or e5m2 values and one power-of-two scale per block of 32.

    | field | shape | dtype | layout |
    |---|---|---|---|
    | ``qdata`` | ``(..., M, K)``; ``(Mp, K)`` for colwise with ``offs`` | fp8 | row-major; colwise: column-major |
    | ``scale`` (rowwise) | ``(..., M, ceil(K/32))`` | float8_e8m0fnu | row-major |
    | ``scale`` (colwise) | ``(..., ceil(M/32), K)`` | float8_e8m0fnu | column-major |
    | ``scale`` (square) | ``(..., ceil(M/32), ceil(K/32))`` | float8_e8m0fnu | row-major |
    | ``scale`` (blocked) | see ``mxmoe.shapes`` | float8_e8m0fnu | 128x4 tiles |
    | ``offs`` | ``(G,)`` or None | int32 | group ends that qdata uses (padded to 32 for colwise) |
    | ``source_offs`` | ``(G,)`` or None | int32 | group ends of the original tensor |
    | ``k_groups`` | | bool | groups run along the blocked dim (colwise with ``offs``), so along a GEMM's contraction |

    ``shape`` is the logical shape, before padding. ``transpose(-2, -1)`` moves no data: it turns rowwise into colwise.
    It is a pytree, so it crosses ``torch.compile``, ``torch.utils._pytree`` and checkpointing; it is no Tensor
    subclass and has no gradient.
    """

    qdata: Tensor
    scale: Tensor
    block: str
    layout: str
    shape: torch.Size
    orig_dtype: torch.dtype
    offs: Tensor | None = None
    source_offs: Tensor | None = None
    k_groups: bool = False

    @property
    def elem_dtype(self) -> torch.dtype:
        """Element type of ``qdata``."""
        return self.qdata.dtype

    @property
    def device(self) -> torch.device:
        """Device of ``qdata``."""
        return self.qdata.device

    @property
    def ndim(self) -> int:
        """Number of logical dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.qdata.nbytes + self.scale.nbytes

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Logical shape, or one entry of it."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def scale_bytes(self) -> Tensor:
        """``scale`` viewed as uint8: what kernels, collectives and op boundaries take."""
        return self.scale.view(torch.uint8)

    def transpose(self, dim0: int, dim1: int) -> MXTensor:
        """The same bytes seen with the last two dims exchanged. ``ValueError`` for other dims."""
        n = self.ndim
        if {d + n if d < 0 else d for d in (dim0, dim1)} != {n - 2, n - 1}:
            raise ValueError(f"MXTensor.transpose exchanges the last two dims only, got ({dim0}, {dim1}) of {n}")
        *lead, m, k = self.shape
        # A blocked scale belongs to the contraction, not to an orientation: the same buffer describes both views.
        scale = self.scale if self.layout == "blocked" else self.scale.transpose(-2, -1)
        return dataclasses.replace(
            self,
            qdata=self.qdata.transpose(-2, -1),
            scale=scale,
            block=_TRANSPOSED_BLOCK[self.block],
            shape=torch.Size([*lead, k, m]),
        )

    @property
    def mT(self) -> MXTensor:  # noqa: N802 (torch's name)
        """``transpose(-2, -1)``."""
        return self.transpose(-2, -1)

    def t(self) -> MXTensor:
        """``transpose(0, 1)`` of a 2-D MXTensor."""
        if self.ndim != 2:
            raise ValueError(f"MXTensor.t() needs 2 dims, got shape {tuple(self.shape)}: use .mT")
        return self.transpose(0, 1)

    def to(self, device: torch.device | str) -> MXTensor:
        """A copy on another device; dtypes never change. ``TypeError`` for anything that names no device."""
        if not isinstance(device, torch.device | str | int):
            raise TypeError(f"MXTensor.to takes a device, got {device!r}: mxmoe.dequantize(t, dtype) gives values")
        device = torch.device(device)
        moved = {name: value.to(device) for name in _TENSORS if (value := getattr(self, name)) is not None}
        return dataclasses.replace(self, **moved)

    def __reduce__(self) -> tuple[object, ...]:
        # pickle and torch.save know no storage of the 8-bit floats: they travel as uint8
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        as_bytes = {"qdata": self.qdata.view(torch.uint8), "scale": self.scale_bytes}
        return _rebuild, (fields | as_bytes, self.elem_dtype)

    def __repr__(self) -> str:
        groups = "" if self.offs is None else f", groups={self.offs.numel()}"
        elem = str(self.elem_dtype).removeprefix("torch.")
        return f"MXTensor({tuple(self.shape)}, {elem}, {self.block}, {self.layout}{groups}, device={self.device})"


def check(t: MXTensor, name: str) -> MXTensor:
    """Refuse an MXTensor, made by hand, whose parts do not belong together: kernels read by these shapes.

    The shape of a blocked scale is checked where it is expanded.
    """
    if torch.compiler.is_compiling():
        return t
    derivative(t.qdata, name)
    if t.qdata.dtype not in ELEM_FORMATS or t.scale.dtype != SCALE_DTYPE:
        raise TypeError(
            f"{name} must hold fp8 values and {SCALE_DTYPE} scales, got {t.qdata.dtype} and {t.scale.dtype}"
        )
    values = list(t.shape)
    if t.k_groups:
        if t.offs is None or t.source_offs is None or t.offs.shape != t.source_offs.shape:
            raise ValueError(f"{name} has k_groups=True and needs as many ends in offs as in source_offs")
        along = -2 if t.block == "colwise" else -1
        values[along] = shapes.padded_rows(values[along], t.offs.shape[0])
    if t.qdata.shape != tuple(values):
        raise ValueError(f"{name}.qdata must have shape {tuple(values)}, got {tuple(t.qdata.shape)}")
    if t.layout == "plain":
        scales = {"rowwise": shapes.rowwise, "colwise": shapes.colwise, "square": shapes.square}[t.block](values)[1]
        if t.scale.shape != scales:
            raise ValueError(f"{name}.scale must have shape {scales}, {t.block}, got {tuple(t.scale.shape)}")
    return t


def _rebuild(fields: dict[str, Any], elem_dtype: torch.dtype) -> MXTensor:
    views = {"qdata": fields["qdata"].view(elem_dtype), "scale": fields["scale"].view(SCALE_DTYPE)}
    return MXTensor(**fields | views)


def make(
    qdata: Tensor,
    scale: Tensor,
    *,
    block: str,
    layout: str,
    shape: torch.Size,
    orig_dtype: torch.dtype,
    offs: Tensor | None = None,
    source_offs: Tensor | None = None,
    k_groups: bool = False,
) -> MXTensor:
    """Build an MXTensor from the outputs of an op, whose scales are uint8."""
    return MXTensor(qdata, scale.view(SCALE_DTYPE), block, layout, shape, orig_dtype, offs, source_offs, k_groups)


_TENSORS = ("qdata", "scale", "offs", "source_offs")
_OTHERS = ("block", "layout", "shape", "orig_dtype", "k_groups")
_Context = tuple[tuple[str, ...], tuple[Any, ...]]


def _flatten(t: Any) -> tuple[list[Tensor], _Context]:
    # Leaves are tensors, never None: tree_map(lambda leaf: leaf.clone(), t) works
    present = tuple(name for name in _TENSORS if getattr(t, name) is not None)
    return [getattr(t, name) for name in present], (present, tuple(getattr(t, name) for name in _OTHERS))


def _flatten_with_keys(t: Any) -> tuple[list[tuple[Any, Tensor]], _Context]:
    leaves, context = _flatten(t)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context


def _unflatten(leaves: Any, context: _Context) -> MXTensor:
    present, others = context
    return MXTensor(**dict(zip(present, leaves, strict=True)), **dict(zip(_OTHERS, others, strict=True)))


def _to_json(context: _Context) -> dict[str, Any]:
    """The context as torch.export writes it."""
    others = dict(zip(_OTHERS, context[1], strict=True))
    return others | {
        "tensors": list(context[0]),
        "shape": list(others["shape"]),
        "orig_dtype": str(others["orig_dtype"]).removeprefix("torch."),
    }


def _from_json(saved: Any) -> _Context:
    shape, dtype = torch.Size(saved["shape"]), getattr(torch, saved["orig_dtype"])
    others = saved | {"shape": shape, "orig_dtype": dtype}
    return tuple(saved["tensors"]), tuple(others[name] for name in _OTHERS)


# torch.load reads what torch.save wrote by its default, weights_only=True
torch.serialization.add_safe_globals([MXTensor, _rebuild])

pytree.register_pytree_node(
    MXTensor,
    _flatten,
    _unflatten,
    serialized_type_name="mxmoe.MXTensor",
    to_dumpable_context=_to_json,
    from_dumpable_context=_from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
