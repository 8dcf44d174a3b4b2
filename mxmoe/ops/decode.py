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

from .. import checks, shapes
from .. import device as devices
from ..formats import BLOCK, ELEM_FORMATS
from ..observe import record
from ..recipe import MXRecipe

LIMIT: Final = 256
"""Mean tokens per expert up to which weights are decoded in registers."""
LIMIT_NO_FACTS: Final = 64
"""The same for a weight without packed scales, which is expanded to bf16 in registers: on an H200 532 us against 567 of
expanding it first at 64, 894 against 669 at 128 ((1536, 2048, 128), 2026-11-30)."""
LIMIT_NATIVE: Final = 64
"""The same where the tensor cores take MXFP8 themselves (a guess: there was no such chip to measure on)."""


_Packed = tuple[Tensor, Tensor]


# --- rule ------------------------------------------------------------------------------------------------------------
def decodes(device: torch.device, recipe: MXRecipe, m: int, groups: int, facts: bool = True) -> bool:
    """Whether a GEMM of m rows in ``groups`` groups goes to the decode kernel. Static: never reads offs.

    ``facts``: the packed scales of the weight are known.
    """
    if recipe.backend not in ("auto", "triton"):
        return False
    needed = (8, 9) if recipe.activations == "mxfp8" else (8, 0)  # rounding activations takes fp8 conversions
    if device.type != "cuda" or (torch.version.hip is None and devices.capability(device) < needed):
        return False
    native = devices.has_mxfp8_tensor_cores(device) and recipe.activations == "mxfp8"
    limit = LIMIT_NATIVE if native else LIMIT
    return m <= (limit if facts else min(limit, LIMIT_NO_FACTS)) * groups


def reason(m: int, groups: int) -> str:
    """What ``explain`` and ``observe`` say of it."""
    return f"decode kernel: {m / max(groups, 1):.1f} tokens per expert, at most {LIMIT}"


# --- operands --------------------------------------------------------------------------------------------------------
def check_weight(w: Tensor, scale: Tensor, k: int, x: Tensor, name: str) -> None:
    """Refuse a weight that is not fp8 ``(G, N, K)``, contraction last, with plain uint8 scales along it."""
    if w.dtype not in ELEM_FORMATS:
        raise TypeError(f"{name} must hold float8_e4m3fn or float8_e5m2 values, got {w.dtype}: quantize it first")
    if w.ndim != 3 or w.shape[-1] != k:
        hint = ": it is transposed, pass its .mT" if w.ndim == 3 and w.shape[1] == k else ""
        raise ValueError(f"{name} must be (experts, N, K) with K = {k}, the last dim of x; got {tuple(w.shape)}{hint}")
    if scale.dtype != torch.uint8:
        raise TypeError(f"scales of {name} must be bytes, got {scale.dtype}: pass MXTensor.scale_bytes")
    g, n, _ = w.shape
    wanted = shapes.rowwise(list(w.shape))[1]
    if tuple(scale.shape) != wanted:
        hint = ""
        if tuple(scale.shape) == (g, shapes.cdiv(n, BLOCK), k):
            hint = ': its blocks run along N, quantize it with block="rowwise" along its contraction'
        elif tuple(scale.shape) == (g, shapes.cdiv(n, BLOCK), shapes.cdiv(k, BLOCK)):
            hint = ": its blocks are square, repeat the scales along N: scale.repeat_interleave(32, 1)[:, :N]"
        elif scale.numel() == shapes.blocked_experts(g, n, wanted[-1])[0] * shapes.blocked_experts(g, n, wanted[-1])[1]:
            hint = ": they are in blocked order, mxmoe.from_blocked_experts makes plain ones"
        raise ValueError(f"scales of {name} must be plain, {wanted}; got {tuple(scale.shape)}{hint}")
    if w.device != x.device or scale.device != x.device:
        raise ValueError(f"x is on {x.device}, {name} on {w.device} and its scales on {scale.device}")


def check_facts(packed: Tensor | None, top: Tensor | None, w: Tensor, name: str) -> _Packed | None:
    """Packed scales that belong to ``w (G, N, K)``, or None; refuses others."""
    if packed is None or top is None:
        return None
    g, n, k = w.shape
    wanted = (g, shapes.cdiv(k, 4 * BLOCK), n, 4)
    if tuple(packed.shape) != wanted or tuple(top.shape) != (g, n):
        raise ValueError(
            f"packed scales of {name} must be {wanted} and {(g, n)}, got {tuple(packed.shape)} and {tuple(top.shape)}: "
            "mxmoe.ops.decode.pack_weight makes them"
        )
    return packed, top


def check_rows(x: Tensor, scale: Tensor | None, name: str) -> None:
    """Refuse tokens that are not ``(M, K)`` in high precision, or MXFP8 with plain uint8 scales ``(M, ceil(K/32))``."""
    if x.ndim != 2:
        raise ValueError(f"{name} must be (rows, K), got {tuple(x.shape)}")
    if (scale is None) == (x.dtype in ELEM_FORMATS):
        raise TypeError(
            f"{name} has dtype {x.dtype} and {'no ' if scale is None else ''}scales: fp8 values need scales"
        )
    if scale is not None:
        wanted = shapes.rowwise(list(x.shape))[1]
        if scale.dtype != torch.uint8 or tuple(scale.shape) != wanted:
            raise ValueError(
                f"scales of {name} must be plain uint8 {wanted}, got {scale.dtype} {tuple(scale.shape)}: quantize it "
                'with block="rowwise" and layout="plain", and pass MXTensor.scale_bytes'
            )


# --- facts about weights ---------------------------------------------------------------------------------------------
_packs: dict[
    tuple[int, int, torch.Size, torch.dtype], tuple[StorageWeakRef, StorageWeakRef, tuple[int, int], _Packed | None]
] = {}


def pack_weight(qdata: Tensor, scale: Tensor) -> _Packed:
    """Packed scales and row tops of a weight ``(G, N, K)``: see :func:`mxmoe.reference.mx_decode.pack_weight`."""
    from ..reference.mx_decode import pack_weight as pack

    return pack(qdata, scale)


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def remembered(qdata: Tensor, scale: Tensor, at_once: bool = False) -> _Packed | None:
    """``pack_weight`` of a weight that is used a second time unchanged; None the first time, or inside a graph capture.

    ``at_once``: already at the first use, for weights that are known to stay.
    Call it once per use. Never of weights made under inference mode, whose writes leave no trace, nor of views that
    have to be copied. Holds no reference to the weight: an entry dies with its storage, and a write to the weight makes
    it stale.
    """
    if not (qdata.is_contiguous() and scale.is_contiguous()):
        return None
    key = (qdata.data_ptr(), scale.data_ptr(), qdata.shape, qdata.dtype)
    versions = (_version(qdata), _version(scale))
    entry = _packs.get(key)
    known = entry is not None and not entry[0].expired() and not entry[1].expired() and entry[2] == versions
    if known and entry is not None and entry[3] is not None:
        return entry[3]
    if -1 in versions or (qdata.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    for old in [k for k, e in _packs.items() if e[0].expired() or e[1].expired()]:
        del _packs[old]
    packed = pack_weight(qdata, scale) if known or at_once else None
    _packs[key] = (StorageWeakRef(qdata.untyped_storage()), StorageWeakRef(scale.untyped_storage()), versions, packed)
    return packed


def known(qdata: Tensor, scale: Tensor) -> bool:
    """Whether :func:`remembered` has an answer for the next use of a weight. Changes nothing."""
    if isinstance(qdata, torch._subclasses.FakeTensor) or qdata.is_meta:
        return False
    entry = _packs.get((qdata.data_ptr(), scale.data_ptr(), qdata.shape, qdata.dtype))
    if entry is None or entry[0].expired() or entry[1].expired():
        return False
    capturing = qdata.is_cuda and torch.cuda.is_current_stream_capturing()
    return entry[2] == (_version(qdata), _version(scale)) and (entry[3] is not None or not capturing)


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
    """The decode GEMM itself, for code inside ops: ``x (M, K)`` or rows ``index // top_k`` of it, ``w (G, N, K)``.

    ``packed``: what :func:`remembered` said, or ``pack_weight`` at load time.
    """
    quantize = None if x_scale is not None else _quantize(recipe)
    if not x.is_cuda:
        from ..reference.mx_decode import mx_decode_m_groups as reference

        return reference(x, x_scale, index, top_k, w, w_scale, offs, bias, out_dtype, quantize)
    from ..kernels.mx_decode import PackedWeight, mx_decode_m_groups

    w, w_scale = w.contiguous(), w_scale.contiguous()
    weight = PackedWeight(*packed) if packed is not None else None
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
    check_rows(x, x_scale, "x")
    check_weight(w, w_scale, x.shape[1], x, "w")
    m, (g, n, k) = x.shape[0], w.shape
    offs = checks.offs(offs, "offs", x.device, g)
    if bias is not None:
        checks.bias(bias, g, n, x.device)
    facts = check_facts(packed, top, w, "w")
    # Without facts the other op looks them up, above the limit that goes without.
    if x.is_cuda and not decodes(x.device, r, m, g, facts is not None):
        op = torch.ops.mxmoe.grouped_mm_m_groups
        return op(x, x_scale, w, w_scale, offs, bias, out_dtype, recipe, False, False)[0]  # type: ignore[no-any-return]
    facts = facts if facts is not None or not x.is_cuda else remembered(w, w_scale)
    out = mm_m_groups(x, x_scale, w, w_scale, offs, bias, out_dtype, r, packed=facts)
    record("fprop", "triton" if x.is_cuda else "reference", reason(m, g), (m, n, k, g), (x, None, offs, out))
    return out


@_m_groups.register_fake
def _(x, x_scale, w, w_scale, packed, top, offs, bias, out_dtype, recipe):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], w.shape[1]), dtype=out_dtype)


# --- the layer -------------------------------------------------------------------------------------------------------
_Weight = tuple[Tensor, Tensor, _Packed | None]


def _rows(x: Tensor, order: Tensor, weights: Tensor, up: _Weight, down: _Weight, offs: Tensor, r: MXRecipe) -> Tensor:
    """Both projections and SwiGLU of gathered rows, times the routing weights: ``(M, H)`` to be summed per token.

    On CUDA rows of no group are not written.
    """
    top_k = weights.shape[1]
    if not x.is_cuda:
        from ..reference.mx_decode import mx_decode_swiglu as reference

        w, s = up[:2]
        hidden = reference(x, None, order, top_k, w, s, offs, weights, order, x.dtype, _quantize(r))
        return mm_m_groups(hidden, None, *down[:2], offs, None, x.dtype, r)
    from ..kernels.mx_decode import PackedWeight
    from ..kernels.mx_decode_swiglu import fits, mx_decode_mlp
    from ..kernels.swiglu_quantize import swiglu_rows

    m, (g, n, k) = order.shape[0], up[0].shape
    if fits(m, g, n, k, x.device, up[2] is not None):
        pairs = [(w, s, PackedWeight(*f) if f is not None else None) for w, s, f in (up, down)]
        return mx_decode_mlp(x, order, weights, *pairs, offs, _quantize(r))
    rows = mm_m_groups(x, None, *up[:2], offs, None, x.dtype, r, packed=up[2], index=order, top_k=top_k)
    hidden = swiglu_rows(rows, weights, order, offs, None, r.scale_mode, x.dtype)
    return mm_m_groups(hidden, None, *down[:2], offs, None, x.dtype, r, packed=down[2])


def _combine(rows: Tensor, position: Tensor, offs: Tensor) -> Tensor:
    if rows.is_cuda:
        from ..kernels.combine import combine as kernel

        return kernel(rows, position, offs, None, rows.dtype, after_chain=True)
    from ..reference.moe import combine as reference

    return reference(rows, position, offs, None, rows.dtype)


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
    check_rows(x, None, "x")
    checks.top_k(top_k_index, top_k_weights, x.shape[0], x.device)
    check_weight(up, up_scale, x.shape[1], x, "up")
    g, two_i, h = up.shape
    if two_i % 2:
        raise ValueError(f"up must hold gate rows, then as many up rows: (experts, 2I, H), got {tuple(up.shape)}")
    check_weight(down, down_scale, two_i // 2, x, "down")
    if down.shape[:2] != (g, h):
        raise ValueError(f"down must be (experts, H, I) = {(g, h, two_i // 2)}, got {tuple(down.shape)}")
    facts = [check_facts(up_packed, up_top, up, "up"), check_facts(down_packed, down_top, down, "down")]
    m = top_k_index.numel()
    if m == 0:
        return x.new_zeros(x.shape)
    if x.is_cuda and not decodes(x.device, r, m, g, all(f is not None for f in facts)):
        args = (x, top_k_index, top_k_weights, up, up_scale, down, down_scale, recipe, False)
        return torch.ops.mxmoe.moe_experts(*args)[0]  # type: ignore[no-any-return]
    up, up_scale, down, down_scale = (t.contiguous() for t in (up, up_scale, down, down_scale))
    if x.is_cuda:
        pairs = zip(facts, ((up, up_scale), (down, down_scale)), strict=True)
        facts = [f if f is not None else remembered(*w) for f, w in pairs]
    offs, order, position = _stages(x.device).route(top_k_index, g)
    rows = _rows(x, order, top_k_weights, (up, up_scale, facts[0]), (down, down_scale, facts[1]), offs, r)
    for sizes in ((m, two_i, h, g), (m, h, two_i // 2, g)):
        record("fprop", "triton" if x.is_cuda else "reference", reason(m, g), sizes, (None, None, offs, None))
    return _combine(rows, position, offs)


@_experts.register_fake
def _(x, top_k_index, top_k_weights, up, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)
