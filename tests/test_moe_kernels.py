"""The layer kernels against their reference: routing, gather, SwiGLU and its backward, combine."""

import itertools

import pytest
import torch
from cases import DEVICE, E4M3, E5M2, MODES, assert_bitwise, poisoned, scaled_randn

from mxmoe.kernels import combine as combine_kernels
from mxmoe.kernels import gather_quantize, route, swiglu_quantize
from mxmoe.reference import moe as reference

BF16 = torch.bfloat16

# name -> (tokens, choices, experts, share of slots on another rank)
ROUTINGS = {
    "one_expert": (40, 1, 1, 0.0),
    "few": (33, 2, 6, 0.0),
    "empty_experts": (7, 2, 17, 0.0),
    "elsewhere": (50, 3, 7, 0.4),
    "all_elsewhere": (9, 2, 4, 1.0),
    "one_token": (1, 4, 8, 0.0),
    "no_tokens": (0, 2, 5, 0.0),
    "many": (45, 3, 20, 0.1),
}


def routing(name, device=DEVICE):
    """Expert ids of one case; skewed, so that one expert gets most rows."""
    tokens, k, experts, elsewhere = ROUTINGS[name]
    gen = torch.Generator().manual_seed(3)
    scores = torch.rand(tokens, experts, generator=gen) + torch.linspace(1, 0, experts) * 0.7
    ids = scores.topk(min(k, experts), dim=-1).indices
    ids = torch.where(torch.rand(ids.shape, generator=gen) < elsewhere, experts, ids)
    return ids.to(device), experts


def routed(name):
    ids, experts = routing(name)
    return (*reference.route(ids, experts), experts)


@pytest.fixture(params=["one_launch", "chunks"])
def launches(request, monkeypatch):
    """Either way of routing, whatever the number of slots."""
    if request.param == "chunks":
        monkeypatch.setattr(route, "ONE_LAUNCH", 0)
        monkeypatch.setattr(route, "CHUNKS", 3)
        monkeypatch.setattr(route, "TILE", 64)


def assert_routes(ids, experts):
    with poisoned():
        got = route.route(ids, experts)
    for what, a, b in zip(("offs", "order", "position"), got, reference.route(ids, experts), strict=True):
        assert_bitwise(a, b, what)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_route(name, dtype, launches):
    ids, experts = routing(name)
    assert_routes(ids.to(dtype), experts)


def test_route_does_not_trust_ids(launches):
    """Any id outside [0, E) belongs to no expert, also one that int32 cannot hold."""
    ids = torch.tensor([[0, -1], [2**40, 1], [3, -(2**40)], [2, 1]], device=DEVICE)
    offs, order, position = route.route(ids, 3)
    assert offs.tolist() == [1, 3, 4]
    assert order.tolist() == [0, 3, 7, 6, 1, 2, 4, 5]
    assert position.view(-1)[order.long()].tolist() == list(range(8))


@pytest.mark.parametrize("experts", [1, 31, 128, 384, 512])
@pytest.mark.parametrize("tokens, k", [(70, 8), (43, 16), (300, 1)])
def test_route_many_experts(experts, tokens, k, launches):
    """More slots than one program places; a share of ids that belong to nobody; all slots to one expert."""
    gen = torch.Generator().manual_seed(0)
    assert_routes(torch.randint(-1, experts + 1, (tokens, k), generator=gen).to(DEVICE), experts)
    assert_routes(torch.full((tokens, k), experts - 1, device=DEVICE), experts)


def test_route_takes_any_strides(launches):
    ids = torch.randint(0, 9, (8, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert_routes(ids.t(), 9)
    assert_routes(ids[:, 3:7], 9)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1023, 1025, 16384, 131072])
@pytest.mark.parametrize("experts", [32, 128, 384])
def test_route_of_many_tokens(tokens, experts):
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    assert_routes(torch.randint(0, experts + 1, (tokens, 8), device=DEVICE, generator=gen), experts)
    assert_routes(torch.randint(0, 2, (tokens, 8), device=DEVICE, generator=gen), experts)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("hidden", [32, 40])
def test_gather_rows(name, hidden):
    offs, _, position, _ = routed(name)
    x = scaled_randn(position.shape[0], hidden)
    weights = torch.rand(position.shape, device=DEVICE)
    for elem, w in ((E4M3, None), (None, None), (None, weights)):
        with poisoned():
            got = gather_quantize.gather_rows(x, position, offs, w, elem, "rceil", BF16)
        assert_bitwise(got, reference.gather_rows(x, position, offs, w, elem, "rceil", BF16))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("hidden", [32, 40])
def test_gather_cols(name, hidden):
    offs, order, position, _ = routed(name)
    x = scaled_randn(position.shape[0], hidden)
    for elem in (E4M3, None):
        with poisoned():
            got = gather_quantize.gather_cols(x, order, position.shape[1], offs, elem, "rceil", BF16)
        expected = reference.gather_cols(x, order, position.shape[1], offs, elem, "rceil", BF16)
        assert_bitwise(got, expected)


@pytest.mark.parametrize("mode, elem", list(itertools.product(MODES, [E4M3, E5M2])))
def test_gather_modes_dtypes_and_strides(mode, elem):
    offs, order, position, _ = routed("one_expert")
    for dtype in (torch.float32, torch.float16, BF16):
        x = scaled_randn(40, 80, dtype=torch.float32).clamp(-6e4, 6e4).to(dtype)[:, 8:72]
        got = gather_quantize.gather_rows(x, position, offs, None, elem, mode, torch.float32)
        assert_bitwise(got, reference.gather_rows(x, position, offs, None, elem, mode, torch.float32))
        got = gather_quantize.gather_cols(x.t().contiguous().t(), order, 1, offs, elem, mode, torch.float32)
        assert_bitwise(got, reference.gather_cols(x, order, 1, offs, elem, mode, torch.float32))


def test_nan_stays_in_its_block():
    offs, order, position, _ = routed("few")
    x = scaled_randn(33, 64)
    clean = gather_quantize.gather_rows(x, position, offs, None, E4M3, "rceil", BF16)
    bad = x.clone()
    bad[5, 40] = float("nan")
    got = gather_quantize.gather_rows(bad, position, offs, None, E4M3, "rceil", BF16)
    hit = torch.zeros_like(got, dtype=torch.bool)
    hit[position[5].long(), 32:] = True
    assert got[hit].isnan().all()
    assert_bitwise(got[~hit], clean[~hit])
    cols = gather_quantize.gather_cols(bad, order, 2, offs, E4M3, "rceil", BF16)
    expected = reference.gather_cols(bad, order, 2, offs, E4M3, "rceil", BF16)
    assert expected.isnan().any()
    assert torch.equal(cols.isnan(), expected.isnan())  # any NaN is a NaN
    assert_bitwise(cols.nan_to_num(), expected.nan_to_num())


def activations(name, intermediate, dtype=BF16):
    offs, order, position, _ = routed(name)
    m = order.shape[0]
    gate_up = torch.randn(m, 2 * intermediate, device=DEVICE).to(dtype)
    grad = scaled_randn(m, intermediate, dtype=torch.float32).to(dtype) / 64
    weights = torch.rand(position.shape, device=DEVICE)
    gate_up[int(offs[-1]) :] = float("nan")  # rows without an expert: whatever they hold, nothing of it arrives
    grad[int(offs[-1]) :] = float("nan")
    return gate_up, grad, weights, order, offs


def assert_sums(got, expected, what):
    """fp32 sums of a few terms: equal up to the order of the terms and fma."""
    assert got.dtype == expected.dtype == torch.float32, what
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * scale)


def assert_rounded(got, expected, what):
    """Same values but for exp: an fp32 ulp may move a value by one step of its element type, in few places."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    a, b = got.double(), expected.double()
    differ = a != b
    assert differ.float().mean() < 2e-3 if differ.numel() > 2000 else differ.sum() <= 4, what
    assert ((a - b).abs() <= b.abs() * 2.0**-2 + 1e-30).all(), what


@pytest.mark.parametrize("name", ROUTINGS)
def test_swiglu_rows(name):
    gate_up, _, weights, order, offs = activations(name, 64)
    for elem in (E4M3, None):
        with poisoned():
            got = swiglu_quantize.swiglu_rows(gate_up, weights, order, offs, elem, "rceil", BF16)
        assert_rounded(got, reference.swiglu_rows(gate_up, weights, order, offs, elem, "rceil", BF16), f"{elem}")
        assert (got[int(offs[-1]) :] == 0).all()


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtypes", [(E5M2, E5M2, E4M3), (E4M3, None, None), (None, None, None)])
def test_swiglu_backward(name, dtypes):
    gate_up, grad, weights, order, offs = activations(name, 64)
    args = (gate_up, grad, weights, order, offs, *dtypes, "rceil", BF16, (True, True, True, True))
    with poisoned():
        got = swiglu_quantize.swiglu_backward(*args)
    names = ("row", "col", "hidden")
    expected = reference.swiglu_backward(*args)
    for what, a, b in zip(names, got[:3], expected[:3], strict=True):
        assert_rounded(a, b, what)
        assert (a[int(offs[-1]) :] == 0).all()
    assert_sums(got[3], expected[3], "weights")


def test_swiglu_backward_gives_what_is_wanted():
    gate_up, grad, weights, order, offs = activations("few", 32)
    full = swiglu_quantize.swiglu_backward(
        gate_up, grad, weights, order, offs, E4M3, E4M3, E4M3, "rceil", BF16, (True,) * 4
    )
    for want in ((True, False, False, False), (False, True, True, False), (False, False, False, True), (False,) * 4):
        got = swiglu_quantize.swiglu_backward(
            gate_up, grad, weights, order, offs, E4M3, E4M3, E4M3, "rceil", BF16, want
        )
        for wanted, a, b in zip(want, got, full, strict=True):
            assert (a is not None) == wanted
            if wanted:
                assert_bitwise(a, b)


@pytest.mark.parametrize(
    "name, intermediate, mode, dtypes",
    [
        ("few", 64, "rceil", (E4M3, E4M3, E4M3)),
        ("few", 96, "rceil", (E4M3, E4M3, E4M3)),
        ("few", 32, "floor", (E5M2, None, E4M3)),
        ("elsewhere", 32, "even", (None, E5M2, None)),
        ("no_tokens", 32, "rceil", (E4M3, E4M3, E4M3)),
    ],
)
def test_swiglu_backward_in_words(monkeypatch, name, intermediate, mode, dtypes):
    """The bits of the plain kernel, and the same sums for any ``want``."""
    gate_up, grad, weights, order, offs = activations(name, intermediate)
    args = (gate_up, grad, weights, order, offs, *dtypes, mode, BF16)
    with poisoned():
        got = swiglu_quantize.swiglu_backward(*args, (True,) * 4)
    parts = [
        swiglu_quantize.swiglu_backward(*args, w) for w in ((True, False, False, True), (False, True, True, False))
    ]
    monkeypatch.setattr(swiglu_quantize, "_whole_words", lambda *_: False)
    expected = swiglu_quantize.swiglu_backward(*args, (True,) * 4)
    for what, a, b in zip(("row", "col", "hidden"), got[:3], expected[:3], strict=True):
        assert_bitwise(a, b, what)
    assert_sums(got[3], expected[3], "weights")
    for part in parts:
        for a, b in zip(part, got, strict=True):
            if a is not None:
                assert_bitwise(a, b)


@pytest.mark.parametrize("elem", [E4M3, E5M2])
def test_rounding_in_bf16_is_exact(elem):
    """``_packed``: (24p + y) - 24p in bf16 gives every bf16 value the bits of the way through fp8, for any byte."""
    steps, normal, largest = (48.0, 2.0**-14, 57344.0) if elem is E5M2 else (24.0, 2.0**-6, 448.0)
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    for byte in (0, 1, 6, 7, 8, 100, 126, 127, 128, 200, 238):
        factor, scale = torch.tensor(2.0 ** (127 - byte)), torch.tensor(2.0 ** (byte - 127))
        inside = x[x.isfinite() & (x.double().abs() * factor.double() <= largest)]
        expected = ((inside.float() * factor).to(elem).float() * scale).to(BF16)
        y = (inside.float() * factor).to(BF16)
        bits = y.view(torch.int16)
        p = torch.maximum((bits & 0x7F80).view(BF16).double(), torch.tensor(normal, dtype=torch.float64))
        t = y.double() + steps * p  # exact in fp64; what follows is one rounding to bf16's eight bits
        ulp = torch.exp2(torch.floor(torch.log2(t)) - 7)
        rounded = (torch.round(t / ulp) * ulp - steps * p).to(BF16)
        got = (rounded.view(torch.int16) | (bits & -32768)).view(BF16)
        assert_bitwise((got.float() * scale).to(BF16), expected, f"byte {byte}")


def close(got, expected):
    """fp32 sums in another order: equal to rounding of the largest value (2.3e-5 of 10 on an H200)."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


def test_reference_swiglu_is_the_gradient_of_itself():
    gate_up, grad, weights, order, offs = activations("elsewhere", 32, torch.float32)
    end = int(offs[-1])
    gate_up = gate_up.nan_to_num().requires_grad_()
    weights = weights.clone().requires_grad_()
    out = reference.swiglu_rows(gate_up, weights, order, offs, None, "rceil", torch.float32)
    d_gate_up, d_weights = torch.autograd.grad(out[:end], (gate_up, weights), grad[:end])
    with torch.no_grad():
        row, col, hidden, d_w = reference.swiglu_backward(
            gate_up, grad, weights, order, offs, None, None, None, "rceil", torch.float32, (True,) * 4
        )
    close(row, d_gate_up)
    close(col, d_gate_up)
    close(hidden[:end], out[:end].detach())
    close(d_w, d_weights)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("hidden", [32, 40])
def test_combine(name, hidden):
    offs, _, position, _ = routed(name)
    rows = scaled_randn(position.numel(), hidden)
    rows[int(offs[-1]) :] = float("nan")
    for weights in (None, torch.rand(position.shape, device=DEVICE)):
        with poisoned():
            got = combine_kernels.combine(rows, position, offs, weights, torch.float32)
        expected = reference.combine(rows, position, offs, weights, torch.float32)
        assert_sums(got, expected, "combine")
        assert_bitwise(got, combine_kernels.combine(rows, position, offs, weights, torch.float32))


@pytest.mark.parametrize("name", ROUTINGS)
def test_combine_weights_grad(name):
    offs, _, position, _ = routed(name)
    rows, grad = torch.randn(position.numel(), 96, device=DEVICE), torch.randn(position.shape[0], 96, device=DEVICE)
    rows[int(offs[-1]) :] = float("nan")
    with poisoned():
        got = combine_kernels.combine_weights_grad(grad, rows, position, offs)
    expected = reference.combine_weights_grad(grad, rows, position, offs)
    assert_sums(got, expected, "weights")
