"""Few tokens per expert against MXFP8 weights: ops, the rule that picks them, and the whole expert layer in one op.

The decode kernels read a weight as it is stored and expand it in registers: with few tokens per expert the bytes of the
weights are the time. Above ``LIMIT`` weights are expanded once per call and multiplied in bf16, or fed to tensor cores
that take MXFP8. ``benchmarks/bench_decode.py`` finds the crossover.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import device as devices
from ..observe import record
from ..recipe import MXRecipe

LIMIT: Final = 256
"""Mean tokens per expert up to which weights are decoded in registers."""
LIMIT_NATIVE: Final = 64
"""The same where the tensor cores take MXFP8 themselves (a guess: there was no such chip to measure on)."""


# --- rule ------------------------------------------------------------------------------------------------------------
def decodes(device: torch.device, recipe: MXRecipe, m: int, groups: int) -> bool:
    """Whether a GEMM of m rows in ``groups`` groups goes to the decode kernel. Static: never reads offs."""
    if recipe.backend not in ("auto", "triton"):
        return False
    needed = (8, 9) if recipe.activations == "mxfp8" else (8, 0)  # rounding activations takes fp8 conversions
    if device.type != "cuda" or (torch.version.hip is None and devices.capability(device) < needed):
        return False
    native = devices.has_mxfp8_tensor_cores(device) and recipe.activations == "mxfp8"
    return m <= (LIMIT_NATIVE if native else LIMIT) * groups


def reason(m: int, groups: int) -> str:
    """What ``explain`` and ``observe`` say of it."""
    return f"decode kernel: {m / max(groups, 1):.1f} tokens per expert, at most {LIMIT}"


# --- facts about weights ---------------------------------------------------------------------------------------------
_Packed = tuple[Tensor, Tensor]
_packs: dict[tuple[int, int, torch.Size], tuple[StorageWeakRef, StorageWeakRef, tuple[int, int], _Packed | None]] = {}


def pack_weight(qdata: Tensor, scale: Tensor) -> _Packed:
    """Packed scales and row tops of a weight ``(G, N, K)``: see :func:`mxmoe.reference.mx_decode.pack_weight`."""
    from ..reference.mx_decode import pack_weight as pack

    return pack(qdata, scale)


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def remembered(qdata: Tensor, scale: Tensor) -> _Packed | None:
    """``pack_weight`` of a weight that is used a second time unchanged; None the first time, or inside a graph capture.

    Holds no reference to the weight: an entry dies with its storage, and a write to the weight makes it stale.
    """
    key = (qdata.data_ptr(), scale.data_ptr(), qdata.shape)
    versions = (_version(qdata), _version(scale))
    entry = _packs.get(key)
    known = entry is not None and not entry[0].expired() and not entry[1].expired() and entry[2] == versions
    if known and entry is not None and entry[3] is not None:
        return entry[3]
    if -1 in versions or (qdata.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    for old in [k for k, e in _packs.items() if e[0].expired() or e[1].expired()]:
        del _packs[old]
    packed = pack_weight(qdata, scale) if known else None
    _packs[key] = (StorageWeakRef(qdata.untyped_storage()), StorageWeakRef(scale.untyped_storage()), versions, packed)
    return packed


def _quantize(recipe: MXRecipe) -> tuple[torch.dtype, str] | None:
    return (recipe.elem_dtype, recipe.scale_mode) if recipe.activations == "mxfp8" else None


# --- one GEMM --------------------------------------------------------------------------------------------------------
def mm_m_groups(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    recipe: MXRecipe,
    *,
    packed: _Packed | None = None,
    index: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:
    """The decode GEMM itself, for code inside ops: ``x (M, K)`` or rows ``index // top_k`` of it, ``w (G, N, K)``."""
    quantize = None if x_scale is not None else _quantize(recipe)
    if not x.is_cuda:
        from ..reference.mx_decode import mx_decode_m_groups as reference

        return reference(x, x_scale, index, top_k, w, w_scale, offs, bias, out_dtype, quantize)
    from ..kernels.mx_decode import PackedWeight, mx_decode_m_groups

    w, w_scale = w.contiguous(), w_scale.contiguous()
    facts = packed if packed is not None else remembered(w, w_scale)
    weight = PackedWeight(*facts) if facts is not None else None
    return mx_decode_m_groups(x, x_scale, index, top_k, w, w_scale, weight, offs, bias, out_dtype, quantize)


@torch.library.custom_op("mxmoe::mx_decode_m_groups", mutates_args=(), device_types=("cpu", "cuda"))
def _m_groups(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    packed: Tensor | None,
    top: Tensor | None,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    recipe: str,
) -> Tensor:
    """``x (M, K)`` and MXFP8 ``w (G, N, K)`` -> ``(M, N)``, decoded or expanded by the rule."""
    r = MXRecipe.from_key(recipe)
    m, (g, n, k) = x.shape[0], w.shape
    if x.is_cuda and not decodes(x.device, r, m, g):
        op = torch.ops.mxmoe.grouped_mm_m_groups
        return op(x, x_scale, w, w_scale, offs, bias, out_dtype, recipe, False, False)[0]  # type: ignore[no-any-return]
    facts = (packed, top) if packed is not None and top is not None else None
    out = mm_m_groups(x, x_scale, w, w_scale, offs, bias, out_dtype, r, packed=facts)
    record("fprop", "triton" if x.is_cuda else "reference", reason(m, g), (m, n, k, g), (x, None, offs, out))
    return out


@_m_groups.register_fake
def _(x, x_scale, w, w_scale, packed, top, offs, bias, out_dtype, recipe):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w.shape[1]), dtype=out_dtype)


# --- the layer -------------------------------------------------------------------------------------------------------
def _swiglu(
    x: Tensor,
    index: Tensor,
    top_k: int,
    w: Tensor,
    w_scale: Tensor,
    packed: _Packed | None,
    offs: Tensor,
    weights: Tensor,
    recipe: MXRecipe,
) -> Tensor:
    """``weight * silu(gate) * up`` of gathered rows: ``(M, I)``."""
    args = (offs, weights, index, x.dtype, _quantize(recipe))
    if not x.is_cuda:
        from ..reference.mx_decode import mx_decode_swiglu as reference

        return reference(x, None, index, top_k, w, w_scale, *args)
    from ..kernels.mx_decode import PackedWeight
    from ..kernels.mx_decode_swiglu import fits, mx_decode_swiglu
    from ..kernels.swiglu_quantize import swiglu_rows

    facts = packed if packed is not None else remembered(w, w_scale)
    weight = PackedWeight(*facts) if facts is not None else None
    m, (g, n, k) = index.shape[0], w.shape
    if fits(m, g, n, k, x.device, weight is not None):
        return mx_decode_swiglu(x, None, index, top_k, w, w_scale, weight, *args)
    rows = mm_m_groups(x, None, w, w_scale, offs, None, x.dtype, recipe, packed=facts, index=index, top_k=top_k)
    return swiglu_rows(rows, weights, index, offs, None, recipe.scale_mode, x.dtype)  # type: ignore[no-any-return]


@torch.library.custom_op("mxmoe::mx_experts", mutates_args=(), device_types=("cpu", "cuda"))
def _experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    up_scale: Tensor,
    up_packed: Tensor | None,
    up_top: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_packed: Tensor | None,
    down_top: Tensor | None,
    recipe: str,
) -> Tensor:
    """SwiGLU experts with MXFP8 weights, ``(T, H)`` -> ``(T, H)``: route, gate/up + SwiGLU, down, combine."""
    from .moe import _stages

    r = MXRecipe.from_key(recipe)
    g, two_i, h = up.shape
    m = top_k_index.numel()
    if x.is_cuda and not decodes(x.device, r, m, g):
        args = (x, top_k_index, top_k_weights, up, up_scale, down, down_scale, recipe, False)
        return torch.ops.mxmoe.moe_experts(*args)[0]  # type: ignore[no-any-return]
    if m == 0:
        return x.new_zeros(x.shape)
    stages = _stages(x.device)
    offs, order, position = stages.route(top_k_index, g)
    pairs = ((up_packed, up_top), (down_packed, down_top))
    facts = [(p, t) if p is not None and t is not None else None for p, t in pairs]
    hidden = _swiglu(x, order, top_k_index.shape[1], up, up_scale, facts[0], offs, top_k_weights, r)
    rows = mm_m_groups(hidden, None, down, down_scale, offs, None, x.dtype, r, packed=facts[1])
    for sizes in ((m, two_i, h, g), (m, h, two_i // 2, g)):
        record("fprop", "triton" if x.is_cuda else "reference", reason(m, g), sizes, (None, None, offs, None))
    return stages.combine(rows, position, offs, None, x.dtype)  # type: ignore[no-any-return]


@_experts.register_fake
def _(x, top_k_index, top_k_weights, up, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)
