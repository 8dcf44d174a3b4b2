"""Quantization kernels against the reference: every byte equal, in the interpreter and on a GPU."""

import contextlib

import pytest
import torch
from cases import (
    DEVICE,
    E4M3,
    E5M2,
    GROUP_CASES,
    GROUPS,
    MODES,
    assert_bitwise,
    ends,
    poisoned,
    scaled_randn,
    special_values,
)

from mxmoe import shapes
from mxmoe.kernels import (
    _e8m0,
    dequantize,
    fake_quantize,
    quantize_both,
    quantize_colwise,
    quantize_rowwise,
    quantize_square,
)
from mxmoe.reference import quantize as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = ("rowwise", "colwise", "square")
QUANTIZERS = {
    "rowwise": (quantize_rowwise.quantize_rowwise, reference.quantize_rowwise),
    "colwise": (quantize_colwise.quantize_colwise, reference.quantize_colwise),
    "both": (quantize_both.quantize_both, reference.quantize_both),
    "colwise_triton": (quantize_colwise.quantize_colwise_triton, reference.quantize_colwise),
    "both_triton": (quantize_both.quantize_both_triton, reference.quantize_both),
}
# Where the fast forms do not apply (no GPU), the launcher is the plain kernel: testing it twice shows nothing.
NAMES = tuple(QUANTIZERS) if DEVICE == "cuda" else ("rowwise", "colwise", "both")


@pytest.fixture(autouse=True)
def _wide_tiles(monkeypatch):
    """In the interpreter a program costs milliseconds whatever its size: fewer, larger tiles."""
    if DEVICE == "cpu":
        monkeypatch.setattr(quantize_rowwise, "TILE", (32, 128, 1, 4))
        monkeypatch.setattr(quantize_rowwise, "TILE_GROUPS", (64, 128, 2, 4))
        monkeypatch.setattr(quantize_colwise, "TILE_BLOCKED", (128, 128, 4))
        for name in ("TILE_ROWWISE", "TILE_ROWWISE_GROUPS"):
            monkeypatch.setattr(fake_quantize, name, (32, 128, 1, 4))


def assert_equal(actual, expected, what):
    """Every tensor of two results: shape, strides, dtype, bits."""
    actual = actual if isinstance(actual, tuple) else (actual,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(actual) == len(expected), what
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        strides = [(s, t) for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1]
        assert a.numel() == 0 or all(s == t for s, t in strides), f"{what}[{i}]: strides {a.stride()} != {b.stride()}"
        assert_bitwise(a, b, f"{what}[{i}]")


def same_nan(t):
    """``t`` with every NaN the same: results in bf16, fp16 and fp32 do not keep the sign and payload of one."""
    return torch.where(t.isnan(), torch.full_like(t, float("nan")), t)


@contextlib.contextmanager
def guarded():
    """Outputs lie between guard bytes, which must survive, in memory poisoned with 0xFF. Checked on leaving."""
    originals, buffers = (torch.empty, torch.empty_strided), []

    def empty_strided(size, stride, *, dtype, device):
        span = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        used = span * dtype.itemsize
        raw = torch.full((used + 1024,), 0xFF, dtype=torch.uint8, device=device)
        raw[:512] = raw[512 + used :] = 0xA5
        buffers.append((raw, used))
        inner = raw[512 : 512 + used].view(dtype)
        return inner.as_strided(size, stride) if span else originals[1](size, stride, dtype=dtype, device=device)

    def empty(*size, dtype=FP32, device=None):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return empty_strided(tuple(size), shapes.row_major(tuple(size)), dtype=dtype, device=device)

    torch.empty, torch.empty_strided = empty, empty_strided
    try:
        yield
    finally:
        torch.empty, torch.empty_strided = originals
    for raw, n in buffers:
        assert bool((raw[:512] == 0xA5).all()), "bytes before an output were written"
        assert bool((raw[512 + n :] == 0xA5).all()), "bytes behind an output were written"


# --- quantize --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("name", NAMES)
def test_groups(name, sizes, blocked):
    kernel, spec = QUANTIZERS[name]
    x, offs = scaled_randn(sum(sizes) + 7, 96 if len(sizes) < 10 else 32), ends(sizes)
    with poisoned():
        actual = kernel(x, offs, blocked, E4M3, "rceil")
    assert_equal(actual, spec(x, offs, blocked, E4M3, "rceil"), name)


@pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 32), (64, 40), (31, 130), (129, 90), (2, 33, 72), (3, 160, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, shape, blocked):
    kernel, spec = QUANTIZERS[name]
    x = scaled_randn(*shape)
    with guarded():
        actual = kernel(x, None, blocked, E4M3, "rceil")
    assert_equal(actual, spec(x, None, blocked, E4M3, "rceil"), name)
    assert_equal(kernel(x, None, blocked, E4M3, "rceil"), actual, "second run")


@pytest.mark.parametrize("name", NAMES)
def test_scale_rows_and_padding(name):
    """Field report 8: (65, 3) and (K = 2880, 90 columns) scales, memory poisoned."""
    kernel, spec = QUANTIZERS[name]
    for m, k in ((65, 96), (32, 2880)):
        x = scaled_randn(m, k)
        with poisoned():
            actual = kernel(x, None, True, E4M3, "rceil")
        assert_equal(actual, spec(x, None, True, E4M3, "rceil"), f"{name} ({m}, {k})")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_special_values(elem, mode, dtype):
    """Field reports 3, 5, 7: special values in every block form. A NaN block does not touch its neighbours."""
    x = special_values(dtype=dtype)
    for name in NAMES:
        kernel, spec = QUANTIZERS[name]
        assert_equal(kernel(x, None, False, elem, mode), spec(x, None, False, elem, mode), name)
    actual = quantize_square.quantize_square(x, False, elem, mode)
    assert_equal(actual, reference.quantize_square(x, False, elem, mode), "square")


@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_integer_cast(elem, monkeypatch):
    """Chips without a single-rounding fp8 instruction take the integer rule: all bf16 values, and fp32 near ties."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(-1, 1024)
    near = (scaled_randn(64, 1024, dtype=FP32, device="cpu").view(torch.int32) & ~0xFFFFF) | 0x80000
    near = near + torch.randint(-1, 2, near.shape, dtype=torch.int32)
    for hardware in (False, True):
        if hardware and DEVICE == "cpu":
            continue
        monkeypatch.setattr(_e8m0, "hardware_cast", lambda device, hardware=hardware: hardware)
        for x in (bits.to(DEVICE), near.view(FP32).to(DEVICE)):
            for mode in ("rceil", "floor"):
                expected = reference.quantize_rowwise(x, None, False, elem, mode)
                assert_equal(quantize_rowwise.quantize_rowwise(x, None, False, elem, mode), expected, mode)
            q = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(2, 1).view(elem)
            scale = torch.tensor([[0, 1, 120, 127, 134, 247, 254, 255]] * 2, dtype=torch.uint8, device=DEVICE)
            args = (q, scale, "rowwise", None, None, 2, FP32)
            assert_equal(same_nan(dequantize.dequantize(*args)), same_nan(reference.dequantize(*args)), "decode")


VECTORS = {  # docs/numerics.md: name -> (value, alone in its block, mode, byte, element)
    "1.75": (1.75, False, "rceil", 119, 0x7E),
    "next_1.75": (1.75 + 2.0**-23, False, "rceil", 120, 0x76),
    "448": (448.0, False, "rceil", 127, 0x7E),
    "next_448": (448.0 + 2.0**-15, False, "rceil", 128, 0x76),
    "2**-120": (2.0**-120, False, "rceil", 0, 0x70),
    "957": (957.0, True, "rceil", 129, 0x77),
    "957_floor": (957.0, True, "floor", 128, 0x7E),
    "below_256_floor": (255.99998, False, "floor", 126, None),
    "256_floor": (256.0, False, "floor", 127, 0x78),
    "0": (0.0, False, "rceil", 0, 0x00),
    "-0": (-0.0, False, "rceil", 0, 0x80),
    "subnormal": (1e-40, False, "rceil", 0, 0x09),
    "nan": (float("nan"), True, "rceil", 255, 0x7F),
    "inf": (float("inf"), True, "rceil", 255, 0x7F),
}


@pytest.mark.parametrize("value, alone, mode, byte, element", VECTORS.values(), ids=VECTORS)
def test_vectors(value, alone, mode, byte, element):
    x = torch.zeros(32, 32) if alone else torch.full((32, 32), value)
    x[0, 0] = value
    x = x.to(DEVICE)
    q, scale = quantize_rowwise.quantize_rowwise(x, None, False, E4M3, mode)
    q_col, scale_col, _ = quantize_colwise.quantize_colwise(x, None, False, E4M3, mode)
    q_square, scale_square = quantize_square.quantize_square(x, False, E4M3, mode)
    for elem, scales in ((q, scale), (q_col, scale_col), (q_square, scale_square)):
        assert scales[0, 0].item() == byte
        assert element is None or elem.view(torch.uint8)[0, 0].item() == element


def test_nan_stays_in_its_block():
    x = scaled_randn(64, 64)
    clean = quantize_both.quantize_both(x, ends([32, 32]), False, E4M3, "rceil")
    x[3, 5] = float("nan")
    dirty = quantize_both.quantize_both(x, ends([32, 32]), False, E4M3, "rceil")
    for i, (a, b) in enumerate(zip(clean[:4], dirty[:4], strict=True)):
        changed = (a.view(torch.uint8) != b.view(torch.uint8)).nonzero().tolist()
        for row, col in changed:
            inside = (row == 3 and col < 32, (row, col) == (3, 0), col == 5 and row < 32, (row, col) == (0, 5))
            assert inside[i], (i, row, col)
        assert changed


@pytest.mark.parametrize("name", NAMES)
def test_strides(name):
    """Field report 11: row-strided, every other row, expanded, transposed, stride-0 inputs, batches of views."""
    kernel, spec = QUANTIZERS[name]
    big = scaled_randn(80, 192)
    views = [big[:, :64], big[::2], big[3:35, 8:72], big.t()[:64], big[:1].expand(40, 192), big[:, :1].expand(80, 64)]
    views += [scaled_randn(2, 40, 96).mT, scaled_randn(2, 40, 96)[:, 3:, :64], big[:, 1:65]]
    for x in views:
        expected = spec(x, None, False, E4M3, "rceil")
        assert_equal(kernel(x, None, False, E4M3, "rceil"), expected, f"{x.shape} {x.stride()}")


@pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
@pytest.mark.parametrize("name", NAMES)
def test_empty(name, blocked):
    """Field report 14: no rows, no columns, no experts; padded ends and slack are defined all the same."""
    kernel, spec = QUANTIZERS[name]
    inputs = [(scaled_randn(0, 64), ends([0, 0, 0])), (torch.empty(8, 0, dtype=BF16, device=DEVICE), ends([3, 5]))]
    inputs += [(torch.empty(s, dtype=BF16, device=DEVICE), None) for s in ((0, 64), (8, 0), (0, 8, 64), (2, 0, 64))]
    for x, offs in inputs:
        with poisoned():
            actual = kernel(x, offs, blocked, E4M3, "rceil")
        assert_equal(actual, spec(x, offs, blocked, E4M3, "rceil"), f"{name} {tuple(x.shape)}")


@pytest.mark.parametrize("bad", [[64, 32, 90], [-5, 40, 1000], [200, 0, 3], [2**31 - 1, 5, 2**31 - 1]])
def test_bad_offs_are_safe(bad):
    """Field report 18: decreasing, negative or too large ends give wrong groups, never an access out of bounds."""
    x, offs = scaled_randn(70, 64), torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    for name in NAMES:
        kernel, spec = QUANTIZERS[name]
        for blocked in (False, True):
            with guarded():
                actual = kernel(x, offs, blocked, E4M3, "rceil")
            assert_equal(actual, spec(x, offs, blocked, E4M3, "rceil"), name)
    for block in ("rowwise", "colwise"):
        args = (x, block, offs, E4M3, "rceil", BF16)
        with guarded():
            actual = fake_quantize.fake_quantize(*args)
        assert_equal(actual, reference.fake_quantize(*args), block)


def test_many_groups():
    """Field report 13: 6, 33, 384, 600 groups. (In the interpreter every group costs time.)"""
    for groups in (6, 33, 384, 600) if DEVICE == "cuda" else (33,):
        sizes = [(11 * i) % 3 for i in range(groups)]
        x, offs = scaled_randn(sum(sizes) + 3, 32), ends(sizes)
        for name in NAMES if DEVICE == "cuda" else ("rowwise", "colwise"):
            kernel, spec = QUANTIZERS[name]
            for blocked in (False, True) if DEVICE == "cuda" else (False,):
                actual = kernel(x, offs, blocked, E4M3, "rceil")
                assert_equal(actual, spec(x, offs, blocked, E4M3, "rceil"), f"{name} {groups}")
        actual = fake_quantize.fake_quantize_both(x, offs, E4M3, "rceil", BF16)
        assert_equal(actual, reference.fake_quantize_both(x, offs, E4M3, "rceil", BF16), f"fake {groups}")


def test_zero_blocks():
    """Field report 7: all-zero blocks, columns and channels quantize to 0, never NaN."""
    x = scaled_randn(64, 96)
    x[:, 32:64] = 0
    x[32:] = 0
    q, scale = quantize_rowwise.quantize_rowwise(x, None, False, E4M3, "rceil")
    assert not scale[:, 1].any()
    assert not scale[32:].any()
    assert not (q.view(torch.uint8)[:, 32:64] & 0x7F).any()
    back = dequantize.dequantize(q, scale, "rowwise", None, None, 64, BF16)
    assert (back[:, 32:64] == 0).all()
    assert (back[32:] == 0).all()


# --- square ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("column_major", [False, True], ids=["row_major", "column_major"])
@pytest.mark.parametrize("shape", [(32, 32), (40, 48), (33, 130), (2, 64, 96), (3, 65, 33)])
def test_square(shape, column_major):
    for x, elem, mode in ((scaled_randn(*shape), E4M3, "rceil"), (scaled_randn(*shape, dtype=FP32).mT, E5M2, "even")):
        with guarded():
            q, scale = quantize_square.quantize_square(x, column_major, elem, mode)
        assert_equal((q, scale), reference.quantize_square(x, column_major, elem, mode), "square")
        with guarded():
            both = quantize_square.quantize_square_both(x, elem, mode)
        assert_equal(both, reference.quantize_square_both(x, elem, mode), "square in both orders")
        assert_equal((both[column_major], both[2]), (q, scale), "square in both orders")
        args = (q, scale, "square", None, None, x.shape[-2], BF16)
        with poisoned():
            actual = dequantize.dequantize(*args)
        assert_equal(actual, reference.dequantize(*args), "dequantize")


# --- dequantize, fake_quantize ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [None, *GROUP_CASES])
def test_dequantize(sizes):
    m = 70 if sizes is None else sum(sizes) + 7
    many = sizes is not None and len(sizes) > 9
    x, offs = scaled_randn(m, 32 if many else 96), None if sizes is None else ends(sizes)
    q, scale = reference.quantize_rowwise(x, offs, False, E4M3, "rceil")
    args = (q, scale, "rowwise", None, None, m, BF16)
    assert_equal(dequantize.dequantize(*args), reference.dequantize(*args), "rowwise")
    q, scale, padded = reference.quantize_colwise(x, offs, False, E4M3, "rceil")
    args = (q, scale, "colwise", None if offs is None else padded, offs, m, BF16)
    with guarded():
        actual = dequantize.dequantize(*args)
    assert_equal(actual, reference.dequantize(*args), "colwise")


@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_dequantize_special_values(elem, out):
    """Field reports 1, 2: byte 0 is 2**-127, byte 255 is NaN; nothing overflows on the way."""
    x = special_values()
    for block, spec in (("rowwise", reference.quantize_rowwise), ("colwise", reference.quantize_colwise)):
        q, scale = spec(x, None, False, elem, "rceil")[:2]
        args = (q, scale, block, None, None, len(x), out)
        assert_equal(same_nan(dequantize.dequantize(*args)), same_nan(reference.dequantize(*args)), block)
    for block in BLOCKS:
        args = (x, block, None, elem, "rceil", out)
        assert_equal(same_nan(fake_quantize.fake_quantize(*args)), same_nan(reference.fake_quantize(*args)), block)


@pytest.mark.parametrize("shape", [(64, 40), (33, 130), (2, 65, 96), (1, 1)])
def test_dequantize_shapes(shape):
    x = scaled_randn(*shape)
    for block, spec in (("rowwise", reference.quantize_rowwise), ("colwise", reference.quantize_colwise)):
        q, scale = spec(x, None, False, E4M3, "rceil")[:2]
        args = (q, scale, block, None, None, shape[-2], BF16)
        with guarded():
            actual = dequantize.dequantize(*args)
        assert_equal(actual, reference.dequantize(*args), block)
        stride = shapes.round_up(shape[-1], 8) + 8
        padded = dequantize.dequantize(*args, row_stride=stride)
        assert padded.stride(-2) == stride
        assert_bitwise(padded.contiguous(), reference.dequantize(*args), "row_stride")


@pytest.mark.parametrize("sizes", GROUP_CASES)
def test_fake_quantize_groups(sizes):
    x, offs = scaled_randn(sum(sizes) + 7, 96 if len(sizes) < 10 else 32), ends(sizes)
    x[sum(sizes) :] = float("nan")  # rows of no group: never read into a result
    for block in ("rowwise", "colwise"):
        args = (x, block, offs, E4M3, "rceil", BF16)
        with poisoned():
            actual = fake_quantize.fake_quantize(*args)
        assert_equal(actual, reference.fake_quantize(*args), block)
    with guarded():
        actual = fake_quantize.fake_quantize_both(x, offs, E4M3, "rceil", BF16)
    assert_equal(actual, reference.fake_quantize_both(x, offs, E4M3, "rceil", BF16), "both")


@pytest.mark.parametrize("shape", [(64, 40), (33, 130), (2, 65, 96), (1, 1), (0, 64), (8, 0)])
def test_fake_quantize_shapes(shape):
    x = scaled_randn(*shape, dtype=FP32) if 0 not in shape else torch.empty(shape, device=DEVICE)
    for block in BLOCKS:
        args = (x, block, None, E5M2, "floor", FP16)
        with guarded():
            actual = fake_quantize.fake_quantize(*args)
        assert_equal(actual, reference.fake_quantize(*args), block)
    stride = shapes.round_up(shape[-1], 8) + 8
    expected = reference.fake_quantize_both(x, None, E4M3, "rceil", BF16)
    for got, want in zip(
        fake_quantize.fake_quantize_both(x, None, E4M3, "rceil", BF16, row_stride=stride), expected, strict=True
    ):
        assert got.numel() == 0 or got.stride(-2) == stride
        assert_bitwise(got.contiguous(), want, "row_stride")


def test_fake_quantize_is_quantize_then_dequantize():
    x, offs = scaled_randn(112, 96), ends(GROUPS["six"])
    q, scale, padded = quantize_colwise.quantize_colwise(x, offs, False, E4M3, "rceil")
    back = dequantize.dequantize(q, scale, "colwise", padded, offs, len(x), BF16)
    assert_equal(fake_quantize.fake_quantize(x, "colwise", offs, E4M3, "rceil", BF16), back, "colwise")


# --- GPU only --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rowwise", "colwise", "both", "colwise_triton", "both_triton"])
def test_large_shapes(name):
    """Real tile configurations: several tiles in both dims, uneven groups, all layouts."""
    kernel, spec = QUANTIZERS[name]
    sizes = [1000, 0, 31, 129, 840, 2, 1500, 96]
    for k in (2048, 2880, 1000):
        x = scaled_randn(sum(sizes) + 77, k)
        for offs in (None, ends(sizes)):
            for blocked in (False, True):
                with poisoned():
                    actual = kernel(x, offs, blocked, E4M3, "rceil")
                assert_equal(actual, spec(x, offs, blocked, E4M3, "rceil"), f"{name} {k} {offs} {blocked}")


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """Field report 12: (524289, 4096), last rows; (257, 2048, 4096), last expert."""
    x = torch.zeros(524289, 4096, dtype=BF16, device="cuda")
    tail = scaled_randn(65, 4096)
    x[-65:] = tail
    offs = torch.tensor([524224, 524289], dtype=torch.int32, device="cuda")
    for blocked in (False, True):
        q_row, s_row, q_col, s_col, padded = quantize_both.quantize_both(x, offs, blocked, E4M3, "rceil")
        q, s = quantize_rowwise.quantize_rowwise(x, offs, blocked, E4M3, "rceil")
        assert torch.equal(q.view(torch.uint8), q_row.view(torch.uint8))
        assert torch.equal(s, s_row)
        q, s, _ = quantize_colwise.quantize_colwise(x, offs, blocked, E4M3, "rceil")
        assert torch.equal(q.view(torch.uint8), q_col.view(torch.uint8))
        assert torch.equal(s, s_col)
        want_q, want_s = reference.quantize_rowwise(tail, None, False, E4M3, "rceil")
        assert_bitwise(q_row[-65:], want_q, "rowwise")
        if not blocked:
            assert_bitwise(s_row[-65:], want_s, "rowwise scale")
        want_q, want_s, _ = reference.quantize_colwise(tail, ends([65]), False, E4M3, "rceil")
        first = padded[0].item()
        assert_bitwise(q_col[first : first + 96], want_q[:96], "colwise")
        if not blocked:
            assert_bitwise(s_col[first // 32 : first // 32 + 3], want_s[:3], "colwise scale")
        del q_row, s_row, q_col, s_col, q, s
    row, col = fake_quantize.fake_quantize_both(x, offs, E4M3, "rceil", BF16)
    assert_bitwise(row[-65:], reference.fake_quantize(tail, "rowwise", None, E4M3, "rceil", BF16), "fake rowwise")
    assert_bitwise(col[-65:], reference.fake_quantize(tail, "colwise", None, E4M3, "rceil", BF16), "fake colwise")
    del x, row, col

    w = torch.zeros(257, 2048, 4096, dtype=BF16, device="cuda")
    last = scaled_randn(2048, 4096)
    w[-1] = last
    results = {
        "rowwise": quantize_rowwise.quantize_rowwise(w, None, False, E4M3, "rceil")[0],
        "colwise": quantize_colwise.quantize_colwise(w, None, False, E4M3, "rceil")[0],
        "square": quantize_square.quantize_square(w, True, E4M3, "rceil")[0],
    }
    assert_bitwise(results["rowwise"][-1], reference.quantize_rowwise(last, None, False, E4M3, "rceil")[0], "rowwise")
    assert_bitwise(results["colwise"][-1], reference.quantize_colwise(last, None, False, E4M3, "rceil")[0], "colwise")
    assert_bitwise(results["square"][-1], reference.quantize_square(last, True, E4M3, "rceil")[0], "square")


@pytest.mark.gpu
def test_many_matrices():
    """More matrices than the second dim of a grid holds."""
    x = scaled_randn(65537, 2, 48)
    for name in NAMES:
        kernel, spec = QUANTIZERS[name]
        assert_equal(kernel(x, None, False, E4M3, "rceil"), spec(x, None, False, E4M3, "rceil"), name)
    args = (x, "square", None, E4M3, "rceil", BF16)
    assert_equal(fake_quantize.fake_quantize(*args), reference.fake_quantize(*args), "fake_quantize")


@pytest.mark.gpu
def test_no_sync_and_graph_replay():
    """No device-to-host copy; a captured graph replayed with new offs gives the new result."""
    x = scaled_randn(300, 256)
    offs = ends([100, 150, 20])

    def run():
        both = quantize_both.quantize_both(x, offs, True, E4M3, "rceil")
        row = quantize_rowwise.quantize_rowwise(x, offs, True, E4M3, "rceil")
        col = quantize_colwise.quantize_colwise(x, offs, False, E4M3, "rceil")
        back = dequantize.dequantize(col[0], col[1], "colwise", col[2], offs, len(x), BF16)
        fake = fake_quantize.fake_quantize_both(x, offs, E4M3, "rceil", BF16)
        return (*both, *row, *col, back, *fake)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for sizes in ([5, 0, 250], [31, 33, 236], [0, 0, 0]):
        offs.copy_(ends(sizes))
        graph.replay()
        torch.cuda.synchronize()
        for i, (a, b) in enumerate(zip(captured, run(), strict=True)):
            assert_bitwise(a, b, f"{sizes} [{i}]")
