"""Inputs and comparisons shared by all tests."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODES = ("rceil", "floor", "ceil", "even")

# The group family: name -> sizes around 32 and 128; empty groups first, in the middle, last; all rows in one group.
GROUPS = {
    "one": [96],
    "two": [33, 63],
    "edges": [1, 31, 32, 33, 127, 128, 129],
    "first_empty": [0, 40, 24],
    "middle_empty": [32, 0, 64, 0, 1],
    "last_empty": [5, 60, 0],
    "all_in_one": [0, 0, 96, 0, 0, 0],
    "six": [7, 0, 33, 1, 64, 2],
    "many": [(7 * i) % 5 for i in range(64)],
    "no_rows": [0, 0, 0],
}
GROUP_CASES = [pytest.param(sizes, id=name) for name, sizes in GROUPS.items()]


def ends(sizes, device=DEVICE) -> Tensor:
    """Group ends of group sizes, int32."""
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def scaled_randn(*shape, dtype=torch.bfloat16, device=DEVICE, seed=0) -> Tensor:
    """Normal values times a random power of two per block of 32, in both dims: misplaced scales show."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=gen)
    *lead, m, k = shape
    k_blocks, m_blocks = -(-k // 32), -(-m // 32)
    by_col = torch.randint(-12, 13, (*lead, m, k_blocks), generator=gen).repeat_interleave(32, -1)[..., :k]
    by_row = torch.randint(-3, 4, (*lead, m_blocks, k), generator=gen).repeat_interleave(32, -2)[..., :m, :]
    return (x * torch.exp2((by_col + by_row).float())).to(dtype).to(device)


def special_values(rows=64, cols=96, dtype=torch.float32, device=DEVICE) -> Tensor:
    """A matrix whose blocks hold special cases: NaN, Inf, zeros, -0.0, subnormals, powers of two, halfway values."""
    x = scaled_randn(rows, cols, dtype=torch.float32, device="cpu", seed=7)
    x[0, 3] = float("nan")
    x[1, 40] = float("inf")
    x[2, 70] = -float("inf")
    x[3] = 0.0
    x[4] = -0.0
    x[5] = 1e-40
    x[6] = 2.0**-120
    x[7] = 1.75
    x[8] = torch.nextafter(torch.tensor(1.75), torch.tensor(2.0))
    x[9] = 448.0
    x[10] = 0.0
    x[10, 5] = 957.0
    x[11] = torch.arange(cols) * 2.0**-9
    x[12] = 3.0e38
    x[13] = -3.3e38
    x[14] = 255.99998
    x[15] = 256.0
    x[16, ::2] = -1e-45
    return x.to(dtype).to(device)


def as_bytes(t: Tensor) -> Tensor:
    """Bits of a tensor, for exact comparison (NaN equals NaN)."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.detach().contiguous().view(bits).cpu()


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Same shape, dtype and bits; the message names the first coordinate that differs."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} != {expected.dtype}"
    a, b = as_bytes(actual), as_bytes(expected)
    bad = (a != b).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise AssertionError(
            f"{what}: {len(bad)} of {a.numel()} differ, first at {at}: {a[at].item():#x} != {b[at].item():#x}"
        )


def assert_accumulation(actual: Tensor, exact: Tensor, in_bf16: Tensor, what: str = "product") -> None:
    """Error against the fp32 product at most twice that of the same product by torch in bf16."""
    error = (actual.double().cpu() - exact.double().cpu()).norm()
    allowed = 2 * (in_bf16.double().cpu() - exact.double().cpu()).norm() + 1e-6 * exact.double().cpu().norm()
    assert torch.isfinite(error), f"{what}: not finite"
    assert error <= allowed, f"{what}: error {error:.3e} > allowed {allowed:.3e}"


def sqnr(actual: Tensor, exact: Tensor) -> float:
    """Signal to quantization noise in dB."""
    actual, exact = actual.double().cpu(), exact.double().cpu()
    return (20 * torch.log10(exact.norm() / (actual - exact).norm())).item()


@contextlib.contextmanager
def poisoned():
    """Memory from ``torch.empty`` and its family is filled with 0xFF (NaN) instead of whatever lies there."""
    originals = {
        (torch, "empty"): torch.empty,
        (torch, "empty_strided"): torch.empty_strided,
        (torch, "empty_like"): torch.empty_like,
        (torch.Tensor, "new_empty"): torch.Tensor.new_empty,
        (torch.Tensor, "new_empty_strided"): torch.Tensor.new_empty_strided,
    }

    def fill(original):
        def wrapped(*args, **kwargs):
            t = original(*args, **kwargs)
            if t.numel() and not isinstance(t, torch._subclasses.FakeTensor) and t.device.type != "meta":
                span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
                flat = torch.as_strided(t.view(torch.uint8) if t.element_size() == 1 else t, (span,), (1,))
                flat.view(torch.uint8).fill_(0xFF)
            return t

        return wrapped

    try:
        for (owner, name), original in originals.items():
            setattr(owner, name, fill(original))
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
