"""The expert layer of an MoE block: MXFP8 against transformers' bf16 ``grouped_mm``, whole and stage by stage.

    python benchmarks/bench_moe_layer.py [--quick] [--out results/moe_layer.jsonl] [--plot results/moe_layer.png]

Rows: forward and forward + backward in the training recipe (weights cast in every call), forward with MXFP8 weights,
for 64, 1024 and 16384 tokens of the Qwen3-30B-A3B block and 16384 tokens of a DeepSeek-V3-like one. The rival runs in
the same process on the same data: transformers' own function where it is installed, else the same torch calls. Results
are compared with the rival's (dB) before anything is timed. Stages are timed apart, with the bytes they have to move:
"floor" is those bytes at the copy rate of this run, or the GEMM's operations at ``--tflops``. Random routing.

Floors of a forward pass of 16384 tokens (H 2048, I 768, 128 experts, top 8), bytes: gather 2TH + 2MH = 0.60 GB, SwiGLU
6MI = 0.60 GB, combine 2MH + 2TH = 0.60 GB, casts of the weights 4E(3IH) = 2.42 GB; backward: gather twice 1.21 GB,
SwiGLU 16MI = 1.61 GB, combine 0.60 GB, casts 2.42 GB. All memory-bound stages together: 2.4 ms at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from _harness import Writer, copy_rate, env_line, markdown, progress, require_gpu, time_graph
from torch import Tensor

KIND = "moe_layer"
DEVICE = "cuda"
BLOCKS = {"qwen3-30b-a3b": (2048, 768, 128, 8), "deepseek-v3-like": (7168, 2048, 32, 8)}
CASES = [("qwen3-30b-a3b", 64), ("qwen3-30b-a3b", 1024), ("qwen3-30b-a3b", 16384), ("deepseek-v3-like", 16384)]


class Block:
    """Weights, tokens and routing of one case."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens = name, tokens
        self.h, self.i, self.e, self.k = BLOCKS[name]
        self.m = tokens * self.k
        gen = torch.Generator(device=DEVICE).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, generator=gen)

        self.x = randn(tokens, self.h).requires_grad_()
        self.up = (randn(self.e, 2 * self.i, self.h) / self.h**0.5).detach().requires_grad_()
        self.down = (randn(self.e, self.h, self.i) / self.i**0.5).detach().requires_grad_()
        scores = torch.rand(tokens, self.e, device=DEVICE, generator=gen)
        weights, self.ids = scores.topk(self.k, -1)
        self.weights = (weights / weights.sum(-1, keepdim=True)).bfloat16().requires_grad_()
        self.grad = randn(tokens, self.h)
        self.leaves = (self.x, self.weights, self.up, self.down)
        # What transformers' experts function reads from its module.
        self.module = types.SimpleNamespace(
            num_experts=self.e,
            has_gate=True,
            has_bias=False,
            is_transposed=False,
            is_concatenated=True,
            gate_up_proj=self.up,
            down_proj=self.down,
            _apply_gate=_swiglu,
        )

    def step(self, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Forward and backward."""
        out = forward()
        return (out, *torch.autograd.grad(out, self.leaves, self.grad))


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rival() -> tuple[str, Callable[..., Tensor]]:
    """transformers' grouped_mm experts function, or the same torch calls."""
    try:
        import transformers
        from transformers.integrations.moe import grouped_mm_experts_forward

        return f"transformers {transformers.__version__}", grouped_mm_experts_forward
    except ImportError:
        return "the torch calls of transformers 5.17", _grouped_mm_experts


def _grouped_mm_experts(module: types.SimpleNamespace, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """transformers 5.17's ``grouped_mm_experts_forward``, call by call, for this kind of module."""
    k = ids.shape[-1]
    sorted_ids, order = torch.sort(ids.reshape(-1))
    rows = x[order // k]
    counts = torch.histc(sorted_ids.int(), bins=module.num_experts, min=0, max=module.num_experts - 1)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    sentinel = (sorted_ids >= module.num_experts).unsqueeze(-1)
    sorted_ids.clamp_(max=module.num_experts - 1)
    rows.masked_fill_(sentinel, 0.0)
    out = torch.nn.functional.grouped_mm(rows, module.gate_up_proj.transpose(-2, -1), offs=offs)
    out = module._apply_gate(out.masked_fill(sentinel, 0.0))
    out = torch.nn.functional.grouped_mm(out, module.down_proj.transpose(-2, -1), offs=offs)
    out = out.masked_fill(sentinel, 0.0) * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=x.device)
    return out[inverse].view(x.shape[0], k, -1).sum(1).to(x.dtype)


def serving_weight(w: Tensor) -> object:
    """MXFP8 weights as ``quantize_experts`` leaves them, with what the decode kernel wants to know about them."""
    import mxmoe
    from mxmoe.nn.mx_experts import ServingWeight
    from mxmoe.ops.decode import pack_weight

    t = mxmoe.quantize(w)
    return ServingWeight(t.qdata, t.scale_bytes, *pack_weight(t.qdata, t.scale_bytes))


def sqnr(actual: Tensor, exact: Tensor) -> float:
    """Signal to quantization noise, dB."""
    a, e = actual.float(), exact.float()
    return (20 * torch.log10(e.norm() / (a - e).norm())).item()


def peak_bytes(fn: Callable[[], object]) -> int:
    """Peak of allocated memory above what is allocated before."""
    fn()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def whole(block: Block, writer: Writer, quick: bool) -> None:
    """Rows of the whole layer: rival and ours, forward and forward + backward."""
    import mxmoe
    from mxmoe.nn.mx_experts import mx_experts_forward
    from mxmoe.ops import moe

    name, theirs = rival()
    x, weights, up, down = block.leaves
    forward = {
        "grouped_mm bf16": lambda: theirs(block.module, x, block.ids, weights),
        "mxfp8": lambda: moe.experts(x, block.ids, weights, up, down),
    }
    lean = mxmoe.MXRecipe(save="mxfp8")
    trained = {
        **forward,
        "mxfp8, save mxfp8": lambda: moe.experts(x, block.ids, weights, up, down, recipe=lean),
    }
    base = {"block": block.name, "tokens": block.tokens, "rival": name}
    timing = {"cold": False, "budget_ms": 4.0 if quick else 12.0, "replays": 7 if quick else 21}

    expected = block.step(forward["grouped_mm bf16"])
    got = block.step(forward["mxfp8"])
    quality = {
        leaf: round(sqnr(a, b), 1)
        for leaf, a, b in zip(("out", "x", "weights", "up", "down"), got, expected, strict=True)
    }
    if min(quality.values()) < 20:
        raise SystemExit(f"{block.name}, {block.tokens} tokens: results do not agree with the rival: {quality} dB")
    out = expected[0].detach()
    del expected, got

    reference: dict[str, float] = {}

    def add(mode: str, version: str, fn: Callable[[], object], **fields: object) -> None:
        try:
            us = time_graph(fn, **timing).median
        except Exception as error:  # a version that cannot run this case is a row, not the end of the run
            writer.row(**base, mode=mode, version=version, error=f"{type(error).__name__}: {error}"[:300])
            print(f"{mode} {version}: {error}", file=sys.stderr)
            return
        if version == "grouped_mm bf16":
            reference[mode] = us
        ratio = us / reference[mode]
        writer.row(**base, mode=mode, version=version, us=us, ratio=ratio, **fields)

    with torch.no_grad():
        for version, fn in forward.items():
            add("forward", version, fn, db=quality["out"] if version == "mxfp8" else None)
        packed = [serving_weight(w.detach()) for w in (up, down)]
        for label, recipe in (("", mxmoe.MXRecipe()), (", bf16 activations", mxmoe.MXRecipe(activations="bf16"))):
            fn = functools.partial(
                mx_experts_forward,
                x.detach(),
                block.ids,
                weights.detach(),
                *packed,
                num_experts=block.e,
                activate=None,
                recipe=recipe,
            )
            add("forward", f"mxfp8 weights{label}", fn, db=round(sqnr(fn(), out), 1))
        del packed, fn
    if block.tokens >= 1024:
        for version, fn in trained.items():
            add("fwd+bwd", version, lambda f=fn: block.step(f), quality=quality if version == "mxfp8" else None)
        for version, fn in trained.items():
            peak = peak_bytes(lambda f=fn: block.step(f))
            reference.setdefault("peak memory", peak)  # the first one: grouped_mm's
            writer.row(**base, mode="peak memory", version=version, bytes=peak, ratio=peak / reference["peak memory"])


def stages(block: Block, writer: Writer, quick: bool, rate: float, tflops: float) -> None:
    """Every stage of forward and backward on its own."""
    from mxmoe import MXRecipe
    from mxmoe.kernels import combine, gather_quantize, route, swiglu_quantize
    from mxmoe.ops.engines import dequant

    recipe, elem, bf16 = MXRecipe(), torch.float8_e4m3fn, torch.bfloat16
    x, weights, up, down = (t.detach() for t in block.leaves)
    offs, order, position = route.route(block.ids, block.e)
    h, i, e, k, m, t = block.h, block.i, block.e, block.k, block.m, block.tokens
    mode = recipe.scale_mode

    xg = gather_quantize.gather_rows(x, position, offs, None, elem, mode, bf16)
    xc = gather_quantize.gather_cols(x, order, k, offs, elem, mode, bf16)
    up_f, down_f = dequant.weight_operand(up, recipe), dequant.weight_operand(down, recipe)
    gate_up = dequant.mm_m_groups(xg, up_f, offs, None, bf16)
    hidden = swiglu_quantize.swiglu_rows(gate_up, weights, order, offs, elem, mode, bf16)
    rows = dequant.mm_m_groups(hidden, down_f, offs, None, bf16)
    up_b, down_b = dequant.weight_operand(up.mT, recipe), dequant.weight_operand(down.mT, recipe)
    dh = dequant.mm_m_groups(xg, down_b, offs, None, bf16)
    swiglu_args = (gate_up, dh, weights, order, offs, elem, elem, elem, mode, bf16, (True,) * 4)
    row, col, hc, _ = swiglu_quantize.swiglu_backward(*swiglu_args)

    gather = lambda: gather_quantize.gather_rows(x, position, offs, None, elem, mode, bf16)  # noqa: E731
    gather_c = lambda: gather_quantize.gather_cols(x, order, k, offs, elem, mode, bf16)  # noqa: E731
    token_bytes, row_bytes = 2 * t * h, 2 * m * h
    up_bytes, down_bytes = 4 * up.numel(), 4 * down.numel()
    up_flop, down_flop = 4 * m * h * i, 2 * m * h * i
    mm, kk = dequant.mm_m_groups, dequant.mm_k_groups
    plan: list[tuple[str, str, Callable[[], object], float, float]] = [
        ("forward", "route", lambda: route.route(block.ids, e), 24 * m, 0),
        ("forward", "gather", gather, token_bytes + row_bytes, 0),
        ("forward", "cast weights", lambda: dequant.weight_operand(up, recipe), up_bytes, 0),
        ("forward", "GEMM up", lambda: mm(xg, up_f, offs, None, bf16), 0, up_flop),
        (
            "forward",
            "SwiGLU",
            lambda: swiglu_quantize.swiglu_rows(gate_up, weights, order, offs, elem, mode, bf16),
            6 * m * i,
            0,
        ),
        ("forward", "cast weights", lambda: dequant.weight_operand(down, recipe), down_bytes, 0),
        ("forward", "GEMM down", lambda: mm(hidden, down_f, offs, None, bf16), 0, down_flop),
        ("forward", "combine", lambda: combine.combine(rows, position, offs, None, bf16), token_bytes + row_bytes, 0),
        ("backward", "gather", gather, token_bytes + row_bytes, 0),
        ("backward", "cast weights", lambda: dequant.weight_operand(down.mT, recipe), down_bytes, 0),
        ("backward", "dgrad down", lambda: mm(xg, down_b, offs, None, bf16), 0, down_flop),
        ("backward", "SwiGLU", lambda: swiglu_quantize.swiglu_backward(*swiglu_args), 16 * m * i, 0),
        ("backward", "gather cols", gather_c, token_bytes + row_bytes, 0),
        ("backward", "wgrad down", lambda: kk(xc, hc, offs, bf16), 0, down_flop),
        ("backward", "gather cols", gather_c, token_bytes + row_bytes, 0),
        ("backward", "wgrad up", lambda: kk(col, xc, offs, bf16), 0, up_flop),
        ("backward", "cast weights", lambda: dequant.weight_operand(up.mT, recipe), up_bytes, 0),
        ("backward", "dgrad up", lambda: mm(row, up_b, offs, None, bf16), 0, up_flop),
        ("backward", "combine", lambda: combine.combine(rows, position, offs, None, bf16), token_bytes + row_bytes, 0),
    ]
    done: dict[str, float] = {}
    for part, stage, fn, moved, flop in plan:
        key = f"{stage} {moved} {flop} {part if stage == 'cast weights' else ''}"
        if key not in done:
            done[key] = time_graph(fn, cold=False, budget_ms=3.0, replays=5 if quick else 15).median
        us = done[key]
        floor = moved / rate / 1e6 if moved else flop / tflops / 1e6
        writer.row(
            block=block.name,
            tokens=t,
            mode="stage",
            part=part,
            stage=stage,
            us=us,
            bytes=moved,
            flop=flop,
            floor_us=floor,
        )


def report(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The whole layer beside the rival, and its stages."""
    layers, parts = [], []
    for r in rows:
        at = [r["block"], r["tokens"]]
        if r["mode"] == "stage":
            us = r["us"]
            speed = f"{r['bytes'] / us / 1e6:.2f} TB/s" if r["bytes"] else f"{r['flop'] / us / 1e6:.0f} TFLOP/s"
            parts.append([*at, r["part"], r["stage"], us, speed])
        elif r["mode"] == "peak memory":
            layers.append([*at, "peak GB", r["version"], r["bytes"] / 1e9, r.get("ratio"), None])
        else:
            layers.append([*at, r["mode"], r["version"], r.get("us", 0) / 1e3 or None, r.get("ratio"), r.get("db")])
    columns = ["block", "tokens", "mode", "version", "ms", "x grouped_mm", "dB"]
    pieces = [env_line(env), "### Whole layer", markdown(columns, layers)]
    pieces += ["### Stages", markdown(["block", "tokens", "part", "stage", "us", "rate"], parts)]
    return "\n\n".join(pieces)


def plot(env: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    """Stacked stages beside the rival's whole time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    blocks = list(dict.fromkeys((r["block"], r["tokens"]) for r in rows if r.get("mode") == "stage"))
    if not blocks:
        return
    names = list(dict.fromkeys(r["stage"] for r in rows if r.get("mode") == "stage"))
    colours = dict(zip(names, plt.get_cmap("tab20").colors, strict=False))
    figure, axes = plt.subplots(1, len(blocks), figsize=(6 * len(blocks), 5), squeeze=False)
    for axis, (block, tokens) in zip(axes[0], blocks, strict=True):
        mine = [r for r in rows if (r["block"], r["tokens"]) == (block, tokens)]
        for at, parts in enumerate((("forward",), ("forward", "backward"))):
            bottom = 0.0
            for r in mine:
                if r.get("mode") == "stage" and r["part"] in parts:
                    label = r["stage"] if r["stage"] not in axis.get_legend_handles_labels()[1] else None
                    axis.bar(2 * at + 1, r["us"] / 1e3, 0.7, bottom=bottom, color=colours[r["stage"]], label=label)
                    bottom += r["us"] / 1e3
            mode = "forward" if at == 0 else "fwd+bwd"
            theirs = [r["us"] / 1e3 for r in mine if r.get("mode") == mode and r.get("version") == "grouped_mm bf16"]
            if theirs:
                axis.bar(2 * at, theirs[0], 0.7, color="lightgrey", label="grouped_mm bf16" if at == 0 else None)
        axis.set_xticks(range(4), ["bf16\nforward", "mxfp8\nforward", "bf16\nfwd+bwd", "mxfp8\nfwd+bwd"])
        axis.set_title(f"{block}, {tokens} tokens")
        axis.set_ylabel("ms")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, Qwen3 block only")
    parser.add_argument("--out", help="JSONL results")
    parser.add_argument("--plot", help="PNG of the stages")
    parser.add_argument("--tflops", type=float, default=700.0, help="rate of the GEMM floors")
    args = parser.parse_args()
    require_gpu()
    writer = Writer(args.out, KIND)
    rate = copy_rate()
    cases = [c for c in CASES if not args.quick or c[0] == "qwen3-30b-a3b"]
    for name, tokens in progress(cases, "moe layer"):
        block = Block(name, tokens)
        whole(block, writer, args.quick)
        if tokens >= 16384:
            stages(block, writer, args.quick, rate, args.tflops)
        del block
        torch.cuda.empty_cache()
    if args.plot:
        plot(writer.env, writer.rows, args.plot)
    print(report(writer.env, writer.rows))


if __name__ == "__main__":
    main()
