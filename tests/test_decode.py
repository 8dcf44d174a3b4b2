"""The decode kernels: exact against the reference whatever the scales, tokens and groups; the rule that picks them."""

import cases
import pytest
import torch
from cases import DEVICE, E4M3, E5M2
from torch.nn.functional import silu

import mxmoe
from mxmoe import MXRecipe
from mxmoe.kernels import mx_decode as kernel
from mxmoe.kernels.mx_decode_swiglu import mx_decode_mlp, mx_decode_swiglu
from mxmoe.ops import decode
from mxmoe.reference import grouped_mm, moe, mx_decode, quantize

RCEIL = (E4M3, "rceil")
SMALL = kernel.Config(16, 64, 2, 3)
TILES = {
    "mma": kernel.Config(8, 64, 2, 3, tma_q=True),
    "wgmma": kernel.Config(16, 64, 4, 3, tma_q=True, tma_x=True, perm=True),
    "wide_step": kernel.Config(16, 64, 2, 2, tma_q=True, step=256),
    "pointers": kernel.Config(32, 128, 4, 3, perm=True, pdl=False),
}


def weight(*shape, elem=E4M3, spread=0, seed=2):
    """Quantized weights whose block scales vary by ``2**spread`` within a row, and their values in fp32."""
    w = cases.scaled_randn(*shape, dtype=torch.float32, device="cpu", seed=seed) * 2.0**-8
    if spread:
        gen = torch.Generator().manual_seed(seed)
        blocks = torch.randint(-spread, spread + 1, (*shape[:-1], -(-shape[-1] // 32)), generator=gen)
        w = w * torch.exp2(blocks.float()).repeat_interleave(32, -1)[..., : shape[-1]]
    q, s = quantize.quantize_rowwise(w, None, False, elem, "rceil")
    return q, s, quantize.dequantize(q, s, "rowwise", None, None, shape[-2], torch.float32)


def packed(q, s):
    return kernel.PackedWeight(*(t.to(DEVICE) for t in mx_decode.pack_weight(q, s)))


def run(x, q, s, offs, *, pack=True, bias=None, dtype=torch.bfloat16, scale=None, config=SMALL, **kwargs):
    facts = packed(q, s) if pack else None
    q, s, x, offs = (t.to(DEVICE) for t in (q, s, x, offs))
    bias = bias.to(DEVICE) if bias is not None else None
    scale = scale.to(DEVICE) if scale is not None else None
    with cases.poisoned():
        return kernel.mx_decode_m_groups(x, scale, None, 0, q, s, facts, offs, bias, dtype, config=config, **kwargs)


def check(out, x, values, offs, bias=None):
    """Error at most twice that of the same product in bf16; rows of no group exactly zero."""
    exact = grouped_mm.mm_m_groups(x.float(), values, offs, bias, torch.float32)
    in_bf16 = grouped_mm.mm_m_groups(x.to(torch.bfloat16), values, offs, bias, torch.bfloat16, torch.float32)
    cases.assert_accumulation(out, exact, in_bf16)
    assert not out[int(offs[-1]) :].any()


# --- what is exact ---------------------------------------------------------------------------------------------------
def test_packed_scales_reproduce_every_weight():
    """2**e in fp16 times 2**(top - ...) is the scale, for every byte 3..246 and for rows up to 22 binades wide."""
    low, high = mx_decode.WINDOW[E4M3]
    tops = torch.arange(3 + high - low, 247)
    below = torch.arange(high - low + 1)
    s = (tops[:, None] - below[None, :]).to(torch.uint8)[None]  # (1, tops, blocks)
    q = torch.full((1, s.shape[1], s.shape[2] * 32), 1.0).to(E4M3)
    scale, top = mx_decode.pack_weight(q, s)
    cases.assert_bitwise(top[0], tops.to(torch.uint8))
    field = scale[0].transpose(0, 1).flatten(1)[:, : s.shape[2]].to(torch.int16) << 8
    e = torch.log2(field.view(torch.float16).double()).to(torch.int32) + tops[:, None] - high
    assert torch.equal(e, s[0].to(torch.int32))


def test_which_rows_are_exact_in_fp16():
    q = torch.full((1, 6, 96), 1.0).to(E4M3)
    s = torch.full((1, 6, 3), 120, dtype=torch.uint8)
    s[0, 1, 2] = 120 - 22  # the widest row that fits
    s[0, 2, 2] = 120 - 23  # one more
    s[0, 3, 2] = 255  # a block of NaN
    s[0, 4, 2] = 0
    q[0, 4, 64:] = 0.0  # a block of zeros fits anywhere
    q.view(torch.uint8)[0, 5, 3] = 0x7F  # a NaN under a finite scale
    _, top = mx_decode.pack_weight(q, s)
    assert top[0].tolist() == [120, 120, 255, 255, 120, 255]


@pytest.mark.parametrize("elem", [E4M3, E5M2])
@pytest.mark.parametrize("spread", [0, 4, 16], ids=["narrow", "some_rows", "wide"])
def test_weights_of_any_spread(elem, spread):
    q, s, values = weight(2, 64, 256, elem=elem, spread=spread)
    x, offs = cases.scaled_randn(12, 256, device="cpu", seed=1), cases.ends([5, 7], "cpu")
    check(run(x, q, s, offs), x, values, offs)


def test_every_scale_byte():
    """Bytes 3..246 in one weight: 244 blocks of a row, far more than fp16 holds."""
    s = torch.arange(3, 247, dtype=torch.uint8).expand(1, 32, 244).contiguous()
    q = cases.scaled_randn(1, 32, 244 * 32, dtype=torch.float32, device="cpu").sign().to(E4M3)
    for first in (0, 236):  # tokens that see a few bytes only, so that the sums are finite
        x = torch.zeros(4, 244 * 32, dtype=torch.bfloat16)
        x[:, first * 32 : (first + 8) * 32] = cases.scaled_randn(4, 256, device="cpu") * 2.0 ** -(first // 2)
        values = quantize.dequantize(q, s, "rowwise", None, None, 32, torch.float32)
        offs = cases.ends([4], "cpu")
        check(run(x, q, s, offs, dtype=torch.float32), x, values, offs)


def test_fp16_and_bf16_give_the_same_bits():
    q, s, _ = weight(2, 64, 256)
    x, offs = cases.scaled_randn(12, 256, device="cpu", seed=1), cases.ends([5, 7], "cpu")
    if DEVICE == "cpu":
        x = torch.round(x.float() * 4).clamp(-8, 8).bfloat16()  # the interpreter sums in an order of its own
        q = torch.round(q.float()).clamp(-4, 4).to(E4M3)
        s = torch.full_like(s, 120)
    out = run(x, q, s, offs, dtype=torch.float32)
    cases.assert_bitwise(out, run(x, q, s, offs, dtype=torch.float32, pack=False))


def test_tokens_that_fp16_cannot_hold():
    """A token with values 2**60 and 2**-60, one of subnormals, one of zeros: each is computed exactly."""
    q, s, values = weight(1, 64, 128)
    x = cases.scaled_randn(6, 128, device="cpu", seed=1)
    x[0, 3], x[0, 40] = 2.0**60, 2.0**-60
    x[1] = x[1] * 2.0**-120
    x[2] = 0.0
    for rows in ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5]):  # with and without the one that is not exact
        part, ends = x[rows], cases.ends([len(rows)], "cpu")
        out = run(part, q, s, ends, dtype=torch.float32)
        a, b, f64 = part.double(), values.double(), torch.float64
        exact = grouped_mm.mm_m_groups(a, b, ends, None, f64, f64)
        magnitude = grouped_mm.mm_m_groups(a.abs(), b.abs(), ends, None, f64, f64)
        assert ((out.double().cpu() - exact).abs() <= magnitude * 2.0**-18).all()


def test_nan_stays_in_its_rows_and_groups():
    q, s, _ = weight(3, 64, 128)
    x, offs = cases.scaled_randn(9, 128, device="cpu", seed=1), cases.ends([3, 3, 3], "cpu")
    clean = run(x, q, s, offs)
    x[4, 7] = float("nan")
    s[2, 5, 1] = 255
    out = run(x, q, s, offs)
    assert out[4].isnan().all()
    assert out[6:, 5].isnan().all()
    keep = ~out.isnan()
    assert keep.sum() == out.numel() - 64 - 3
    cases.assert_bitwise(out[keep], clean[keep])


# --- shapes, groups, activations -------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", cases.GROUP_CASES)
def test_groups(sizes):
    if DEVICE == "cpu":  # one program per row, at interpreter speed
        sizes = [min(size, 34) for size in sizes[:20]]
    q, s, values = weight(len(sizes), 40, 64)
    rows = sum(sizes)
    x, offs = cases.scaled_randn(rows + 3, 64, device="cpu", seed=1), cases.ends(sizes, "cpu")
    x[rows:] = float("nan")
    bias = cases.scaled_randn(len(sizes), 40, device="cpu", seed=5)
    config = kernel.Config(32, 64, 2, 2)
    out = run(x, q, s, offs, bias=bias, config=config)
    check(out, x.nan_to_num(0.0), values, offs, bias)
    cases.assert_bitwise(out, run(x, q, s, offs, bias=bias, config=config))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("n, k", [(48, 96), (130, 272)])
def test_tiles(tile, n, k):
    q, s, values = weight(2, n, k)
    x, offs = cases.scaled_randn(25, k, device="cpu", seed=1), cases.ends([20, 4], "cpu")
    check(run(x, q, s, offs, config=TILES[tile]), x, values, offs)


@pytest.mark.parametrize("k", [16, 33, 40, 100, 127])
def test_odd_contractions(k):
    q, s, values = weight(2, 33, k)
    x, offs = cases.scaled_randn(6, k, device="cpu", seed=1), cases.ends([1, 4], "cpu")
    for pack in (True, False):
        check(run(x, q, s, offs, pack=pack), x, values, offs)


@pytest.mark.parametrize("splits", [2, 3])
def test_splits_are_summed_in_order(splits):
    q, s, values = weight(3, 64, 640)
    x, offs = cases.scaled_randn(9, 640, device="cpu", seed=1), cases.ends([4, 0, 3], "cpu")
    bias = cases.scaled_randn(3, 64, device="cpu", seed=5)
    out = run(x, q, s, offs, bias=bias, splits=splits)
    check(out, x, values, offs, bias)
    cases.assert_bitwise(out, run(x, q, s, offs, bias=bias, splits=splits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activations", ["bf16", "mxfp8", "already"])
def test_activations(dtype, activations):
    q, s, values = weight(2, 64, 160)
    x, offs = (cases.scaled_randn(7, 160, device="cpu", seed=1) * 2.0**-8).to(dtype), cases.ends([5, 2], "cpu")
    qx, sx = quantize.quantize_rowwise(x, None, False, *RCEIL)
    rounded = quantize.dequantize(qx, sx, "rowwise", None, None, 7, torch.float32)
    match activations:
        case "bf16":
            check(run(x, q, s, offs, dtype=dtype), x.to(torch.bfloat16), values, offs)
        case "mxfp8":
            check(run(x, q, s, offs, dtype=dtype, quantize=RCEIL), rounded, values, offs)
        case "already":
            check(run(qx, q, s, offs, dtype=dtype, scale=sx), rounded, values, offs)


def test_bad_offs_touch_nothing_else():
    """Decreasing or too large ends: other groups than asked for, no access out of bounds (as ``groups.safe_ends``)."""
    q, s, values = weight(4, 64, 64)
    x = cases.scaled_randn(10, 64, device="cpu", seed=1)
    offs = torch.tensor([4, 2, 1000, -3], dtype=torch.int32)
    out = run(x, q, s, offs)
    check(out, x, values, torch.tensor([4, 4, 10, 10], dtype=torch.int32))


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_gate_up_swiglu(pack):
    """Gathered tokens, both projections, the gate and the routing weight in one launch."""
    q, s, values = weight(3, 2 * 40, 96)
    tokens, top_k, sizes = 5, 3, [7, 0, 6]
    x, offs = cases.scaled_randn(tokens, 96, device="cpu", seed=1), cases.ends(sizes, "cpu")
    order = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(0))
    rows = x[order.long() // top_k]

    def expected(compute, dtype):
        gate, up = grouped_mm.mm_m_groups(rows, values, offs, None, compute, torch.float32).float().chunk(2, -1)
        return (silu(gate) * up * weights.reshape(-1)[order.long()][:, None]).to(dtype)

    exact, in_bf16 = expected(torch.float32, torch.float32), expected(torch.bfloat16, torch.bfloat16)
    facts = packed(q, s) if pack else None
    x, q, s, order, offs, weights = (t.to(DEVICE) for t in (x, q, s, order, offs, weights))
    with cases.poisoned():
        out = mx_decode_swiglu(x, None, order, top_k, q, s, facts, offs, weights, order, torch.bfloat16, config=SMALL)
    cases.assert_accumulation(out, exact, in_bf16)
    assert not out[13:].any()


@pytest.mark.parametrize("rounded", [False, True], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("same_tiles", [True, False])
def test_both_projections_in_one_chain(rounded, same_tiles):
    """Tokens prepared once and gathered by the product, tiles listed once: the bits of the two steps by themselves."""
    tokens, hidden, inner, experts, top_k = 9, 96, 64, 5, 3
    up, down = weight(experts, 2 * inner, hidden)[:2], weight(experts, hidden, inner, seed=4)[:2]
    up, down = ((*(t.to(DEVICE) for t in w), packed(*w)) for w in (up, down))
    x = cases.scaled_randn(tokens, hidden, seed=1)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(0, experts + 1, (tokens, top_k), generator=gen).to(DEVICE)  # some of another rank
    weights = torch.rand(tokens, top_k, generator=gen).to(DEVICE)
    offs, order, _ = moe.route(ids, experts)
    quantize_to = RCEIL if rounded else None
    configs = SMALL, SMALL if same_tiles else kernel.Config(32, 64, 2, 3)
    with cases.poisoned():
        out = mx_decode_mlp(x, order, weights, up, down, offs, quantize_to, *configs)
    rows = x[order.long() // top_k]
    middle = mx_decode_swiglu(
        rows, None, None, 0, *up, offs, weights, order, torch.bfloat16, quantize_to, config=configs[0]
    )
    expected = kernel.mx_decode_m_groups(
        middle, None, None, 0, *down, offs, None, torch.bfloat16, quantize_to, config=configs[1]
    )
    end = int(offs[-1])
    assert 0 < end < len(order)
    cases.assert_bitwise(out[:end], expected[:end])


# --- ops -------------------------------------------------------------------------------------------------------------
def test_opcheck():
    """Without its comparisons of values: torch has no allclose for fp8."""
    utils = ("test_autograd_registration", "test_faketensor")
    q, s, _ = weight(2, 32, 64)
    x, offs = cases.scaled_randn(5, 64, seed=1), cases.ends([2, 3])
    q, s = q.to(DEVICE), s.to(DEVICE)
    args = (x, None, q, s, None, None, offs, None, torch.bfloat16, MXRecipe(activations="bf16").key)
    torch.library.opcheck(torch.ops.mxmoe.mx_decode_m_groups.default, args, test_utils=utils)
    up, up_scale, _ = weight(4, 64, 32)
    down, down_scale, _ = weight(4, 32, 32)
    up, up_scale, down, down_scale = (t.to(DEVICE) for t in (up, up_scale, down, down_scale))
    ids = torch.tensor([[0, 2], [3, 4], [2, 1]], device=DEVICE)  # 4: on another rank
    tokens = cases.scaled_randn(3, 32, seed=1)
    args = (tokens, ids, torch.rand(3, 2, device=DEVICE), up, up_scale, None, None, down, down_scale, None, None)
    args = (*args, MXRecipe(activations="bf16").key)
    torch.library.opcheck(torch.ops.mxmoe.mx_experts.default, args, test_utils=utils)


def test_rule_is_static():
    cuda, recipe = torch.device("cuda"), MXRecipe(activations="bf16")
    assert not decode.decodes(torch.device("cpu"), recipe, 1, 8)
    assert not decode.decodes(cuda, recipe.replace(backend="dequant"), 1, 8)
    if torch.cuda.is_available():
        assert decode.decodes(cuda, recipe, decode.LIMIT * 8, 8)
        assert not decode.decodes(cuda, recipe, decode.LIMIT * 8 + 1, 8)
        assert decode.decodes(cuda, recipe, decode.LIMIT_NO_FACTS * 8, 8, facts=False)
        assert not decode.decodes(cuda, recipe, decode.LIMIT_NO_FACTS * 8 + 1, 8, facts=False)


def test_remembered_facts_follow_the_weight():
    q, s, _ = weight(2, 32, 64)
    assert not decode.known(q, s)
    assert decode.remembered(q, s) is None  # used once: not worth a look at every byte
    assert decode.known(q, s)
    first = decode.remembered(q, s)
    assert first is not None
    assert decode.remembered(q, s) is first
    s[0, 0, 0] = 255  # a write makes them stale
    assert decode.remembered(q, s) is None
    again = decode.remembered(q, s)
    assert again is not None
    assert again[1][0, 0] == 255
    before = len(decode._packs)
    del q, s, first, again
    other = weight(1, 32, 32)[:2]
    decode.remembered(*other)
    assert len(decode._packs) <= before


def test_facts_are_not_remembered_without_a_trace_of_writes():
    q, s, _ = weight(2, 32, 64)
    for _ in range(2):
        assert decode.remembered(q.mT, s.mT) is None  # copied for every call
    with torch.inference_mode():
        q, s = q.clone(), s.clone()
        for _ in range(2):
            assert decode.remembered(q, s) is None
    assert not decode.known(q, s)


def test_wrong_operands_are_refused():
    q, s, _ = weight(2, 32, 64)
    facts = mx_decode.pack_weight(q, s)
    x, offs = cases.scaled_randn(5, 64, device="cpu"), cases.ends([2, 3], "cpu")
    key = MXRecipe(activations="bf16").key

    def call(x=x, x_scale=None, w=q, w_scale=s, packed=None, top=None, offs=offs):
        args = (x, x_scale, w, w_scale, packed, top, offs, None, torch.bfloat16, key)
        return torch.ops.mxmoe.mx_decode_m_groups(*args)

    assert call().shape == (5, 32)
    cases.assert_bitwise(call(offs=offs.long()), call())
    source = torch.randn(2, 32, 64)
    colwise, square = (mxmoe.quantize(source, block=block) for block in ("colwise", "square"))
    blocked = mxmoe.quantize(source, layout="blocked")
    for error, message, arguments in (
        (ValueError, "blocks run along N", {"w": colwise.qdata, "w_scale": colwise.scale_bytes}),
        (ValueError, "blocks are square", {"w": square.qdata, "w_scale": square.scale_bytes}),
        (ValueError, "blocked order", {"w": blocked.qdata, "w_scale": blocked.scale_bytes}),
        (ValueError, r"transposed, pass its \.mT", {"w": q.mT}),
        (ValueError, "the last dim of x", {"x": x[:, :32]}),
        (TypeError, "quantize it first", {"w": source}),
        (TypeError, "pass MXTensor.scale_bytes", {"w_scale": s.view(torch.float8_e8m0fnu)}),
        (TypeError, "fp8 values need scales", {"x": x.to(E4M3)}),
        (ValueError, "scales of x must be plain uint8", {"x": x.to(E4M3), "x_scale": s[0]}),
        (ValueError, "must be \\(rows, K\\)", {"x": x[None]}),
        (ValueError, "pack_weight makes them", {"packed": facts[0][:1], "top": facts[1]}),
        (ValueError, "one cumulative end per group", {"offs": offs[:1]}),
    ):
        with pytest.raises(error, match=message):
            call(**arguments)


def test_wrong_layers_are_refused():
    up, down = weight(4, 64, 32), weight(4, 32, 32)
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    x, key = cases.scaled_randn(3, 32, device="cpu"), MXRecipe(activations="bf16").key

    def call(up=up, down=down):
        args = (x, ids, weights, *up[:2], None, None, *down[:2], None, None, key)
        return torch.ops.mxmoe.mx_experts(*args)

    assert call().shape == x.shape
    with pytest.raises(ValueError, match="down must be .* K = 32, the last dim|down must be \\(experts, H, I\\)"):
        call(down=weight(4, 64, 32))
    with pytest.raises(ValueError, match="down must be"):
        call(down=weight(3, 32, 32))
    with pytest.raises(ValueError, match="as many up rows"):
        call(up=weight(4, 63, 32))


@pytest.mark.gpu
def test_a_weight_without_facts_is_expanded_earlier():
    """Above 64 tokens per expert the first use expands, the second decodes; never under inference mode."""
    w = mxmoe.quantize(torch.randn(2, 64, 128, device=DEVICE))
    x, offs = cases.scaled_randn(200, 128, seed=1), cases.ends([90, 110])
    recipe = MXRecipe(activations="bf16")
    reasons = []
    for _ in range(3):
        said = mxmoe.explain(x, w.mT, offs, recipe=recipe).reason
        with mxmoe.observe() as seen:
            mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe)
        assert seen[0].reason == said
        reasons.append("decode kernel" in said)
    assert reasons == [False, True, True]
    with torch.inference_mode():
        w = mxmoe.quantize(torch.randn(2, 64, 128, device=DEVICE))
        for _ in range(3):
            assert "decode kernel" not in mxmoe.explain(x, w.mT, offs, recipe=recipe).reason
            mxmoe.grouped_mm(x, w.mT, offs, recipe=recipe)
        assert "decode kernel" in mxmoe.explain(x[:100], w.mT, offs // 2, recipe=recipe).reason


@pytest.mark.gpu
def test_graph_replay_with_new_offs_and_no_sync():
    q, s, values = weight(8, 128, 256)
    facts = packed(q, s)
    q, s = q.to(DEVICE), s.to(DEVICE)
    x, offs = cases.scaled_randn(64, 256, seed=1), cases.ends([8] * 8)

    def call():
        return kernel.mx_decode_m_groups(x, None, None, 0, q, s, facts, offs, None, torch.bfloat16)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for sizes in ([8] * 8, [0, 64, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [0] * 8):
        offs.copy_(cases.ends(sizes))
        graph.replay()
        torch.cuda.synchronize()
        check(out.cpu(), x.cpu(), values, offs.cpu())


@pytest.mark.gpu
def test_weights_beyond_2_gib():
    """Field report 12: the last expert of a weight of more than 2**31 elements."""
    experts, n, k = 257, 2048, 4096
    q = torch.zeros(experts, n, k, dtype=torch.uint8, device=DEVICE).view(E4M3)
    s = torch.full((experts, n, k // 32), 120, dtype=torch.uint8, device=DEVICE)
    last_q, last_s, values = weight(1, n, k)
    q[-1], s[-1] = last_q[0].to(DEVICE), last_s[0].to(DEVICE)
    offs = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
    offs[-1] = 3
    x = cases.scaled_randn(3, k, seed=1)
    for facts in (kernel.PackedWeight(*mx_decode.pack_weight(q, s)), None):
        out = kernel.mx_decode_m_groups(x, None, None, 0, q, s, facts, offs, None, torch.bfloat16)
        check(out.cpu(), x.cpu(), values, cases.ends([3], "cpu"))
