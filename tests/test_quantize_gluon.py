"""Gluon forms of colwise and both: which inputs they take (anywhere), every byte equal to the reference (on a GPU)."""

import itertools

import pytest
import torch
from cases import DEVICE, E4M3, E5M2, GROUP_CASES, MODES, assert_bitwise, ends, poisoned, scaled_randn, special_values

from mxmoe import shapes
from mxmoe.kernels import _gluon, dequantize, gluon_both, gluon_colwise, gluon_dequantize
from mxmoe.reference import quantize as reference

BF16, FP16 = torch.bfloat16, torch.float16
FORMS = {
    "colwise": (gluon_colwise, gluon_colwise.quantize_colwise, reference.quantize_colwise),
    "both": (gluon_both, gluon_both.quantize_both, reference.quantize_both),
}
SM90 = (9, 0)


# --- which inputs: no GPU needed -------------------------------------------------------------------------------------
def meta(*shape, dtype=BF16, strides=None):
    return torch.empty_strided(shape, strides or torch.empty(shape, device="meta").stride(), dtype=dtype, device="meta")


def takes(x, offs=None, capability=SM90):
    modules = [form[0] for form in FORMS.values()]
    answers = {m.supported(x, offs, blocked, E4M3, capability) for m in modules for blocked in (False, True)}
    assert len(answers) == 1
    return answers.pop()


@pytest.mark.parametrize(
    ("why", "expected", "shape", "options"),
    [
        ("2-D", True, (256, 512), {}),
        ("3-D", True, (3, 160, 72), {}),
        ("fp16", True, (256, 512), {"dtype": FP16}),
        ("row-strided", True, (256, 512), {"strides": (1024, 1)}),
        ("fp32", False, (256, 512), {"dtype": torch.float32}),
        ("rows of the result not 16-byte aligned", False, (250, 512), {}),
        ("rows of x not 16-byte aligned", False, (256, 508), {}),
        ("row stride not 16-byte aligned", False, (256, 512), {"strides": (516, 1)}),
        ("column-major", False, (256, 512), {"strides": (1, 256)}),
        ("no rows", False, (0, 512), {}),
        ("int32 inside a tile", False, (256, 512), {"strides": (2**25, 1)}),
        ("int32 inside a tile of the result", False, (2**24, 8), {}),
    ],
)
def test_supported(why, expected, shape, options):
    assert takes(meta(*shape, **options)) == expected, why


def test_supported_groups():
    offs = torch.zeros(6, dtype=torch.int32)
    assert takes(meta(250, 512), offs)  # the result is padded: any number of rows
    assert not takes(meta(250, 508), offs)
    assert not takes(meta(2, 250, 512), offs)
    assert not takes(meta(250, 512), torch.zeros(_gluon.MAX_GROUPS + 1, dtype=torch.int32))
    assert not takes(meta(250, 512), torch.zeros(12, dtype=torch.int32)[::2])


def test_supported_chip():
    x = meta(256, 512)
    assert not takes(x, capability=(8, 9))
    assert not takes(x, capability=(0, 0))
    assert takes(x, capability=(10, 0))


def takes_values(shape, *, block="colwise", offs=None, rows=None, out=BF16, row_stride=None, strides=None, chip=SM90):
    strides = strides or shapes.column_major(shape)
    q = torch.empty_strided(shape, strides, dtype=E4M3, device="meta")
    scale_shape = shapes.colwise(shape)[1]
    scale = torch.empty_strided(scale_shape, shapes.column_major(scale_shape), dtype=torch.uint8, device="meta")
    return gluon_dequantize.supported(q, scale, block, offs, rows or shape[-2], out, row_stride, chip)


@pytest.mark.parametrize(
    ("why", "expected", "shape", "options"),
    [
        ("2-D", True, (256, 512), {}),
        ("3-D", True, (3, 160, 72), {}),
        ("fp16", True, (256, 512), {"out": FP16}),
        ("rows of the result with a gap", True, (256, 512), {"row_stride": 520}),
        ("fp32", False, (256, 512), {"out": torch.float32}),
        ("row-major", False, (256, 512), {"strides": (512, 1)}),
        ("rowwise", False, (256, 512), {"block": "rowwise"}),
        ("square", False, (256, 512), {"block": "square"}),
        ("columns not 16-byte aligned", False, (250, 512), {}),
        ("column stride not 16-byte aligned", False, (256, 512), {"strides": (1, 264)}),
        ("rows of the result not 16-byte aligned", False, (256, 508), {}),
        ("gap not 16-byte aligned", False, (256, 512), {"row_stride": 516}),
        ("nothing", False, (0, 512), {}),
        ("int32 inside a tile", False, (2**24, 8), {}),
        ("chip", False, (256, 512), {"chip": (8, 9)}),
    ],
)
def test_supported_values(why, expected, shape, options):
    assert takes_values(shape, **options) == expected, why


def test_supported_values_of_groups():
    offs = torch.zeros(6, dtype=torch.int32)
    mp = shapes.padded_rows(250, 6)
    assert takes_values((mp, 512), offs=offs, rows=250)
    assert not takes_values((mp - 32, 512), offs=offs, rows=250)  # offs could point behind the last row
    assert not takes_values((mp, 512), offs=torch.zeros(12, dtype=torch.int32)[::2], rows=250)


@pytest.mark.parametrize("config", [gluon_both.CONFIG_ROWS, gluon_dequantize.CONFIG])
def test_configuration_of_one_result(config):
    assert config.rows == _gluon.TILE_ROWS
    assert config.cols % 32 == 0
    assert config.SR == 1


@pytest.mark.parametrize("form", FORMS)
def test_configuration(form):
    """Whole tiles of 128 rows; a rowwise block lies in lanes of one warp; no more than 64 K registers in an SM."""
    config = FORMS[form][0].CONFIG
    assert config.rows == _gluon.TILE_ROWS
    assert config.cols % 32 == 0
    assert 16 % config.TW == 0
    assert 32 // config.LR * config.TW >= 16
    assert (config.maxnreg or 255) * 32 * config.W <= 65536


# --- bytes -----------------------------------------------------------------------------------------------------------
def check(form, x, offs=None, blocked=False, elem=E4M3, mode="rceil", twice=False):
    module, kernel, spec = FORMS[form]
    assert module.supported(x, offs, blocked, elem, torch.cuda.get_device_capability())
    with poisoned():
        actual = kernel(x, offs, blocked, elem, mode)
    for i, (a, e) in enumerate(zip(actual, spec(x, offs, blocked, elem, mode), strict=True)):
        assert all(p == q for p, q, n in zip(a.stride(), e.stride(), a.shape, strict=True) if n > 1)
        assert_bitwise(a, e, f"{form}[{i}]")
    if twice:
        for i, (a, e) in enumerate(zip(kernel(x, offs, blocked, elem, mode), actual, strict=True)):
            assert_bitwise(a, e, f"{form}[{i}], second run")


layouts = pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.gpu
@layouts
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(16, 8), (256, 512), (144, 136), (272, 1160), (48, 264), (2, 48, 64), (3, 160, 272)])
@forms
def test_shapes(form, shape, dtype, blocked):
    check(form, scaled_randn(*shape, dtype=dtype), blocked=blocked, twice=True)


@pytest.mark.gpu
@layouts
@pytest.mark.parametrize("cols", [8, 264])
@pytest.mark.parametrize("sizes", GROUP_CASES)
@forms
def test_groups(form, sizes, cols, blocked):
    for tail in (0, 7, 300):  # rows of no group
        rows = sum(sizes) + tail
        if rows:
            check(form, scaled_randn(rows, cols), ends(sizes), blocked)


@pytest.mark.gpu
@layouts
@forms
def test_groups_of_every_size(form, blocked):
    """Group ends at every row of a tile; many groups in one tile and many tiles in one group."""
    for sizes in (list(range(64)), [1] * 300, [500, 1, 0, 500], [31] * 40, [32, 96, 128, 160]):
        check(form, scaled_randn(sum(sizes) + 65, 136), ends(sizes), blocked)


@pytest.mark.gpu
@layouts
@pytest.mark.parametrize("bad", [[50, 20, 90, 90, 90], [-5, 1000, 40, 7, 8], [500, 400, 300, 1, 2], [200] * 8])
@forms
def test_bad_offs_are_safe(form, bad, blocked):
    """Decreasing, negative and too large group ends mean what the reference says."""
    check(form, scaled_randn(210, 264), torch.tensor(bad, dtype=torch.int32, device=DEVICE), blocked)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("elem", "mode"), list(itertools.product((E4M3, E5M2), MODES)))
@forms
def test_special_values(form, elem, mode, dtype):
    x = special_values(rows=64, cols=96, dtype=dtype)
    check(form, x, elem=elem, mode=mode)
    check(form, x, ends([33, 20]), elem=elem, mode=mode)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4112, 4104), (16384, 1024)])
def test_plain_scales_by_way_of_blocked(shape):
    """Large matrices write their plain scales in two launches: the same bytes."""
    x = scaled_randn(*shape)
    assert x.numel() >= gluon_both.PLAIN_BY_WAY_OF_BLOCKED
    with poisoned():
        got = gluon_both.quantize_both(x, None, False, E4M3, "rceil")
    for i, (a, b) in enumerate(zip(got, reference.quantize_both(x, None, False, E4M3, "rceil"), strict=True)):
        assert_bitwise(a, b, f"output {i}")
        assert a.stride() == b.stride()


@pytest.mark.gpu
@layouts
@forms
def test_strided(form, blocked):
    x = scaled_randn(256, 1024)
    check(form, x[:, 256:768], blocked=blocked)
    check(form, x[::2], blocked=blocked)
    check(form, x[:200, :264], ends([33, 60, 7, 80]), blocked)
    check(form, scaled_randn(4, 64, 256)[::2, :, :136], blocked=blocked)


@pytest.mark.gpu
@layouts
@forms
def test_tile_order(form, blocked):
    """More row and column tiles than a band has, in numbers that no band divides."""
    check(form, scaled_randn(2448, 2440), blocked=blocked)
    check(form, scaled_randn(2500, 2440), ends([100 * (i % 5) for i in range(11)]), blocked)


@pytest.mark.gpu
@layouts
@forms
def test_guard_bytes(form, blocked, monkeypatch):
    """Nothing is written outside the results."""
    guards = []

    def guarded(original):
        def allocate(size, stride, *, dtype, device):
            count = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0
            flat = original((count + 1024,), (1,), dtype=dtype, device=device).fill_(85)
            guards.append((flat, count))
            return flat[512 : 512 + count].as_strided(size, stride, 512)

        return allocate

    empty_strided = guarded(torch.empty_strided)

    def new_empty(self, *size, dtype):
        size = torch.Size(size[0] if isinstance(size[0], (tuple, list, torch.Size)) else size)
        stride = torch.empty(size, device="meta").stride()
        return empty_strided(size, stride, dtype=dtype, device=self.device)

    for x, offs in (
        (scaled_randn(144, 136), None),
        (scaled_randn(2, 48, 72), None),
        (scaled_randn(210, 264), ends([33, 0, 64, 1, 90])),
    ):
        expected = FORMS[form][2](x, offs, blocked, E4M3, "rceil")
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_strided", empty_strided)
            patch.setattr(torch.Tensor, "new_empty", new_empty)
            actual = FORMS[form][1](x, offs, blocked, E4M3, "rceil")
        for a, e in zip(actual, expected, strict=True):
            assert_bitwise(a, e)
        for flat, count in guards:
            assert (flat[:512] == 85).all()
            assert (flat[512 + count :] == 85).all()
        guards.clear()


@pytest.mark.gpu
@forms
def test_no_sync_and_graph_replay(form):
    """New offs in a captured graph: the grid depends on sizes only."""
    kernel, spec = FORMS[form][1:]
    x, offs = scaled_randn(300, 136), ends([33, 67, 200])
    torch.cuda.synchronize()
    kernel(x, offs, True, E4M3, "rceil")
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(x, offs, True, E4M3, "rceil")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        actual = kernel(x, offs, True, E4M3, "rceil")
    for sizes in ([0, 1, 298], [100, 100, 100], [128, 0, 0]):
        offs.copy_(ends(sizes))
        graph.replay()
        for a, e in zip(actual, spec(x, offs, True, E4M3, "rceil"), strict=True):
            assert_bitwise(a, e)


# --- rowwise: blocked scales of groups -------------------------------------------------------------------------------
def check_rows(x, offs, elem=E4M3, mode="rceil"):
    assert gluon_both.supported(x, offs, True, elem, torch.cuda.get_device_capability())
    with poisoned():
        actual = gluon_both.quantize_rowwise(x, offs, True, elem, mode)
    expected = reference.quantize_rowwise(x, offs, True, elem, mode)
    for a, e, what in zip(actual, expected, ("qdata", "scale"), strict=True):
        assert_bitwise(a, e, what)
        assert a.stride() == e.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [*GROUP_CASES, pytest.param(list(range(70)), id="every_size")])
def test_rows_of_groups(sizes, dtype):
    for tail, cols in ((0, 8), (7, 264), (300, 512)):
        if sum(sizes) + tail:
            check_rows(scaled_randn(sum(sizes) + tail, cols, dtype=dtype), ends(sizes))


@pytest.mark.gpu
@pytest.mark.parametrize(("elem", "mode"), list(itertools.product((E4M3, E5M2), MODES)))
def test_rows_special_values(elem, mode):
    check_rows(special_values(rows=64, cols=96, dtype=BF16), ends([33, 20]), elem, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [[50, 20, 90, 90, 90], [-5, 1000, 40, 7, 8], [500, 400, 300, 1, 2], [200] * 8])
def test_rows_of_bad_offs(bad):
    check_rows(scaled_randn(210, 264), torch.tensor(bad, dtype=torch.int32, device=DEVICE))


# --- values ----------------------------------------------------------------------------------------------------------
def check_values(q, scale, offs, rows, out=BF16, row_stride=None):
    assert gluon_dequantize.supported(q, scale, "colwise", offs, rows, out, row_stride, SM90)
    with poisoned():
        actual = gluon_dequantize.dequantize(q, scale, offs, rows, out, row_stride)
    one_nan = torch.tensor(torch.nan, dtype=out, device=DEVICE)
    expected = reference.dequantize(q, scale, "colwise", offs, offs, rows, out)
    assert_bitwise(torch.where(actual.isnan(), one_nan, actual), torch.where(expected.isnan(), one_nan, expected))
    # The plain form gives the same bits, those of NaN with them.
    plain = dequantize.dequantize_triton(q, scale, "colwise", offs, offs, rows, out, row_stride=row_stride)
    assert_bitwise(actual, plain, "against the plain form")
    assert actual.stride() == plain.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("out", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(256, 256), (144, 136), (16, 8), (272, 1160), (3, 48, 72)])
def test_values_of_all_bytes(shape, elem, out):
    """Every element byte meets every scale byte: 2**-127, the largest, NaN."""
    *lead, m, k = shape
    gen = torch.Generator().manual_seed(m + k)
    q = torch.randint(0, 256, (*lead, k, m), generator=gen, dtype=torch.uint8).to(DEVICE).view(elem).mT
    scale = torch.randint(0, 256, (*lead, k, -(-m // 32)), generator=gen, dtype=torch.uint8)
    scale[..., : min(k, 256), 0] = torch.arange(min(k, 256), dtype=torch.uint8)
    check_values(q, scale.to(DEVICE).mT, None, m, out)
    check_values(q, scale.to(DEVICE).mT, None, m, out, row_stride=k + 8)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*GROUP_CASES, pytest.param(list(range(70)), id="every_size")])
def test_values_of_groups(sizes):
    for tail, cols in ((0, 8), (7, 264), (300, 512)):
        rows = sum(sizes) + tail
        if rows:
            q, scale, _ = reference.quantize_colwise(scaled_randn(rows, cols), ends(sizes), False, E4M3, "rceil")
            check_values(q, scale, ends(sizes), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [[50, 20, 90, 90, 90], [-5, 1000, 40, 7, 8], [500, 400, 300, 1, 2], [200] * 8])
def test_values_of_bad_offs(bad):
    offs = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    q, scale, _ = reference.quantize_colwise(scaled_randn(210, 264), offs, False, E4M3, "rceil")
    check_values(q, scale, offs, 210)


@pytest.mark.gpu
def test_values_strided():
    q, scale, _ = reference.quantize_colwise(scaled_randn(256, 512), None, False, E4M3, "rceil")
    check_values(q[:, 128:392], scale[:, 128:392], None, 256)
    check_values(q[:, ::2], scale[:, ::2], None, 256)
    check_values(q[:128], scale[:4], None, 128)
