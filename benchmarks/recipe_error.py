"""What each recipe costs in accuracy: one expert layer, forward and all gradients, against fp32.

    python benchmarks/recipe_error.py [--out results/recipe_error.jsonl]

Signal to quantization noise in dB (6 dB is a factor of two in the error). Runs on a CPU in seconds; the numbers do not
depend on the device. Tokens and gradients differ in size from row to row by powers of two, as in training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from _harness import Writer, markdown
from torch import Tensor

H, I, E, K, T = 512, 256, 8, 2, 1024  # noqa: E741
NAMES = ("out", "dX", "d routing", "dW up", "dW down")


def recipes() -> dict[str, object]:
    """What is compared."""
    from mxmoe import MXRecipe

    e5m2 = torch.float8_e5m2
    return {
        "MXRecipe()": MXRecipe(),
        'scale_mode="even"': MXRecipe(scale_mode="even"),
        'scale_mode="floor"': MXRecipe(scale_mode="floor"),
        'scale_mode="ceil"': MXRecipe(scale_mode="ceil"),
        "weight_block=(32, 32)": MXRecipe(weight_block=(32, 32)),
        'wgrad="bf16"': MXRecipe(wgrad="bf16"),
        "grad_elem_dtype=e5m2": MXRecipe(grad_elem_dtype=e5m2),
        "elem_dtype and grad_elem_dtype e5m2": MXRecipe(elem_dtype=e5m2, grad_elem_dtype=e5m2),
        'activations="bf16"': MXRecipe(activations="bf16"),
    }


def loop(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The layer in fp32, expert by expert."""
    out = torch.zeros_like(x)
    for e in range(E):
        token, choice = torch.where(ids == e)
        gate, upper = (x[token] @ up[e].T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * upper
        out = out.index_add(0, token, hidden @ down[e].T * weights[token, choice, None])
    return out


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSONL results")
    args = parser.parse_args()
    from mxmoe.ops import moe

    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    def per_row(low: int, high: int) -> Tensor:
        return torch.exp2(torch.randint(low, high + 1, (T, 1), generator=gen).float())

    x = (randn(T, H) * per_row(-2, 2)).requires_grad_()
    up, down = (randn(E, 2 * I, H) / H**0.5).requires_grad_(), (randn(E, H, I) / I**0.5).requires_grad_()
    weights = torch.softmax(randn(T, K), -1).requires_grad_()
    ids = torch.rand(T, E, generator=gen).topk(K).indices
    grad = randn(T, H) * per_row(-4, 4)
    leaves = (x, weights, up, down)
    exact = loop(x, ids, weights, up, down)
    expected = (exact, *torch.autograd.grad(exact, leaves, grad))

    writer = Writer(args.out, "recipe_error")
    rows = []
    for name, recipe in recipes().items():
        out = moe.experts(x, ids, weights, up, down, recipe=recipe)
        got = (out, *torch.autograd.grad(out, leaves, grad))
        db = [(20 * torch.log10(b.norm() / (a - b).norm())).item() for a, b in zip(got, expected, strict=True)]
        writer.row(recipe=name, **dict(zip(NAMES, db, strict=True)))
        rows.append([name, *(f"{v:.1f}" for v in db)])
    print(markdown(["recipe", *NAMES], rows))


if __name__ == "__main__":
    main()
