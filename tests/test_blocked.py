"""Scale layout: every byte of every form against an oracle written from the formula of the layout, padding included."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from cases import DEVICE, GROUPS, assert_bitwise, ends, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import mxmoe
from mxmoe import shapes
from mxmoe.kernels import blocked as kernels
from mxmoe.reference import blocked as reference

E8M0 = torch.float8_e8m0fnu
METHODS = ("parallel", "naive")
IMPLEMENTATIONS = [pytest.param(reference, id="reference"), pytest.param(kernels, id="kernels")]


# --- the oracle: the formula, byte by byte; it shares nothing with the kernels or the reference ----------------------
def _place(out, base, scale):
    """Scatter one matrix into the flat buffer ``out`` from byte ``base`` on; returns the bytes it takes, padded."""
    rows, cols = scale.shape
    col_tiles = -(-cols // 4)
    for c in range(cols):
        r = torch.arange(rows)
        tile = (r // 128) * col_tiles + c // 4
        out[base + tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scale[:, c]
    return -(-rows // 128) * 128 * col_tiles * 4


def oracle(scale):
    rows, cols = scale.shape
    out = torch.zeros(-(-rows // 128) * 128, -(-cols // 4) * 4, dtype=torch.uint8)
    _place(out.view(-1), 0, scale.cpu())
    return out


def oracle_m_groups(scale, sizes):
    m, cols = scale.shape
    out = torch.zeros(128 * ((m + 127 * len(sizes)) // 128), -(-cols // 4) * 4, dtype=torch.uint8)
    base = start = 0
    for size in sizes:
        base += _place(out.view(-1), base, scale[start : start + size].cpu())
        start += size
    return out


def oracle_k_groups(scale, sizes):
    rows, cols = scale.shape
    out = torch.zeros(-(-rows // 128) * 128, 4 * ((cols + 3 * len(sizes)) // 4), dtype=torch.uint8)
    base = start = 0
    for size in sizes:
        base += _place(out.view(-1), base, scale[:, start : start + size].cpu())
        start += size
    return out


def random_scale(*shape, seed=0, device=DEVICE):
    """Any byte may be a scale; 0 is left out, so that a scale is never mistaken for padding."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, shape, generator=gen, dtype=torch.uint8).to(device)


@contextlib.contextmanager
def guarded(count=4096):
    """What ``torch.empty`` returns is poisoned and lies between guard bytes, which must survive."""
    original, buffers = torch.empty, []

    def empty(*args, **kwargs):
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        if kwargs.get("dtype") is not torch.uint8:
            return original(*args, **kwargs)
        n = 1
        for size in shape:
            n *= size
        buffer = original(n + 2 * count, dtype=torch.uint8, device=kwargs.get("device"))
        buffer.fill_(0xFF)
        buffers.append((buffer, n))
        return buffer[count : count + n].view(shape)

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = original
    for buffer, n in buffers:
        assert (buffer[:count] == 0xFF).all(), "written before the buffer"
        assert (buffer[count + n :] == 0xFF).all(), "written beyond the buffer"


# --- values ----------------------------------------------------------------------------------------------------------
UNITS = {"x16": 16, "x4": 4, "x1": 1}  # what the column count divides by: vectors, words, bytes


def _columns(used, unit):
    """A column count beyond ``used``, so there is a tail: a multiple of ``unit``, but of no larger unit."""
    cols = -(-(used + 1) // unit) * unit
    if unit == 16:
        return cols
    return cols if cols % (4 * unit if unit == 1 else 16) else cols + unit


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())
@pytest.mark.parametrize("name", GROUPS)
def test_k_groups(name, unit):
    sizes = GROUPS[name]
    rows = 40 if unit < 16 or name == "many" else 129
    scale = random_scale(rows, _columns(sum(sizes), unit))
    offs, expected = ends(sizes), oracle_k_groups(scale, sizes)
    assert_bitwise(reference.to_blocked_k_groups(scale, offs), expected, "reference")
    if name == "many" and unit != 4 and DEVICE == "cpu":
        return  # ten seconds each in the interpreter
    for method in METHODS if name != "many" or DEVICE != "cpu" else METHODS[:1]:
        with guarded():
            blocked = kernels.to_blocked_k_groups(scale, offs, method)
        assert_bitwise(blocked, expected, f"kernel, {method}")
    back = scale.clone()
    back[:, sum(sizes) :] = 0
    with guarded():
        assert_bitwise(kernels.from_blocked_k_groups(blocked, offs, *scale.shape), back, "kernel, inverse")
    assert_bitwise(reference.from_blocked_k_groups(blocked, offs, *scale.shape), back, "reference, inverse")


@pytest.mark.parametrize("cols", [1, 3, 16, 44, 90])
@pytest.mark.parametrize("name", ["edges", "first_empty", "middle_empty", "last_empty", "six", "no_rows"])
def test_m_groups(name, cols):
    sizes = GROUPS[name]
    scale = random_scale(sum(sizes) + 130, cols)
    offs, expected = ends(sizes), oracle_m_groups(scale, sizes)
    assert_bitwise(reference.to_blocked_m_groups(scale, offs), expected, "reference")
    if name == "edges" and cols not in (16, 90) and DEVICE == "cpu":
        return  # many tiles; the paths of the other column counts are covered by the smaller groups
    for method in METHODS:
        with guarded():
            blocked = kernels.to_blocked_m_groups(scale, offs, method)
        assert_bitwise(blocked, expected, f"kernel, {method}")
    back = scale.clone()
    back[sum(sizes) :] = 0
    with guarded():
        assert_bitwise(kernels.from_blocked_m_groups(blocked, offs, *scale.shape), back, "kernel, inverse")
    assert_bitwise(reference.from_blocked_m_groups(blocked, offs, *scale.shape), back, "reference, inverse")


@pytest.mark.parametrize("name", ["one", "two", "all_in_one", "many"])
def test_m_groups_wide(name):
    sizes = GROUPS[name]
    scale = random_scale(sum(sizes), 80)  # two chunks of columns
    for method in METHODS if name != "many" or DEVICE != "cpu" else METHODS[:1]:
        blocked = kernels.to_blocked_m_groups(scale, ends(sizes), method)
        assert_bitwise(blocked, oracle_m_groups(scale, sizes), method)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows, cols", [(1, 1), (65, 3), (128, 4), (130, 44), (257, 16), (33, 90)])
def test_one_matrix_and_experts(impl, rows, cols):
    scale = random_scale(2, rows, cols)
    expected = torch.stack([oracle(one) for one in scale])
    with guarded():
        one, all_of_them = impl.to_blocked(scale[0]), impl.to_blocked_experts(scale)
    assert_bitwise(one, expected[0], "one matrix")
    assert_bitwise(all_of_them, expected.flatten(1), "experts")
    assert_bitwise(impl.from_blocked(one, rows, cols), scale[0], "inverse")
    assert_bitwise(impl.from_blocked_experts(all_of_them, rows, cols), scale, "inverse, experts")


def test_worked_example():
    """Field report 17: inside a group the tile-row stride is the group's own. R = 256, column ends [4, 12]."""
    scale = random_scale(256, 12)
    for impl in (reference, kernels):
        flat = impl.to_blocked_k_groups(scale, ends([4, 8]), "parallel").flatten()
        assert flat[1024] == scale[0, 4]
        assert flat[2048] == scale[128, 4]


@pytest.mark.parametrize("rows, cols", [(65, 3), (2880, 90)])
def test_padding_is_written(rows, cols):
    """Field report 8: padding bytes are 0 even if memory held 0xFF, a NaN scale."""
    scale = random_scale(rows, cols)
    with poisoned():
        blocked = mxmoe.to_blocked(scale)
        fast = kernels.to_blocked(scale)
    assert (blocked == 0).sum() == blocked.numel() - rows * cols
    assert_bitwise(fast, blocked, "kernel")


@pytest.mark.parametrize("groups", [6, 33, *(pytest.param(n, marks=pytest.mark.gpu) for n in (60, 384))])
def test_any_number_of_groups(groups):
    """Field report 13."""
    sizes = [(3 * g) % 4 for g in range(groups)]
    scale = random_scale(16, sum(sizes) // 16 * 16 + 16)
    for method in METHODS:
        blocked = kernels.to_blocked_k_groups(scale, ends(sizes), method)
        assert_bitwise(blocked, oracle_k_groups(scale, sizes), f"k groups, {method}")
        blocked = kernels.to_blocked_m_groups(scale.t().contiguous(), ends(sizes), method)
        assert_bitwise(blocked, oracle_m_groups(scale.t(), sizes), f"m groups, {method}")


@pytest.mark.parametrize("bad", [[40, 16, 64], [16, 1000, 2000], [-5, 16, 48], [2**31 - 1, -(2**31), 64]])
def test_offs_out_of_range(bad):
    """Wrong groups, but no access out of bounds: the safe ends are those of the reference."""
    offs = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    k, m = random_scale(40, 64), random_scale(64, 20)
    for method in METHODS:
        with guarded():
            ours = kernels.to_blocked_k_groups(k, offs, method), kernels.to_blocked_m_groups(m, offs, method)
        assert_bitwise(ours[0], reference.to_blocked_k_groups(k, offs), f"k groups, {method}")
        assert_bitwise(ours[1], reference.to_blocked_m_groups(m, offs), f"m groups, {method}")
    with guarded():
        k_back = kernels.from_blocked_k_groups(ours[0], offs, 40, 64)
        m_back = kernels.from_blocked_m_groups(ours[1], offs, 64, 20)
    assert_bitwise(k_back, reference.from_blocked_k_groups(ours[0], offs, 40, 64), "k groups, inverse")
    assert_bitwise(m_back, reference.from_blocked_m_groups(ours[1], offs, 64, 20), "m groups, inverse")


def _strided(kind):
    big = random_scale(80, 96)
    match kind:
        case "columns of a wider matrix":
            return big[:, 16:80]
        case "odd address":
            return big.flatten()[1 : 1 + 64 * 64].view(64, 64)
        case "every other row":
            return big[::2, :64]
        case "every other column":
            return big[:, ::2]
        case "transposed":
            return big.t()[:64]
        case "expanded":
            return big[:1, :64].expand(70, 64)
    raise ValueError(kind)


@pytest.mark.parametrize(
    "kind",
    ["columns of a wider matrix", "odd address", "every other row", "every other column", "transposed", "expanded"],
)
def test_strides(kind):
    scale = _strided(kind)
    rows, cols = scale.shape
    k_sizes, m_sizes = [5, cols - 9], [33, rows - 33]
    for method in METHODS:
        k, m = kernels.to_blocked_k_groups(scale, ends(k_sizes), method), None
        assert_bitwise(k, oracle_k_groups(scale, k_sizes), f"k groups, {method}")
        m = kernels.to_blocked_m_groups(scale, ends(m_sizes), method)
        assert_bitwise(m, oracle_m_groups(scale, m_sizes), f"m groups, {method}")
    assert_bitwise(kernels.to_blocked(scale), oracle(scale), "one matrix")
    assert_bitwise(mxmoe.to_blocked(scale), oracle(scale), "public")


def test_more_row_tiles_than_a_grid_dimension_holds(monkeypatch):
    """The second dim of a grid ends at 65535; what is beyond goes into the third. Here it ends at 2."""
    monkeypatch.setattr("mxmoe.kernels._launch.GRID_Y", 2)
    scale = random_scale(2 * 128 + 40, 16)
    rows, cols = scale.shape
    k_sizes, m_sizes = [4, 8], [140, 100]
    k = kernels.to_blocked_k_groups(scale, ends(k_sizes), "parallel")
    assert_bitwise(k, oracle_k_groups(scale, k_sizes), "k groups")
    m = kernels.to_blocked_m_groups(scale, ends(m_sizes), "parallel")
    assert_bitwise(m, oracle_m_groups(scale, m_sizes), "m groups")
    one = kernels.to_blocked(scale)
    assert_bitwise(one, oracle(scale), "one matrix")
    assert_bitwise(kernels.from_blocked(one, rows, cols), scale, "one matrix, inverse")
    k_back, m_back = scale.clone(), scale.clone()
    k_back[:, sum(k_sizes) :], m_back[sum(m_sizes) :] = 0, 0
    assert_bitwise(kernels.from_blocked_k_groups(k, ends(k_sizes), rows, cols), k_back, "k groups, inverse")
    assert_bitwise(kernels.from_blocked_m_groups(m, ends(m_sizes), rows, cols), m_back, "m groups, inverse")


@pytest.mark.parametrize("sizes", [[4, 0, 8, 20], [16, 16, 0], [64, 0], [0, 0, 4], [4, 4, 4, 4, 4, 4, 4, 4]])
def test_chunks_that_span_aligned_groups(sizes):
    """All ends are multiples of 4: one load per chunk, stored group by group; the tail must not reach the slack."""
    scale = random_scale(33, 80)
    assert sum(sizes) < 80
    for method in METHODS:
        with guarded():
            blocked = kernels.to_blocked_k_groups(scale, ends(sizes), method)
        assert_bitwise(blocked, oracle_k_groups(scale, sizes), method)


def test_second_run_is_equal():
    scale, offs = random_scale(40, 64), ends([7, 20, 30])
    for method in METHODS:
        first = kernels.to_blocked_k_groups(scale, offs, method)
        assert_bitwise(kernels.to_blocked_k_groups(scale, offs, method), first, method)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 140), st.integers(0, 5))
def test_reference_any_groups(sizes, other, tail):
    k, m = random_scale(other, sum(sizes) + tail), random_scale(sum(sizes) + tail, 5)
    offs = ends(sizes)
    k_blocked, m_blocked = mxmoe.to_blocked_k_groups(k, offs), mxmoe.to_blocked_m_groups(m, offs)
    assert_bitwise(k_blocked, oracle_k_groups(k, sizes), "k groups")
    assert_bitwise(m_blocked, oracle_m_groups(m, sizes), "m groups")
    k[:, sum(sizes) :], m[sum(sizes) :] = 0, 0
    assert_bitwise(mxmoe.from_blocked_k_groups(k_blocked, offs, *k.shape), k, "k groups, inverse")
    assert_bitwise(mxmoe.from_blocked_m_groups(m_blocked, offs, *m.shape), m, "m groups, inverse")


# --- the public functions --------------------------------------------------------------------------------------------
def _calls(dtype, device=DEVICE):
    """Every public function on small inputs, with its shape from ``shapes``."""
    scale, offs = random_scale(65, 33, device=device).view(dtype), ends([2, 0, 24], device)
    three = random_scale(3, 65, 33, device=device).view(dtype)
    m = mxmoe.to_blocked_m_groups(scale, offs)
    k = mxmoe.to_blocked_k_groups(scale, offs)
    return [
        (mxmoe.to_blocked, (scale,), shapes.blocked(65, 33)),
        (mxmoe.from_blocked, (mxmoe.to_blocked(scale), 65, 33), (65, 33)),
        (mxmoe.to_blocked_experts, (three,), shapes.blocked_experts(3, 65, 33)),
        (mxmoe.from_blocked_experts, (mxmoe.to_blocked_experts(three), 65, 33), (3, 65, 33)),
        (mxmoe.to_blocked_m_groups, (scale, offs), shapes.blocked_m_groups(65, 33, 3)),
        (mxmoe.from_blocked_m_groups, (m, offs, 65, 33), (65, 33)),
        (mxmoe.to_blocked_k_groups, (scale, offs), shapes.blocked_k_groups(65, 33, 3)),
        (mxmoe.from_blocked_k_groups, (k, offs, 65, 33), (65, 33)),
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, E8M0], ids=["uint8", "e8m0"])
def test_public_functions(dtype):
    """Both dtypes in, the same out; shape and strides as ``shapes`` says; the same bytes for either dtype."""
    for (function, args, shape), (_, raw_args, _) in zip(_calls(dtype), _calls(torch.uint8), strict=True):
        with poisoned():
            result = function(*args)
        name = function.__name__
        assert result.dtype == dtype, name
        assert tuple(result.shape) == shape, name
        assert result.is_contiguous(), name
        assert_bitwise(result.view(torch.uint8), function(*raw_args), name)


def test_fake_equals_real():
    with FakeTensorMode() as mode:
        for function, args, _ in _calls(torch.uint8):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
                real_args = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
                real = function(*real_args)
                fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in real_args]
            fake = function(*fakes)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), function.__name__


def test_opcheck():
    ops = torch.ops.mxmoe
    scale, offs = random_scale(65, 33), ends([2, 0, 24])
    three = random_scale(2, 5, 3)
    for op, args in (
        (ops.to_blocked, (scale,)),
        (ops.from_blocked, (mxmoe.to_blocked(scale), 65, 33)),
        (ops.to_blocked_experts, (three,)),
        (ops.from_blocked_experts, (mxmoe.to_blocked_experts(three), 5, 3)),
        (ops.to_blocked_m_groups, (scale, offs, "parallel")),
        (ops.from_blocked_m_groups, (mxmoe.to_blocked_m_groups(scale, offs), offs, 65, 33)),
        (ops.to_blocked_k_groups, (scale, offs, "naive")),
        (ops.from_blocked_k_groups, (mxmoe.to_blocked_k_groups(scale, offs), offs, 65, 33)),
    ):
        torch.library.opcheck(op.default, args)


def test_compile_once_for_any_size():
    """Field report 26: the sizes are not part of the compiled code."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def round_trip(scale, offs):
        blocked = mxmoe.to_blocked_m_groups(scale, offs)
        return blocked, mxmoe.from_blocked_m_groups(blocked, offs, *scale.shape)

    for m in (64, 65, 66, 128):
        scale, offs = random_scale(m, 12), ends([30, m - 30])
        blocked, back = round_trip(scale, offs)
        assert_bitwise(blocked, oracle_m_groups(scale, [30, m - 30]), f"M = {m}")
        assert_bitwise(back, scale, f"M = {m}")
    assert counter.frame_count <= 2, "one static and one dynamic compilation at most"


_U8 = torch.zeros(8, 8, dtype=torch.uint8)
_OFFS = torch.tensor([4, 8], dtype=torch.int32)
ERRORS = [
    (lambda s, o: mxmoe.to_blocked(s.float()), TypeError, "scale must be float8_e8m0fnu or uint8, got float32"),
    (lambda s, o: mxmoe.to_blocked(None), TypeError, "scale must be a torch.Tensor, got NoneType"),
    (lambda s, o: mxmoe.to_blocked(s[0]), ValueError, r"scale must be 2-D \(R, C\), got shape \(8,\)"),
    (lambda s, o: mxmoe.to_blocked_experts(s), ValueError, r"scale must be 3-D \(G, R, C\), got shape \(8, 8\)"),
    (lambda s, o: mxmoe.to_blocked_m_groups(s, None), TypeError, "offs must be"),
    (lambda s, o: mxmoe.to_blocked_m_groups(s, o.float()), TypeError, "offs must be int32"),
    (lambda s, o: mxmoe.to_blocked_k_groups(s, o[None]), ValueError, r"offs must be 1-D"),
    (lambda s, o: mxmoe.to_blocked_k_groups(s, o[:0]), ValueError, "at least one group"),
    (lambda s, o: mxmoe.to_blocked_k_groups(s, o, method="fast"), ValueError, "method must be one of .* got 'fast'"),
    (lambda s, o: mxmoe.from_blocked(s, 8, 8), ValueError, r"blocked must have shape \(128, 8\).*got \(8, 8\)"),
    (lambda s, o: mxmoe.from_blocked(s, -1, 8), ValueError, "rows must be at least 0, got -1"),
    (lambda s, o: mxmoe.from_blocked(s, 8.0, 8), TypeError, "rows must be an int, got float"),
    (lambda s, o: mxmoe.from_blocked_k_groups(s, o, 8, 8), ValueError, r"blocked must have shape \(128, 12\)"),
    (lambda s, o: mxmoe.from_blocked_m_groups(s, o, 8, 8), ValueError, r"blocked must have shape \(256, 8\)"),
    (lambda s, o: mxmoe.from_blocked_experts(s, 8, 8), ValueError, r"blocked must have shape \(8, 1024\)"),
]


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
@pytest.mark.parametrize("call, error, message", ERRORS)
def test_errors(call, error, message, fake):
    """Field report 18: clear errors with names and numbers, the same in eager and under fake tensors."""
    if not fake:
        with pytest.raises(error, match=message):
            call(_U8, _OFFS)
        return
    with FakeTensorMode() as mode, pytest.raises(error, match=message):
        call(mode.from_tensor(_U8), mode.from_tensor(_OFFS))


def test_int64_offs_and_flat_buffers():
    scale, offs = random_scale(20, 12), ends([3, 9])
    blocked = mxmoe.to_blocked_k_groups(scale, offs.long())
    assert_bitwise(blocked, oracle_k_groups(scale, [3, 9]), "int64 offs")
    assert_bitwise(mxmoe.from_blocked_k_groups(blocked.flatten(), offs, 20, 12), scale, "flat buffer")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_empty(impl):
    offs = ends([0, 0])
    assert impl.to_blocked(random_scale(0, 8)).shape == (0, 8)
    assert impl.to_blocked_experts(random_scale(0, 8, 8)).shape == (0, 1024)
    for rows, cols in ((0, 8), (8, 0)):
        for method in METHODS:
            with guarded():
                m = impl.to_blocked_m_groups(random_scale(rows, cols), offs, method)
                k = impl.to_blocked_k_groups(random_scale(rows, cols), offs, method)
            assert not m.any()
            assert not k.any()
            assert tuple(m.shape) == shapes.blocked_m_groups(rows, cols, 2)
            assert tuple(k.shape) == shapes.blocked_k_groups(rows, cols, 2)
        assert impl.from_blocked_m_groups(m, offs, rows, cols).shape == (rows, cols)
        assert impl.from_blocked_k_groups(k, offs, rows, cols).shape == (rows, cols)


# --- code that is compiled for a GPU ---------------------------------------------------------------------------------
_OFFLINE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from mxmoe.kernels import blocked_k_groups as k, blocked_m_groups as m

for fn in (k.to_blocked_k_groups_kernel, m.to_blocked_m_groups_kernel):
    for parallel in (True, False):
        consts = dict(G_POW2=8, CB=16, UNIT=16, PARALLEL=parallel)
        names = fn.arg_names
        types = {n: "*u8" if n.endswith("_ptr") else "constexpr" if n in consts else "i32" for n in names}
        types["offs_ptr"] = "*i32"
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
        source = ASTSource(fn, types, {(names.index(n),): v for n, v in consts.items()}, aligned)
        for arch in (90, 100):
            ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=4)).asm["ptx"]
            assert ".shared" not in ptx and "bar.sync" not in ptx, (fn, arch)
            assert "st.global.v4.b32" in ptx, (fn, arch)
            assert "ld.global.v4.b32" in ptx or (fn is k.to_blocked_k_groups_kernel and not parallel), (fn, arch)
print("done")
"""


@pytest.mark.slow
def test_offline_compile(tmp_path):
    """Both forms compile for sm_90 and sm_100: 16-byte loads and stores, no shared memory. Needs no GPU."""
    root = Path(__file__).parent.parent
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", _OFFLINE], capture_output=True, text=True, env=env, cwd=root)
    assert run.stdout.strip().endswith("done"), run.stderr[-2000:]


@pytest.mark.gpu
def test_no_sync():
    scale, offs = random_scale(512, 256), ends([5, 100, 31])
    calls = [lambda m=m: mxmoe.to_blocked_k_groups(scale, offs, method=m) for m in METHODS]
    calls += [lambda m=m: mxmoe.to_blocked_m_groups(scale, offs, method=m) for m in METHODS]
    calls += [lambda: mxmoe.from_blocked_k_groups(k, offs, 512, 256)]
    calls += [lambda: mxmoe.from_blocked_m_groups(m, offs, 512, 256)]
    k, m = mxmoe.to_blocked_k_groups(scale, offs), mxmoe.to_blocked_m_groups(scale, offs)
    for call in calls:
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_graph_replay_with_new_offs(method):
    scale, offs = random_scale(300, 160), ends([5, 100, 31])
    mxmoe.to_blocked_k_groups(scale, offs, method=method)
    mxmoe.to_blocked_m_groups(scale, offs, method=method)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k = mxmoe.to_blocked_k_groups(scale, offs, method=method)
        m = mxmoe.to_blocked_m_groups(scale, offs, method=method)
    for sizes in ([5, 100, 31], [0, 4, 128], [160, 0, 0], [1, 1, 1]):
        offs.copy_(ends(sizes))
        graph.replay()
        assert_bitwise(k, oracle_k_groups(scale, sizes), f"k groups {sizes}")
        assert_bitwise(m, oracle_m_groups(scale, sizes), f"m groups {sizes}")


@pytest.mark.gpu
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())
def test_beyond_2_to_31_elements(unit):
    """Field report 12: the last rows and columns of a matrix of more than 2**31 scales."""
    rows, cols = 128 * 260, 65536 + unit
    assert rows * cols > 2**31
    scale = torch.randint(1, 256, (rows, cols), dtype=torch.uint8, device=DEVICE)
    offs = ends([cols - 9, 9])
    blocked = mxmoe.to_blocked_k_groups(scale, offs)
    assert_bitwise(mxmoe.from_blocked_k_groups(blocked, offs, rows, cols)[-128:], scale[-128:], "k groups, round trip")
    tail = blocked.flatten()[: 128 * (rows // 128) * (-(-(cols - 9) // 4) * 4 + 12)][-512 * 3 :]
    expected = oracle(scale[-128:, -9:])
    assert_bitwise(tail, expected.flatten(), "k groups, last row tile of the last group")
    del blocked
    offs = ends([rows - 100, 100])
    blocked = mxmoe.to_blocked_m_groups(scale, offs)
    used = -(-(rows - 100) // 128) * 128
    assert_bitwise(blocked[used : used + 128], oracle(scale[-100:]), "m groups, last group")
