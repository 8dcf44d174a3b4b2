"""The reference of fake_quantize equals dequantize of quantize, bit by bit: it is written as one pass for speed."""

from __future__ import annotations

import pytest
import torch

from mxmoe.reference import quantize as reference

SHAPES = [(1, 1), (31, 33), (96, 64), (130, 40), (0, 64), (64, 0)]
SIZES = [[130], [0, 1, 31, 32, 33, 0, 20], [0, 0], [40, 90, 0, 500], [64, 10]]


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 13, shape).float())
    flat = x.flatten()
    special = torch.tensor([0.0, -0.0, 448.0, 1e-40, torch.inf, -torch.inf, torch.nan, 2.0**-120])
    if flat.numel() > 64:
        flat[torch.randperm(flat.numel())[: special.numel()]] = special
    return x.to(dtype)


def _two_steps(
    x: torch.Tensor, block: str, offs: torch.Tensor | None, elem: torch.dtype, mode: str, out: torch.dtype
) -> torch.Tensor:
    if block == "rowwise":
        q, scale = reference.quantize_rowwise(x, offs, False, elem, mode)
        return reference.dequantize(q, scale, block, None, None, x.shape[-2], out)
    if block == "square":
        q, scale = reference.quantize_square(x, False, elem, mode)
        return reference.dequantize(q, scale, block, None, None, x.shape[-2], out)
    q, scale, padded = reference.quantize_colwise(x, offs, False, elem, mode)
    ends = padded if offs is not None else None
    return reference.dequantize(q, scale, block, ends, offs, x.shape[-2], out)


def _check(
    x: torch.Tensor, block: str, offs: torch.Tensor | None, elem: torch.dtype, mode: str, out: torch.dtype
) -> None:
    got = reference.fake_quantize(x, block, offs, elem, mode, out)
    wanted = _two_steps(x, block, offs, elem, mode, out)
    assert got.shape == x.shape == wanted.shape
    assert got.dtype == out
    assert got.is_contiguous()
    word = torch.int32 if out == torch.float32 else torch.int16
    assert torch.equal(got.view(word), wanted.view(word))


@pytest.mark.parametrize("block", ["rowwise", "colwise", "square"])
@pytest.mark.parametrize("elem", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
def test_equals_two_steps(block: str, elem: torch.dtype, mode: str) -> None:
    for shape in SHAPES:
        _check(_values(*shape), block, None, elem, mode, torch.float32)
    _check(_values(3, 33, 70, dtype=torch.bfloat16), block, None, elem, mode, torch.bfloat16)
    _check(_values(130, 64).t()[:, :97], block, None, elem, mode, torch.bfloat16)


@pytest.mark.parametrize("block", ["rowwise", "colwise"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_two_steps_in_groups(block: str, sizes: list[int]) -> None:
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    _check(_values(130, 40), block, offs, torch.float8_e4m3fn, "rceil", torch.float32)
    _check(_values(130, 40, dtype=torch.float16), block, offs, torch.float8_e4m3fn, "rceil", torch.bfloat16)
