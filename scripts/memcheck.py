"""Run every CUDA kernel once on small, ugly shapes: the program to put under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python scripts/memcheck.py

Without the caching allocator every tensor is an allocation of its own, so a byte too far is seen. Prints one line per
call; exits 1 without a GPU. Values are the business of the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import mxmoe
from mxmoe import MXRecipe

SIZES = ([1, 31, 0, 33, 127], [0, 0, 192], [200, 129, 128, 1])
DIMS = ((40, 33), (96, 160), (136, 264))


def ends(sizes: list[int]) -> torch.Tensor:
    """Group ends on the GPU."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()


def quantizers(x: torch.Tensor, offs: torch.Tensor | None) -> None:
    """Every quantizer, both layouts, and back."""
    for layout in ("plain", "blocked"):
        for t in (*mxmoe.quantize_both(x, offs=offs, layout=layout), mxmoe.quantize(x, offs=offs, layout=layout)):
            mxmoe.dequantize(t)
        mxmoe.dequantize(mxmoe.quantize(x, block="colwise", offs=offs, layout=layout))
    for block in ("rowwise", "colwise"):
        mxmoe.fake_quantize(x, block=block, offs=offs)


def layouts(scale: torch.Tensor, offs: torch.Tensor) -> None:
    """Every scale layout and its inverse."""
    rows, cols = scale.shape
    for method in ("naive", "parallel"):
        mxmoe.from_blocked_m_groups(mxmoe.to_blocked_m_groups(scale, offs, method=method), offs, rows, cols)
        turned = scale.t().contiguous()
        mxmoe.from_blocked_k_groups(mxmoe.to_blocked_k_groups(turned, offs, method=method), offs, cols, rows)
    mxmoe.from_blocked(mxmoe.to_blocked(scale), rows, cols)
    mxmoe.from_blocked_experts(mxmoe.to_blocked_experts(scale[None]), rows, cols)


def steps(m: int, n: int, k: int, offs: torch.Tensor) -> None:
    """A training step under every recipe, and decoding."""
    groups = offs.numel()
    bias = torch.randn(groups, n, device="cuda", requires_grad=True)
    for recipe in (
        MXRecipe(),
        MXRecipe(save="mxfp8"),
        MXRecipe(weight_block=(32, 32)),
        MXRecipe(activations="bf16"),
        MXRecipe(backend="triton"),
    ):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mxmoe.grouped_mm(x, w.mT, offs, bias=bias, recipe=recipe).sum().backward()
    mxmoe.grouped_mm(x.detach(), mxmoe.quantize(w.detach()).mT, offs)


def main() -> None:
    """Everything, once."""
    if not torch.cuda.is_available():
        raise SystemExit("scripts/memcheck.py needs a CUDA GPU")
    for sizes in SIZES:
        offs = ends(sizes)
        for k, n in DIMS:
            m = sum(sizes) + 3
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            quantizers(x, offs)
            quantizers(x, None)
            quantizers(torch.randn(2, 48, k, device="cuda", dtype=torch.bfloat16), None)
            mxmoe.dequantize(mxmoe.quantize(torch.randn(2, 65, k, device="cuda"), block="square"))
            layouts(torch.randint(0, 255, (m, -(-k // 32)), dtype=torch.uint8, device="cuda"), offs)
            steps(m, n, k, offs)
            torch.cuda.synchronize()
            print(f"groups {sizes}, K = {k}, N = {n}: done", flush=True)


if __name__ == "__main__":
    main()
