"""The native backend without sm_100: its whole path on a CPU through an emulator that asserts the op's contract."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import E4M3, GROUP_CASES, assert_bitwise, ends, poisoned, scaled_randn
from native_emulator import NativeEmulator

import mxmoe
from mxmoe import device as devices
from mxmoe.formats import SCALE_DTYPE
from mxmoe.ops._impl import impl
from mxmoe.ops.engines import native

N, K = 96, 160  # N: not a multiple of 128; K32 = 5: a second, short column tile


@pytest.fixture
def emulator(monkeypatch):
    """This CPU passes for an sm_100 device whose op is the emulator."""
    import torch._inductor.lowering  # noqa: F401 (looks at torch's functions when imported: not at the stand-in)

    stand_in = NativeEmulator()
    monkeypatch.setattr(torch, "_scaled_grouped_mm", stand_in)
    monkeypatch.setattr(devices, "has_mxfp8_tensor_cores", lambda where: True)
    return stand_in


def _step(x, w, offs, grad, recipe, bias=None):
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    bias = None if bias is None else bias.clone().requires_grad_()
    out = mxmoe.grouped_mm(leaves[0], leaves[1].transpose(-2, -1), offs, bias=bias, recipe=recipe)
    out.backward(grad)
    return [out.detach(), leaves[0].grad, leaves[1].grad] + ([] if bias is None else [bias.grad])


def _close(actual, expected, what):
    """Same values; fp32 sums may be ordered differently, then bf16 rounding differs by one step."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-7, atol=1e-30, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("weight_block", [(1, 32), (32, 32)])
def test_forward_and_backward_equal_the_reference(emulator, sizes, weight_block):
    offs, m = ends(sizes, "cpu"), sum(sizes) + 5  # five rows of no group
    x, w = scaled_randn(m, K, device="cpu"), scaled_randn(len(sizes), N, K, device="cpu", seed=1)
    grad = scaled_randn(m, N, device="cpu", seed=2)
    x[sum(sizes) :] = torch.nan
    grad[sum(sizes) :] = torch.nan
    results = {}
    for backend in ("native", "reference"):
        with poisoned():
            results[backend] = _step(x, w, offs, grad, mxmoe.MXRecipe(backend=backend, weight_block=weight_block))
    for name, ours, oracle in zip(("out", "dx", "dw"), results["native"], results["reference"], strict=True):
        _close(ours, oracle, name)
    out, dx, dw = results["native"]
    assert (out[sum(sizes) :] == 0).all()
    assert (dx[sum(sizes) :] == 0).all()
    assert all((dw[g] == 0).all() for g, size in enumerate(sizes) if size == 0)
    assert emulator.calls == (["m_groups", "m_groups", "k_groups"] if m else [])


WEIGHT_QUANTIZERS = ("quantize_rowwise", "quantize_colwise", "quantize_both", "quantize_square", "quantize_square_both")


@pytest.fixture
def reads_of_w(emulator, monkeypatch):
    """Names of the quantizers that read a 3-D tensor."""
    kernels, reads = impl(torch.device("cpu")), []

    def counted(quantize, x, *args):
        reads.extend([quantize.__name__] if x.ndim == 3 else [])
        return quantize(x, *args)

    for name in WEIGHT_QUANTIZERS:
        monkeypatch.setattr(kernels, name, functools.partial(counted, getattr(kernels, name)))
    return reads


@pytest.mark.parametrize("transposed", [False, True], ids=["N_K", "K_N"])
@pytest.mark.parametrize("weight_block", [(1, 32), (32, 32)])
def test_weights_are_quantized_once_per_step(reads_of_w, weight_block, transposed):
    """One read serves fprop and dgrad, with the bytes and the results of two; what needs no dX keeps nothing."""
    sizes, recipe = [33, 0, 70], mxmoe.MXRecipe(backend="native", weight_block=weight_block)
    offs, stored = ends(sizes, "cpu"), scaled_randn(3, *((K, N) if transposed else (N, K)), device="cpu", seed=1)
    x, grad = scaled_randn(103, K, device="cpu"), scaled_randn(103, N, device="cpu", seed=2)
    w = stored.mT if transposed else stored
    for ours, alone in zip(
        native.weight_operands(w, recipe),
        (native.weight_operand(w, recipe), native.weight_operand(w.mT, recipe)),
        strict=True,
    ):
        assert_bitwise(ours.qdata, alone.qdata)
        assert_bitwise(ours.scale_bytes, alone.scale_bytes)
        assert ours.qdata.is_contiguous()
        assert ours.shape == alone.shape

    def step(recipe, x_grad=True, w_grad=True):
        reads_of_w.clear()
        leaves = [x.clone().requires_grad_(x_grad), stored.clone().requires_grad_(w_grad)]
        out = mxmoe.grouped_mm(leaves[0], leaves[1] if transposed else leaves[1].mT, offs, recipe=recipe)
        out.backward(grad)
        return [t for t in (out.detach(), *(leaf.grad for leaf in leaves)) if t is not None], list(reads_of_w)

    once = "quantize_both" if weight_block == (1, 32) else "quantize_square_both"
    results, reads = step(recipe)
    assert reads == [once]
    expected, _ = step(recipe.replace(backend="reference"))
    for name, a, b in zip(("out", "dx", "dw"), results, expected, strict=True):
        _close(a, b, name)
    (out, dx), reads = step(recipe, w_grad=False)  # frozen weights
    assert reads == [once]
    assert_bitwise(out, results[0])
    assert_bitwise(dx, results[1])
    (out, dw), reads = step(recipe, x_grad=False)  # the first layer: no dX
    assert reads != [once]
    assert len(reads) == 1
    assert_bitwise(out, results[0])
    assert_bitwise(dw, results[2])
    with torch.no_grad():
        reads_of_w.clear()
        mxmoe.grouped_mm(x.clone().requires_grad_(), w.mT, offs, recipe=recipe)
    assert reads_of_w == reads  # inference


def test_bytes_kept_of_the_weights(emulator):
    """1.03 bytes per weight between forward and backward on this backend; nothing on another."""
    offs, kept = ends([33, 70], "cpu"), {}
    x, w = scaled_randn(103, 128, device="cpu").requires_grad_(), scaled_randn(2, 256, 128, device="cpu")
    for backend in ("native", "dequant"):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            mxmoe.grouped_mm(x, w.mT, offs, recipe=mxmoe.MXRecipe(backend=backend))
        kept[backend] = sum(t.nbytes for t in saved if t.dtype == torch.uint8)
    assert kept == {"native": w.numel() * 33 // 32, "dequant": 0}


@pytest.mark.parametrize("weight_block", [(1, 32), (32, 32)])
@pytest.mark.parametrize("transposed", [False, True], ids=["N_K", "K_N"])
def test_opcheck_with_kept_weights(emulator, weight_block, transposed):
    for save in ("bf16", "mxfp8"):
        recipe = mxmoe.MXRecipe(backend="native", weight_block=weight_block, save=save)
        x, offs = scaled_randn(65, 64, device="cpu").requires_grad_(), ends([30, 0, 35], "cpu")
        w = scaled_randn(3, *((64, 96) if transposed else (96, 64)), device="cpu", seed=1).requires_grad_()
        w = w.mT if transposed else w
        args = (x, None, w, None, offs, None, torch.bfloat16, recipe.key, True, True)
        torch.library.opcheck(torch.ops.mxmoe.grouped_mm_m_groups.default, args)


def test_compile_fullgraph(emulator):
    """Forward and backward in one graph each, the kept bytes of w crossing from one to the other."""
    torch._dynamo.reset()
    recipe, offs = mxmoe.MXRecipe(backend="native"), ends([33, 0, 70], "cpu")
    x, w = scaled_randn(103, K, device="cpu").requires_grad_(), scaled_randn(3, N, K, device="cpu", seed=1)
    w, grad = w.requires_grad_(), scaled_randn(103, N, device="cpu", seed=2)

    def layer(x, w):
        return mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = [(out := run(x, w), *torch.autograd.grad(out, (x, w), grad)) for run in (compiled, layer)]
    for ours, eager in zip(*results, strict=True):
        assert_bitwise(ours.detach(), eager.detach())


def test_bias_and_wider_outputs(emulator):
    sizes = [33, 0, 70]
    offs, n = ends(sizes, "cpu"), 64
    x, w = scaled_randn(103, K, device="cpu"), scaled_randn(3, n, K, device="cpu", seed=1)
    bias, grad = scaled_randn(3, n, device="cpu", seed=3), scaled_randn(103, n, device="cpu", seed=2)
    both = [_step(x, w, offs, grad, mxmoe.MXRecipe(backend=b), bias) for b in ("native", "reference")]
    for name, ours, oracle in zip(("out", "dx", "dw", "dbias"), *both, strict=True):
        scale = oracle.float().abs().amax().item()
        torch.testing.assert_close(ours.float(), oracle.float(), rtol=2**-6, atol=scale * 2**-9, msg=name)
    wide = mxmoe.grouped_mm(x, w.mT, offs, out_dtype=torch.float32, recipe=mxmoe.MXRecipe(backend="native"))
    narrow = mxmoe.grouped_mm(x, w.mT, offs, recipe=mxmoe.MXRecipe(backend="native"))
    assert wide.dtype == torch.float32
    assert torch.equal(wide, narrow.float())  # the op rounds to bf16, whatever the result type


def test_quantized_operands(emulator):
    """MXTensor operands with plain and with blocked scales, for both forms."""
    sizes, n = [31, 0, 66], 64
    offs = ends(sizes, "cpu")
    x, w = scaled_randn(97, K, device="cpu"), scaled_randn(3, n, K, device="cpu", seed=1)
    grad = scaled_randn(97, n, device="cpu", seed=2)
    expected = mxmoe.grouped_mm(x, w.mT, offs, recipe=mxmoe.MXRecipe(backend="reference"))
    expected_dw = mxmoe.grouped_mm(grad.t(), x, offs, recipe=mxmoe.MXRecipe(backend="reference"))
    for layout in ("plain", "blocked"):
        groups = {"offs": offs} if layout == "blocked" else {}
        xq = mxmoe.quantize(x, layout=layout, **groups)
        wq = mxmoe.quantize(w, layout=layout)
        _close(mxmoe.scaled_grouped_mm(xq, wq.mT, offs, backend="native"), expected, f"{layout} m_groups")
        gq = mxmoe.quantize(grad, block="colwise", offs=offs, layout=layout)
        xq = mxmoe.quantize(x, block="colwise", offs=offs, layout=layout)
        _close(mxmoe.scaled_grouped_mm(gq.t(), xq, backend="native"), expected_dw, f"{layout} k_groups")
    assert emulator.calls.count("m_groups") == emulator.calls.count("k_groups") == 2


def test_auto_picks_native_where_its_contract_holds(emulator):
    x, w, offs = scaled_randn(40, 64, device="cpu"), scaled_randn(2, 64, 64, device="cpu"), ends([8, 32], "cpu")
    assert mxmoe.explain(x, w.mT, offs).backend == "native"
    narrow = scaled_randn(2, 48, 64, device="cpu")
    assert mxmoe.explain(x, narrow.mT, offs).backend == "dequant"


def test_never_reached_on_another_device(monkeypatch):
    """Without sm_100 the op is not called, whatever is asked for: it would kill the CUDA context."""

    def explode(*args, **kwargs):
        raise AssertionError("the native op was called")

    monkeypatch.setattr(torch, "_scaled_grouped_mm", explode)
    x, w, offs = scaled_randn(40, 64, device="cpu"), scaled_randn(2, 64, 64, device="cpu"), ends([8, 32], "cpu")
    with pytest.raises(RuntimeError, match="sm_100"):
        mxmoe.grouped_mm(x, w.mT, offs, recipe=mxmoe.MXRecipe(backend="native"))
    a, b = native.rows_operand(x, offs, E4M3, mxmoe.MXRecipe()), native.weight_operand(w, mxmoe.MXRecipe())
    with pytest.raises(RuntimeError, match="sm_100"):
        native.mm_m_groups(a, b, offs, None, torch.bfloat16)


def test_refusals_name_the_dim(emulator):
    recipe, offs = mxmoe.MXRecipe(), ends([8, 32], "cpu")
    x, w = scaled_randn(40, 64, device="cpu"), scaled_randn(2, 72, 64, device="cpu")
    a, b = native.rows_operand(x, offs, E4M3, recipe), native.weight_operand(w, recipe)
    with pytest.raises(ValueError, match="N must be a multiple of 16, got 72"):
        native.mm_m_groups(a, b, offs, None, torch.bfloat16)
    e5m2 = recipe.replace(elem_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        native.mm_m_groups(
            a, native.weight_operand(scaled_randn(2, 64, 64, device="cpu"), e5m2), offs, None, torch.bfloat16
        )


@pytest.mark.parametrize("form", ["m_groups", "k_groups"])
def test_meta_function_of_the_real_op_accepts_what_we_send(form):
    """What we send passes the checks that the real op makes under fake tensors, and its output shape is ours."""
    recipe = mxmoe.MXRecipe()
    sizes = [33, 0, 70, 2]
    offs, m, n = ends(sizes, "cpu"), 110, 64
    x, w = scaled_randn(m, K, device="cpu"), scaled_randn(4, n, K, device="cpu")
    grad = scaled_randn(m, n, device="cpu")
    if form == "m_groups":
        a, b = native.rows_operand(x, offs, E4M3, recipe), native.weight_operand(w, recipe)
        args = (a.qdata, b.qdata.mT, a.scale, b.scale, offs)
        shape = (m, n)
    else:
        a, b = native.cols_operand(grad, offs, E4M3, recipe), native.cols_operand(x, offs, E4M3, recipe)
        args = (a.qdata.t(), b.qdata, a.scale, b.scale, a.offs)
        shape = (4, n, K)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in args]
        out = torch._scaled_grouped_mm(*fakes[:4], offs=fakes[4], out_dtype=torch.bfloat16)
    assert out.shape == shape
    assert out.dtype == torch.bfloat16


def test_emulator_finds_misplaced_scales(emulator):
    """The emulator is no rubber stamp: the whole-matrix tile stride of field report 17 gives another result."""
    recipe, offs = mxmoe.MXRecipe(), ends([32, 224], "cpu")
    x, grad = scaled_randn(256, 160, device="cpu"), scaled_randn(256, 160, device="cpu", seed=3)
    a, b = native.cols_operand(grad, offs, E4M3, recipe), native.cols_operand(x, offs, E4M3, recipe)
    right = emulator(a.qdata.t(), b.qdata, a.scale, b.scale, a.offs)
    wrong = a.scale.view(torch.uint8).reshape(2, -1, 512).transpose(0, 1).reshape(a.scale.shape).contiguous()
    with pytest.raises(AssertionError):
        assert_bitwise(emulator(a.qdata.t(), b.qdata, wrong.view(SCALE_DTYPE), b.scale, a.offs), right)
