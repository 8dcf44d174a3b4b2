"""The bias gradient's kernel against the loop."""

import pytest
import torch
from cases import DEVICE, GROUP_CASES, assert_bitwise, ends, poisoned

from mxmoe.kernels.group_sum import group_sum
from mxmoe.reference import grouped_mm as ref


@pytest.mark.parametrize("sizes", GROUP_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_group_sum(sizes, dtype):
    """Integers: sums are exact in any order, so the comparison is bitwise."""
    x = torch.randint(-64, 64, (sum(sizes) + 7, 33), device=DEVICE).to(dtype)
    with poisoned():
        got = group_sum(x, ends(sizes))
    assert_bitwise(got, ref.group_sum(x, ends(sizes)))
    assert_bitwise(group_sum(x.t().contiguous().t(), ends(sizes)), got)


def test_nan_stays_in_its_group():
    x = torch.randn(64, 8, device=DEVICE)
    x[40:] = float("nan")
    got = group_sum(x, ends([40, 24]))
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1]).all()
