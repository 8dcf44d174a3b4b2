"""Gradients of the GEMM ops: the only file that knows them. Each backward is one op, so one dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ops import bf16_grouped_mm as _bf16_ops  # noqa: F401  (defines the ops)
from .ops import grouped_mm as _ops
from .ops import moe as _moe_ops  # noqa: F401
from .ops.engines.dequant import value_dtype
from .recipe import MXRecipe


def _m_groups_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x_scale, w, w_scale, offs, bias, _, recipe, keep_x, keep_w = inputs
    _, kept_q, kept_scale, kept_offs, *kept_w = output
    ctx.set_materialize_grads(False)  # or every backward fills a gradient of kept_q's size with zeros
    need_x, need_w = ctx.needs_input_grad[0] and x_scale is None, ctx.needs_input_grad[2] and w_scale is None
    r, (n, k) = MXRecipe.from_key(recipe), w.shape[1:]
    form = _ops.kept_form(r, x.device, n, k) if keep_x else "x"
    held_x = x if need_w and form == "x" else None
    held = {"x": (None, None, None), "values": (kept_q, None, None), "bytes": (kept_q, kept_scale, kept_offs)}[form]
    ctx.kept_dtype = value_dtype(x) if form == "values" else None
    held_w = kept_w if need_x and keep_w and _ops.keeps_weight(r, x.device, n, k) else (None, None)
    ctx.save_for_backward(held_x, x_scale if need_w else None, w, w_scale, offs, *held, *held_w)
    ctx.recipe = recipe
    ctx.dtypes = (
        x.dtype if need_x else None,
        w.dtype if need_w else None,
        bias.dtype if bias is not None and ctx.needs_input_grad[5] else None,
    )


def _m_groups_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    x, x_scale, w, w_scale, offs, kept_q, kept_scale, kept_offs, kept_w, kept_w_scale = ctx.saved_tensors
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    dx, dw, dbias = torch.ops.mxmoe.grouped_mm_m_groups_backward(
        grad,
        x,
        x_scale,
        w,
        w_scale,
        offs,
        kept_q,
        kept_scale,
        kept_offs,
        ctx.kept_dtype,
        kept_w,
        kept_w_scale,
        ctx.recipe,
        x_dtype,
        w_dtype,
        bias_dtype,
    )
    return (
        dx if x_dtype is not None else None,
        None,
        dw if w_dtype is not None else None,
        None,
        None,
        dbias if bias_dtype is not None else None,
        *(None,) * 4,
    )


torch.library.register_autograd("mxmoe::grouped_mm_m_groups", _m_groups_backward, setup_context=_m_groups_setup)


def _k_groups_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, a_scale, b, b_scale, offs, _, _, _, recipe = inputs
    need_a, need_b = ctx.needs_input_grad[0] and a_scale is None, ctx.needs_input_grad[2] and b_scale is None
    if (need_a and b_scale is not None) or (need_b and a_scale is not None):
        raise NotImplementedError("a 2-D x 2-D grouped_mm with one MXTensor has no gradient for the other operand")
    ctx.save_for_backward(a if need_b else None, b if need_a else None, offs)
    ctx.recipe = recipe
    ctx.dtypes = (a.dtype if need_a else None, b.dtype if need_b else None)


def _k_groups_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs = ctx.saved_tensors
    a_dtype, b_dtype = ctx.dtypes
    da, db = torch.ops.mxmoe.grouped_mm_k_groups_backward(grad, a, b, offs, ctx.recipe, a_dtype, b_dtype)
    return (
        da if a_dtype is not None else None,
        None,
        db if b_dtype is not None else None,
        *(None,) * 6,
    )


torch.library.register_autograd("mxmoe::grouped_mm_k_groups", _k_groups_backward, setup_context=_k_groups_setup)


# --- bf16 ------------------------------------------------------------------------------------------------------------
def _bf16_m_groups_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, bias, _ = inputs
    ctx.need_a, need_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if need_b else None, b, offs)
    ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[3] else None


def _bf16_m_groups_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs = ctx.saved_tensors
    da, db, dbias = torch.ops.mxmoe.bf16_mm_m_groups_backward(grad, a, b, offs, ctx.need_a, ctx.bias_dtype)
    return (
        da if ctx.need_a else None,
        db if a is not None else None,
        None,
        dbias if ctx.bias_dtype is not None else None,
        None,
    )


torch.library.register_autograd("mxmoe::bf16_mm_m_groups", _bf16_m_groups_backward, setup_context=_bf16_m_groups_setup)


def _bf16_k_groups_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, _ = inputs
    need_a, need_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if need_b else None, b if need_a else None, offs)


def _bf16_k_groups_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs = ctx.saved_tensors
    grad = grad.to(torch.bfloat16)  # the weights of two GEMMs with M groups
    mm = torch.ops.mxmoe.bf16_mm_m_groups
    return (
        None if b is None else mm(b, grad, offs, None, torch.bfloat16),
        None if a is None else mm(a, grad.mT, offs, None, torch.bfloat16),
        None,
        None,
    )


torch.library.register_autograd("mxmoe::bf16_mm_k_groups", _bf16_k_groups_backward, setup_context=_bf16_k_groups_setup)


# --- expert layer ----------------------------------------------------------------------------------------------------
def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weights, position, offs = inputs
    if weights is not None and any(ctx.needs_input_grad):
        raise NotImplementedError("moe_gather with weights has no gradient: it is the backward of moe_combine")
    ctx.save_for_backward(position, offs)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    position, offs = ctx.saved_tensors
    return torch.ops.mxmoe.moe_combine(grad, None, position, offs), None, None, None


torch.library.register_autograd("mxmoe::moe_gather", _gather_backward, setup_context=_gather_setup)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, position, offs = inputs
    need_weights = weights is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(rows if need_weights else None, weights, position, offs)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, position, offs = ctx.saved_tensors
    d_rows = d_weights = None
    if ctx.needs_input_grad[0]:
        d_rows = torch.ops.mxmoe.moe_gather(grad, weights, position, offs)
    if rows is not None:
        d_weights = torch.ops.mxmoe.moe_combine_weights_grad(grad, rows, position, offs).to(weights.dtype)
    return d_rows, d_weights, None, None


torch.library.register_autograd("mxmoe::moe_combine", _combine_backward, setup_context=_combine_setup)


def _experts_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, up, up_scale, down, down_scale, recipe, _ = inputs
    ctx.set_materialize_grads(False)  # or a gradient of zeros is made for gate_up
    ctx.save_for_backward(x, weights, up, up_scale, down, down_scale, *output[1:])
    ctx.recipe = recipe
    needs = ctx.needs_input_grad
    ctx.needs = (needs[0], needs[2], needs[3] and up_scale is None, needs[5] and down_scale is None)


def _experts_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    found = torch.ops.mxmoe.moe_experts_backward(grad, *ctx.saved_tensors, ctx.recipe, *ctx.needs)
    dx, d_weights, d_up, d_down = (g if need else None for g, need in zip(found, ctx.needs, strict=True))
    return dx, None, d_weights, d_up, None, d_down, None, None, None


torch.library.register_autograd("mxmoe::moe_experts", _experts_backward, setup_context=_experts_setup)


# --- what has no gradient says what to do instead --------------------------------------------------------------------
def _none(op: str, text: str) -> None:
    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise NotImplementedError(f"mxmoe::{op} has no gradient: {text}")

    torch.library.register_autograd(f"mxmoe::{op}", refuse)


for _name in ("quantize_rowwise", "quantize_colwise", "quantize_both", "quantize_square", "dequantize"):
    _none(_name, "quantize x.detach(), or give the GEMM x itself, which it rounds and differentiates")
for _name in ("fake_quantize", "fake_quantize_both"):
    _none(_name, "use x.detach(), or, straight through, x + (mxmoe.fake_quantize(x.detach()) - x).detach()")
for _name in ("grouped_mm_m_groups", "grouped_mm_k_groups", "bf16_mm_m_groups", "moe_experts"):
    _none(f"{_name}_backward", "there are first derivatives only, no create_graph=True with a second backward")
