"""Calls that cannot work say so, by the name of the argument and what to do; calls that look odd and are right work."""

from __future__ import annotations

import io
import re

import pytest
import torch
from cases import DEVICE, assert_bitwise, ends, scaled_randn
from torch.utils import _pytree as pytree

import mxmoe
from mxmoe import MXRecipe, checks, groups
from mxmoe.nn import routing
from mxmoe.ops.moe import experts

BF16 = torch.bfloat16


def operands(m=96, n=48, k=64, g=3, dtype=BF16):
    """x, w (G, K, N) as a view of the parameter, offs, bias."""
    x, w = scaled_randn(m, k, dtype=dtype), scaled_randn(g, n, k, dtype=dtype, seed=1)
    return x, w.mT, ends([m // g] * g), scaled_randn(g, n, dtype=dtype, seed=2)


def layer():
    """x, ids, weights, up, down of an expert layer."""
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]], device=DEVICE)
    return scaled_randn(4, 32), ids, torch.rand(4, 2, device=DEVICE), scaled_randn(3, 64, 32), scaled_randn(3, 32, 32)


# --- derivatives -----------------------------------------------------------------------------------------------------
def differentiable():
    """Every public function that takes a tensor with values: name -> (function of that tensor, the tensor)."""
    x, w, offs, bias = operands()
    a, b = mxmoe.quantize(x), mxmoe.quantize(w.mT).mT
    batch, rows = x.view(3, 32, 64), mxmoe.quantize(x, block="colwise", offs=offs)
    tokens, ids, weights, up, down = layer()
    found, module = routing.route(ids, 3), mxmoe.nn.Experts(3, 32, 32, dtype=BF16).to(DEVICE)
    sorted_rows = routing.permute(tokens, found)
    return {
        "grouped_mm x": (lambda t: mxmoe.grouped_mm(t, w, offs), x),
        "grouped_mm w": (lambda t: mxmoe.grouped_mm(x, t, offs), w),
        "grouped_mm bias": (lambda t: mxmoe.grouped_mm(x, w, offs, bias=t), bias),
        "grouped_mm 3-D": (lambda t: mxmoe.grouped_mm(t, w), batch),
        "grouped_mm 2-D": (lambda t: mxmoe.grouped_mm(t.t(), x, offs), x),
        "grouped_mm mirror": (lambda t: mxmoe.grouped_mm(t, x.t(), offs), w.mT),
        "grouped_mm MXTensor": (lambda t: mxmoe.grouped_mm(t, b, offs), x),
        "scaled_grouped_mm bias": (lambda t: mxmoe.scaled_grouped_mm(a, b, offs, bias=t), bias),
        "bf16_grouped_mm x": (lambda t: mxmoe.bf16_grouped_mm(t, w, offs), x),
        "bf16_grouped_mm w": (lambda t: mxmoe.bf16_grouped_mm(x, t, offs), w),
        "bf16_grouped_mm bias": (lambda t: mxmoe.bf16_grouped_mm(x, w, offs, bias=t), bias),
        "quantize": (lambda t: mxmoe.quantize(t).qdata.float(), x),
        "quantize_both": (lambda t: mxmoe.quantize_both(t)[1].qdata.float(), x),
        "dequantize": (lambda t: mxmoe.dequantize(rows) + t, x),
        "fake_quantize": (lambda t: mxmoe.fake_quantize(t), x),
        "permute": (lambda t: routing.permute(t, found), tokens),
        "combine rows": (lambda t: routing.combine(t, weights, found), sorted_rows),
        "combine weights": (lambda t: routing.combine(sorted_rows, t, found), weights),
        "experts x": (lambda t: experts(t, ids, weights, up, down), tokens),
        "experts weights": (lambda t: module(tokens, ids, t), weights),
        "experts up": (lambda t: experts(tokens, ids, weights, t, down), up),
    }


def refuses(name, match, fn, *args):
    """fn(*args) raises NotImplementedError with such a message; a failure prints the name."""
    try:
        fn(*args)
    except NotImplementedError as error:
        assert re.search(match, str(error)), f"{name}: {error}"  # noqa: PT017 (the name would be lost)
    else:
        pytest.fail(f"{name}: accepted")


def test_torch_func_grad_says_what_to_use():
    """torch's own text was about a staticmethod of an autograd.Function that no user wrote."""
    text = r"inside torch.func.grad .*use loss.backward\(\)"
    for name, (fn, t) in differentiable().items():
        grad = torch.func.grad(lambda v, fn=fn: fn(v).float().sum())
        refuses(name, text, grad, t)
        refuses(name, text, torch.func.vmap(grad), t[None])
        refuses(name, text, torch.func.grad(lambda v, fn=fn: torch.func.vmap(fn)(v).float().sum()), t[None])


def test_a_tangent_is_refused():
    """It was dropped without a word."""
    for name, (fn, t) in differentiable().items():
        if name != "dequantize":
            refuses(name, "has a tangent: .* reverse-mode", torch.func.jvp, fn, (t,), (torch.ones_like(t),))


def test_no_tangent_no_complaint():
    x, w, offs, _ = operands()
    with torch.autograd.forward_ad.dual_level():
        assert_bitwise(mxmoe.grouped_mm(x, w, offs), mxmoe.grouped_mm(x, w, offs), "under a dual level")


def test_vmap_runs_the_entries_one_by_one():
    x, w, offs, _ = operands(m=33, n=32)
    many = torch.stack([x, -2 * x])
    out = torch.func.vmap(lambda t: mxmoe.grouped_mm(t, w, offs))(many)
    for i in range(2):
        assert_bitwise(out[i], mxmoe.grouped_mm(many[i], w, offs), f"entry {i}")


def test_functional_call_with_backward():
    """What the message of torch.func.grad points to."""
    module = mxmoe.nn.Experts(3, 32, 32, dtype=BF16).to(DEVICE)
    x, ids, weights, _, _ = layer()
    params = {k: v.detach().clone().requires_grad_() for k, v in module.named_parameters()}
    torch.func.functional_call(module, params, (x, ids, weights)).float().sum().backward()
    module(x, ids, weights).float().sum().backward()
    for name, p in module.named_parameters():
        assert_bitwise(params[name].grad, p.grad, name)


@pytest.mark.parametrize(
    "fn",
    [lambda t: mxmoe.quantize(t).qdata, lambda t: mxmoe.quantize(t, block="square").qdata,
     lambda t: mxmoe.quantize_both(t)[1].qdata, lambda t: mxmoe.dequantize(mxmoe.quantize(t)), mxmoe.fake_quantize],
)  # fmt: skip
def test_no_gradient_says_what_to_do_instead(fn):
    """torch's own text tells the user to register a formula."""
    x = scaled_randn(64, 64).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"has no gradient: .*x.detach\(\)"):
        fn(x).float().sum().backward()


def test_no_second_derivative():
    x, w, offs, _ = operands()
    tokens, ids, weights, up, down = layer()
    for fn, t in (
        (lambda t: mxmoe.grouped_mm(t, w, offs), x),
        (lambda t: mxmoe.grouped_mm(t.t(), x, offs), x),
        (lambda t: mxmoe.bf16_grouped_mm(t, w, offs), x),
        (lambda t: experts(t, ids, weights, up, down), tokens),
    ):
        leaf = t.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(fn(leaf).float().square().sum(), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="has no gradient: there are first derivatives only"):
            grad.float().sum().backward()


# --- offs ------------------------------------------------------------------------------------------------------------
BEYOND = [2**32 + 32, 2**31, 2**40, -(2**32) + 32, 2**62]


def takes_offs():
    """Every public function that takes offs: name -> function of it."""
    x, w, _, _ = operands(g=2)
    square, scale = scaled_randn(96, 96), torch.zeros(96, 96, dtype=torch.uint8, device=DEVICE)
    m_groups = mxmoe.to_blocked_m_groups(scale, ends([96, 0]))
    k_groups = mxmoe.to_blocked_k_groups(scale, ends([96, 0]))
    return {
        "grouped_mm": lambda offs: mxmoe.grouped_mm(x, w, offs),
        "grouped_mm 2-D": lambda offs: mxmoe.grouped_mm(x.t(), x, offs),
        "grouped_mm mirror": lambda offs: mxmoe.grouped_mm(scaled_randn(2, 8, 64), x.t(), offs),
        "bf16_grouped_mm": lambda offs: mxmoe.bf16_grouped_mm(x, w, offs),
        "bf16_grouped_mm 2-D": lambda offs: mxmoe.bf16_grouped_mm(x.t(), x, offs),
        "bf16_grouped_mm mirror": lambda offs: mxmoe.bf16_grouped_mm(scaled_randn(2, 8, 64), x.t(), offs),
        "fake_quantize": lambda offs: mxmoe.fake_quantize(x, block="colwise", offs=offs),
        "quantize": lambda offs: mxmoe.dequantize(mxmoe.quantize(x, block="colwise", offs=offs)),
        "quantize_both": lambda offs: mxmoe.dequantize(mxmoe.quantize_both(square, offs=offs)[1]),
        "to_blocked_m_groups": lambda offs: mxmoe.to_blocked_m_groups(scale, offs),
        "to_blocked_k_groups": lambda offs: mxmoe.to_blocked_k_groups(scale, offs),
        "from_blocked_m_groups": lambda offs: mxmoe.from_blocked_m_groups(m_groups, offs, 96, 96),
        "from_blocked_k_groups": lambda offs: mxmoe.from_blocked_k_groups(k_groups, offs, 96, 96),
    }


def test_ends_beyond_int32(monkeypatch):
    """2**32 + 32 became the valid end 32. It is clamped like any end beyond M, and the debug check prints it."""

    def two(end):
        return torch.tensor([end, 96], device=DEVICE)

    for name, fn in takes_offs().items():
        for end in BEYOND:
            assert_bitwise(fn(two(end)), fn(two(max(0, min(end, 96))).int()), f"{name} {end}")
    monkeypatch.setenv("MXMOE_DEBUG", "1")
    for name, fn in takes_offs().items():
        for end in BEYOND if not name.startswith("from_") else ():
            with pytest.raises(ValueError, match=rf"offs\[0\] = {end} (lies beyond|is smaller)"):
                fn(two(end))


def test_ends_beyond_int32_alone():
    wide = torch.tensor([5, 2**32 + 3, -(2**33)], device=DEVICE)
    assert checks.offs(wide, "offs", wide.device).tolist() == [5, 2**31 - 1, 0]
    assert groups.safe_ends(wide, 96).tolist() == [5, 96, 96]


# --- recipe ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key",
    ["garbage", "", "scale_mode", "scale_mode=odd", "elem_dtype=int8", "weight_block=32", "weight_block=axb",
     "weight_block=1x32x1", "scale_mode=floor,scale_mode=ceil", "save=mxfp8,wgrad=bf16", MXRecipe().key + ","],
)  # fmt: skip
def test_a_key_that_is_none(key):
    with pytest.raises(ValueError, match="not the key of an MXRecipe: .*elem_dtype=float8_e4m3fn,") as error:
        MXRecipe.from_key(key)
    assert repr(key) in str(error.value)


def test_keys():
    with pytest.raises(TypeError, match="is text, got int"):
        MXRecipe.from_key(5)
    assert MXRecipe.from_key("scale_mode=floor") == MXRecipe(scale_mode="floor")
    recipe = MXRecipe(weight_block=(32, 32), grad_elem_dtype=torch.float8_e5m2, save="mxfp8")
    assert MXRecipe.from_key(recipe.key) == recipe


# --- operands --------------------------------------------------------------------------------------------------------
def test_dtensors_are_named():
    """offs, scales and expert ids as DTensors ended in torch's "mixed torch.Tensor and DTensor"."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    dist = torch.distributed
    if dist.is_initialized():
        pytest.skip("a process group of another test is there")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.DeviceMesh("cpu", [0])
        x, w, offs, bias = (t.cpu() for t in operands())
        ids, scale = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(96, 2, dtype=torch.uint8)

        def spread(t):
            return distributed.distribute_tensor(t, mesh, [distributed.Replicate()])

        for name, fn in {
            "x": lambda: mxmoe.grouped_mm(spread(x), w, offs),
            "w": lambda: mxmoe.bf16_grouped_mm(x, spread(w), offs),
            "bias": lambda: mxmoe.grouped_mm(x, w, offs, bias=spread(bias)),
            "offs": lambda: mxmoe.grouped_mm(x, w, spread(offs)),
            "scale": lambda: mxmoe.to_blocked_m_groups(spread(scale), offs),
            "blocked": lambda: mxmoe.from_blocked(spread(mxmoe.to_blocked(scale)), 96, 2),
            "top_k_index": lambda: routing.route(spread(ids), 3),
        }.items():
            with pytest.raises(TypeError, match=rf"{name} is a DTensor .* pass {name}.to_local\(\)"):
                fn()
    finally:
        dist.destroy_process_group()


def test_a_dtype_is_no_device():
    with pytest.raises(TypeError, match=r"takes a device, got torch.float32: mxmoe.dequantize"):
        mxmoe.quantize(scaled_randn(32, 32)).to(torch.float32)


def test_experts_want_a_recipe():
    with pytest.raises(TypeError, match="recipe must be an mxmoe.MXRecipe, got str"):
        mxmoe.nn.Experts(3, 32, 32, recipe="mxfp8")


def test_rows_that_are_not_those_of_the_routing():
    """A kernel would read beyond the end of them; on a CPU it was an index error of torch's."""
    x, ids, weights, _, _ = layer()
    found = routing.route(ids, 3)
    rows = routing.permute(x, found)
    for fn, error, match in (
        (lambda: routing.permute(x[:3], found), ValueError, r"x must be \(T, H\) with T = 4, got shape \(3, 32\)"),
        (lambda: routing.permute(x[None], found), ValueError, "x must be 2-D"),
        (lambda: routing.permute(x.to("meta"), found), ValueError, "x is on meta, the routing is on"),
        (lambda: routing.combine(x, weights, found), ValueError, r"rows must be \(M, H\) with M = 8"),
        (lambda: routing.combine(rows, weights[:3], found), ValueError, r"top_k_weights must be \(T, k\) = \(4, 2\)"),
        (lambda: routing.combine(rows, ids, found), TypeError, "top_k_weights must be floating, got int64"),
        (lambda: routing.route(ids.float(), 3), TypeError, "top_k_index must be int64 or int32, got float32"),
        (lambda: routing.route(ids[0], 3), ValueError, r"top_k_index must be \(T, k\), got shape \(2,\)"),
        (lambda: routing.route(ids, 3.0), TypeError, "num_experts must be an int, got float"),
    ):
        with pytest.raises(error, match=match):
            fn()


def test_experts_name_what_does_not_fit():
    """Float ids were taken; ids elsewhere than the tokens gave the kernel a pointer of another device."""
    module = mxmoe.nn.Experts(3, 32, 32, dtype=BF16).to(DEVICE)
    x, ids, weights, _, _ = layer()

    class InSteps(mxmoe.nn.Experts):
        def _grouped_mm(self, x, w, offs, bias):
            return super()._grouped_mm(x, w, offs, bias)

    for experts_module in (module, InSteps(3, 32, 32, dtype=BF16).to(DEVICE)):
        for args, error, match in (
            ((x, ids.float(), weights), TypeError, "top_k_index must be int64 or int32, got float32"),
            ((x, ids.to("meta"), weights), ValueError, "top_k_index is on meta, the tokens are on"),
            ((x, ids, weights.to("meta")), ValueError, "top_k_weights are on meta"),
            ((x, ids[:3], weights), ValueError, r"top_k_index must be \(T, k\) with T = 4"),
            ((x, ids.tolist(), weights), TypeError, "top_k_index must be an int64 or int32 tensor, got list"),
            ((x[None], ids, weights), ValueError, "x must be 2-D"),
        ):
            with pytest.raises(error, match=match):
                experts_module(*args)


# --- MXTensor as a pytree --------------------------------------------------------------------------------------------
def mx_tensors():
    x, _, offs, _ = operands()
    return [
        mxmoe.quantize(x),
        mxmoe.quantize(x.view(3, 32, 64), layout="blocked").mT,
        mxmoe.quantize(x, block="colwise", offs=offs, elem_dtype=torch.float8_e5m2),
        mxmoe.quantize(x.float(), block="square"),
    ]


def test_every_leaf_is_a_tensor():
    """None among the leaves broke tree_map(lambda t: t.clone(), ...)."""
    for t in mx_tensors():
        copy = pytree.tree_map(lambda leaf: leaf.clone(), t)
        assert_bitwise(mxmoe.dequantize(copy), mxmoe.dequantize(t), repr(t))
        leaves, spec = pytree.tree_flatten(t)
        again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
        fields = ("block", "layout", "shape", "orig_dtype", "k_groups", "elem_dtype")
        assert [getattr(again, f) for f in fields] == [getattr(t, f) for f in fields]
        assert (again.offs is None) == (t.offs is None)
        keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(t)[0]]
        assert keys[:2] == [".qdata", ".scale"]


def saves_e8m0():
    """torch 2.11 has no code for e8m0 in saved programs, 2.13 has."""
    from torch._export.serde import serialize

    return torch.float8_e8m0fnu in serialize._TORCH_TO_SERIALIZE_DTYPE


@pytest.mark.skipif(not saves_e8m0(), reason="this torch cannot save exported programs with e8m0 tensors")
def test_export_with_quantized_weights():
    class Layer(torch.nn.Module):
        def forward(self, x, w, offs):
            return mxmoe.grouped_mm(x, w.mT, offs)

    x, w, offs, _ = operands()
    args = (x, mxmoe.quantize(w.mT), offs)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Layer(), args), file)
    file.seek(0)
    assert_bitwise(torch.export.load(file).module()(*args), Layer()(*args), "exported")


# --- models ----------------------------------------------------------------------------------------------------------
def test_models_that_are_quantized_already():
    """convert() said that there were no experts; the second report that 0 B had become 0 B."""
    tiny_models = pytest.importorskip("tiny_models")
    model = tiny_models.tiny("qwen3_moe", dtype=BF16)
    mxmoe.quantize_experts(model, progress=False)
    again = str(mxmoe.quantize_experts(model, progress=False))
    assert "2 expert modules were MXFP8 before: nothing was quantized" in again
    assert "0 B" not in again
    with pytest.raises(ValueError, match="mlp.experts: .* holds 8-bit weights already: load the model in bf16"):
        mxmoe.convert(model)


def test_what_is_no_model_no_folder_no_recipe(tmp_path):
    pytest.importorskip("transformers")
    from mxmoe.integrations import huggingface

    (tmp_path / "file").write_text("")
    for fn, error, match in (
        (
            lambda: mxmoe.save_checkpoint(None, tmp_path / "a"),
            TypeError,
            r"save_checkpoint\(\) takes a torch.nn.Module",
        ),
        (
            lambda: mxmoe.load_checkpoint(None, tmp_path / "a"),
            TypeError,
            r"load_checkpoint\(\) takes a torch.nn.Module",
        ),
        (lambda: mxmoe.load_checkpoint(torch.nn.Linear(1, 1), tmp_path / "file"), ValueError, "config.json is missing"),
        (lambda: huggingface.register("mxmoe-str", recipe="mxfp8"), TypeError, "must be an mxmoe.MXRecipe, got str"),
    ):
        with pytest.raises(error, match=match):
            fn()
