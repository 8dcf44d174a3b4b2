"""The reference numerics against an oracle written from the table of docs/numerics.md, value by value."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from cases import E4M3, E5M2, GROUP_CASES, MODES, assert_bitwise, ends, scaled_randn, special_values

import mxmoe
from mxmoe import shapes
from mxmoe.reference import quantize as ref


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def oracle_byte(amax_bits: int, mode: str, emax: int, mantissa: int) -> int:
    """The table, with exact integers: smallest or nearest power of two by comparing fractions."""
    if amax_bits >= 0x7F800000:
        return 255
    e, m = amax_bits >> 23, amax_bits & 0x7FFFFF
    if mode == "rceil":
        up = m > 0x600000
    elif mode == "floor":
        up = False
    elif mode == "ceil":
        up = m > 0
    else:
        up = m >= {3: 0x780000, 2: 0x700000}[mantissa]
    return min(max(e - emax + up, 0), 254)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("elem", "emax", "mantissa"), [(E4M3, 8, 3), (E5M2, 15, 2)])
def test_scale_bytes_of_random_bit_patterns(mode, elem, emax, mantissa):
    gen = torch.Generator().manual_seed(1)
    amax = torch.randint(0, 2**31, (100_000,), generator=gen, dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, bits(1.75), bits(448.0)])
    amax = torch.cat([amax, edges.to(torch.int32), edges.to(torch.int32) + 1])
    got = ref.scale_bytes(amax.view(torch.float32), elem, mode).tolist()
    want = [oracle_byte(a & 0x7FFFFFFF, mode, emax, mantissa) for a in amax.tolist()]
    assert got == want


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elem", [E4M3, E5M2])
def test_scale_is_the_power_of_two_it_promises(mode, elem):
    """rceil: smallest power of two with amax / scale <= max. Checked with exact arithmetic, not with bits."""
    limit = {E4M3: 448, E5M2: 57344}[elem]
    gen = torch.Generator().manual_seed(2)
    amax = torch.rand(2000, generator=gen) * torch.exp2(torch.randint(-60, 60, (2000,), generator=gen).float())
    for a, byte in zip(amax.tolist(), ref.scale_bytes(amax, elem, mode).tolist(), strict=True):
        scale = 2.0 ** (byte - 127)
        if mode in ("rceil", "ceil"):
            assert a <= limit * scale
        if mode == "rceil":
            assert a > limit * scale / 2
        if mode == "floor":
            assert 2 ** (8 if elem == E4M3 else 15) <= a / scale < 2 ** (9 if elem == E4M3 else 16)


NEXT_175 = struct.unpack("<f", struct.pack("<I", bits(1.75) + 1))[0]
NEXT_448 = struct.unpack("<f", struct.pack("<I", bits(448.0) + 1))[0]

VECTORS = [
    ("1.75", 1.75, "rceil", 119, 0x7E, 1.75),
    ("next above 1.75", NEXT_175, "rceil", 120, 0x76, 1.75),
    ("448", 448.0, "rceil", 127, 0x7E, 448.0),
    ("next above 448", NEXT_448, "rceil", 128, 0x76, 448.0),
    ("2^-120", 2.0**-120, "rceil", 0, 0x70, 2.0**-120),
    ("255.99998 floor", 255.99998, "floor", 126, None, None),
    ("256 floor", 256.0, "floor", 127, 0x78, 256.0),
    ("0", 0.0, "rceil", 0, 0x00, 0.0),
    ("-0.0", -0.0, "rceil", 0, 0x80, -0.0),
    ("1e-40", 1e-40, "rceil", 0, 0x09, None),
]


@pytest.mark.parametrize(("name", "value", "mode", "byte", "elem", "back"), VECTORS, ids=[v[0] for v in VECTORS])
@pytest.mark.parametrize("block", ["rowwise", "colwise", "square"])
def test_vectors(name, value, mode, byte, elem, back, block):
    x = torch.full((32, 32), value)
    t = mxmoe.quantize(x, block=block, scale_mode=mode)
    assert t.scale_bytes.flatten()[0] == byte
    if elem is not None:
        assert t.qdata.view(torch.uint8).flatten()[0] == elem
    y = mxmoe.dequantize(t, torch.float32).flatten()[0].item()
    if back is not None:
        assert y == back
        assert math.copysign(1, y) == math.copysign(1, back)
    if name == "1e-40":
        assert abs(y - 1e-40) <= 2.0**-10 * 2.0**-127


@pytest.mark.parametrize(("mode", "byte", "elem", "back"), [("rceil", 129, 0x77, 960.0), ("floor", 128, 0x7E, 896.0)])
def test_957_alone(mode, byte, elem, back):
    """Field report 4: floor clips 957 to 896. That is the mode; the default does not."""
    x = torch.zeros(1, 32)
    x[0, 0] = 957.0
    t = mxmoe.quantize(x, scale_mode=mode)
    assert t.scale_bytes.item() == byte
    assert t.qdata.view(torch.uint8)[0, 0] == elem
    assert mxmoe.dequantize(t, torch.float32)[0, 0] == back


def test_scale_bytes_decode():
    """Field report 1."""
    got = ref.scale_values(torch.tensor([0, 1, 127, 134, 254, 255], dtype=torch.uint8))
    assert got[:5].tolist() == [2.0**-127, 2.0**-126, 1.0, 128.0, 2.0**127]
    assert torch.isnan(got[5])


def test_nan_and_inf_stay_in_their_block():
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = scaled_randn(4, 96, dtype=torch.float32, device="cpu")
        clean = mxmoe.quantize(x)
        x[1, 40] = bad
        t = mxmoe.quantize(x)
        assert t.scale_bytes[1, 1] == 255
        assert (t.qdata.view(torch.uint8)[1, 32:64] == 0x7F).all()
        assert torch.isnan(mxmoe.dequantize(t)[1, 32:64]).all()
        same = torch.ones(4, 96, dtype=torch.bool)
        same[1, 32:64] = False
        assert torch.equal(t.qdata.view(torch.uint8)[same], clean.qdata.view(torch.uint8)[same])


def test_clamp_before_cast():
    """Field report 5: floor leaves values up to 512 after scaling; they become 448, never NaN."""
    x = torch.full((1, 32), 511.9)
    t = mxmoe.quantize(x, scale_mode="floor")
    assert (t.qdata.view(torch.uint8) == 0x7E).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elem", [E4M3, E5M2])
@pytest.mark.parametrize("mode", MODES)
def test_elements_against_float64(dtype, elem, mode):
    """Every element is the nearest representable one of x / scale (ties to even): brute force over the 256 bytes."""
    x = special_values(dtype=dtype, device="cpu")
    t = mxmoe.quantize(x, elem_dtype=elem, scale_mode=mode)
    table = torch.arange(256, dtype=torch.uint8).view(elem).double()
    finite = torch.isfinite(table)
    values = table[finite]
    scale = ref.scale_values(t.scale_bytes).double().repeat_interleave(32, 1)
    limit = values.max()
    y = (x.double() / scale).clamp(-limit, limit)
    ok = torch.isfinite(y)
    distance = (y[ok][:, None] - values[None]).abs()
    best = distance.min(1).values
    got = t.qdata.view(torch.uint8)[ok].long()
    assert torch.equal((table[got] - y[ok]).abs(), best)
    tie = (distance == best[:, None]).sum(1) > 1  # +-0 tie as well
    nonzero = tie & (y[ok] != 0) & (table[got] != 0)
    assert (got[nonzero] % 2 == 0).all()
    assert torch.equal(torch.signbit(table[got]), torch.signbit(y[ok]))


def test_error_budget():
    """N(0,1): 0.0266 (rceil), 0.0276 (even), 0.0294 (floor)."""
    x = torch.randn(512, 4096, generator=torch.Generator().manual_seed(3))
    for mode, rms in (("rceil", 0.0266), ("even", 0.0276), ("floor", 0.0294)):
        y = mxmoe.fake_quantize(x, scale_mode=mode, dtype=torch.float32)
        assert ((y - x).norm() / x.norm()).item() == pytest.approx(rms, rel=0.02)


# --- structure -------------------------------------------------------------------------------------------------------
def by_hand_colwise(x, sizes):
    """Colwise per group written the long way: slice, pad with zeros, transpose, quantize rowwise."""
    parts, start = [], 0
    for m in sizes:
        part = x[start : start + m]
        padded = x.new_zeros(-(-m // 32) * 32, x.shape[1])
        padded[:m] = part
        parts.append(padded)
        start += m
    padded = torch.cat(parts) if parts else x[:0]
    return padded, [p.shape[0] for p in parts]


@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("tail", [0, 37])
def test_colwise_groups(sizes, tail):
    m = sum(sizes) + tail
    x = scaled_randn(m, 40, dtype=torch.float32, device="cpu")
    offs = ends(sizes, "cpu")
    t = mxmoe.quantize(x, block="colwise", offs=offs)
    padded, padded_sizes = by_hand_colwise(x, sizes)
    rows = padded.shape[0]
    want = mxmoe.quantize(padded.t().contiguous())
    mp = shapes.padded_rows(m, len(sizes))
    assert tuple(t.qdata.shape) == (mp, 40)
    assert t.qdata.t().is_contiguous() or mp <= 1
    assert_bitwise(t.qdata[:rows].t(), want.qdata, "qdata")
    assert_bitwise(t.scale_bytes[: rows // 32].t(), want.scale_bytes, "scale")
    assert not t.qdata.view(torch.uint8)[rows:].any()
    assert not t.scale_bytes[rows // 32 :].any()
    assert t.offs.tolist() == torch.tensor(padded_sizes).cumsum(0).tolist()
    back = mxmoe.dequantize(t, torch.float32)
    assert back.shape == x.shape
    assert_bitwise(back, mxmoe.fake_quantize(x, block="colwise", offs=offs, dtype=torch.float32), "dequantize")
    assert not back[sum(sizes) :].any()


def test_small_row_beside_a_large_one_of_another_group():
    """Field report 9: row 0 = 2^-10 in its own group keeps its own scale."""
    x = torch.full((65, 32), 448.0)
    x[0] = 2.0**-10
    y = mxmoe.fake_quantize(x, block="colwise", offs=ends([1, 31, 33, 0], "cpu"), dtype=torch.float32)
    assert (y[0] == 2.0**-10).all()
    assert (y[1:] == 448).all()


@pytest.mark.parametrize("shape", [(65, 40), (3, 33, 50), (1, 1), (32, 32), (0, 64), (2, 0, 32), (5, 0)])
def test_round_trip_shapes(shape):
    x = scaled_randn(*shape, dtype=torch.float32, device="cpu")
    row, col = mxmoe.quantize_both(x)
    assert tuple(row.scale.shape) == shapes.rowwise(shape)[1]
    assert tuple(col.scale.shape) == shapes.colwise(shape)[1]
    assert_bitwise(row.qdata, mxmoe.quantize(x).qdata)
    assert_bitwise(col.qdata, mxmoe.quantize(x, block="colwise").qdata)
    # colwise is rowwise of the transposed matrix
    turned = mxmoe.quantize(x.mT)
    assert_bitwise(col.mT.qdata, turned.qdata)
    assert_bitwise(col.mT.scale, turned.scale)
    for t, source in ((row, x), (col, x), (mxmoe.quantize(x, block="square"), x), (col.mT, x.mT)):
        y = mxmoe.dequantize(t, torch.float32)
        assert y.shape == source.shape == t.shape
        assert y.is_contiguous()
        if x.numel():
            assert (y - source).norm() <= 0.05 * x.norm()


@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("block", ["rowwise", "colwise"])
def test_blocked_layout_round_trip(sizes, block):
    x = scaled_randn(sum(sizes) + 5, 72, dtype=torch.float32, device="cpu")
    offs = ends(sizes, "cpu")
    plain, blocked = (mxmoe.quantize(x, block=block, offs=offs, layout=y) for y in ("plain", "blocked"))
    assert_bitwise(blocked.qdata, plain.qdata)
    assert_bitwise(mxmoe.dequantize(blocked), mxmoe.dequantize(plain))


def test_square_is_valid_in_both_directions():
    x = scaled_randn(2, 64, 96, dtype=torch.float32, device="cpu")
    t = mxmoe.quantize(x, block="square")
    y = mxmoe.dequantize(t, torch.float32)
    row = (
        t.qdata.float().unflatten(-1, (-1, 32)) * ref.scale_values(t.scale_bytes.repeat_interleave(32, -2))[..., None]
    ).flatten(-2)
    assert torch.equal(y, row)
    assert_bitwise(t.mT.qdata, mxmoe.quantize(x.mT, block="square").qdata)


def test_pytree_and_copies():
    import copy
    import pickle

    from torch.utils import _pytree as pytree

    x = scaled_randn(65, 40, device="cpu")
    t = mxmoe.quantize(x, block="colwise", offs=ends([33, 32], "cpu"))
    leaves, spec = pytree.tree_flatten(t)
    for other in (pytree.tree_unflatten(leaves, spec), copy.deepcopy(t), pickle.loads(pickle.dumps(t)), t.to("cpu")):
        assert_bitwise(mxmoe.dequantize(other), mxmoe.dequantize(t))
    assert "colwise" in repr(t)
    assert t.nbytes == t.qdata.numel() + t.scale.numel()


def test_torchao_agrees_where_it_is_right():
    to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").to_mx
    mode = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
    x = scaled_randn(64, 128, device="cpu")
    for ours, theirs in (("rceil", mode.RCEIL), ("floor", mode.FLOOR), ("even", mode.EVEN)):
        scale, data = to_mx(x, E4M3, 32, theirs)
        t = mxmoe.quantize(x, scale_mode=ours)
        right = (t.scale_bytes > 0).flatten()  # torchao reads byte 0 as zero
        assert torch.equal(t.scale_bytes.flatten()[right], scale.view(torch.uint8).flatten()[right])
        got = t.qdata.view(torch.uint8).reshape(-1, 32)[right]
        assert torch.equal(got, data.view(torch.uint8).reshape(-1, 32)[right])


# --- bad input -------------------------------------------------------------------------------------------------------
X = torch.zeros(64, 32)
BAD = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor"),
    ({"x": X.double()}, TypeError, "float64"),
    ({"x": X[0]}, ValueError, "2-D or 3-D"),
    ({"x": X, "block": "dim0"}, ValueError, "'dim0'"),
    ({"x": X, "layout": "swizzled"}, ValueError, "'swizzled'"),
    ({"x": X, "scale_mode": "round"}, ValueError, "'round'"),
    ({"x": X, "elem_dtype": torch.int8}, ValueError, "elem_dtype"),
    ({"x": X, "offs": [32, 64]}, TypeError, "offs must be an int32 tensor"),
    ({"x": X, "offs": torch.tensor([32.0])}, TypeError, "float32"),
    ({"x": X, "offs": torch.tensor([[32]])}, ValueError, "1-D"),
    ({"x": X, "offs": torch.tensor([], dtype=torch.int32)}, ValueError, "at least one group"),
    ({"x": X[None], "offs": torch.tensor([32])}, ValueError, "2-D x"),
    ({"x": X, "block": "square", "offs": torch.tensor([32])}, ValueError, "takes no offs"),
    ({"x": X, "block": "square", "layout": "blocked"}, ValueError, "no blocked layout"),
]


@pytest.mark.parametrize(("kwargs", "error", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input(kwargs, error, message):
    with pytest.raises(error, match=message):
        mxmoe.quantize(**kwargs)


def test_bad_offs_values_stay_in_bounds():
    """Decreasing, negative or too large ends: any result, no access out of bounds; the debug check names the entry."""
    x = scaled_randn(64, 32, device="cpu")
    for values in ([40, 10, 64], [-5, 200, 7], [2**31 - 1, 0, 0]):
        offs = torch.tensor(values, dtype=torch.int32)
        for block in ("rowwise", "colwise"):
            assert mxmoe.dequantize(mxmoe.quantize(x, block=block, offs=offs)).shape == x.shape
    with pytest.raises(ValueError, match=r"offs\[1\] = 10 is smaller"):
        mxmoe.debug_offs(torch.tensor([40, 10, 64]), 64)
    with pytest.raises(ValueError, match=r"offs\[0\] = 65"):
        mxmoe.debug_offs(torch.tensor([65]), 64)


def test_debug_mode(monkeypatch):
    monkeypatch.setenv("MXMOE_DEBUG", "1")
    with pytest.raises(ValueError, match=r"offs\[1\]"):
        mxmoe.quantize(X, offs=torch.tensor([40, 10]))
