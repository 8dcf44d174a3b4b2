"""Grouped GEMMs in MXFP8: two ops with their backward ops, and the public functions that lower every form to them.

    form                      lowered to
    (M,K) x (G,K,N)           m_groups(x, w.mT)                     backward: dgrad (M groups), wgrad (K groups)
    (N,M) x (M,K)             k_groups(x.t(), w)
    (G,M,K) x (G,K,N)         m_groups(x as (G*M, K), w.mT), groups of M rows
    (G,M,K) x (K,N)           m_groups(w.t(), x).t()

m_groups: a ``(M, K)`` times b ``(G, N, K)``, contraction contiguous in both -> ``(M, N)``.
k_groups: a ``(M, N)`` and b ``(M, K)``, contraction over the rows of each group -> ``(G, N, K)``.
Gradients are declared in :mod:`mxmoe.autograd`.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType

import torch
from torch import Tensor

from .. import checks, groups, shapes
from ..formats import BLOCK
from ..observe import record
from ..recipe import MXRecipe
from ..tensor import MXTensor, check, make
from . import decode
from ._impl import impl
from .engines import dequant
from .quantize import plain_scale
from .select import Choice, choose

_DEFAULT = MXRecipe()
_BLOCK_1X32 = (1, BLOCK)


def _engine(name: str) -> ModuleType:
    return importlib.import_module(f".engines.{name}", __package__)


# --- operands --------------------------------------------------------------------------------------------------------
def _mx(
    q: Tensor,
    scale: Tensor,
    block: str,
    rows: int,
    offs: Tensor | None = None,
    source: Tensor | None = None,
    layout: str = "plain",
) -> MXTensor:
    """An MXTensor from the flat arguments of an op."""
    shape = torch.Size([*q.shape[:-2], rows, q.shape[-1]])
    ends = {"offs": offs, "source_offs": source, "k_groups": source is not None}
    return make(q, scale, block=block, layout=layout, shape=shape, orig_dtype=torch.bfloat16, **ends)  # type: ignore[arg-type]


def _high(x: Tensor) -> Tensor:
    """x as it enters a bf16 GEMM. On a CPU fp32 stays fp32."""
    return x.to(torch.bfloat16) if x.is_cuda or x.dtype == torch.float16 else x


def _high_rows(x: Tensor) -> Tensor:
    x = _high(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _grad_recipe(recipe: MXRecipe) -> MXRecipe:
    """The recipe under which a gradient takes the place of the weights."""
    return recipe.replace(elem_dtype=recipe.grad_elem_dtype, weight_block=_BLOCK_1X32)


def _choice(device: torch.device, recipe: MXRecipe, n: int, k: int, has_mx: bool) -> Choice:
    choice = choose(device, recipe, n, k)
    if has_mx and choice.backend in ("native", "triton") and recipe.backend == "auto":
        choice = choose(device, recipe.replace(backend="dequant"), n, k)
    return choice


def _pick(device: torch.device, recipe: MXRecipe, n: int, k: int, has_mx: bool) -> tuple[Choice, ModuleType]:
    choice = _choice(device, recipe, n, k, has_mx)
    return choice, _engine(choice.backend)


def kept_form(recipe: MXRecipe, device: torch.device, n: int, k: int) -> str:
    """What forward keeps of x for wgrad: "bytes" (colwise MXFP8), "values" (colwise values in bf16) or "x" itself.

    Values cost the bytes of x and save backward a read of it: forward rounds both directions in one pass.
    """
    if recipe.save == "mxfp8":
        return "bytes"
    rounds = recipe.activations == "mxfp8" and recipe.wgrad == "mxfp8"
    return "values" if rounds and choose(device, recipe, n, k).backend == "dequant" else "x"


def keeps_weight(recipe: MXRecipe, device: torch.device, n: int, k: int) -> bool:
    """Whether forward rounds w in both directions from one read and keeps the bytes of the one that dgrad needs.

    Only ``native``, whose GEMMs are the fastest, so the second read weighs most. Costs 1.03 bytes per weight until
    backward has run.
    """
    return choose(device, recipe, n, k).backend == "native"


def _decodes(device: torch.device, x: torch.dtype, w: torch.dtype, recipe: MXRecipe, m: int, groups_: int) -> bool:
    """Whether a GEMM with MXFP8 weights is decoded: few rows per group, e4m3, activations e4m3 or bf16."""
    e4m3 = torch.float8_e4m3fn
    takes = w == e4m3 and x in (e4m3, torch.bfloat16) and recipe.elem_dtype == e4m3
    return takes and decode.decodes(device, recipe, m, groups_)


# --- m_groups --------------------------------------------------------------------------------------------------------
@torch.library.custom_op("mxmoe::grouped_mm_m_groups", mutates_args=(), device_types=("cpu", "cuda"))
def _m_groups(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    recipe: str,
    keep_x: bool,
    keep_w: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, and what backward keeps of x (``kept_form``): colwise bytes or values, scales, padded ends (else empty);
    then of w (``keeps_weight``): bytes of the operand of dgrad ``(G, K, N)``, its blocked scales (else empty).

    ``keep_x`` (dW is needed) and ``keep_w`` (dX is needed) are for operands that are not quantized yet.
    """
    r = MXRecipe.from_key(recipe)
    form = kept_form(r, x.device, w.shape[1], w.shape[2]) if keep_x else "x"
    kept, kept_w = _nothing(x), _nothing(x)[:2]
    sizes = (x.shape[0], w.shape[1], w.shape[2], offs.shape[0])
    if w_scale is not None and _decodes(x.device, x.dtype, w.dtype, r, x.shape[0], w.shape[0]):
        facts = decode.remembered(w, w_scale)
        if decode.decodes(x.device, r, x.shape[0], w.shape[0], facts is not None):
            out = decode.mm_m_groups(x, x_scale, w, w_scale, offs, bias, out_dtype, r, packed=facts)
            record("fprop", "triton", decode.reason(x.shape[0], w.shape[0]), sizes, (x, w, offs, out))
            return out, *kept, *kept_w
    choice, engine = _pick(x.device, r, w.shape[1], w.shape[2], x_scale is not None or w_scale is not None)
    if x_scale is not None:
        a = engine.expand(_mx(x, x_scale, "rowwise", x.shape[0]))
    elif r.activations == "bf16":
        a = _high_rows(x)
    elif form == "values":
        a, values = engine.both_operands(x, offs, r.elem_dtype, r)
        kept = (values.view(torch.uint8), *kept[1:])
    else:
        a = engine.rows_operand(x, offs, r.elem_dtype, r)
    if w_scale is not None:
        b = engine.expand(_mx(w, w_scale, "rowwise", w.shape[1]))
    elif keep_w and keeps_weight(r, x.device, w.shape[1], w.shape[2]):
        b, across = engine.weight_operands(w, r)
        kept_w = across.qdata.view(torch.uint8), across.scale_bytes
    else:
        b = engine.weight_operand(w, r)
    out = engine.mm_m_groups(a, b, offs, bias, out_dtype)
    record("fprop", *_why(choice), sizes, (x, w, offs, out))
    if form == "bytes":
        q, scale, padded = impl(x.device).quantize_colwise(x, offs, False, r.elem_dtype, r.scale_mode)
        kept = q.view(torch.uint8), scale, padded
    return out, *kept, *kept_w


def _why(choice: Choice) -> tuple[str, str]:
    return choice.backend, choice.reason


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u8 = torch.uint8
    return x.new_empty(0, dtype=u8), x.new_empty(0, dtype=u8), x.new_empty(0, dtype=torch.int32)


@_m_groups.register_fake
def _(x, x_scale, w, w_scale, offs, bias, out_dtype, recipe, keep_x, keep_w):  # type: ignore[no-untyped-def]
    out = x.new_empty((x.shape[0], w.shape[1]), dtype=out_dtype)
    r = MXRecipe.from_key(recipe)
    form = kept_form(r, x.device, w.shape[1], w.shape[2]) if keep_x else "x"
    kept, kept_w = _nothing(x), _nothing(x)[:2]
    if form == "values":
        kept = (dequant.values_like(x).view(torch.uint8), *kept[1:])
    elif form == "bytes":
        q, scale = (
            torch.empty_strided(shape, shapes.column_major(shape), dtype=torch.uint8, device=x.device)
            for shape in shapes.colwise_groups(x.shape[0], x.shape[1], offs.shape[0])
        )
        kept = q, scale, x.new_empty(offs.shape[0], dtype=torch.int32)
    if keep_w and keeps_weight(r, x.device, w.shape[1], w.shape[2]):
        scale_shape = shapes.rowwise_blocked_scale(w.mT.shape, None)
        kept_w = w.new_empty(w.mT.shape, dtype=torch.uint8), w.new_empty(scale_shape, dtype=torch.uint8)
    return out, *kept, *kept_w


@torch.library.custom_op("mxmoe::grouped_mm_m_groups_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _m_groups_backward(
    grad: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    offs: Tensor,
    kept_q: Tensor | None,
    kept_scale: Tensor | None,
    kept_offs: Tensor | None,
    kept_dtype: torch.dtype | None,
    kept_w: Tensor | None,
    kept_w_scale: Tensor | None,
    recipe: str,
    x_dtype: torch.dtype | None,
    w_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dW, dbias; empty where the dtype is None. x or what forward kept is given, by ``kept_form``.

    With ``kept_w`` (``keeps_weight``) only the shape and the strides of w are looked at.
    """
    r = MXRecipe.from_key(recipe)
    n, k = w.shape[1:]
    sizes = (grad.shape[0], n, k, offs.shape[0])
    choice, engine = _pick(grad.device, r, n, k, x_scale is not None or w_scale is not None)
    quantized = r.activations == "mxfp8"
    wgrad_mx = quantized and r.wgrad == "mxfp8"
    grad_rows = grad_cols = None
    if x_dtype is not None and w_dtype is not None and wgrad_mx:
        grad_rows, grad_cols = engine.both_operands(grad, offs, r.grad_elem_dtype, r)
    elif x_dtype is not None and quantized:
        grad_rows = engine.rows_operand(grad, offs, r.grad_elem_dtype, r)
    elif w_dtype is not None and wgrad_mx:
        grad_cols = engine.cols_operand(grad, offs, r.grad_elem_dtype, r)

    dx, dw, dbias = (grad.new_empty(0) for _ in range(3))  # outputs of an op must not alias
    if x_dtype is not None:
        if w_scale is not None:  # the rounded weights are all there is
            b = engine.expand(_mx(w, w_scale, "rowwise", n)).mT
        elif kept_w is not None:
            assert kept_w_scale is not None
            b = _mx(kept_w.view(r.elem_dtype), kept_w_scale, "rowwise", k, layout="blocked")
        elif quantized:
            b = engine.weight_operand(w.mT, r)
        else:  # weight-only: the gradient of what forward computed
            b = engine.weight_operand(w, r).mT
        a = grad_rows if grad_rows is not None else _high_rows(grad)
        dx = engine.mm_m_groups(a, b, offs, None, x_dtype)
        record("dgrad", *_why(choice), sizes, (grad, w, offs, dx))
    if w_dtype is not None:
        wgrad_engine = engine
        if (not wgrad_mx or x_scale is not None) and choice.backend in ("native", "triton"):
            wgrad_engine, grad_cols = _engine("dequant"), None
        if x_scale is not None:  # the rounded activations are all there is
            assert x is not None
            x_cols = wgrad_engine.expand(_mx(x, x_scale, "rowwise", x.shape[0]))
            if not wgrad_mx:
                grad_cols = _high_rows(grad)
            elif grad_cols is None:
                grad_cols = wgrad_engine.cols_operand(grad, offs, r.grad_elem_dtype, r)
        elif not wgrad_mx:
            assert x is not None
            grad_cols, x_cols = _high_rows(grad), _high_rows(x)
        elif kept_q is not None and kept_scale is None:
            assert kept_dtype is not None
            x_cols = kept_q.view(kept_dtype)
        elif kept_q is not None:
            assert kept_scale is not None
            q = kept_q.view(r.elem_dtype)
            x_cols = engine.expand(_mx(q, kept_scale, "colwise", grad.shape[0], kept_offs, offs))
        else:
            assert x is not None
            x_cols = engine.cols_operand(x, offs, r.elem_dtype, r)
        if shapes.is_transposed(w.stride()):
            dw = wgrad_engine.mm_k_groups(x_cols, grad_cols, offs, w_dtype).mT
        else:
            dw = wgrad_engine.mm_k_groups(grad_cols, x_cols, offs, w_dtype)
        record("wgrad", *_why(choice), sizes, (grad, x, offs, dw))
    if bias_dtype is not None:
        dbias = impl(grad.device).group_sum(grad, offs).to(bias_dtype)
    return dx, dw, dbias


@_m_groups_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad,
    x,
    x_scale,
    w,
    w_scale,
    offs,
    kept_q,
    kept_scale,
    kept_offs,
    kept_dtype,
    kept_w,
    kept_w_scale,
    recipe,
    x_dtype,
    w_dtype,
    bias_dtype,
):
    n, k = w.shape[1:]
    dx = grad.new_empty(0) if x_dtype is None else grad.new_empty((grad.shape[0], k), dtype=x_dtype)
    dbias = grad.new_empty(0) if bias_dtype is None else grad.new_empty((offs.shape[0], n), dtype=bias_dtype)
    if w_dtype is None:
        return dx, grad.new_empty(0), dbias
    if shapes.is_transposed(w.stride()):
        return dx, grad.new_empty((w.shape[0], k, n), dtype=w_dtype).mT, dbias
    return dx, grad.new_empty((w.shape[0], n, k), dtype=w_dtype), dbias


# --- k_groups --------------------------------------------------------------------------------------------------------
@torch.library.custom_op("mxmoe::grouped_mm_k_groups", mutates_args=(), device_types=("cpu", "cuda"))
def _k_groups(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor | None,
    offs: Tensor,
    padded_offs: Tensor | None,
    rows: int,
    out_dtype: torch.dtype,
    recipe: str,
) -> Tensor:
    """``(M, N)`` and ``(M, K)`` -> ``(G, N, K)``. MX operands are colwise qdata ``(Mp, .)`` with padded ends."""
    r = MXRecipe.from_key(recipe)
    n, k = a.shape[1], b.shape[1]
    choice, engine = _pick(a.device, r, n, k, a_scale is not None or b_scale is not None)

    def operand(t: Tensor, scale: Tensor | None) -> Tensor | MXTensor:
        if scale is not None:
            values: Tensor | MXTensor = engine.expand(_mx(t, scale, "colwise", rows, padded_offs, offs))
        elif r.activations == "bf16":
            values = _high_rows(t)
        else:
            values = engine.cols_operand(t, offs, r.elem_dtype, r)
        return values

    out: Tensor = engine.mm_k_groups(operand(a, a_scale), operand(b, b_scale), offs, out_dtype)
    record("fprop", *_why(choice), (rows, n, k, offs.shape[0]), (a, b, offs, out))
    return out


@_k_groups.register_fake
def _(a, a_scale, b, b_scale, offs, padded_offs, rows, out_dtype, recipe):  # type: ignore[no-untyped-def]
    return a.new_empty((offs.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype)


@torch.library.custom_op("mxmoe::grouped_mm_k_groups_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _k_groups_backward(
    grad: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    offs: Tensor,
    recipe: str,
    a_dtype: torch.dtype | None,
    b_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of a and b; empty where the dtype is None. Both are GEMMs with M groups and grad as the weights."""
    r = MXRecipe.from_key(recipe)
    n, k = grad.shape[1:]
    choice, engine = _pick(grad.device, r, n, k, False)

    def product(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        if r.activations == "bf16":
            values, by = _high_rows(rows), _high(weights)
        else:
            values = engine.rows_operand(rows, offs, r.elem_dtype, r)
            by = engine.weight_operand(weights, _grad_recipe(r))
        out: Tensor = engine.mm_m_groups(values, by, offs, None, dtype)
        record("dgrad", *_why(choice), (rows.shape[0], n, k, offs.shape[0]), (rows, weights, offs, out))
        return out

    da, db = grad.new_empty(0), grad.new_empty(0)
    if a_dtype is not None:
        assert b is not None
        da = product(b, grad, a_dtype)
    if b_dtype is not None:
        assert a is not None
        db = product(a, grad.mT, b_dtype)
    return da, db


@_k_groups_backward.register_fake
def _(grad, a, b, offs, recipe, a_dtype, b_dtype):  # type: ignore[no-untyped-def]
    da = grad.new_empty(0) if a_dtype is None else grad.new_empty((b.shape[0], grad.shape[1]), dtype=a_dtype)
    db = grad.new_empty(0) if b_dtype is None else grad.new_empty((a.shape[0], grad.shape[2]), dtype=b_dtype)
    return da, db


# --- public ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Flat:
    """An operand as op arguments: a tensor, or qdata and plain scale of an MXTensor."""

    data: Tensor
    scale: Tensor | None
    shape: torch.Size
    offs: Tensor | None = None  # padded ends of a K-group MXTensor

    @property
    def requires_grad(self) -> bool:
        return self.scale is None and self.data.requires_grad and torch.is_grad_enabled()


def _flat(t: Tensor | MXTensor, along: str, name: str, k_groups: bool = False) -> _Flat:
    """``along``: the block that runs along the contraction of this operand ("rowwise": its last dim).

    ``k_groups``: the contraction has groups, so an operand whose blocks restart at them (and are padded) will do.
    """
    if not isinstance(t, MXTensor):
        return _Flat(t, None, t.shape)
    if t.k_groups and not k_groups:
        raise ValueError(
            f'{name} is quantized in groups along the contraction (block="colwise" with offs), but this GEMM has no '
            f"groups there: quantize {name} without offs, or with the block along its other dim"
        )
    data = t.qdata.detach()  # quantized under grad mode, qdata has a grad_fn that refuses to run
    if t.block == "square":
        scale = plain_scale(t).repeat_interleave(BLOCK, -2 if along == "rowwise" else -1)
        m, k = t.shape[-2:]
        scale = scale[..., :m, :] if along == "rowwise" else scale[..., :k]
        return _Flat(data, scale, t.shape)
    if t.block != along:
        raise ValueError(
            f"{name} is quantized {t.block}, but this GEMM contracts over its "
            f"{'last' if along == 'rowwise' else 'first'} dim and needs blocks along it: "
            f'quantize(..., block="{along}"), or pass a transposed MXTensor'
        )
    return _Flat(data, plain_scale(t), t.shape, t.offs if t.k_groups else None)


def _operand(t: object, name: str) -> Tensor | MXTensor:
    if isinstance(t, MXTensor):
        if t.ndim not in (2, 3):
            raise ValueError(f"{name} must be 2-D or 3-D, got shape {tuple(t.shape)}")
        return check(t, name)
    return checks.tensor(t, name, dims=(2, 3))


def _recipe(recipe: MXRecipe | None) -> MXRecipe:
    if recipe is None:
        return _DEFAULT
    if not isinstance(recipe, MXRecipe):
        raise TypeError(f"recipe must be an mxmoe.MXRecipe, got {type(recipe).__name__}")
    return recipe


def _runnable(device: torch.device, recipe: MXRecipe, n: int, k: int) -> None:
    """Refuse a backend that cannot run here. In compiled code the op itself does so."""
    if not torch.compiler.is_compiling():
        choose(device, recipe, n, k)


def _contracts(x: torch.Size, w: torch.Size, x_dim: int, w_dim: int) -> None:
    if x[x_dim] != w[w_dim]:
        raise ValueError(
            f"x {tuple(x)} and w {tuple(w)} do not contract: x has {x[x_dim]} in dim {x_dim}, w has {w[w_dim]} in dim "
            f"{w_dim} (w is (G, K, N): for a parameter (G, N, K) pass w.transpose(-2, -1))"
        )


def _autocast(t: Tensor | MXTensor) -> Tensor | MXTensor:
    if isinstance(t, MXTensor) or t.is_meta or not torch.is_autocast_enabled(t.device.type):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _m(x: _Flat, w: _Flat, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype, recipe: MXRecipe) -> Tensor:
    keep_x = w.requires_grad and x.scale is None
    keep_w = x.requires_grad and w.scale is None
    out: Tensor = torch.ops.mxmoe.grouped_mm_m_groups(
        x.data, x.scale, w.data, w.scale, offs, bias, out_dtype, recipe.key, keep_x, keep_w
    )[0]
    return out


def _transposed(f: _Flat) -> _Flat:
    scale = None if f.scale is None else f.scale.mT
    return _Flat(f.data.mT, scale, torch.Size([*f.shape[:-2], f.shape[-1], f.shape[-2]]), f.offs)


def grouped_mm(
    x: Tensor | MXTensor,
    w: Tensor | MXTensor,
    offs: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: MXRecipe | None = None,
) -> Tensor:
    """Multiply groups of x with their own matrix of w, in MXFP8. Drop-in for ``torch.nn.functional.grouped_mm``.

    | x | w | offs | returns | use |
    |---|---|---|---|---|
    | ``(M, K)`` | ``(G, K, N)`` | ends along M | ``(M, N)`` | forward, dgrad |
    | ``(N, M)`` | ``(M, K)`` | ends along M, the contraction | ``(G, N, K)`` | wgrad |
    | ``(G, M, K)`` | ``(G, K, N)`` | None | ``(G, M, N)`` | dense batch |
    | ``(G, M, K)`` | ``(K, N)`` | ends along N | ``(M, N)`` | the mirror of the first |

    | argument | shape | dtype | notes |
    |---|---|---|---|
    | ``x``, ``w`` | as above | bf16, fp16, fp32, or :class:`MXTensor` | any strides; an MXTensor gets no gradient |
    | ``offs`` | ``(G,)`` | int32, int64 | cumulative group ends, no leading zero; any sizes, zero included |
    | ``bias`` | ``(G, N)`` | bf16, fp16, fp32 | added to the rows of its group; first and third form |
    | ``out_dtype`` | | bf16, fp16, fp32 | default: x's dtype (autocast: its dtype; MXTensor: the one it came from) |
    | ``recipe`` | | :class:`MXRecipe` | default ``MXRecipe()`` |

    Raises: ``TypeError`` / ``ValueError`` naming the argument, the value and what is expected, before anything is
    launched, under fake tensors alike; ``RuntimeError`` if the recipe's backend cannot run on this device.
    Sync: none on a GPU, except with backend="reference".
    Empty: an empty group gives no rows and an exactly zero dW; rows at or beyond ``offs[-1]`` are zero, in the result
    and in dX; no rows at all still give a result with a grad_fn.
    Gradient: x, w and bias (fp32 sums per group); each GEMM quantizes from the high-precision tensor along its own
    contraction. On ``native`` w is read once: 1.03 bytes per weight are kept for dX (``docs/grouped_gemm.md``).
    Source: ``docs/design.md``; ``torch.nn.functional.grouped_mm``.
    """
    recipe = _recipe(recipe)
    x, w = _autocast(_operand(x, "x")), _autocast(_operand(w, "w"))
    if x.device != w.device:
        raise ValueError(f"x is on {x.device}, w is on {w.device}: both must be on one device")
    default = x.orig_dtype if isinstance(x, MXTensor) else x.dtype
    dtype = checks.out_dtype(out_dtype, default)
    form = (x.ndim, w.ndim)
    if form != (3, 3) and offs is None and not (isinstance(x, MXTensor) and x.k_groups):
        raise ValueError(f"offs is required for a {x.ndim}-D x and a {w.ndim}-D w: int32 (G,) cumulative group ends")
    match form:
        case (2, 3):
            return _form_2d_3d(x, w, offs, bias, dtype, recipe)
        case (2, 2):
            return _form_2d_2d(x, w, offs, bias, dtype, recipe)
        case (3, 3):
            return _form_3d_3d(x, w, offs, bias, dtype, recipe)
        case (3, 2):
            return _form_3d_2d(x, w, offs, bias, dtype, recipe)
    raise AssertionError(form)


def _form_2d_3d(
    x: Tensor | MXTensor,
    w: Tensor | MXTensor,
    offs: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    recipe: MXRecipe,
) -> Tensor:
    _contracts(x.shape, w.shape, 1, 1)
    groups_, k, n = w.shape
    ends = checks.offs(offs, "offs", x.device, groups_, total=x.shape[0])
    if bias is not None:
        bias = checks.bias(bias, groups_, n, x.device)
    _runnable(x.device, recipe, n, k)
    return _m(_flat(x, "rowwise", "x"), _transposed(_flat(w, "colwise", "w")), ends, bias, dtype, recipe)


def _form_3d_2d(
    x: Tensor | MXTensor,
    w: Tensor | MXTensor,
    offs: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    recipe: MXRecipe,
) -> Tensor:
    _contracts(x.shape, w.shape, 2, 0)
    if bias is not None:
        raise ValueError("bias is not defined for a 3-D x and a 2-D w: the groups run along N")
    groups_, m, k = x.shape
    ends = checks.offs(offs, "offs", x.device, groups_, total=w.shape[1])
    _runnable(x.device, recipe, m, k)
    out = _m(_transposed(_flat(w, "colwise", "w")), _flat(x, "rowwise", "x"), ends, None, dtype, recipe)
    return out.t().contiguous()


def _form_3d_3d(
    x: Tensor | MXTensor,
    w: Tensor | MXTensor,
    offs: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    recipe: MXRecipe,
) -> Tensor:
    if offs is not None:
        raise ValueError("offs must be None for a 3-D x and a 3-D w: every batch entry is one group")
    _contracts(x.shape, w.shape, 2, 1)
    if x.shape[0] != w.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)} and w {tuple(w.shape)} have {x.shape[0]} and {w.shape[0]} groups in dim 0"
        )
    groups_, m, k = x.shape
    n = w.shape[2]
    if groups_ == 0:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} are empty batches: at least one group is needed")
    if bias is not None:
        bias = checks.bias(bias, groups_, n, x.device)
    _runnable(x.device, recipe, n, k)
    flat = _flat(x, "rowwise", "x")
    scale = None if flat.scale is None else flat.scale.reshape(groups_ * m, flat.scale.shape[-1])
    rows = _Flat(flat.data.reshape(groups_ * m, k), scale, torch.Size([groups_ * m, k]))
    ends = groups.even_ends(groups_, m, x.device)
    return _m(rows, _transposed(_flat(w, "colwise", "w")), ends, bias, dtype, recipe).view(groups_, m, n)


def _form_2d_2d(
    x: Tensor | MXTensor,
    w: Tensor | MXTensor,
    offs: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    recipe: MXRecipe,
) -> Tensor:
    _contracts(x.shape, w.shape, 1, 0)
    if bias is not None:
        raise ValueError("bias is not defined for a 2-D x and a 2-D w: the result is (G, N, K)")
    if offs is None:
        assert isinstance(x, MXTensor)
        assert x.source_offs is not None
        offs = x.source_offs
    ends = checks.offs(offs, "offs", x.device, total=x.shape[1])
    for t, name in ((x, "x"), (w, "w")):
        if isinstance(t, MXTensor) and (not t.k_groups or t.offs is None or t.offs.shape[0] != ends.shape[0]):
            raise ValueError(
                f"{name} is an MXTensor whose blocks do not restart at the groups of the contraction: "
                'quantize it with block="colwise" and the same offs'
            )
        if isinstance(t, MXTensor) and t.source_offs is not None:
            checks.maybe_debug_equal(t.source_offs, ends, f"the offs that {name} was quantized with,", "offs")
    _runnable(x.device, recipe, x.shape[0], w.shape[1])
    a, b = _transposed(_flat(x, "rowwise", "x", k_groups=True)), _flat(w, "colwise", "w", k_groups=True)
    padded = a.offs if a.offs is not None else b.offs
    out: Tensor = torch.ops.mxmoe.grouped_mm_k_groups(
        a.data, a.scale, b.data, b.scale, ends, padded, w.shape[0], dtype, recipe.key
    )
    return out


def scaled_grouped_mm(
    x: MXTensor,
    w: MXTensor,
    offs: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """Multiply groups of two quantized tensors: ``grouped_mm`` whose operands are already MXFP8.

    | argument | shape | dtype | notes |
    |---|---|---|---|
    | ``x`` | as in :func:`grouped_mm` | :class:`MXTensor` | blocks along the contraction, either scale layout |
    | ``w`` | as in :func:`grouped_mm` | :class:`MXTensor` | usually ``quantize(W).mT`` of W ``(G, N, K)`` |
    | ``offs`` | ``(G,)`` | int32, int64 | original group ends; may be left out for 2-D x 2-D (x carries them) |
    | ``bias`` | ``(G, N)`` | bf16, fp16, fp32 | as in :func:`grouped_mm` |
    | ``out_dtype`` | | bf16, fp16, fp32 | of the result |
    | ``backend`` | | str | as in :class:`MXRecipe` |

    Raises: as :func:`grouped_mm`; ``ValueError`` if the blocks of an operand do not run along the contraction.
    Sync: none, except with backend="reference". Empty: as :func:`grouped_mm`. Gradient: bias only.
    Source: ``docs/layouts.md``.
    """
    for t, name in ((x, "x"), (w, "w")):
        if not isinstance(t, MXTensor):
            raise TypeError(f"{name} must be an MXTensor (mxmoe.quantize makes one), got {type(t).__name__}")
    return grouped_mm(x, w, offs, bias=bias, out_dtype=out_dtype, recipe=MXRecipe(backend=backend))


def explain(
    x: Tensor | MXTensor, w: Tensor | MXTensor, offs: Tensor | None = None, *, recipe: MXRecipe | None = None
) -> Choice:
    """Which backend :func:`grouped_mm` would use for these operands, and why. Runs nothing.

    | argument | shape | notes |
    |---|---|---|
    | ``x``, ``w``, ``offs``, ``recipe`` | as in :func:`grouped_mm` | only shapes, dtypes and the device are looked at |
    | returns | :class:`Choice` | ``backend`` and ``reason`` |

    Raises: ``TypeError``, ``ValueError`` as :func:`grouped_mm`; ``RuntimeError`` if the recipe names a backend that
    cannot run. Sync: none.
    """
    recipe = _recipe(recipe)
    x, w = _operand(x, "x"), _operand(w, "w")
    has_mx = isinstance(x, MXTensor) or isinstance(w, MXTensor)
    form = (x.ndim, w.ndim)
    _contracts(x.shape, w.shape, x.ndim - 1, w.ndim - 2)
    if form == (2, 2):
        n, k = x.shape[0], w.shape[1]
    elif form == (3, 2):  # x takes the place of the weights
        n, k = x.shape[1], x.shape[2]
    else:
        n, k = w.shape[2], x.shape[-1]
    if form == (2, 3) and isinstance(w, MXTensor):
        x_dtype = x.elem_dtype if isinstance(x, MXTensor) else x.dtype
        m, g = x.shape[0], w.shape[0]
        facts = decode.known(w.qdata.mT, w.scale_bytes.mT)
        if _decodes(x.device, x_dtype, w.elem_dtype, recipe, m, g) and decode.decodes(x.device, recipe, m, g, facts):
            return Choice("triton", decode.reason(m, g))
    return _choice(x.device, recipe, n, k, has_mx)
