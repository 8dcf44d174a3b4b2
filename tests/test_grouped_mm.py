"""grouped_mm: values, gradients, groups, strides, recipes, compile. Backends are a parameter of the same test."""

from __future__ import annotations

import pytest
import torch
from cases import (
    DEVICE,
    E4M3,
    E5M2,
    GROUP_CASES,
    assert_accumulation,
    assert_bitwise,
    ends,
    poisoned,
    scaled_randn,
    sqnr,
)

import mxmoe
from mxmoe import MXRecipe

BACKENDS = ["reference", "dequant"]
REF = MXRecipe(backend="reference")


def fq(x, block, offs=None, elem=E4M3, mode="rceil"):
    return mxmoe.fake_quantize(
        x.detach(), block=block, offs=offs, elem_dtype=elem, scale_mode=mode, dtype=torch.float32
    )


def spans(sizes):
    start = 0
    for g, m in enumerate(sizes):
        yield g, start, start + m
        start += m


def check_product(actual, parts, what):
    """``parts``: (slice of the result, a, b) with a @ b the exact product in fp32 of rounded operands."""
    exact, in_bf16 = torch.zeros_like(actual, dtype=torch.float32), torch.zeros_like(actual, dtype=torch.float32)
    for where, a, b in parts:
        exact[where] = a @ b
        in_bf16[where] = (a.bfloat16() @ b.bfloat16()).float()
    assert_accumulation(actual.float(), exact, in_bf16, what)
    return exact


def step(x, w, offs, grad, recipe=None, **kwargs):
    """Forward and backward; w is the parameter (G, N, K)."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    out = mxmoe.grouped_mm(x, w.transpose(-2, -1), offs, recipe=recipe, **kwargs)
    out.backward(grad)
    return out.detach(), x.grad, w.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("tail", [0, 19])
def test_training_step(backend, sizes, tail):
    """fprop, dgrad, wgrad against fp32 products of operands rounded along each GEMM's own contraction."""
    m, n, k, used = sum(sizes) + tail, 48, 96, sum(sizes)
    x, w, grad = scaled_randn(m, k), scaled_randn(len(sizes), n, k, seed=1), scaled_randn(m, n, seed=2)
    offs = ends(sizes)
    x[used:], grad[used:] = float("nan"), float("nan")
    with poisoned():
        out, dx, dw = step(x, w, offs, grad, MXRecipe(backend=backend))
    assert out.dtype == dx.dtype == torch.bfloat16
    assert dw.dtype == w.dtype
    assert not out[used:].any()
    assert not dx[used:].any()
    x, grad = x.clone(), grad.clone()
    x[used:], grad[used:] = 0, 0
    x_row, w_row = fq(x, "rowwise"), fq(w, "rowwise")
    check_product(out, [(slice(s, e), x_row[s:e], w_row[g].T) for g, s, e in spans(sizes)], "fprop")
    g_row, w_col = fq(grad, "rowwise"), fq(w, "colwise")
    check_product(dx, [(slice(s, e), g_row[s:e], w_col[g]) for g, s, e in spans(sizes)], "dgrad")
    g_col, x_col = fq(grad, "colwise", offs), fq(x, "colwise", offs)
    check_product(dw, [(g, g_col[s:e].T, x_col[s:e]) for g, s, e in spans(sizes)], "wgrad")
    for g, s, e in spans(sizes):
        if s == e:
            assert not dw[g].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(48, 40), (16, 96), (33, 50), (1, 1), (7, 129)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_dims_and_dtypes(backend, shape, dtype):
    """Field report 10: what passes forward passes backward, any N and K, in every dtype."""
    n, k = shape
    sizes = [33, 0, 32]
    x = (torch.randn(65, k, device=DEVICE)).to(dtype)
    w, grad = torch.randn(3, n, k, device=DEVICE).to(dtype), torch.randn(65, n, device=DEVICE).to(dtype)
    offs = ends(sizes)
    out, dx, dw = step(x, w, offs, grad, MXRecipe(backend=backend))
    assert out.dtype == dx.dtype == dw.dtype == dtype
    x_row, w_row = fq(x, "rowwise"), fq(w, "rowwise")
    check_product(out, [(slice(s, e), x_row[s:e], w_row[g].T) for g, s, e in spans(sizes)], "fprop")
    g_row, w_col = fq(grad, "rowwise"), fq(w, "colwise")
    check_product(dx, [(slice(s, e), g_row[s:e], w_col[g]) for g, s, e in spans(sizes)], "dgrad")
    g_col, x_col = fq(grad, "colwise", offs), fq(x, "colwise", offs)
    check_product(dw, [(g, g_col[s:e].T, x_col[s:e]) for g, s, e in spans(sizes)], "wgrad")


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_forms_equal_the_first(backend):
    recipe = MXRecipe(backend=backend)
    sizes, n, k = [31, 0, 65], 48, 64
    offs = ends(sizes)
    x, w = scaled_randn(96, k), scaled_randn(3, n, k, seed=1)
    base = mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe)
    # mirror: (G, N, K) x (K, M)
    mirror = mxmoe.grouped_mm(w, x.t(), offs, recipe=recipe)
    assert mirror.shape == (n, 96)
    assert mirror.is_contiguous()
    assert_bitwise(mirror.t().contiguous(), base, "mirror")
    # dense batch
    xb = scaled_randn(3, 20, k, seed=4)
    batch = mxmoe.grouped_mm(xb, w.mT, recipe=recipe)
    flat = mxmoe.grouped_mm(xb.reshape(60, k), w.mT, ends([20, 20, 20]), recipe=recipe)
    assert batch.shape == (3, 20, n)
    assert_bitwise(batch.reshape(60, n), flat, "batch")
    # contraction over tokens
    g = scaled_randn(96, n, seed=5)
    dw = mxmoe.grouped_mm(g.t(), x, offs, recipe=recipe)
    _, _, want = step(x, w, offs, g, recipe)
    assert_bitwise(dw, want, "wgrad")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["2d3d", "2d2d", "3d3d", "3d2d"])
def test_gradients_of_every_form(backend, form):
    """Against autograd through fp32 products of the unrounded operands: SQNR of MXFP8 gradients."""
    offs = ends([40, 0, 56])
    shapes = {
        "2d3d": ((96, 64), (3, 64, 32), offs),
        "2d2d": ((32, 96), (96, 64), offs),
        "3d3d": ((3, 32, 64), (3, 64, 96), None),
        "3d2d": ((3, 32, 64), (64, 96), offs),
    }
    x_shape, w_shape, o = shapes[form]
    x, w = (torch.randn(s, device=DEVICE, requires_grad=True) for s in (x_shape, w_shape))
    out = mxmoe.grouped_mm(x, w, o, recipe=MXRecipe(backend=backend))
    grad = torch.randn_like(out)
    out.backward(grad)
    got = [out.detach(), x.grad, w.grad]
    x2, w2 = (t.detach().cpu().clone().requires_grad_() for t in (x, w))
    o_cpu = None if o is None else o.cpu()
    want_out = torch._grouped_mm(x2, w2, offs=o_cpu)
    want_out.backward(grad.cpu())
    for name, a, b in zip(("out", "dx", "dw"), got, (want_out.detach(), x2.grad, w2.grad), strict=True):
        assert a.shape == b.shape, name
        assert sqnr(a, b) > 26, name  # measured 27.8 to 29


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    """Field report 11: slices, steps, expanded weights, transposed and stride-0 gradients."""
    recipe = MXRecipe(backend=backend)
    offs = ends([40, 24])
    w = scaled_randn(2, 32, 64, seed=1)
    big = scaled_randn(128, 96)
    grad = scaled_randn(64, 32, seed=2)
    want = {}
    for name, x in {
        "cols": big[:64, :64],
        "offset": big[:64, 3:67],
        "rows": big[::2, :64],
        "transposed": scaled_randn(64, 64, seed=3).t(),
        "expanded": big[:1, :64].expand(64, 64),
    }.items():
        want[name] = step(x.contiguous(), w, offs, grad, recipe)
        xs = x.detach().requires_grad_()
        ws = w.clone().requires_grad_()
        out = mxmoe.grouped_mm(xs, ws.mT, offs, recipe=recipe)
        dx, dw = torch.autograd.grad(out, (xs, ws), grad)
        for a, b in zip((out, dx, dw), want[name], strict=True):
            assert_bitwise(a, b, name)
    x = big[:64, :64].contiguous()
    # weights that are stored (G, K, N)
    w_t = w.mT.contiguous().requires_grad_()
    xr = x.clone().requires_grad_()
    out = mxmoe.grouped_mm(xr, w_t, offs, recipe=recipe)
    dx, dw = torch.autograd.grad(out, (xr, w_t), grad)
    for a, b in zip((out, dx, dw.mT.contiguous()), want["cols"], strict=True):
        assert_accumulation(a, b, (b.float() * (1 + 2**-8)).bfloat16(), "stored (G, K, N)")
    # an expanded weight
    ew = w[:1].expand(2, 32, 64)
    assert_bitwise(
        mxmoe.grouped_mm(x, ew.mT, offs, recipe=recipe), mxmoe.grouped_mm(x, ew.contiguous().mT, offs, recipe=recipe)
    )
    # gradients: stride 0, transposed
    for g in (torch.ones((), device=DEVICE, dtype=x.dtype).expand(64, 32), scaled_randn(32, 64, seed=6).t()):
        a, b = step(x, w, offs, g, recipe), step(x, w, offs, g.contiguous(), recipe)
        for left, right in zip(a, b, strict=True):
            assert_bitwise(left, right, "gradient strides")
    xr = x.clone().requires_grad_()
    mxmoe.grouped_mm(xr, w.mT, offs, recipe=recipe).sum().backward()
    assert xr.grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_does_not_cross_groups(backend):
    """Field report 6."""
    recipe = MXRecipe(backend=backend)
    x, w, grad = scaled_randn(64, 64), scaled_randn(2, 32, 64, seed=1), scaled_randn(64, 32, seed=2)
    offs = ends([32, 32])
    clean = step(x, w, offs, grad, recipe)
    x[0] = float("nan")
    out, dx, dw = step(x, w, offs, grad, recipe)
    assert torch.isnan(out[0]).all()
    assert_bitwise(out[1:], clean[0][1:], "out")
    assert_bitwise(dx, clean[1], "dx")
    assert torch.isnan(dw[0]).all()
    assert_bitwise(dw[1], clean[2][1], "dw of the other expert")


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_columns(backend):
    """Field report 7: zero columns, rows and blocks give exact zeros."""
    x, w, grad = scaled_randn(64, 64), scaled_randn(2, 32, 64, seed=1), scaled_randn(64, 32, seed=2)
    x[:, 5] = 0
    x[:, 32:] = 0
    _, _, dw = step(x, w, ends([40, 24]), grad, MXRecipe(backend=backend))
    assert not dw[:, :, 5].any()
    assert not dw[:, :, 32:].any()
    assert torch.isfinite(dw).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    """Field report 14."""
    x = torch.zeros(0, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = scaled_randn(3, 32, 64).requires_grad_()
    out = mxmoe.grouped_mm(x, w.mT, ends([0, 0, 0]), recipe=MXRecipe(backend=backend))
    assert out.shape == (0, 32)
    assert out.grad_fn is not None
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    assert not w.grad.any()


@pytest.mark.parametrize("groups", [1, 6, 33, 384])
def test_group_counts(groups):
    """Field report 13."""
    sizes = [(5 * i) % 4 for i in range(groups)]
    x, w, grad = (
        scaled_randn(sum(sizes), 32),
        scaled_randn(groups, 16, 32, seed=1),
        scaled_randn(sum(sizes), 16, seed=2),
    )
    got = step(x, w, ends(sizes), grad, MXRecipe(backend="dequant"))
    want = step(x, w, ends(sizes), grad, REF)
    for a, b in zip(got, want, strict=True):
        assert sqnr(a, b) > 45 if b.any() else not a.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias(backend):
    """Field report 20: G == M == N does not broadcast; empty groups and tail rows get none."""
    recipe = MXRecipe(backend=backend)
    n = 4
    x, w = scaled_randn(4, 32), scaled_randn(4, n, 32, seed=1)
    bias = torch.randn(4, n, device=DEVICE, requires_grad=True)
    offs = ends([1, 0, 2, 0])
    out = mxmoe.grouped_mm(x, w.mT, offs, bias=bias, recipe=recipe, out_dtype=torch.float32)
    plain = mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe, out_dtype=torch.float32)
    want = torch.zeros(4, n, device=DEVICE)
    want[0], want[1:3] = bias[0].detach(), bias[2].detach()
    torch.testing.assert_close(out.detach() - plain, want, rtol=1e-5, atol=1e-5 * plain.abs().max().item())
    assert not out[3:].any()
    grad = torch.randn(4, n, device=DEVICE)
    out.backward(grad)
    want = torch.stack([grad[0], torch.zeros_like(grad[0]), grad[1] + grad[2], torch.zeros_like(grad[0])])
    torch.testing.assert_close(bias.grad, want)
    for bad in (bias[:3], bias[0], torch.zeros(n, 5, device=DEVICE)):
        with pytest.raises(ValueError, match=r"bias must have shape \(G, N\) = \(4, 4\)"):
            mxmoe.grouped_mm(x, w.mT, offs, bias=bad, recipe=recipe)


# --- recipes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_save_mxfp8_changes_no_bit(backend):
    x, w, grad = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    offs = ends([33, 0, 50])
    a = step(x, w, offs, grad, MXRecipe(backend=backend))
    b = step(x, w, offs, grad, MXRecipe(backend=backend, save="mxfp8"))
    for left, right in zip(a, b, strict=True):
        assert_bitwise(left, right)


def test_save_mxfp8_keeps_half_the_bytes():
    x, w = scaled_randn(2048, 512).requires_grad_(), scaled_randn(4, 64, 512).requires_grad_()
    offs = ends([600, 400, 1000, 48])
    kept = {}
    for save in ("bf16", "mxfp8"):
        seen = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, seen=seen: (seen.__setitem__(t.data_ptr(), t.nbytes), t)[1], lambda t: t
        ):
            mxmoe.grouped_mm(x, w.mT, offs, recipe=MXRecipe(save=save))
        kept[save] = sum(b for p, b in seen.items() if p != w.data_ptr())
    assert kept["mxfp8"] <= 0.56 * kept["bf16"]  # 1.03 bytes per element, and 31 rows of padding per group


@pytest.mark.parametrize("backend", BACKENDS)
def test_wgrad_bf16(backend):
    """dW from unrounded operands: as exact as bf16, and different from the rounded one."""
    sizes = [33, 0, 63]
    x, w, grad = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    _, dx, dw = step(x, w, ends(sizes), grad, MXRecipe(backend=backend, wgrad="bf16"))
    check_product(dw, [(g, grad[s:e].float().T, x[s:e].float()) for g, s, e in spans(sizes)], "wgrad")
    assert_bitwise(dx, step(x, w, ends(sizes), grad, MXRecipe(backend=backend))[1], "dgrad is still rounded")


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_only(backend):
    sizes = [33, 0, 63]
    x, w, grad = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    out, dx, dw = step(x, w, ends(sizes), grad, MXRecipe(backend=backend, activations="bf16"))
    w_row = fq(w, "rowwise")
    check_product(out, [(slice(s, e), x[s:e].float(), w_row[g].T) for g, s, e in spans(sizes)], "fprop")
    check_product(dx, [(slice(s, e), grad[s:e].float(), w_row[g]) for g, s, e in spans(sizes)], "dgrad")
    check_product(dw, [(g, grad[s:e].float().T, x[s:e].float()) for g, s, e in spans(sizes)], "wgrad")


@pytest.mark.parametrize("backend", BACKENDS)
def test_square_weights_serve_both_gemms(backend):
    sizes = [33, 0, 63]
    x, w, grad = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    out, dx, _ = step(x, w, ends(sizes), grad, MXRecipe(backend=backend, weight_block=(32, 32)))
    w_sq = fq(w, "square")
    x_row, g_row = fq(x, "rowwise"), fq(grad, "rowwise")
    check_product(out, [(slice(s, e), x_row[s:e], w_sq[g].T) for g, s, e in spans(sizes)], "fprop")
    check_product(dx, [(slice(s, e), g_row[s:e], w_sq[g]) for g, s, e in spans(sizes)], "dgrad")


@pytest.mark.parametrize("backend", BACKENDS)
def test_element_types_and_modes(backend):
    sizes = [33, 0, 63]
    offs = ends(sizes)
    x, w, grad = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    recipe = MXRecipe(backend=backend, grad_elem_dtype=E5M2, scale_mode="even")
    _, dx, dw = step(x, w, offs, grad, recipe)
    g_row, w_col = fq(grad, "rowwise", elem=E5M2, mode="even"), fq(w, "colwise", mode="even")
    check_product(dx, [(slice(s, e), g_row[s:e], w_col[g]) for g, s, e in spans(sizes)], "dgrad")
    g_col, x_col = fq(grad, "colwise", offs, E5M2, "even"), fq(x, "colwise", offs, mode="even")
    check_product(dw, [(g, g_col[s:e].T, x_col[s:e]) for g, s, e in spans(sizes)], "wgrad")


def test_recipe_errors():
    with pytest.raises(ValueError, match="scale_mode=.*'rceil'.*got 'nearest'"):
        MXRecipe(scale_mode="nearest")
    with pytest.raises(ValueError, match="weight_block"):
        MXRecipe(weight_block=(128, 128))
    with pytest.raises(ValueError, match='save="mxfp8"'):
        MXRecipe(save="mxfp8", wgrad="bf16")
    with pytest.raises(TypeError):
        MXRecipe(torch.float8_e4m3fn)
    recipe = MXRecipe(weight_block=[32, 32], grad_elem_dtype=E5M2, save="mxfp8")
    assert MXRecipe.from_key(recipe.key) == recipe
    assert hash(recipe) == hash(MXRecipe.from_key(recipe.key))


# --- quantized operands ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_mxtensor_operands_equal_quantizing_inside(backend, layout):
    offs = ends([33, 0, 63])
    x, w = scaled_randn(100, 64), scaled_randn(3, 32, 64, seed=1)
    recipe = MXRecipe(backend=backend)
    want = mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe)
    xq, wq = mxmoe.quantize(x, offs=offs, layout=layout), mxmoe.quantize(w, layout=layout)
    assert_bitwise(mxmoe.grouped_mm(x, wq.mT, offs, recipe=recipe), want, "w")
    assert_bitwise(mxmoe.grouped_mm(xq, w.mT, offs, recipe=recipe), want, "x")
    assert_bitwise(mxmoe.scaled_grouped_mm(xq, wq.mT, offs, backend=backend), want, "both")
    g = scaled_randn(100, 32, seed=3)
    want = mxmoe.grouped_mm(g.t(), x, offs, recipe=recipe)
    gq, xq = (mxmoe.quantize(t, block="colwise", offs=offs, layout=layout) for t in (g, x))
    assert_bitwise(mxmoe.scaled_grouped_mm(gq.t(), xq, backend=backend), want, "k groups")
    assert_bitwise(mxmoe.grouped_mm(gq.t(), x, offs, recipe=recipe), want, "k groups, one quantized")
    square = mxmoe.quantize(w, block="square")
    want = mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe.replace(weight_block=(32, 32)))
    assert_bitwise(mxmoe.grouped_mm(x, square.mT, offs, recipe=recipe), want, "square")


def test_frozen_quantized_weights_pass_the_gradient_on():
    offs = ends([33, 63])
    x, w = scaled_randn(96, 64).requires_grad_(), scaled_randn(2, 32, 64, seed=1)
    grad = scaled_randn(96, 32, seed=2)
    mxmoe.grouped_mm(x, mxmoe.quantize(w).mT, offs).backward(grad)
    g_row, w_row = fq(grad, "rowwise"), fq(w, "rowwise")
    check_product(x.grad, [(slice(s, e), g_row[s:e], w_row[g]) for g, s, e in spans([33, 63])], "dgrad")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_quantized_activations_train_the_weights(backend, wgrad):
    """dW of an MXTensor x: its values as they are, times the gradient."""
    sizes = [33, 0, 50]
    offs = ends(sizes)
    x, w, grad = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1).requires_grad_(), scaled_randn(96, 32, seed=2)
    t = mxmoe.quantize(x)
    mxmoe.grouped_mm(t, w.mT, offs, recipe=MXRecipe(backend=backend, wgrad=wgrad)).backward(grad)
    values = mxmoe.dequantize(t, torch.float32)
    g = fq(grad, "colwise", offs) if wgrad == "mxfp8" else grad.float()
    check_product(w.grad, [(i, g[s:e].T, values[s:e]) for i, s, e in spans(sizes)], "wgrad")


def test_wrong_block_is_refused():
    offs = ends([32, 32])
    x, w = scaled_randn(64, 64), scaled_randn(2, 32, 64)
    with pytest.raises(ValueError, match='w is quantized rowwise.*block="colwise"'):
        mxmoe.grouped_mm(x, mxmoe.quantize(w.mT), offs)
    with pytest.raises(ValueError, match="x is quantized colwise"):
        mxmoe.grouped_mm(mxmoe.quantize(x, block="colwise"), w.mT, offs)
    with pytest.raises(ValueError, match="do not restart at the groups"):
        mxmoe.grouped_mm(mxmoe.quantize(x, block="colwise").t(), x, offs)
    with pytest.raises(TypeError, match="x must be an MXTensor"):
        mxmoe.scaled_grouped_mm(x, mxmoe.quantize(w).mT, offs)


# --- autograd --------------------------------------------------------------------------------------------------------
def test_needs_input_grad():
    """Field report 19: no work for frozen operands; no_grad first, training after."""
    offs = ends([33, 63])
    x, w, grad = scaled_randn(96, 64), scaled_randn(2, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    with torch.no_grad():
        before = mxmoe.grouped_mm(x, w.mT, offs)
    full = step(x, w, offs, grad)
    assert_bitwise(before, full[0])
    for need_x, need_w, ops in ((True, False, ["fprop", "dgrad"]), (False, True, ["fprop", "wgrad"])):
        for save in ("bf16", "mxfp8"):
            xr, wr = x.clone().requires_grad_(need_x), w.clone().requires_grad_(need_w)
            with mxmoe.observe() as log:
                mxmoe.grouped_mm(xr, wr.mT, offs, recipe=MXRecipe(save=save)).backward(grad)
            assert [r.op for r in log] == ops
            assert (xr.grad is None) != need_x
            assert (wr.grad is None) != need_w
            got = xr.grad if need_x else wr.grad
            assert_bitwise(got, full[1] if need_x else full[2])


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    offs = ends([33, 63])
    x, w, grad = scaled_randn(96, 64), scaled_randn(2, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    want = step(x, w, offs, grad)
    for reentrant in (False, True):
        xr, wr = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = checkpoint(lambda a, b: mxmoe.grouped_mm(a, b.mT, offs), xr, wr, use_reentrant=reentrant)
        out.backward(grad)
        for a, b in zip((out.detach(), xr.grad, wr.grad), want, strict=True):
            assert_bitwise(a, b)


def test_autocast():
    offs = ends([33, 63])
    x, w = (
        torch.randn(96, 64, device=DEVICE, requires_grad=True),
        torch.randn(2, 32, 64, device=DEVICE, requires_grad=True),
    )
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = mxmoe.grouped_mm(x, w.mT, offs)
    assert out.dtype == torch.bfloat16
    assert_bitwise(out, mxmoe.grouped_mm(x.bfloat16(), w.bfloat16().mT, offs))
    out.sum().backward()
    assert x.grad.dtype == torch.float32
    assert w.grad.dtype == torch.float32


def test_two_runs_are_equal():
    offs = ends([33, 0, 63])
    args = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1), offs, scaled_randn(96, 32, seed=2)
    for a, b in zip(step(*args), step(*args), strict=True):
        assert_bitwise(a, b)


def test_inputs_are_not_modified():
    x, w, offs = scaled_randn(64, 32), scaled_randn(2, 32, 32), ends([40, 24])
    copies = x.clone(), w.clone(), offs.clone()
    step(x, w, offs, scaled_randn(64, 32, seed=2))
    for a, b in zip((x, w, offs), copies, strict=True):
        assert_bitwise(a, b)


# --- compile and fake tensors ----------------------------------------------------------------------------------------
OPCHECK = [(65, 3, 96, 33), (0, 2, 32, 32), (64, 1, 40, 48)]


@pytest.mark.parametrize("m_g_k_n", OPCHECK)
@pytest.mark.parametrize("recipe", [MXRecipe(), MXRecipe(save="mxfp8"), MXRecipe(backend="reference", wgrad="bf16")])
def test_opcheck_m_groups(m_g_k_n, recipe):
    m, g, k, n = m_g_k_n
    sizes = [m // g] * (g - 1) + [m - m // g * (g - 1)]
    x, w = scaled_randn(m, k).requires_grad_(), scaled_randn(g, n, k).requires_grad_()
    bias = torch.randn(g, n, device=DEVICE, requires_grad=True)
    offs = ends(sizes)
    args = (x, None, w, None, offs, bias, torch.bfloat16, recipe.key, recipe.save == "mxfp8", False)
    torch.library.opcheck(torch.ops.mxmoe.grouped_mm_m_groups.default, args)
    stored = scaled_randn(g, k, n).requires_grad_()
    args = (x, None, stored.mT, None, offs, bias, torch.bfloat16, recipe.key, False, False)
    torch.library.opcheck(torch.ops.mxmoe.grouped_mm_m_groups.default, args)


def opcheck_fp8(op, args):
    """opcheck without its comparisons of values: torch cannot compare fp8 tensors (allclose has no kernel)."""
    torch.library.opcheck(op, args, test_utils=("test_autograd_registration", "test_faketensor"))


def test_opcheck_k_groups_and_quantize():
    a, b = scaled_randn(65, 33).requires_grad_(), scaled_randn(65, 96).requires_grad_()
    offs = ends([0, 33, 32])
    args = (a, None, b, None, offs, None, 65, torch.bfloat16, MXRecipe().key)
    torch.library.opcheck(torch.ops.mxmoe.grouped_mm_k_groups.default, args)
    x = scaled_randn(65, 96)
    for blocked in (False, True):
        for o in (None, offs):
            for op in ("quantize_rowwise", "quantize_colwise", "quantize_both"):
                opcheck_fp8(getattr(torch.ops.mxmoe, op).default, (x, o, blocked, E4M3, "rceil"))
    w = scaled_randn(2, 33, 40)
    opcheck_fp8(torch.ops.mxmoe.quantize_square.default, (w, True, E4M3, "rceil"))
    opcheck_fp8(torch.ops.mxmoe.quantize_colwise.default, (w, None, True, E4M3, "rceil"))
    for block in ("rowwise", "colwise"):
        torch.library.opcheck(torch.ops.mxmoe.fake_quantize.default, (x, block, offs, E4M3, "rceil", torch.bfloat16))
    torch.library.opcheck(torch.ops.mxmoe.fake_quantize_both.default, (x, offs, E4M3, "rceil", torch.float32))
    t = mxmoe.quantize(x, block="colwise", offs=offs)
    args = (t.qdata, t.scale_bytes, "colwise", t.offs, offs, 65, torch.bfloat16)
    opcheck_fp8(torch.ops.mxmoe.dequantize.default, args)


def layer(x, w1, w2, offs, bias, recipe):
    h = mxmoe.grouped_mm(x, w1.transpose(-2, -1), offs, bias=bias, recipe=recipe)
    return mxmoe.grouped_mm(torch.nn.functional.silu(h), w2.transpose(-2, -1), offs, recipe=recipe)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph_without_recompilation(compiler):
    """Field reports 21, 26: forward and backward in one graph, one compilation for every M."""
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    w1, w2 = scaled_randn(3, 33, 96, seed=1).requires_grad_(), scaled_randn(3, 40, 33, seed=2).requires_grad_()
    bias = torch.randn(3, 33, device=DEVICE, requires_grad=True)
    for m in (65, 64, 66, 128):
        offs = ends([m // 2, 0, m - m // 2 - 3])
        x = scaled_randn(m, 96).requires_grad_()
        for recipe in (MXRecipe(),):
            args = (x, w1, w2, offs, bias, recipe)
            grad = scaled_randn(m, 40, seed=3)
            want_out = layer(*args)
            want = torch.autograd.grad(want_out, (x, w1, w2, bias), grad)
            out = compiled(*args)
            got = torch.autograd.grad(out, (x, w1, w2, bias), grad)
            for a, b in zip((out, *got), (want_out, *want), strict=True):
                assert_accumulation(a, b, (b.float() * (1 + 2**-7)).bfloat16())
    assert count.frame_count == 1


def test_compile_quantize_and_mxtensor():
    torch._dynamo.reset()

    def f(x, w, offs):
        t = mxmoe.quantize(x, offs=offs)
        return mxmoe.grouped_mm(t, mxmoe.quantize(w).mT, offs), mxmoe.dequantize(t)

    x, w, offs = scaled_randn(64, 32), scaled_randn(2, 32, 32), ends([40, 24])
    for a, b in zip(torch.compile(f, fullgraph=True, backend="aot_eager")(x, w, offs), f(x, w, offs), strict=True):
        assert_bitwise(a, b)


# --- bad input: the same error in eager and under fake tensors -------------------------------------------------------
def bad_inputs():
    x, w, offs = torch.zeros(64, 32), torch.zeros(2, 32, 16), torch.tensor([32, 64], dtype=torch.int32)
    i32 = torch.int32
    yield "x int", (x.int(), w, offs), {}, TypeError, "x must be bfloat16, float16, float32"
    yield "x list", ([1.0], w, offs), {}, TypeError, "x must be a torch.Tensor"
    yield "w 4-D", (x, w[None], offs), {}, ValueError, "w must be 2-D or 3-D"
    yield "contraction", (x, torch.zeros(2, 16, 32), offs), {}, ValueError, r"do not contract: x has 32.*w has 16"
    yield "offs None", (x, w), {}, ValueError, "offs is required"
    yield "offs counts with zero", (x, w, torch.tensor([0, 32, 64], dtype=i32)), {}, ValueError, "3 entries, expected 2"
    yield "offs leading zero", (x, w, torch.tensor([0, 32, 64], dtype=i32)), {}, ValueError, "leading zero"
    yield "offs float", (x, w, torch.tensor([32.0, 64.0])), {}, TypeError, "offs must be int32"
    yield "offs 2-D", (x, w, offs[None]), {}, ValueError, "1-D"
    yield "offs int", (x, w, 64), {}, TypeError, "offs must be an int32 tensor"
    yield "offs with batch", (x[None].expand(2, 64, 32), w, offs), {}, ValueError, "offs must be None"
    yield "batch sizes", (torch.zeros(3, 64, 32), w), {}, ValueError, "3 and 2 groups"
    yield "out_dtype", (x, w, offs), {"out_dtype": torch.int8}, TypeError, "out_dtype"
    yield "recipe", (x, w, offs), {"recipe": "mxfp8"}, TypeError, "recipe must be an mxmoe.MXRecipe, got str"
    yield "bias shape", (x, w, offs), {"bias": torch.zeros(16)}, ValueError, r"\(G, N\) = \(2, 16\)"
    yield "bias 2d2d", (x.t(), x, offs), {"bias": torch.zeros(2, 2)}, ValueError, "bias is not defined"


BAD = list(bad_inputs())


@pytest.mark.parametrize(("name", "args", "kwargs", "error", "message"), BAD, ids=[b[0] for b in BAD])
@pytest.mark.parametrize("fake", [False, True])
def test_bad_input(name, args, kwargs, error, message, fake):
    if not fake:
        with pytest.raises(error, match=message):
            mxmoe.grouped_mm(*args, **kwargs)
        return
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _pytree as pytree

    with FakeTensorMode() as mode:
        args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        with pytest.raises(error, match=message):
            mxmoe.grouped_mm(*args, **kwargs)


def test_dtensor_is_refused_by_name():
    class Pretend(torch.Tensor):
        _local_tensor = torch.zeros(1)
        placements = ("Shard(0)",)

    x = torch.zeros(64, 32).as_subclass(Pretend)
    with pytest.raises(TypeError, match=r"x is a DTensor with placements.*to_local"):
        mxmoe.grouped_mm(x, torch.zeros(2, 32, 16), ends([32, 32], "cpu"))


def test_native_is_never_reached_elsewhere(monkeypatch):
    called = []
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *a, **k: called.append(a))
    with pytest.raises(RuntimeError, match=r'backend="native" needs MXFP8 tensor cores \(sm_100\)'):
        mxmoe.grouped_mm(
            torch.zeros(64, 32, device=DEVICE),
            torch.zeros(2, 32, 32, device=DEVICE),
            ends([32, 32]),
            recipe=MXRecipe(backend="native"),
        )
    assert not called


def test_backends_and_explain():
    table = mxmoe.backends(DEVICE)
    found = {(b, o): (available, reason) for b, o, available, reason in table}
    assert found["reference", "fprop"] == (True, "")
    assert found["dequant", "wgrad"] == (True, "")
    assert "native" in str(table)
    assert all(reason for available, reason in found.values() if not available)
    choice = mxmoe.explain(torch.zeros(64, 32, device=DEVICE), torch.zeros(2, 32, 32, device=DEVICE))
    with mxmoe.observe() as log:
        mxmoe.grouped_mm(torch.zeros(64, 32, device=DEVICE), torch.zeros(2, 32, 32, device=DEVICE), ends([32, 32]))
    assert (log[0].backend, log[0].reason) == (choice.backend, choice.reason)


def test_observe_counts_and_keeps_operands():
    x, w, offs = scaled_randn(64, 32), scaled_randn(2, 16, 32), ends([40, 24])
    with mxmoe.observe(tensors=True) as log:
        step(x, w, offs, scaled_randn(64, 16))
    assert [(r.op, r.m, r.n, r.k, r.groups) for r in log] == [(o, 64, 16, 32, 2) for o in ("fprop", "dgrad", "wgrad")]
    assert log[0].out.shape == (64, 16)
    assert log[2].out.shape == (2, 16, 32)


def test_long_contraction_does_not_drift():
    x, w = (
        torch.ones(32, 8192, device=DEVICE, dtype=torch.bfloat16),
        torch.ones(1, 32, 8192, device=DEVICE, dtype=torch.bfloat16),
    )
    for backend in BACKENDS:
        out = mxmoe.grouped_mm(x, w.mT, ends([32]), recipe=MXRecipe(backend=backend))
        assert (out == 8192).all()


def test_backward_makes_no_zeros_for_what_forward_kept():
    """The op returns what it keeps; autograd would fill a gradient of that size with zeros in every backward."""
    m, k = 96, 160
    x, w = scaled_randn(m, k).requires_grad_(), scaled_randn(2, 32, k).requires_grad_()
    out = mxmoe.grouped_mm(x, w.mT, ends([40, 56]))
    with torch.profiler.profile(record_shapes=True) as run:
        out.backward(torch.ones_like(out))
    filled = [e.input_shapes[0] for e in run.events() if e.name in ("aten::zero_", "aten::fill_") and e.input_shapes]
    assert [m, 2 * k] not in filled, "a gradient for the bytes that forward kept"
