"""The expert layer as ops: routing, gather and combine one by one, and the whole SwiGLU layer as a single op.

    experts:  route -> gather + round -> GEMM -> SwiGLU + round -> GEMM -> combine
              x (T,H)     (M,H)       (M,2I)      (M,I)         (M,H)     (T,H)          M = T * k routed rows
    backward: gather + round twice -> dgrad, wgrad of down -> SwiGLU backward + round -> dgrad, wgrad of up -> combine

The routing weight multiplies the activation in front of the down projection, not its result: the same sum, but backward
then needs neither the result nor its gradient per row. Where the backend is ``dequant`` the roundings happen inside the
neighbouring kernels; elsewhere the backend rounds the same tensors itself, to the same bytes.
Gradients are declared in :mod:`mxmoe.autograd`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from .. import checks, shapes
from ..formats import BLOCK
from ..observe import _observers
from ..observe import record as _record
from ..recipe import MXRecipe
from ..tensor import MXTensor, check
from .grouped_mm import _engine, _high, _mx, _recipe
from .quantize import plain_scale
from .select import Choice, choose

Operand = Tensor | MXTensor
_Held = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@functools.cache
def _cpu() -> SimpleNamespace:
    from ..reference import moe

    return SimpleNamespace(**{name: getattr(moe, name) for name in _STAGES})


@functools.cache
def _cuda() -> SimpleNamespace:
    from ..kernels import combine, gather_quantize, route, swiglu_quantize

    modules = (route, gather_quantize, swiglu_quantize, combine)
    found = {name: getattr(m, name) for m in modules for name in _STAGES if hasattr(m, name)}
    return SimpleNamespace(**found)


_STAGES = (
    "route",
    "gather_rows",
    "gather_cols",
    "swiglu_rows",
    "swiglu_backward",
    "combine",
    "combine_weights_grad",
)


def _stages(device: torch.device) -> SimpleNamespace:
    return _cuda() if device.type == "cuda" else _cpu()


# --- routing, gather, combine ----------------------------------------------------------------------------------------
@torch.library.custom_op("mxmoe::moe_route", mutates_args=(), device_types=("cpu", "cuda"))
def _route(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return _stages(top_k_index.device).route(top_k_index, num_experts)  # type: ignore[no-any-return]


@_route.register_fake
def _(top_k_index, num_experts):  # type: ignore[no-untyped-def]
    def empty(*shape):  # type: ignore[no-untyped-def]
        return top_k_index.new_empty(shape, dtype=torch.int32)

    return empty(num_experts), empty(top_k_index.numel()), empty(*top_k_index.shape)


@torch.library.custom_op("mxmoe::moe_gather", mutates_args=(), device_types=("cpu", "cuda"))
def _gather(x: Tensor, weights: Tensor | None, position: Tensor, offs: Tensor) -> Tensor:
    """``x (T, H)`` -> ``(M, H)`` by expert, times weights."""
    return _stages(x.device).gather_rows(x, position, offs, weights, None, "rceil", x.dtype)  # type: ignore[no-any-return]


@_gather.register_fake
def _(x, weights, position, offs):  # type: ignore[no-untyped-def]
    return x.new_empty((position.numel(), x.shape[1]))


@torch.library.custom_op("mxmoe::moe_combine", mutates_args=(), device_types=("cpu", "cuda"))
def _combine(rows: Tensor, weights: Tensor | None, position: Tensor, offs: Tensor) -> Tensor:
    """``rows (M, H)`` -> ``(T, H)``."""
    return _stages(rows.device).combine(rows, position, offs, weights, rows.dtype)  # type: ignore[no-any-return]


@_combine.register_fake
def _(rows, weights, position, offs):  # type: ignore[no-untyped-def]
    return rows.new_empty((position.shape[0], rows.shape[1]))


@torch.library.custom_op("mxmoe::moe_combine_weights_grad", mutates_args=(), device_types=("cpu", "cuda"))
def _combine_weights_grad(grad: Tensor, rows: Tensor, position: Tensor, offs: Tensor) -> Tensor:
    """fp32 ``(T, k)``."""
    return _stages(rows.device).combine_weights_grad(grad, rows, position, offs)  # type: ignore[no-any-return]


@_combine_weights_grad.register_fake
def _(grad, rows, position, offs):  # type: ignore[no-untyped-def]
    return grad.new_empty(position.shape, dtype=torch.float32)


# --- the whole layer -------------------------------------------------------------------------------------------------
class _Layer:
    """How one call rounds: the recipe, the engine, and whether rounding is fused into the stages."""

    def __init__(self, x: Tensor, up: Tensor, recipe: str) -> None:
        self.recipe = MXRecipe.from_key(recipe)
        self.stages = _stages(x.device)
        self.choice: Choice = choose(x.device, self.recipe, up.shape[1], up.shape[2])
        self.engine: ModuleType = _engine(self.choice.backend)
        self.rounds = self.recipe.activations == "mxfp8"
        self.wgrad_rounds = self.rounds and self.recipe.wgrad == "mxfp8"
        # A block of 32 must not hold gate and up at once.
        self.fused = self.choice.backend == "dequant" and up.shape[1] % (2 * BLOCK) == 0
        self.value_dtype = torch.bfloat16 if x.is_cuda or x.dtype != torch.float32 else torch.float32
        self.dtype = x.dtype
        self.wgrad_engine = self.engine
        if not self.wgrad_rounds and self.choice.backend in ("native", "triton"):
            self.wgrad_engine = _engine("dequant")

    def elem(self, grad: bool = False) -> torch.dtype | None:
        """Element type of a rounded operand of fprop or dgrad, None where it stays as it is."""
        dtype = self.recipe.grad_elem_dtype if grad else self.recipe.elem_dtype
        return dtype if self.rounds else None

    def wgrad_elem(self, grad: bool = False) -> torch.dtype | None:
        """The same for wgrad."""
        return self.elem(grad) if self.wgrad_rounds else None

    def rows(self, x: Tensor, offs: Tensor, grad: bool = False) -> Operand:
        """Operand of fprop or dgrad from rows in high precision."""
        elem = self.elem(grad)
        return _high(x) if elem is None else self.engine.rows_operand(x, offs, elem, self.recipe)

    def cols(self, x: Tensor, offs: Tensor, grad: bool = False) -> Operand:
        """Operand of wgrad from rows in high precision."""
        elem = self.wgrad_elem(grad)
        return _high(x) if elem is None else self.engine.cols_operand(x, offs, elem, self.recipe)

    def gather(self, x: Tensor, position: Tensor, offs: Tensor) -> Tensor:
        """Rows by expert, in high precision."""
        return self.stages.gather_rows(x, position, offs, None, None, "rceil", x.dtype)  # type: ignore[no-any-return]

    def gather_rows(self, x: Tensor, position: Tensor, offs: Tensor, grad: bool = False) -> Operand:
        """Rows by expert as an operand of fprop or dgrad."""
        if not self.fused:
            return self.rows(self.gather(x, position, offs), offs, grad)
        mode, elem = self.recipe.scale_mode, self.elem(grad)
        return self.stages.gather_rows(x, position, offs, None, elem, mode, self.value_dtype)  # type: ignore[no-any-return]

    def gather_cols(self, x: Tensor, order: Tensor, position: Tensor, offs: Tensor, grad: bool = False) -> Operand:
        """Rows by expert as an operand of wgrad."""
        if not self.fused:
            return self.cols(self.gather(x, position, offs), offs, grad)
        mode, elem, k = self.recipe.scale_mode, self.wgrad_elem(grad), position.shape[1]
        return self.stages.gather_cols(x, order, k, offs, elem, mode, self.value_dtype)  # type: ignore[no-any-return]

    def weight_back(self, w: Tensor, scale: Tensor | None) -> Operand:
        """``w (E, N, K)`` as the weights of dgrad ``(E, K, N)``."""
        if scale is not None:  # the rounded weights are all there is
            return self.engine.expand(_mx(w, scale, "rowwise", w.shape[1])).mT  # type: ignore[no-any-return]
        if self.rounds:
            return self.engine.weight_operand(w.mT, self.recipe)  # type: ignore[no-any-return]
        return self.engine.weight_operand(w, self.recipe).mT  # type: ignore[no-any-return]

    def wgrad(self, grad: Operand, x: Operand, offs: Tensor, w: Tensor) -> Tensor:
        """Gradient of ``w (E, N, K)``, stored as w is."""
        if shapes.is_transposed(w.stride()):
            return self.wgrad_engine.mm_k_groups(x, grad, offs, w.dtype).mT  # type: ignore[no-any-return]
        return self.wgrad_engine.mm_k_groups(grad, x, offs, w.dtype)  # type: ignore[no-any-return]

    def record(self, op: str, sizes: tuple[int, int, int, int], tensors: Callable[[], _Held]) -> None:
        """Tell observers of a GEMM. ``tensors``: a, b, offs, out in high precision, made only if one keeps them."""
        if _observers:
            held = tensors() if any(o.tensors for o in _observers) else (None, None, None, None)
            _record(op, self.choice.backend, self.choice.reason, sizes, held)


@torch.library.custom_op("mxmoe::moe_experts", mutates_args=(), device_types=("cpu", "cuda"))
def _experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    recipe: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out ``(T, H)``; gate_up ``(M, 2I)`` (empty unless ``keep``), offs, order, position for backward."""
    layer = _Layer(x, up, recipe)
    r, s = layer.recipe, layer.stages
    experts, two_i, h = up.shape
    offs, order, position = s.route(top_k_index, experts)
    m = order.shape[0]

    def product(a: Operand, w: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return layer.engine.mm_m_groups(a, layer.engine.weight_operand(w, r), offs, None, x.dtype)  # type: ignore[no-any-return]
        # MXFP8 weights: rows are rounded already, the GEMM op picks between decoding and expanding.
        key = r.replace(activations="bf16", wgrad="mxfp8", save="bf16").key
        return torch.ops.mxmoe.grouped_mm_m_groups(a, None, w, scale, offs, None, x.dtype, key, False, False)[0]  # type: ignore[no-any-return]

    gate_up = product(layer.gather_rows(x, position, offs), up, up_scale)
    if layer.fused:
        mode, elem = r.scale_mode, layer.elem()
        hidden: Operand = s.swiglu_rows(gate_up, top_k_weights, order, offs, elem, mode, layer.value_dtype)
    else:
        plain = s.swiglu_rows(gate_up, top_k_weights, order, offs, None, r.scale_mode, x.dtype)
        hidden = layer.rows(plain, offs)
    rows = product(hidden, down, down_scale)
    out = s.combine(rows, position, offs, None, x.dtype)

    if up_scale is None:
        layer.record("fprop", (m, two_i, h, experts), lambda: (layer.gather(x, position, offs), up, offs, gate_up))
    if down_scale is None:
        layer.record(
            "fprop",
            (m, h, two_i // 2, experts),
            lambda: (s.swiglu_rows(gate_up, top_k_weights, order, offs, None, "rceil", x.dtype), down, offs, rows),
        )
    return out, gate_up if keep else x.new_empty(0), offs, order, position


@_experts.register_fake
def _(x, top_k_index, top_k_weights, up, up_scale, down, down_scale, recipe, keep):  # type: ignore[no-untyped-def]
    m = top_k_index.numel()

    def ints(*shape):  # type: ignore[no-untyped-def]
        return x.new_empty(shape, dtype=torch.int32)

    gate_up = x.new_empty((m, up.shape[1])) if keep else x.new_empty(0)
    return x.new_empty(x.shape), gate_up, ints(up.shape[0]), ints(m), ints(*top_k_index.shape)


@torch.library.custom_op("mxmoe::moe_experts_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    gate_up: Tensor,
    offs: Tensor,
    order: Tensor,
    position: Tensor,
    recipe: str,
    need_x: bool,
    need_weights: bool,
    need_up: bool,
    need_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, d_top_k_weights, d_up, d_down; empty where not needed."""
    layer = _Layer(x, up, recipe)
    r, s = layer.recipe, layer.stages
    experts, two_i, h = up.shape
    m = order.shape[0]
    dx, d_weights, d_up, d_down = (x.new_empty(0) for _ in range(4))
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    through = need_x or need_weights or need_up  # something in front of the down projection is asked for

    # 1. Down projection: gradient of the activation. The gradient of every routed row is its token's.
    def of_hidden() -> Tensor:
        a = layer.gather_rows(grad, position, offs, grad=True)
        return layer.engine.mm_m_groups(a, layer.weight_back(down, down_scale), offs, None, x.dtype)  # type: ignore[no-any-return]

    # A gradient of any values will do where only the activation is wanted: all frozen but the down projection.
    d_hidden = of_hidden() if through else gate_up[:, : two_i // 2]
    if through:
        held = d_hidden
        layer.record(
            "dgrad", (m, h, two_i // 2, experts), lambda: (layer.gather(grad, position, offs), down, offs, held)
        )
        del held

    def activation(d_hidden: Tensor, want: tuple[bool, bool, bool, bool]) -> tuple[Operand | None, ...]:
        """Operands of dgrad up, wgrad up (its gradient side) and wgrad down, and the gradient of the weights."""
        if layer.fused:
            dtypes = (layer.elem(grad=True), layer.wgrad_elem(grad=True), layer.wgrad_elem())
            mode, dtype = r.scale_mode, layer.value_dtype
            return s.swiglu_backward(gate_up, d_hidden, top_k_weights, order, offs, *dtypes, mode, dtype, want)  # type: ignore[no-any-return]
        none = (None, None, None, r.scale_mode, x.dtype)
        row, col, hidden, d_w = s.swiglu_backward(gate_up, d_hidden, top_k_weights, order, offs, *none, want)
        plain = row if row is not None else col
        return (
            layer.rows(plain, offs, grad=True) if want[0] else None,
            layer.cols(plain, offs, grad=True) if want[1] else None,
            layer.cols(hidden, offs) if want[2] else None,
            d_w,
        )

    def d_gate_up() -> Tensor:
        plain = (None, None, None, "rceil", x.dtype, (True, False, False, False))
        return s.swiglu_backward(gate_up, of_hidden(), top_k_weights, order, offs, *plain)[0]  # type: ignore[no-any-return]

    # 2. SwiGLU: everything that is made of gate and up, from one read of them. ``save="mxfp8"`` reads them twice, so
    # that the operands of wgrad, 6 bytes per element of the activation, do not exist yet while dgrad runs.
    lean = r.save == "mxfp8" and need_x and (need_up or need_down)
    want = (need_x, need_up and not lean, need_down and not lean, need_weights)
    row, col, hidden, d_w = activation(d_hidden, want)
    if not lean:
        del d_hidden
    if need_weights:
        assert isinstance(d_w, Tensor)
        d_weights = d_w.to(top_k_weights.dtype)

    # 3. Gradient of the tokens, first: its rows and weights are gone when the weight gradients are made.
    if need_x:
        rows = layer.engine.mm_m_groups(row, layer.weight_back(up, up_scale), offs, None, x.dtype)
        del row
        dx = s.combine(rows, position, offs, None, x.dtype)
        held = rows
        layer.record("dgrad", (m, two_i, h, experts), lambda: (d_gate_up(), up, offs, held))
        del rows, held
    if lean:
        _, col, hidden, _ = activation(d_hidden, (False, need_up, need_down, False))
        del d_hidden

    # 4. Weight gradients, the larger operand first: it is gone when the second result is made.
    if need_up:
        assert col is not None
        d_up = layer.wgrad(col, layer.gather_cols(x, order, position, offs), offs, up)
        del col
        layer.record(
            "wgrad", (m, two_i, h, experts), lambda: (d_gate_up(), layer.gather(x, position, offs), offs, d_up)
        )
    if need_down:
        assert hidden is not None
        d_down = layer.wgrad(layer.gather_cols(grad, order, position, offs, grad=True), hidden, offs, down)
        del hidden
        layer.record(
            "wgrad",
            (m, h, two_i // 2, experts),
            lambda: (
                layer.gather(grad, position, offs),
                s.swiglu_rows(gate_up, top_k_weights, order, offs, None, "rceil", x.dtype),
                offs,
                d_down,
            ),
        )
    return dx, d_weights, d_up, d_down


@_experts_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, x, top_k_weights, up, up_scale, down, down_scale, gate_up, offs, order, position, recipe,
    need_x, need_weights, need_up, need_down,
):  # fmt: skip
    def like(t, needed):  # type: ignore[no-untyped-def]
        if not needed:
            return x.new_empty(0)
        if t.ndim == 3 and shapes.is_transposed(t.stride()):
            return t.new_empty(t.mT.shape).mT
        return t.new_empty(t.shape)

    return like(x, need_x), like(top_k_weights, need_weights), like(up, need_up), like(down, need_down)


# --- public ----------------------------------------------------------------------------------------------------------
def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor | MXTensor,
    down: Tensor | MXTensor,
    *,
    recipe: MXRecipe | None = None,
) -> Tensor:
    """Run tokens through their SwiGLU experts in MXFP8: ``sum_j weight_j * down_j(silu(gate_j(x)) * up_j(x))``.

    | name | shape | dtype | notes |
    |---|---|---|---|
    | ``x`` | ``(T, H)`` | bf16, fp16, fp32 | tokens |
    | ``top_k_index`` | ``(T, k)`` | int64, int32 | ids outside ``[0, E)`` belong to no expert here |
    | ``top_k_weights`` | ``(T, k)`` | floating | |
    | ``up`` | ``(E, 2I, H)`` | as x, or MXTensor | gate rows, then up rows; either of the last dims contiguous |
    | ``down`` | ``(E, H, I)`` | as x, or MXTensor | |

    Returns: ``(T, H)``, dtype of x. Raises: ``TypeError``, ``ValueError`` for operands that do not fit. Sync: none.
    Empty: T = 0 gives ``(0, H)`` with gradients. Gradient: to x, top_k_weights, up and down; none to an MXTensor.
    Deterministic: two runs give the same bits. Memory: ``save="mxfp8"`` runs the activation's backward twice, for less
    at the peak (Qwen3-30B-A3B block, 16384 tokens: 2.48 GB above the inputs instead of 2.82), with the
    same bits.
    Source: ``docs/integrations/huggingface.md``.
    """
    recipe = _recipe(recipe)
    checks.tensor(x, "x", dims=(2,))
    for name, w in (("up", up), ("down", down)):
        if isinstance(w, MXTensor):
            _check_weight(w, name, x.device)
        else:
            checks.tensor(w, name, dims=(3,))
    e, two_i, h = up.shape
    if x.ndim != 2 or x.shape[1] != h or tuple(down.shape) != (e, h, two_i // 2) or two_i % 2:
        raise ValueError(
            f"experts() takes x (T, H), up (E, 2I, H) and down (E, H, I), got {tuple(x.shape)}, {tuple(up.shape)} and "
            f"{tuple(down.shape)}"
        )
    checks.top_k(top_k_index, top_k_weights, x.shape[0], x.device)
    if e == 0:
        raise ValueError("up and down hold no experts: at least one is needed")
    up_data, up_scale = _flat(up)
    down_data, down_scale = _flat(down)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, top_k_weights, up_data, down_data))
    out: Tensor = torch.ops.mxmoe.moe_experts(
        x, top_k_index, top_k_weights, up_data, up_scale, down_data, down_scale, recipe.key, keep
    )[0]
    return out


def _flat(w: Tensor | MXTensor) -> tuple[Tensor, Tensor | None]:
    if not isinstance(w, MXTensor):
        return w, None
    return w.qdata, plain_scale(w)


def _check_weight(w: MXTensor, name: str, device: torch.device) -> None:
    """Refuse MXFP8 weights that the layer cannot read, and say how to make others."""
    check(w, name)
    if w.ndim != 3:
        raise ValueError(f"{name} must be 3-D (E, N, K), got an MXTensor of shape {tuple(w.shape)}")
    if w.k_groups or w.offs is not None:
        raise ValueError(f"{name} was quantized with offs, as rows by expert: quantize the weights (E, N, K) without")
    if w.block != "rowwise":
        hint = "this is a transposed view, pass .mT" if w.block == "colwise" else "quantize it again"
        raise ValueError(
            f'{name} needs blocks along its last dim, got block="{w.block}": mxmoe.quantize(w, block="rowwise") makes '
            f"them ({hint})"
        )
    if w.device != device or w.scale.device != device:
        raise ValueError(f"{name} is on {w.device}, x is on {device}: move it with {name}.to({str(device)!r})")
    if w.layout == "blocked":
        values = math.prod(shapes.rowwise_blocked_scale(w.shape, None))
        if w.scale.numel() != values:
            raise ValueError(
                f"{name}.scale in the blocked layout must have {values} bytes for shape {tuple(w.shape)}, got "
                f"{w.scale.numel()}: mxmoe.quantize makes it"
            )
