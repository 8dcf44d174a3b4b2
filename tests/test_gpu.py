"""What only a GPU can show: no host sync, CUDA graphs, no recompilation, indices beyond 2^31, backends that agree."""

from __future__ import annotations

import pytest
import torch
from cases import GROUP_CASES, assert_bitwise, ends, poisoned, scaled_randn

import mxmoe
from mxmoe import MXRecipe
from mxmoe.nn.mx_experts import ServingWeight, mx_experts_forward
from mxmoe.ops import moe
from mxmoe.reference import blocked as ref_blocked
from mxmoe.reference import quantize as ref

pytestmark = pytest.mark.gpu
RECIPES = {
    "default": MXRecipe(),
    "save": MXRecipe(save="mxfp8"),
    "square": MXRecipe(weight_block=(32, 32)),
    "weight_only": MXRecipe(activations="bf16"),
    "wgrad": MXRecipe(wgrad="bf16"),
}
RECIPE_CASES = [pytest.param(r, id=name) for name, r in RECIPES.items()]


def step(x, w, offs, grad, recipe, bias=None):
    out = mxmoe.grouped_mm(x, w.transpose(-2, -1), offs, bias=bias, recipe=recipe)
    inputs = (x, w) if bias is None else (x, w, bias)
    return out, *torch.autograd.grad(out, inputs, grad)


def make(m, g, n, k, seed=0):
    x, w = scaled_randn(m, k, seed=seed).requires_grad_(), scaled_randn(g, n, k, seed=seed + 1).requires_grad_()
    return x, w, scaled_randn(m, n, seed=seed + 2)


@pytest.mark.parametrize("recipe", RECIPE_CASES)
def test_no_host_sync(recipe):
    x, w, grad = make(200, 3, 96, 160)
    bias = torch.randn(3, 96, device="cuda", requires_grad=True)
    offs = ends([70, 0, 100])
    step(x, w, offs, grad, recipe, bias)  # compile first
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, w, offs, grad, recipe, bias)
        step(x, w, offs.long(), grad, recipe, bias)
        for layout in ("plain", "blocked"):
            row, col = mxmoe.quantize_both(x.detach(), offs=offs, layout=layout)
            mxmoe.dequantize(row), mxmoe.dequantize(col)
        mxmoe.scaled_grouped_mm(row, mxmoe.quantize(w.detach()).mT, offs)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("recipe", RECIPE_CASES)
def test_cuda_graph_replay_with_new_offs(recipe):
    """Forward and backward captured once; new offs, x and grad in the same buffers give the new results."""
    x, w, grad = make(200, 4, 64, 96)
    offs = ends([50, 0, 100, 30])
    step(x, w, offs, grad, recipe)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x, w, offs, grad, recipe)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, w, offs, grad, recipe)
    for i, sizes in enumerate(([1, 31, 33, 135], [0, 0, 0, 0], [0, 200, 0, 0], [50, 50, 50, 50])):
        offs.copy_(ends(sizes))
        with torch.no_grad():
            x.copy_(scaled_randn(200, 96, seed=10 + i))
            grad.copy_(scaled_randn(200, 64, seed=20 + i))
        graph.replay()
        want = step(x, w, offs, grad, recipe)
        for name, a, b in zip(("out", "dx", "dw"), captured, want, strict=True):
            assert_bitwise(a.detach(), b.detach(), f"{sizes} {name}")


def compiled_kernels():
    """Every compiled variant of every Triton kernel in memory, by name."""
    import gc

    from triton.runtime.jit import JITFunction

    found = {}
    for f in gc.get_objects():
        if isinstance(f, JITFunction):
            for entry in f.device_caches.values():
                found.update({(f.__name__, key): None for key in entry[0]})
    return found


def test_kernels_compile_once_for_every_token_count():
    """Field report 26: M = 64, 65, 66, 128 and new group sizes compile nothing new."""
    recipe = RECIPES["save"]
    for m in (96, 97, 4096, 4097):  # both alignments of a row count; few and many rows per group
        x, w, grad = make(m, 2, 64, 96)
        step(x, w, ends([m // 2, m - m // 2]), grad, recipe)
    before = compiled_kernels()
    for m in (64, 65, 66, 128, 1000, 1001):
        x, w, grad = make(m, 2, 64, 96)
        step(x, w, ends([m // 3, m - m // 3]), grad, recipe)
    new = [f"{name}: {key}"[:300] for name, key in compiled_kernels() if (name, key) not in before]
    assert not new, new


@pytest.mark.parametrize("groups", [1, 6, 33, 60, 384, 512])
def test_any_group_count(groups):
    """Field report 13."""
    sizes = [(7 * i) % 5 for i in range(groups)]
    m = sum(sizes) + 3
    x, w, grad = make(m, groups, 32, 64)
    offs = ends(sizes)
    with poisoned():
        got = step(x, w, offs, grad, MXRecipe())
    want = step(x, w, offs, grad, MXRecipe(backend="reference"))
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).norm() <= 2**-8 * b.float().norm() + 1e-30


@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("backend", ["dequant", "triton"])
def test_backends_agree(sizes, backend):
    """Same bytes in, so results differ by accumulation order only: error at most that of one bf16 rounding."""
    m = sum(sizes) + 19
    x, w, grad = make(m, len(sizes), 96, 160)
    offs = ends(sizes)
    with torch.no_grad():
        x[sum(sizes) :] = float("nan")
        grad[sum(sizes) :] = float("nan")
    with poisoned():
        got = step(x, w, offs, grad, MXRecipe(backend=backend))
    want = step(x, w, offs, grad, MXRecipe(backend="reference"))
    for name, a, b in zip(("out", "dx", "dw"), got, want, strict=True):
        assert torch.isfinite(a).all(), name
        assert (a.float() - b.float()).norm() <= 2**-8 * b.float().norm(), name
    assert not got[0][sum(sizes) :].any()
    assert not got[1][sum(sizes) :].any()
    for g, size in enumerate(sizes):
        if size == 0:
            assert not got[2][g].any()


@pytest.mark.parametrize("activations", ["mxfp8", "bf16"])
@pytest.mark.parametrize("sizes", [[1], [3, 0, 8, 1], [0, 0, 40], [33, 200, 7, 0]])
def test_few_tokens_against_quantized_weights(activations, sizes):
    """grouped_mm hands them to the decode kernel and says so; once, again (with facts remembered), and in a graph."""
    m = sum(sizes) + 5
    x, w, _ = make(m, len(sizes), 96, 160)
    x, w = x.detach(), w.detach()
    x[sum(sizes) :] = float("nan")
    offs, bias = ends(sizes), torch.randn(len(sizes), 96, device="cuda")
    recipe = MXRecipe(activations=activations)
    t = mxmoe.quantize(w)
    want = mxmoe.grouped_mm(x, t.mT, offs, bias=bias, recipe=recipe.replace(backend="reference"))
    for _ in range(3):
        with poisoned(), mxmoe.observe() as log:
            got = mxmoe.grouped_mm(x, t.mT, offs, bias=bias, recipe=recipe)
        assert log[0].backend == "triton" and "decode" in log[0].reason
        assert mxmoe.explain(x, t.mT, offs, recipe=recipe).reason == log[0].reason
        assert (got.float() - want.float()).norm() <= 2**-8 * want.float().norm()
        assert not got[sum(sizes) :].any()


def test_native_does_not_touch_this_gpu():
    if torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("this GPU has MXFP8 tensor cores")
    x, w, _ = make(64, 2, 64, 64)
    with pytest.raises(RuntimeError, match="sm_100"):
        mxmoe.grouped_mm(x, w.mT, ends([32, 32]), recipe=MXRecipe(backend="native"))
    torch.cuda.synchronize()


def test_float16_and_float32():
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(130, 96, device="cuda", dtype=dtype, requires_grad=True)
        w = torch.randn(3, 64, 96, device="cuda", dtype=dtype, requires_grad=True)
        grad = torch.randn(130, 64, device="cuda", dtype=dtype)
        offs = ends([60, 0, 70])
        got = step(x, w, offs, grad, MXRecipe())
        want = step(x, w, offs, grad, MXRecipe(backend="reference"))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype
            assert (a - b).norm() <= 2**-10 * b.norm()


# --- field reports in poisoned memory ---------------------------------------------------------------------------------
BACKENDS = ("dequant", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_expert(backend):
    """Field report 6: a NaN row of expert 0 leaves no bit of expert 1 changed, and shows in its own gradients."""
    x, w, grad = (t.detach() for t in make(64, 2, 96, 160))
    offs, recipe = ends([32, 32]), MXRecipe(backend=backend)

    def run(x, grad):
        with poisoned():
            return step(x.clone().requires_grad_(), w.clone().requires_grad_(), offs, grad, recipe)

    clean = run(x, grad)
    bad = x.clone()
    bad[0] = float("nan")
    out, dx, dw = run(bad, grad)
    assert_bitwise(out[1:].detach(), clean[0][1:].detach(), "out")
    assert_bitwise(dx, clean[1], "dx")
    assert_bitwise(dw[1], clean[2][1], "dw")
    assert out[0].isnan().all()
    assert dw[0].isnan().all()
    bad = grad.clone()
    bad[3, 5] = float("nan")
    _, dx, dw = run(x, bad)
    assert dx[3].isnan().all()
    assert dw[0, 5].isnan().all()
    assert_bitwise(dx[4:], clean[1][4:], "dx")
    assert_bitwise(dw[1], clean[2][1], "dw")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ungrouped_and_grouped_rounding_agree(backend):
    """Field report 9: sizes [1, 31, 33, 0], row 0 = 2**-10 beside rows of 448: dW[0] has a scale of its own."""
    x, w, _ = (t.detach() for t in make(65, 4, 32, 64))
    x[0], x[1:32] = 2.0**-10, 448.0
    grad = torch.ones(65, 32, device="cuda", dtype=torch.bfloat16)
    recipe = MXRecipe(backend=backend)
    with poisoned():
        out, dx, dw = step(x.requires_grad_(), w.requires_grad_(), ends([1, 31, 33, 0]), grad, recipe)
    assert (dw[0] == 2.0**-10).all()
    assert (dw[1] == 31 * 448.0).all()
    assert not dw[3].any()
    start = 0
    for g, size in enumerate([1, 31, 33]):  # every group by itself
        rows = slice(start, start + size)
        own = [t.detach().clone().requires_grad_() for t in (x[rows], w[g : g + 1])]
        want = step(*own, ends([size]), grad[rows], recipe)
        for name, a, b in zip(("out", "dx", "dw"), (out[rows], dx[rows], dw[g : g + 1]), want, strict=True):
            assert (a.float() - b.float()).norm() <= 2**-8 * b.float().norm(), f"{name} of group {g}"
        start += size


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_on_this_rank(backend):
    """Field report 14: an output with a grad_fn, gradients of full shape that are zero."""
    x = torch.zeros(0, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = scaled_randn(3, 32, 64).requires_grad_()
    with poisoned():
        out = mxmoe.grouped_mm(x, w.mT, ends([0, 0, 0]), recipe=MXRecipe(backend=backend))
        assert out.shape == (0, 32)
        assert out.grad_fn is not None
        out.sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    assert not w.grad.any()


@pytest.mark.parametrize("recipe", RECIPE_CASES)
def test_tail_and_empty_experts_in_every_recipe(recipe):
    """Field reports 15 and 16: NaN beyond offs[-1] changes no bit; experts without tokens have gradients of zeros."""
    sizes = [0, 32, 0, 33, 0]
    x, w, grad = (t.detach() for t in make(96, 5, 96, 160))
    results = []
    for fill in (0.0, float("nan")):
        x[65:], grad[65:] = fill, fill
        with poisoned():
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            results.append([t.detach() for t in step(*leaves, ends(sizes), grad, recipe)])
    for name, a, b in zip(("out", "dx", "dw"), *results, strict=True):
        assert torch.isfinite(b).all(), name
        assert_bitwise(a, b, name)
    out, dx, dw = results[1]
    assert not out[65:].any()
    assert not dx[65:].any()
    assert not dw[::2].any()


@pytest.mark.parametrize("offs", [[40, 30, 26], [-5, 1000, 7], [10, 2**31 - 1, 20], [-1, -1, -1]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_offs_that_are_no_ends(backend, offs):
    """Field report 18: made safe as the reference does, nothing is read or written out of bounds."""
    x, w, grad = (t.detach() for t in make(96, 3, 32, 64))
    ends_of = torch.tensor(offs, dtype=torch.int32, device="cuda")
    safe = ends_of.clamp(0, 96).cummax(0).values.to(torch.int32)
    results = []
    for o in (ends_of, safe):
        with poisoned():
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            results.append([t.detach() for t in step(*leaves, o, grad, MXRecipe(backend=backend))])
    torch.cuda.synchronize()
    for name, a, b in zip(("out", "dx", "dw"), *results, strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_gradients_that_are_asked_for(backend):
    """Field report 19: one side frozen, evaluation first: the same bits, and no GEMM for the frozen side."""
    x, w, grad = make(70, 3, 96, 160)
    offs, recipe = ends([33, 0, 30]), MXRecipe(backend=backend)
    want = step(x, w, offs, grad, recipe)
    with torch.no_grad(), poisoned():
        assert_bitwise(mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe), want[0].detach(), "evaluation")
    for i, op in ((0, "dgrad"), (1, "wgrad")):
        leaves = [t.detach() for t in (x, w)]
        leaves[i].requires_grad_()
        with poisoned(), mxmoe.observe() as log:
            out = mxmoe.grouped_mm(leaves[0], leaves[1].mT, offs, recipe=recipe)
            (got,) = torch.autograd.grad(out, leaves[i], grad)
        assert [g.op for g in log] == ["fprop", op]
        assert_bitwise(got, want[1 + i], op)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_of_the_right_group(backend):
    """Field report 20: G == M == N, where a plain broadcast succeeds; empty groups, tail rows."""
    sizes = [0, 3, 0, 2, 1, 0, 0, 0]
    x, w = torch.zeros(8, 32, device="cuda", dtype=torch.bfloat16), scaled_randn(8, 8, 32)
    x[6:] = float("nan")
    bias = torch.randint(-9, 9, (8, 8), device="cuda").float().requires_grad_()
    with poisoned():
        out = mxmoe.grouped_mm(x, w.mT, ends(sizes), bias=bias, recipe=MXRecipe(backend=backend))
        (d_bias,) = torch.autograd.grad(out, bias, torch.ones_like(out))
    assert torch.equal(out[:6].float(), bias[[1, 1, 1, 3, 3, 4]])
    assert not out[6:].any()
    assert torch.equal(d_bias, torch.tensor(sizes, device="cuda").float()[:, None].expand(8, 8))


@pytest.mark.parametrize("save", ["bf16", "mxfp8"])
def test_opcheck_of_odd_shapes(save):
    """Field report 21: M = 65, G = 3, K = 96, odd N: fake and real outputs have the same strides."""
    x, w = scaled_randn(65, 96).requires_grad_(), scaled_randn(3, 33, 96).requires_grad_()
    key = MXRecipe(save=save).key
    args = (x, None, w, None, ends([20, 0, 40]), None, torch.bfloat16, key, True, True)
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.mxmoe.grouped_mm_m_groups, args, test_utils=utils)


@pytest.mark.parametrize("recipe", [RECIPES["default"], RECIPES["save"], RECIPES["weight_only"]], ids=str)
def test_expert_layer_in_poisoned_memory(recipe):
    """Field reports 6, 14, 16 of the whole layer: a NaN token, an expert without tokens, no tokens, other ranks."""
    x, weights = scaled_randn(7, 64), torch.rand(7, 2, device="cuda")
    up, down = scaled_randn(5, 128, 64, seed=1) / 64, scaled_randn(5, 64, 64, seed=2) / 64
    grad = scaled_randn(7, 64, seed=3)
    ids = torch.tensor([[0, 2]] * 3 + [[3, 4]] * 4, device="cuda")  # expert 1 has none

    def run(x, ids, weights, grad):
        leaves = [t.clone().requires_grad_() for t in (x, weights, up, down)]
        with poisoned():
            out = moe.experts(leaves[0], ids, *leaves[1:], recipe=recipe)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    clean = run(x, ids, weights, grad)
    for t in clean:
        assert torch.isfinite(t).all()
    assert not clean[3][1].any()
    assert not clean[4][1].any()
    bad = x.clone()
    bad[0] = float("nan")
    out, dx, _, d_up, d_down = run(bad, ids, weights, grad)
    assert out[0].isnan().all()
    assert d_up[0].isnan().any()
    for a, b in ((out[1:], clean[0][1:]), (dx[1:], clean[1][1:]), (d_up[3:], clean[3][3:]), (d_down[3:], clean[4][3:])):
        assert_bitwise(a, b)
    for nothing in (run(x[:0], ids[:0], weights[:0], grad[:0]), run(x, torch.full_like(ids, 5), weights, grad)):
        for t in nothing:
            assert not t.any()


def test_serving_layer_takes_tokens_of_any_strides():
    """Tokens that are copied first: the copy is complete before a kernel that starts early reads it."""
    up, down = (
        ServingWeight.of(mxmoe.quantize(torch.randn(16, n, k, device="cuda") / k**0.5))
        for n, k in ((1024, 1024), (1024, 512))
    )
    ids, weights = torch.randint(0, 17, (200, 4), device="cuda"), torch.rand(200, 4, device="cuda")
    for seed in range(20):
        x = scaled_randn(200, 1024, seed=seed)
        odd = torch.full((200 * 1024 + 1,), float("nan"), device="cuda", dtype=x.dtype)[1:].view(200, 1024).copy_(x)
        results = []
        for t in (x, x.t().contiguous().t(), odd):
            with poisoned():
                results.append(
                    mx_experts_forward(t, ids, weights, up, down, num_experts=16, activate=None, recipe=MXRecipe())
                )
        assert_bitwise(results[1], results[0], "transposed")
        assert_bitwise(results[2], results[0], "at an odd address")


# --- beyond 2^31 elements (field report 12) --------------------------------------------------------------------------
def test_rowwise_beyond_int32():
    x = torch.zeros(524289, 4096, device="cuda", dtype=torch.bfloat16)
    x[-32:] = scaled_randn(32, 4096)
    t = mxmoe.quantize(x)
    want = ref.quantize_rowwise(x[-32:], None, False, torch.float8_e4m3fn, "rceil")
    assert_bitwise(t.qdata[-32:], want[0])
    assert_bitwise(t.scale_bytes[-32:], want[1])
    assert not t.qdata.view(torch.uint8)[:64].any()
    y = mxmoe.fake_quantize(x)
    assert_bitwise(y[-32:], mxmoe.dequantize(t)[-32:])


def test_weights_beyond_int32():
    w = torch.zeros(257, 2048, 4096, device="cuda", dtype=torch.bfloat16)
    w[-1] = scaled_randn(2048, 4096)
    row, col = mxmoe.quantize_both(w)
    q, s = ref.quantize_rowwise(w[-1], None, False, torch.float8_e4m3fn, "rceil")
    assert_bitwise(row.qdata[-1], q)
    assert_bitwise(row.scale_bytes[-1], s)
    q, s, _ = ref.quantize_colwise(w[-1], None, False, torch.float8_e4m3fn, "rceil")
    assert_bitwise(col.qdata[-1], q)
    assert_bitwise(col.scale_bytes[-1], s)
    x = scaled_randn(64, 4096)
    offs = torch.zeros(257, dtype=torch.int32, device="cuda")
    offs[-1] = 64
    out = mxmoe.grouped_mm(x, w.mT, offs)
    want = mxmoe.grouped_mm(x, w[-1:].mT, ends([64]))
    assert_bitwise(out, want)


def test_colwise_groups_beyond_int32():
    x = torch.zeros(524289, 4096, device="cuda", dtype=torch.bfloat16)
    x[-40:] = scaled_randn(40, 4096)
    offs = torch.tensor([524249, 524289], dtype=torch.int32, device="cuda")
    t = mxmoe.quantize(x, block="colwise", offs=offs)
    q, s, _ = ref.quantize_colwise(x[-40:], None, False, torch.float8_e4m3fn, "rceil")
    start, end = t.offs.tolist()
    assert_bitwise(t.qdata[start : start + 40], q)
    assert_bitwise(t.scale_bytes[start // 32 : end // 32], s)


def test_long_scale_layout_beyond_int32():
    scale = torch.randint(0, 255, (1 << 21, 1028), dtype=torch.uint8, device="cuda")  # 2.2e9 bytes
    offs = torch.tensor([1 << 20, 1 << 21], dtype=torch.int32, device="cuda")
    blocked = mxmoe.to_blocked_m_groups(scale, offs)
    last = ref_blocked.to_blocked(scale[-128:])
    assert_bitwise(blocked[(1 << 21) - 128 : 1 << 21], last)
    assert_bitwise(mxmoe.from_blocked_m_groups(blocked, offs, *scale.shape), scale)


# --- compile ---------------------------------------------------------------------------------------------------------
def test_compile_inductor_on_the_gpu():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def f(x, w1, w2, offs):
        h = torch.nn.functional.silu(mxmoe.grouped_mm(x, w1.transpose(-2, -1), offs))
        return mxmoe.grouped_mm(h, w2.transpose(-2, -1), offs)

    compiled = torch.compile(f, fullgraph=True, backend=counter, dynamic=True)
    w1, w2 = scaled_randn(3, 80, 96).requires_grad_(), scaled_randn(3, 96, 80, seed=1).requires_grad_()
    for m in (64, 65, 66, 128):  # none equals another dim: equal sizes would share one symbol
        x, offs = scaled_randn(m, 96, seed=m).requires_grad_(), ends([m // 2, 0, m - m // 2])
        want = f(x, w1, w2, offs)
        grad = scaled_randn(m, 96, seed=3)
        want_grads = torch.autograd.grad(want, (x, w1, w2), grad)
        got = compiled(x, w1, w2, offs)
        got_grads = torch.autograd.grad(got, (x, w1, w2), grad)
        for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
            assert (a.float() - b.float()).norm() <= 2**-5 * b.float().norm()
    assert counter.frame_count == 1
