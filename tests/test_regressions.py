"""Faults that were found once, and field reports on whole GEMMs with the numbers they were reported with."""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import threading

import pytest
import torch
from cases import DEVICE, assert_bitwise, ends, poisoned, scaled_randn
from torch._subclasses.fake_tensor import FakeTensorMode

import mxmoe
from mxmoe import MXRecipe
from mxmoe.observe import _observers
from mxmoe.ops.select import choose

BACKENDS = ["reference", "dequant"]
BF16 = torch.bfloat16
NAN = float("nan")


def operands(m=96, n=48, k=64, groups=3, dtype=BF16, device=DEVICE):
    """x, the parameter (G, N, K), offs."""
    x, w = (
        scaled_randn(m, k, dtype=dtype, device=device),
        scaled_randn(groups, n, k, dtype=dtype, device=device, seed=1),
    )
    return x.requires_grad_(), w.requires_grad_(), ends([m // groups] * groups, device)


def step(x, w, offs, grad, recipe=None):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    out = mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe)
    out.backward(grad)
    return out.detach(), x.grad, w.grad


# --- observe ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tensors", [False, True])
def test_nested_observers_end_in_any_state(tensors):
    """Ending the inner block took the outer list away while both held the same records."""
    x, w, offs = operands()
    with mxmoe.observe(tensors=tensors) as outer:
        with mxmoe.observe(tensors=tensors) as empty:
            pass
        with mxmoe.observe(tensors=tensors) as inner:
            mxmoe.grouped_mm(x, w.mT, offs)
        mxmoe.grouped_mm(x, w.mT, offs)
    mxmoe.grouped_mm(x, w.mT, offs)
    assert [len(log) for log in (outer, inner, empty)] == [2, 1, 0]


def test_observers_in_threads_and_after_errors():
    x, w, offs = (t.detach() for t in operands(m=6, n=8, k=32))
    with pytest.raises(KeyError), mxmoe.observe():
        raise KeyError
    errors, seen = [], []

    def work():
        try:
            for _ in range(20):
                with mxmoe.observe() as log:
                    mxmoe.grouped_mm(x, w.mT, offs)
                seen.append(len(log))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert min(seen) >= 1
    assert not _observers


# --- MXTensor --------------------------------------------------------------------------------------------------------
def test_parameters_quantized_under_grad_mode():
    """An operand quantized from a Parameter stopped the backward pass of the other operand."""
    x, w, offs = operands()
    mxmoe.grouped_mm(x, mxmoe.quantize(w).mT, offs).sum().backward()
    mxmoe.grouped_mm(mxmoe.quantize(x), w.mT, offs).sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape


@pytest.mark.parametrize("fake", [False, True])
def test_k_groups_tensor_in_a_gemm_without_k_groups(fake):
    """Its contraction is padded, the other one is not: an error deep in the GEMM, and none under fake tensors."""
    y, w3, x3 = torch.zeros(64, 96), torch.zeros(3, 64, 8), torch.zeros(3, 8, 64)
    inner, outer = ends([10, 54], "cpu"), ends([32, 32, 32], "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad():
        t = mxmoe.quantize(y, block="colwise", offs=inner)
        with pytest.raises(ValueError, match="x is quantized in groups along the contraction"):
            mxmoe.grouped_mm(t.mT, w3, outer)
        with pytest.raises(ValueError, match="w is quantized in groups along the contraction"):
            mxmoe.grouped_mm(x3, t, outer)


def test_torch_load_reads_mxtensors_by_default():
    x, _, offs = operands()
    t = mxmoe.quantize(x.detach(), block="colwise", offs=offs, layout="blocked")
    buffer = io.BytesIO()
    torch.save({"t": t}, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=True)["t"]
    for other in (back, copy.deepcopy(t)):
        assert other.qdata.stride() == t.qdata.stride()
        assert_bitwise(other.scale, t.scale)
        assert_bitwise(mxmoe.dequantize(other), mxmoe.dequantize(t))


def test_mxtensor_refuses_what_it_is_not():
    t = mxmoe.quantize(torch.zeros(64, 32))
    with pytest.raises(TypeError):
        t.to(BF16)  # made a "quantized" tensor of bf16 values
    for dims in ((0, 3), (0, 0), (-3, 1)):
        with pytest.raises(ValueError, match="last two dims"):
            t.transpose(*dims)
    assert t.transpose(-1, 0).block == "colwise"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scale": torch.zeros(10, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
            r"scale must have shape \(96, 2\)",
        ),
        ({"shape": torch.Size([95, 64])}, r"qdata must have shape \(95, 64\)"),
        ({"k_groups": True}, "needs as many ends"),
        ({"scale": torch.zeros(96, 2, dtype=torch.uint8)}, "got torch.float8_e4m3fn and torch.uint8"),
    ],
)
def test_parts_that_do_not_belong_together(changes, message):
    """Kernels would read beyond the end of the smaller part."""
    t = dataclasses.replace(mxmoe.quantize(torch.zeros(96, 64)), **changes)
    for run in (
        lambda: mxmoe.dequantize(t),
        lambda: mxmoe.grouped_mm(t, torch.zeros(1, 64, 8), ends([96], "cpu")),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            run()


def test_debug_mode_compares_the_ends_of_quantized_operands(monkeypatch):
    x, w, offs = torch.zeros(96, 64), torch.zeros(96, 32), ends([10, 86], "cpu")
    a, b = mxmoe.quantize(x, block="colwise", offs=ends([11, 85], "cpu")), mxmoe.quantize(w, block="colwise", offs=offs)
    monkeypatch.setenv("MXMOE_DEBUG", "1")
    with pytest.raises(ValueError, match=r"x was quantized with, \[11, 96\] and offs \[10, 96\]"):
        mxmoe.grouped_mm(a.mT, b, offs)


# --- recipe ----------------------------------------------------------------------------------------------------------
def test_recipe_values_that_are_equal_to_a_choice():
    """They passed the check and then could not be read back from the key, inside the op."""

    class Mode(str, enum.Enum):  # noqa: UP042 (a StrEnum prints as its value, this one does not)
        floor = "floor"

    recipe = MXRecipe(weight_block=(32.0, 32.0), scale_mode=Mode.floor)
    assert recipe == MXRecipe(weight_block=(32, 32), scale_mode="floor")
    assert MXRecipe.from_key(recipe.key) == recipe
    assert MXRecipe(weight_block=(True, 32)).key == MXRecipe().key


# --- which backend ---------------------------------------------------------------------------------------------------
def test_explain_refuses_what_grouped_mm_refuses():
    x, w, offs = torch.zeros(96, 64), torch.zeros(3, 48, 64), ends([32] * 3, "cpu")
    with pytest.raises(ValueError, match="do not contract"):
        mxmoe.explain(x, w, offs)
    with pytest.raises(TypeError, match="recipe must be an mxmoe.MXRecipe, got dict"):
        mxmoe.explain(x, w.mT, offs, recipe={})


@pytest.mark.parametrize("form", ["2d3d", "2d2d", "3d3d", "3d2d"])
def test_explain_names_the_sizes_of_every_form(form, monkeypatch):
    """The mirror form was judged by the number of tokens instead of the number of outputs."""
    from mxmoe.ops import grouped_mm as module

    asked = []
    monkeypatch.setattr(module, "choose", lambda *args: asked.append(args[2:]) or choose(*args))
    m, n, k, offs = 70, 48, 64, ends([30, 0, 40], "cpu")
    args = {
        "2d3d": (torch.zeros(m, k), torch.zeros(3, k, n), offs),
        "2d2d": (torch.zeros(n, m), torch.zeros(m, k), offs),
        "3d3d": (torch.zeros(3, m, k), torch.zeros(3, k, n)),
        "3d2d": (torch.zeros(3, n, k), torch.zeros(k, m), offs),
    }[form]
    mxmoe.explain(*args)
    mxmoe.grouped_mm(*args)
    assert set(asked) == {(n, k)}


def test_devices_that_are_not_here():
    for device in ("cuda:99", *(["cuda"] if DEVICE == "cpu" else [])):
        with pytest.raises(RuntimeError, match=f"no device {device} on this machine"):
            mxmoe.backends(device)
    assert not any(available for _, _, available, _ in mxmoe.backends("mps"))
    with pytest.raises(RuntimeError, match="runs on cpu and cuda; this tensor is on mps"):
        choose(torch.device("mps"), MXRecipe(), 32, 32)


def test_meta_and_fake_tensors():
    """A meta tensor failed at the question whether autocast is on, a fake GPU tensor at the GPU's capability."""
    x, w, offs = (t.detach().to("meta") for t in operands(device="cpu"))
    x, w = x.requires_grad_(), w.requires_grad_()
    mxmoe.grouped_mm(x, w.mT, offs, recipe=MXRecipe(save="mxfp8")).sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    with FakeTensorMode():
        x, w = torch.empty(96, 64, dtype=BF16, device="cuda:0"), torch.empty(3, 48, 64, dtype=BF16, device="cuda:0")
        out = mxmoe.grouped_mm(x, w.mT, torch.empty(3, dtype=torch.int32, device="cuda:0"))
    assert out.shape == (96, 48)


# --- refusals --------------------------------------------------------------------------------------------------------
def test_empty_batch_is_refused_by_name():
    with pytest.raises(ValueError, match="at least one group"):
        mxmoe.grouped_mm(torch.zeros(0, 4, 64), torch.zeros(0, 64, 8))


@pytest.mark.parametrize("dtype", [None, "bf16", torch.float64])
def test_dtype_of_expanded_values(dtype):
    x = torch.zeros(32, 32)
    with pytest.raises(TypeError, match="dtype must be one of bfloat16"):
        mxmoe.dequantize(mxmoe.quantize(x), dtype)
    with pytest.raises(TypeError, match="dtype must be one of bfloat16"):
        mxmoe.fake_quantize(x, dtype=dtype)


def test_sparse_and_nested_tensors():
    with pytest.raises(TypeError, match="x must be a dense tensor"):
        mxmoe.quantize(torch.eye(32).to_sparse())
    nested = torch.nested.nested_tensor([torch.zeros(3, 64), torch.zeros(4, 64)], layout=torch.jagged)
    with pytest.raises(TypeError, match="x must be a dense tensor"):
        mxmoe.grouped_mm(nested, torch.zeros(2, 64, 8))


@pytest.mark.parametrize("value", [[32, 64], None, torch.tensor([32.0])])
def test_debug_offs_types(value):
    with pytest.raises(TypeError, match="int32 or int64 tensor"):
        mxmoe.debug_offs(value, 64)
    with pytest.raises(ValueError, match="1-D"):
        mxmoe.debug_offs(torch.tensor([[32]]), 64)


def test_derivatives_there_are_none_of():
    """Forward mode lost the tangent without a word; a second derivative says so by itself."""
    x, w, offs = operands(dtype=torch.float32)
    for run in (
        lambda: torch.func.jvp(lambda t: mxmoe.grouped_mm(t, w.detach().mT, offs), (x.detach(),), (x.detach(),)),
        lambda: torch.func.jvp(lambda t: mxmoe.grouped_mm(x.detach(), t.mT, offs), (w.detach(),), (w.detach(),)),
    ):
        with pytest.raises(NotImplementedError, match="has a tangent"):
            run()
    (dx,) = torch.autograd.grad(mxmoe.grouped_mm(x, w.mT, offs).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_mm_m_groups_backward"):
        dx.sum().backward()


# --- empty dims ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "m_n_k_g", [(0, 48, 64, 3), (96, 0, 64, 3), (96, 48, 0, 3), (0, 0, 0, 1), (5, 7, 1, 2), (5, 1, 1, 2)]
)
def test_empty_and_single_dims_in_every_form(backend, m_n_k_g):
    m, n, k, groups = m_n_k_g
    recipe = MXRecipe(backend=backend)
    x, w, _ = operands(m, n, k, groups)
    offs = ends([m // groups] * groups)
    bias = torch.randn(groups, n, device=DEVICE, requires_grad=True)
    forms = [
        (x, w.detach().mT.requires_grad_(), offs, (m, n)),
        (scaled_randn(n, m).requires_grad_(), x, offs, (groups, n, k)),
        (scaled_randn(groups, m, k).requires_grad_(), w.detach().mT.requires_grad_(), None, (groups, m, n)),
        (w, x.detach().t().requires_grad_(), offs, (n, m)),
    ]
    for a, b, o, shape in forms:
        a.grad = b.grad = None
        with poisoned():
            out = mxmoe.grouped_mm(a, b, o, recipe=recipe)
            out.sum().backward()
        assert out.shape == shape
        for t in (out, a.grad, b.grad):
            assert torch.isfinite(t).all()
        assert a.grad.shape == a.shape
        assert b.grad.shape == b.shape
    out = mxmoe.grouped_mm(x, w.mT, offs, bias=bias, recipe=recipe)
    if k == 0:  # nothing but the bias
        rows = bias.detach().to(BF16).repeat_interleave(m // groups, 0)
        assert_bitwise(out[: rows.shape[0]], rows, "bias")


# --- field reports on whole GEMMs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_blocks_through_a_gemm(backend):
    """Field report 2: a block of 2**-120 is exactly 2**-120, never NaN or 0."""
    x, w = torch.full((1, 32), 2.0**-120, device=DEVICE), torch.eye(32, device=DEVICE)[None]
    out = mxmoe.grouped_mm(x, w, ends([1]), recipe=MXRecipe(backend=backend))
    assert (out == 2.0**-120).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_group_sizes_that_are_no_multiples_of_32(backend):
    """Field report 9: sizes [1, 31, 33, 0], row 0 = 2**-10 beside rows of 448."""
    recipe = MXRecipe(backend=backend)
    sizes, n, k = [1, 31, 33, 0], 32, 64
    x = scaled_randn(65, k)
    x[0], x[1:32] = 2.0**-10, 448.0
    w, grad = scaled_randn(4, n, k, seed=1), torch.ones(65, n, device=DEVICE, dtype=BF16)
    out, dx, dw = step(x, w, ends(sizes), grad, recipe)
    # the same rows, every group padded by hand
    at, starts = [0, 32, 64, 128], [0, 1, 32, 65]
    padded, padded_grad = x.new_zeros(128, k), grad.new_zeros(128, n)
    for to, start, size in zip(at, starts, sizes, strict=True):
        padded[to : to + size], padded_grad[to : to + size] = x[start : start + size], grad[start : start + size]
    want, want_dx, want_dw = step(padded, w, ends([32, 32, 64, 0]), padded_grad, recipe)
    for to, start, size in zip(at, starts, sizes, strict=True):
        assert_bitwise(out[start : start + size], want[to : to + size], "out")
        assert_bitwise(dx[start : start + size], want_dx[to : to + size], "dx")
    assert_bitwise(dw, want_dw, "dw")
    assert (dw[0] == 2.0**-10).all()
    assert (dw[1] == 31 * 448.0).all()
    assert not dw[3].any()


@pytest.mark.parametrize(
    "recipe", [{}, {"save": "mxfp8"}, {"wgrad": "bf16"}, {"activations": "bf16"}, {"weight_block": (32, 32)}]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_the_last_group(backend, recipe):
    """Field report 15: NaN in x and in grad_out beyond offs[-1] = 64 of 96 rows; everything else bit-identical."""
    recipe = MXRecipe(backend=backend, **recipe)
    x, w, grad = scaled_randn(96, 64), scaled_randn(2, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    clean = step(x, w, ends([32, 32]), grad, recipe)
    x[64:], grad[64:] = NAN, NAN
    with poisoned():
        out, dx, dw = step(x, w, ends([32, 32]), grad, recipe)
    assert not out[64:].any()
    assert not dx[64:].any()
    for name, a, b in zip(("out", "dx", "dw"), (out, dx, dw), clean, strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("recipe", [{}, {"save": "mxfp8"}, {"wgrad": "bf16"}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_without_tokens(backend, recipe):
    """Field report 16: sizes [0, 32, 0, 64, 0] in poisoned memory."""
    x, w, grad = scaled_randn(96, 64), scaled_randn(5, 32, 64, seed=1), scaled_randn(96, 32, seed=2)
    with poisoned():
        _, dx, dw = step(x, w, ends([0, 32, 0, 64, 0]), grad, MXRecipe(backend=backend, **recipe))
    assert not dw[::2].any()
    assert dw[1::2].flatten(1).any(1).all()
    assert torch.isfinite(dw).all()
    assert torch.isfinite(dx).all()


def test_counts_in_the_place_of_ends(monkeypatch):
    """Field report 18: counts stay in bounds, and the debug check names the first of them."""
    x, w, counts = scaled_randn(96, 64), scaled_randn(3, 32, 64, seed=1), torch.tensor([40, 30, 26], device=DEVICE)
    assert torch.isfinite(mxmoe.grouped_mm(x, w.mT, counts)).all()
    monkeypatch.setenv("MXMOE_DEBUG", "1")
    with pytest.raises(ValueError, match=r"offs\[1\] = 30 is smaller than the end before it, 40 .*sizes.cumsum"):
        mxmoe.grouped_mm(x, w.mT, counts)


def test_evaluation_first_then_training():
    """Field report 19: with the same weights, under no_grad and in inference mode, also one side frozen."""
    x, w, offs = operands()
    grad = scaled_randn(96, 48, seed=2)
    want = step(x, w, offs, grad)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_bitwise(mxmoe.grouped_mm(x, w.mT, offs).clone(), want[0], "evaluation")
        out = mxmoe.grouped_mm(x, w.mT, offs)
        dx, dw = torch.autograd.grad(out, (x, w), grad)
        assert_bitwise(dx, want[1], "dx")
        assert_bitwise(dw, want[2], "dw")
    (dx,) = torch.autograd.grad(mxmoe.grouped_mm(x, w.detach().mT, offs), x, grad)
    (dw,) = torch.autograd.grad(mxmoe.grouped_mm(x.detach(), w.mT, offs), w, grad)
    assert_bitwise(dx, want[1], "dx")
    assert_bitwise(dw, want[2], "dw")
