"""Grouped GEMM kernels: bf16 and MXFP8, M groups and K groups, and the zeroing of what a GEMM leaves unwritten."""

from __future__ import annotations

import pytest
import torch
from cases import (
    DEVICE,
    E4M3,
    E5M2,
    GROUP_CASES,
    GROUPS,
    assert_accumulation,
    assert_bitwise,
    ends,
    poisoned,
    scaled_randn,
)

import mxmoe
from mxmoe.kernels import _gemm, bf16_grouped_mm, mx_grouped_mm, zero_tail
from mxmoe.kernels._gemm import Config
from mxmoe.kernels.bf16_grouped_mm import bf16_mm_k_groups, bf16_mm_m_groups
from mxmoe.kernels.mx_grouped_mm import mx_mm_k_groups, mx_mm_m_groups
from mxmoe.ops import select
from mxmoe.reference import quantize

BF16 = torch.bfloat16
TAIL = 7  # rows of no group

# Small tiles make many tiles of small problems, so that bands, halves and the persistent walk are exercised.
SMALL = Config(32, 64, 32, band=2, tma_out=True, halves=True, flatten=True, warps=4, stages=3)
NESTED = Config(32, 64, 32, band=2, tma_out=False, halves=False, flatten=False, warps=4, stages=3)
CONFIGS = [pytest.param(SMALL, id="small"), pytest.param(NESTED, id="nested"), pytest.param(None, id="default")]
MX_SMALL = Config(32, 64, 64, band=2, tma_out=True, halves=False, flatten=False, warps=4, stages=2)


def _spans(offs):
    e = offs.tolist()
    return list(zip([0, *e[:-1]], e, strict=True))


def _m_groups(a, b, offs, bias=None, dtype=torch.float32):
    """Oracle: one product per group, computed in ``dtype``."""
    out = torch.zeros(a.shape[0], b.shape[1], device=a.device, dtype=torch.float64)
    for g, (s, e) in enumerate(_spans(offs)):
        out[s:e] = (a[s:e].to(dtype) @ b[g].to(dtype).T).double()
        if bias is not None:
            out[s:e] += bias[g].double()
    return out


def _k_groups(a, b, offs, dtype=torch.float32):
    return torch.stack([(a[s:e].to(dtype).T @ b[s:e].to(dtype)).double() for s, e in _spans(offs)])


def _case(sizes, n, k, seed=0):
    if len(sizes) > 16 and DEVICE == "cpu":  # the interpreter takes its time for every tile
        n, k = min(n, 64), min(k, 64)
    m = sum(sizes) + TAIL
    a, b = scaled_randn(m, k, seed=seed), scaled_randn(len(sizes), n, k, seed=seed + 1)
    grad = scaled_randn(m, n, seed=seed + 2)
    a[sum(sizes) :] = torch.nan
    grad[sum(sizes) :] = torch.nan
    return a, b, grad, ends(sizes)


def _clean(t, sizes):
    """Without the NaN of the tail."""
    t = t.clone()
    t[sum(sizes) :] = 0
    return t


# --- bf16 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("stored", ["n_k", "k_n"])
def test_bf16_m_groups(sizes, stored):
    a, b, _, offs = _case(sizes, 72, 80)
    if stored == "k_n":
        b = b.mT.contiguous().mT
    with poisoned():
        out = bf16_mm_m_groups(a, b, offs, None, BF16, SMALL)
    a = _clean(a, sizes)
    assert_accumulation(out, _m_groups(a, b, offs), _m_groups(a, b, offs, dtype=BF16), "m_groups")
    assert (out[sum(sizes) :] == 0).all()


@pytest.mark.parametrize("sizes", GROUP_CASES)
def test_bf16_k_groups(sizes):
    a, _, grad, offs = _case(sizes, 72, 80)
    with poisoned():
        out = bf16_mm_k_groups(grad, a, offs, BF16, SMALL)
    a, grad = _clean(a, sizes), _clean(grad, sizes)
    assert_accumulation(out, _k_groups(grad, a, offs), _k_groups(grad, a, offs, dtype=BF16), "k_groups")
    assert all((out[g] == 0).all() for g, size in enumerate(sizes) if size == 0)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("n, k", [(72, 80), (71, 81), (1, 1), (16, 200)])
def test_bf16_sizes_and_configurations(config, n, k):
    """Sizes whose rows do not start at multiples of 16 bytes take pointers instead of TMA."""
    sizes = [33, 0, 70, 1]
    a, b, grad, offs = _case(sizes, n, k)
    with poisoned():
        out = bf16_mm_m_groups(a, b, offs, None, BF16, config)
        dw = bf16_mm_k_groups(grad, a, offs, BF16, config)
    a, grad = _clean(a, sizes), _clean(grad, sizes)
    assert_accumulation(out, _m_groups(a, b, offs), _m_groups(a, b, offs, dtype=BF16), "m_groups")
    assert_accumulation(dw, _k_groups(grad, a, offs), _k_groups(grad, a, offs, dtype=BF16), "k_groups")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_bf16_bias_and_output_types(dtype):
    sizes = [33, 0, 70]
    m, offs = sum(sizes) + TAIL, ends(sizes)
    a, b, grad, bias = (torch.randn(*s, device=DEVICE, dtype=BF16) for s in ((m, 80), (3, 72, 80), (m, 72), (3, 72)))
    out = bf16_mm_m_groups(a, b, offs, bias, dtype, SMALL)
    dw = bf16_mm_k_groups(grad, a, offs, dtype, SMALL)
    exact, exact_dw = _m_groups(a, b, offs, bias), _k_groups(grad, a, offs)
    assert out.dtype == dw.dtype == dtype
    assert_accumulation(out, exact, exact.to(dtype), f"{dtype} out")
    assert_accumulation(dw, exact_dw, exact_dw.to(dtype), f"{dtype} dw")
    assert (out[103:] == 0).all(), "rows of no group get no bias"


@pytest.mark.parametrize("kind", ["expanded", "strided", "misaligned", "one_group_any_stride"])
def test_bf16_strides(kind):
    sizes = [20, 45]
    a, b, grad, offs = _case(sizes, 64, 96)
    a = _clean(a, sizes)
    if kind == "expanded":
        b = b[:1].expand(2, 64, 96)
    elif kind == "strided":
        a = torch.cat([a, a], 1)[:, :96]
        b = torch.stack([b, b], 2).flatten(1, 2)[:, ::2]
    elif kind == "misaligned":
        a = torch.cat([a.new_zeros(1), a.flatten()])[1:].view(a.shape)
    else:
        offs, b = ends([65]), torch.as_strided(b[:1], (1, 64, 96), (1, 96, 1))
    out = bf16_mm_m_groups(a, b, offs, None, BF16, SMALL)
    assert_accumulation(out, _m_groups(a, b, offs), _m_groups(a, b, offs, dtype=BF16), kind)


def test_bf16_nan_stays_in_its_group():
    sizes = [20, 33, 0, 40]
    a, b, grad, offs = _case(sizes, 72, 80)
    a, grad = _clean(a, sizes), _clean(grad, sizes)
    out, dw = bf16_mm_m_groups(a, b, offs, None, BF16, SMALL), bf16_mm_k_groups(grad, a, offs, BF16, SMALL)
    a[20:53] = torch.nan
    grad[20:53] = torch.inf
    b[1] = torch.nan
    for config in (SMALL, NESTED):
        out2, dw2 = bf16_mm_m_groups(a, b, offs, None, BF16, config), bf16_mm_k_groups(grad, a, offs, BF16, config)
        keep = torch.tensor([*range(20), *range(53, 100)], device=DEVICE)
        assert_bitwise(out2[keep], out[keep], "rows of other groups")
        assert_bitwise(dw2[[0, 2, 3]], dw[[0, 2, 3]], "dw of other groups")
        assert out2[20:53].isnan().all()


@pytest.mark.parametrize("bad", [[40, 10, 70], [-5, 1000, 60], [200, 300, 400], [0, 0, -1]])
def test_bad_offs_touch_no_other_memory(bad):
    """Values cannot be checked without a sync; whatever they are, guard bytes around the outputs survive."""
    a, b, grad = scaled_randn(70, 80), scaled_randn(3, 72, 80, seed=1), scaled_randn(70, 72, seed=2)
    offs = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    guards = []
    new_empty = torch.Tensor.new_empty

    def guarded(self, shape, **kwargs):
        if not isinstance(shape, tuple):  # Triton's interpreter
            return new_empty(self, shape, **kwargs)
        size = torch.Size(shape).numel()
        whole = new_empty(self, (size + 8192,), **kwargs).fill_(3.0)
        guards.append((whole, size))
        return whole[4096 : 4096 + size].view(shape)

    torch.Tensor.new_empty = guarded
    try:
        outs = [bf16_mm_m_groups(a, b, offs, None, BF16, SMALL), bf16_mm_k_groups(grad, a, offs, BF16, SMALL)]
    finally:
        torch.Tensor.new_empty = new_empty
    assert len(guards) == 2
    for whole, size in guards:
        assert (whole[:4096] == 3).all()
        assert (whole[4096 + size :] == 3).all()
    assert all(t.isfinite().all() for t in outs)


def test_bf16_empty_sizes():
    offs = ends([0, 0])
    assert bf16_mm_m_groups(scaled_randn(0, 64), scaled_randn(2, 32, 64), offs, None, BF16).shape == (0, 32)
    out = bf16_mm_k_groups(scaled_randn(0, 32), scaled_randn(0, 64), offs, BF16)
    assert out.shape == (2, 32, 64)
    assert (out == 0).all()
    nothing = bf16_mm_m_groups(scaled_randn(8, 0), scaled_randn(2, 32, 0), ends([3, 5]), None, BF16, SMALL)
    assert (nothing == 0).all()


def test_bf16_constant_operands_do_not_drift():
    """K = 8192 of ones: every partial sum is exact in fp32."""
    a, b = torch.ones(3, 8192, device=DEVICE, dtype=BF16), torch.ones(1, 16, 8192, device=DEVICE, dtype=BF16)
    assert (bf16_mm_m_groups(a, b, ends([3]), None, torch.float32) == 8192).all()


# --- public function -------------------------------------------------------------------------------------------------
def test_bf16_public_forms_and_gradients():
    sizes = [33, 0, 70]
    x, w, grad, offs = _case(sizes, 64, 96)
    x, grad = _clean(x, sizes), _clean(grad, sizes)
    bias = scaled_randn(3, 64, seed=4)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    out = mxmoe.bf16_grouped_mm(leaves[0], leaves[1].mT, offs, bias=leaves[2])
    out.backward(grad)
    exact = _m_groups(x, w, offs, bias)
    assert_accumulation(out, exact, exact.to(BF16), "out")
    dx = _m_groups(grad, w.mT, offs)
    assert_accumulation(leaves[0].grad, dx, dx.to(BF16), "dx")
    dw = _k_groups(grad, x, offs)
    assert_accumulation(leaves[1].grad, dw, dw.to(BF16), "dw")
    db = torch.stack([grad[s:e].double().sum(0) for s, e in _spans(offs)])
    assert_accumulation(leaves[2].grad, db, db.to(BF16), "dbias")

    a, b = grad.clone().requires_grad_(), x.clone().requires_grad_()
    wgrad = mxmoe.bf16_grouped_mm(a.t(), b, offs)
    assert_accumulation(wgrad, dw, dw.to(BF16), "2-D x 2-D")
    up = scaled_randn(3, 64, 96, seed=6)
    wgrad.backward(up)
    da = _m_groups(x, up, offs)
    assert_accumulation(a.grad, da, da.to(BF16), "da")

    batch = scaled_randn(3, 10, 96, seed=7)
    dense = torch.einsum("gmk,gnk->gmn", batch.double(), w.double())
    assert_accumulation(mxmoe.bf16_grouped_mm(batch, w.mT), dense, dense.to(BF16), "3-D x 3-D")
    mirror = mxmoe.bf16_grouped_mm(w, x.t(), offs)
    exact = _m_groups(x, w, offs).t()
    assert_accumulation(mirror, exact, exact.to(BF16), "3-D x 2-D")


def test_bf16_public_errors():
    x, w, offs = scaled_randn(8, 32), scaled_randn(2, 32, 16), ends([3, 5])
    f = mxmoe.bf16_grouped_mm
    with pytest.raises(TypeError, match=r"x must be bfloat16, got float32"):
        f(x.float(), w, offs)
    with pytest.raises(ValueError, match=r"offs is required"):
        f(x, w)
    with pytest.raises(ValueError, match=r"do not contract"):
        f(x, w.mT, offs)
    with pytest.raises(ValueError, match=r"offs has 3 entries, expected 2"):
        f(x, w, ends([1, 2, 3]))
    with pytest.raises(ValueError, match=r"bias must have shape"):
        f(x, w, offs, bias=scaled_randn(16, 2))


# --- MXFP8 -----------------------------------------------------------------------------------------------------------
def _decode(q, scale):
    byte = scale.double()
    factor = torch.where(byte == 255, torch.nan, torch.exp2(byte - 127)).float()
    return q.float() * factor.repeat_interleave(32, -1)[..., : q.shape[-1]]


def _mx(x, w, grad, offs, elem=E4M3):
    rows = quantize.quantize_rowwise(x, offs, False, elem, "rceil")
    weights = quantize.quantize_rowwise(w, None, False, E4M3, "rceil")
    xq, xs, padded = quantize.quantize_colwise(x, offs, False, elem, "rceil")
    gq, gs, _ = quantize.quantize_colwise(grad, offs, False, E4M3, "rceil")
    return rows, weights, (xq.t(), xs.t()), (gq.t(), gs.t()), padded


@pytest.mark.parametrize("sizes", GROUP_CASES)
def test_mx_groups(sizes):
    x, w, grad, offs = _case(sizes, 80, 96)
    rows, weights, cols, grad_cols, padded = _mx(x, w, grad, offs)
    with poisoned():
        out = mx_mm_m_groups(*rows, *weights, offs, None, BF16, MX_SMALL)
        dw = mx_mm_k_groups(*grad_cols, *cols, padded, BF16, MX_SMALL)
    a, b = _clean(_decode(*rows), sizes), _decode(*weights)
    assert_accumulation(out, _m_groups(a, b, offs), _m_groups(a, b, offs, dtype=BF16), "m_groups")
    assert (out[sum(sizes) :] == 0).all()
    ga, xb = _decode(*grad_cols).T, _decode(*cols).T
    assert_accumulation(dw, _k_groups(ga, xb, padded), _k_groups(ga, xb, padded, dtype=BF16), "k_groups")
    assert all((dw[g] == 0).all() for g, size in enumerate(sizes) if size == 0)


@pytest.mark.parametrize("elem", [E4M3, E5M2])
@pytest.mark.parametrize("n, k", [(80, 96), (71, 40), (128, 256)])
def test_mx_sizes_types_bias(elem, n, k):
    """K = 40: the last block of 32 is short, and rows do not start at multiples of 16 bytes."""
    sizes = [33, 0, 70, 1]
    x, w, grad, offs = _case(sizes, n, k)
    bias = scaled_randn(4, n, seed=9)
    rows, weights, cols, grad_cols, padded = _mx(x, w, grad, offs, elem)
    out = mx_mm_m_groups(*rows, *weights, offs, bias, torch.float32)
    dw = mx_mm_k_groups(*grad_cols, *cols, padded, torch.float32)
    a, b = _clean(_decode(*rows), sizes), _decode(*weights)
    exact = _m_groups(a, b, offs, bias)
    assert_accumulation(out, exact, exact.to(BF16), "m_groups")
    exact = _k_groups(_decode(*grad_cols).T, _decode(*cols).T, padded)
    assert_accumulation(dw, exact, exact.to(BF16), "k_groups")


def test_mx_nan_stays_in_its_group():
    sizes = [20, 33, 0, 40]
    x, w, grad, offs = _case(sizes, 80, 96)
    x, grad = _clean(x, sizes), _clean(grad, sizes)

    def run():
        rows, weights, cols, grad_cols, padded = _mx(x, w, grad, offs)
        out = mx_mm_m_groups(*rows, *weights, offs, None, BF16, MX_SMALL)
        return out, mx_mm_k_groups(*grad_cols, *cols, padded, BF16, MX_SMALL)

    out, dw = run()
    x[20:53] = torch.nan
    grad[20:53] = torch.inf
    out2, dw2 = run()
    keep = torch.tensor([*range(20), *range(53, 100)], device=DEVICE)
    assert_bitwise(out2[keep], out[keep], "rows of other groups")
    assert_bitwise(dw2[[0, 2, 3]], dw[[0, 2, 3]], "dw of other groups")
    assert out2[20:53].isnan().all()
    assert dw2[1].isnan().all()


@pytest.mark.parametrize("weight_block", [(1, 32), (32, 32)])
def test_triton_backend_equals_reference(weight_block, monkeypatch):
    """The whole backend, forward and backward; without a GPU its kernels run in the interpreter."""
    monkeypatch.setitem(select._RULES, "triton", lambda *a: None)
    sizes = [33, 0, 70]
    x, w, grad, offs = _case(sizes, 64, 96)
    results = []
    for backend in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        recipe = mxmoe.MXRecipe(backend=backend, weight_block=weight_block)
        with poisoned():
            out = mxmoe.grouped_mm(leaves[0], leaves[1].mT, offs, recipe=recipe)
            out.backward(grad)
        results.append([out.detach(), *(t.grad for t in leaves)])
    for ours, oracle, what in zip(*results, ("out", "dx", "dw"), strict=True):
        assert ours.shape == oracle.shape
        torch.testing.assert_close(
            ours.float(), oracle.float(), rtol=2**-7, atol=1e-30, msg=lambda m, w=what: f"{w}: {m}"
        )
    weights = mxmoe.quantize(w)  # dgrad of a quantized weight: its blocks run along the wrong dim, so it is expanded
    frozen = x.clone().requires_grad_()
    dx = []
    for backend in ("triton", "reference"):
        out = mxmoe.grouped_mm(frozen, weights.mT, offs, recipe=mxmoe.MXRecipe(backend=backend))
        dx.append(torch.autograd.grad(out, frozen, grad)[0])
    torch.testing.assert_close(dx[0].float(), dx[1].float(), rtol=2**-6, atol=1e-30)


# --- zeroing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("n", [64, 33])
def test_zero_tail_and_empty_groups(sizes, n):
    offs, used = ends(sizes), sum(sizes)
    out = torch.full((used + TAIL, n), torch.nan, device=DEVICE, dtype=BF16)
    zero_tail.zero_tail_rows(out, offs)
    assert out[:used].isnan().all()
    assert (out[used:] == 0).all()
    dw = torch.full((len(sizes), n, 80), torch.nan, device=DEVICE, dtype=BF16)
    zero_tail.zero_empty_groups(dw, offs, used)
    for g, size in enumerate(sizes):
        assert dw[g].isnan().all() if size else (dw[g] == 0).all()


# --- on a GPU --------------------------------------------------------------------------------------------------------
def _one_of_each(m=500, n=256, k=192, g=6):
    gen = torch.Generator().manual_seed(3)
    cuts = torch.sort(torch.randint(0, m, (g,), generator=gen)).values.to(torch.int32).cuda()
    return scaled_randn(m, k), scaled_randn(g, n, k, seed=1), scaled_randn(m, n, seed=2), cuts


@pytest.mark.gpu
def test_gpu_no_sync_and_graph_replay_with_new_offs():
    x, w, grad, offs = _one_of_each()

    def step():
        return (
            bf16_mm_m_groups(x, w, offs, None, BF16),
            bf16_mm_m_groups(grad, w.mT, offs, None, BF16),
            bf16_mm_k_groups(grad, x, offs, BF16),
        )

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for sizes in ([0, 500, 0, 0, 0, 0], [100, 1, 33, 66, 0, 200]):
        offs.copy_(ends(sizes))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert_bitwise(got, expected, f"replay with {sizes}")


@pytest.mark.gpu
def test_gpu_compiles_once_for_any_number_of_rows():
    kernels = [bf16_grouped_mm._bf16_mm_m_groups_kernel, bf16_grouped_mm._bf16_mm_k_groups_kernel]

    def count():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    w = scaled_randn(6, 256, 192, seed=1)
    before = None
    for m in (64, 65, 66, 128, 1, 17):
        x, grad, offs = scaled_randn(m, 192), scaled_randn(m, 256, seed=2), ends([m, 0, 0, 0, 0, 0])
        bf16_mm_m_groups(x, w, offs, None, BF16)
        bf16_mm_k_groups(grad, x, offs, BF16)
        before = count() if before is None else before
    assert count() == before


@pytest.mark.gpu
@pytest.mark.parametrize("g", [1, 33, 128, 384, 512])
def test_gpu_group_counts(g):
    sizes = [(37 * i) % 71 for i in range(g)]
    x, w, grad, offs = _case(sizes, 144, 208)
    out, dx = bf16_mm_m_groups(x, w, offs, None, BF16), bf16_mm_m_groups(grad, w.mT, offs, None, BF16)
    dw = bf16_mm_k_groups(grad, x, offs, BF16)
    x, grad = _clean(x, sizes), _clean(grad, sizes)
    assert_accumulation(out, _m_groups(x, w, offs), _m_groups(x, w, offs, dtype=BF16), "fprop")
    assert_accumulation(dx, _m_groups(grad, w.mT, offs), _m_groups(grad, w.mT, offs, dtype=BF16), "dgrad")
    assert_accumulation(dw, _k_groups(grad, x, offs), _k_groups(grad, x, offs, dtype=BF16), "wgrad")


@pytest.mark.gpu
def test_gpu_past_two_billion_elements():
    """x (1048577, 2064), weights (257, 2048, 4096): last rows, last expert."""
    x = torch.zeros(1048577, 2064, device="cuda", dtype=BF16)
    x[-32:] = scaled_randn(32, 2064)
    w = scaled_randn(2, 128, 2064, seed=1)
    out = bf16_mm_m_groups(x, w, ends([1048545, 32]), None, BF16)
    exact = x[-32:].float() @ w[1].float().T
    assert_accumulation(out[-32:], exact, x[-32:] @ w[1].T, "last rows")
    del x
    w = torch.empty(257, 2048, 4096, device="cuda", dtype=BF16)
    w[-1] = scaled_randn(2048, 4096, seed=3)
    x = scaled_randn(64, 4096, seed=4)
    out = bf16_mm_m_groups(x, w, ends([0] * 256 + [64]), None, BF16)
    assert_accumulation(out, x.float() @ w[-1].float().T, x @ w[-1].T, "last expert")
    dw = bf16_mm_k_groups(scaled_randn(64, 2048, seed=5), x, ends([0] * 256 + [64]), BF16)
    exact = scaled_randn(64, 2048, seed=5).float().T @ x.float()
    assert_accumulation(dw[-1], exact, scaled_randn(64, 2048, seed=5).T @ x, "dw of the last expert")
    assert (dw[:-1].abs().amax() == 0).item()


# --- the warp-specialized kernel of sm_90 ----------------------------------------------------------------------------
def _gluon():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma: sm_90 only")
    from mxmoe.kernels import gluon_grouped_mm

    return gluon_grouped_mm


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*GROUP_CASES, pytest.param([(37 * i) % 71 for i in range(512)], id="512")])
def test_gpu_gluon_groups(sizes):
    """Bit-equal to the Triton kernel; tail and empty groups zero; NaN of one group stays there."""
    gluon = _gluon()
    n, k = 144, 208
    a, b, grad, offs = _case(sizes, n, k)
    with poisoned():
        out, dx = gluon.gluon_mm_m_groups(a, b, offs), gluon.gluon_mm_m_groups(grad, b.mT, offs)
        dw = gluon.gluon_mm_k_groups(grad, a, offs)
    wide = bf16_grouped_mm.WIDE
    assert_bitwise(out, bf16_mm_m_groups(a, b, offs, None, BF16, wide), "fprop")
    assert_bitwise(dx, bf16_mm_m_groups(grad, b.mT, offs, None, BF16, wide), "dgrad")
    assert_bitwise(dw, bf16_mm_k_groups(grad, a, offs, BF16, wide), "wgrad")
    assert (out[sum(sizes) :] == 0).all()
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    start, end = _spans(offs)[largest]
    a[start:end], b[largest], grad[start:end] = torch.nan, torch.nan, torch.inf
    rows = torch.ones(a.shape[0], dtype=torch.bool, device=DEVICE)
    rows[start:end] = False
    others = torch.arange(len(sizes), device=DEVICE) != largest
    assert_bitwise(gluon.gluon_mm_m_groups(a, b, offs)[rows], out[rows], "rows of other groups")
    assert_bitwise(gluon.gluon_mm_k_groups(grad, a, offs)[others], dw[others], "dw of other groups")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(131072, 2048, 7168, 8), (16384, 8192, 5120, 8)])
def test_gpu_gluon_large(shape):
    """The shapes it is chosen for, against torch's kernel; more than 2**29 elements."""
    gluon = _gluon()
    m, n, k, g = shape
    x, w, grad = (torch.randn(s, device="cuda", dtype=BF16) for s in ((m, k), (g, n, k), (m, n)))
    cuts = torch.sort(torch.randint(0, m, (g - 1,), generator=torch.Generator().manual_seed(5))).values
    offs = torch.cat([cuts, torch.tensor([m])]).to(torch.int32).cuda()
    for ours, theirs in (
        (lambda: gluon.gluon_mm_m_groups(x, w, offs), lambda: torch._grouped_mm(x, w.mT, offs=offs)),
        (lambda: gluon.gluon_mm_m_groups(grad, w.mT, offs), lambda: torch._grouped_mm(grad, w, offs=offs)),
        (lambda: gluon.gluon_mm_k_groups(grad, x, offs), lambda: torch._grouped_mm(grad.t(), x, offs=offs)),
    ):
        got, expected = ours(), theirs()
        assert ((got - expected).norm() / expected.norm()).item() < 2**-8
        assert_bitwise(ours(), got, "second run")


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [[40, 10, 70], [-5, 1000, 60], [200, 300, 400], [0, 0, -1]])
def test_gpu_gluon_bad_offs(bad):
    gluon = _gluon()
    offs = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    a, b, grad = scaled_randn(70, 80), scaled_randn(3, 72, 80, seed=1), scaled_randn(70, 72, seed=2)
    wide = bf16_grouped_mm.WIDE
    assert_bitwise(gluon.gluon_mm_m_groups(a, b, offs), bf16_mm_m_groups(a, b, offs, None, BF16, wide), "M groups")
    assert_bitwise(gluon.gluon_mm_k_groups(grad, a, offs), bf16_mm_k_groups(grad, a, offs, BF16, wide), "K groups")


@pytest.mark.gpu
def test_gpu_gluon_supported():
    supported = _gluon().supported
    a, b, offs = scaled_randn(70, 80), scaled_randn(3, 72, 80, seed=1), scaled_randn(70, 72, seed=2)
    assert supported(a, b, None, BF16)
    assert supported(a, b.mT.contiguous().mT, None, BF16)
    assert supported(offs, a, None, BF16)
    assert not supported(a, b, scaled_randn(3, 72), BF16)
    assert not supported(a, b, None, torch.float32)
    assert not supported(a, b[:, :71], None, BF16)
    assert not supported(scaled_randn(70, 81), scaled_randn(3, 72, 81), None, BF16)
    assert not supported(a[:0], b, None, BF16)


def test_group_family_is_whole():
    """The tests above run on the family of cases.py; an empty family would be green."""
    assert len(GROUPS) >= 10
    assert _gemm.tma_ready(scaled_randn(8, 64)) == (DEVICE == "cpu" or torch.cuda.get_device_capability() >= (9, 0))
    assert mx_grouped_mm.CONFIG.step % 128 == 0
