"""Decoding: few tokens per expert against MXFP8 weights, beside bf16 ``torch._grouped_mm``, and where the two cross.

    python benchmarks/bench_decode.py [--quick] [--out results/decode.jsonl] [--plot results/decode.png]

Rows per weight shape and tokens per expert (1 to 256, random routing; "1 of 2": one token for every second expert):

    bf16       torch._grouped_mm on bf16 weights
    decode     weights expanded in registers, tokens in bf16 (weight-only)
    mxfp8      the same, tokens rounded to MXFP8 first (the same bytes as a chip with MXFP8 tensor cores)
    no facts   the same as decode without ``pack_weight``: every tile is expanded to bf16
    expand     weights expanded to bf16 once per call, then the bf16 GEMM: what runs above the crossover
    swiglu     gate and up projection with SwiGLU in one launch (N = 2I)

TB/s counts bytes of MXFP8 values and scales of experts with tokens, once. Each result is compared with torch's product
of the expanded weights before it is timed. Weights exceed the L2 many times over, so every launch finds it cold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from _harness import Writer, copy_rate, env_line, markdown, progress, require_gpu, time_graph
from torch import Tensor

KIND = "decode"
SHAPES = [(1536, 2048, 128), (2048, 768, 128), (4096, 7168, 32), (28672, 4096, 8)]
TOKENS = [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256]
# Speed over bf16 and TB/s that are asked for.
TARGETS = {
    ((1536, 2048, 128), 8): (2.3, 3.6),
    ((2048, 768, 128), 8): (2.5, 3.4),
    ((4096, 7168, 32), 8): (2.4, 3.7),
    ((28672, 4096, 8), 16): (2.6, 3.7),
    ((1536, 2048, 128), 32): (1.8, None),
    ((1536, 2048, 128), 0.5): (2.0, None),
}


class Weights:
    """One weight in all its forms."""

    def __init__(self, n: int, k: int, experts: int) -> None:
        from mxmoe.ops.decode import pack_weight

        self.shape = (n, k, experts)
        gen = torch.Generator(device="cuda").manual_seed(0)
        self.bf16 = torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16)
        self.q = torch.empty(experts, n, k, device="cuda", dtype=torch.float8_e4m3fn)
        self.scale = torch.empty(experts, n, k // 32, device="cuda", dtype=torch.uint8)
        for g in range(experts):
            w = torch.randn(n, k, device="cuda", generator=gen) * 0.02
            self.q[g], self.scale[g] = torch.ops.mxmoe.quantize_rowwise(w, None, False, torch.float8_e4m3fn, "rceil")
            self.bf16[g] = self.expanded(self.q[g], self.scale[g])
        self.packed, self.top = pack_weight(self.q, self.scale)

    @staticmethod
    def expanded(q: Tensor, scale: Tensor) -> Tensor:
        """bf16 values."""
        rows = q.shape[-2]
        out: Tensor = torch.ops.mxmoe.dequantize(q, scale, "rowwise", None, None, rows, torch.bfloat16)
        return out


def routing(tokens: float, experts: int) -> Tensor:
    """Rows of every expert: random, or one token for every second expert."""
    if tokens < 1:
        sizes = torch.zeros(experts, dtype=torch.long)
        sizes[:: round(1 / tokens)] = 1
        return sizes
    gen = torch.Generator().manual_seed(3)
    return torch.bincount(torch.randint(0, experts, (int(tokens * experts),), generator=gen), minlength=experts)


def versions(w: Weights, x: Tensor, offs: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What is timed."""
    from mxmoe import MXRecipe
    from mxmoe.kernels.mx_decode import PackedWeight, mx_decode_m_groups
    from mxmoe.kernels.mx_decode_swiglu import mx_decode_swiglu

    rounded = MXRecipe()
    facts = PackedWeight(w.packed, w.top)
    bf16 = torch.bfloat16

    def decode(facts: Any, quantize: Any = None) -> Tensor:
        return mx_decode_m_groups(x, None, None, 0, w.q, w.scale, facts, offs, None, bf16, quantize)

    return {
        "bf16": lambda: torch._grouped_mm(x, w.bf16.transpose(-2, -1), offs=offs),
        "decode": lambda: decode(facts),
        "mxfp8": lambda: decode(facts, (rounded.elem_dtype, rounded.scale_mode)),
        "no facts": lambda: decode(None),
        "expand": lambda: torch._grouped_mm(x, w.expanded(w.q, w.scale).transpose(-2, -1), offs=offs),
        "swiglu": lambda: mx_decode_swiglu(x, None, None, 0, w.q, w.scale, facts, offs, None, None, bf16),
    }


def expected(version: str, product: Tensor) -> Tensor:
    """What a version must give, from torch's product of the expanded weights."""
    if version != "swiglu":
        return product
    gate, up = product.float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def measure(w: Weights, tokens: float, writer: Writer, quick: bool) -> None:
    """Rows of one weight and token count."""
    n, k, experts = w.shape
    sizes = routing(tokens, experts)
    offs = sizes.cumsum(0).to(torch.int32).cuda()
    x = torch.randn(int(sizes.sum()), k, device="cuda", dtype=torch.bfloat16)
    live = int((sizes > 0).sum())
    nbytes = live * n * k * 33 // 32
    runs = versions(w, x, offs)
    product = runs["bf16"]()
    base: float | None = None
    for version, fn in runs.items():
        row = {"shape": list(w.shape), "tokens": tokens, "version": version}
        if quick and version in ("no facts", "expand"):
            continue
        result, wanted = fn().float(), expected(version, product).float()
        error = ((result - wanted).norm() / wanted.norm()).item()
        # Rounded tokens are 31.5 dB from unrounded ones; everything else is bf16 rounding of the result.
        limit = 0.05 if version == "mxfp8" else 0.01
        if not error <= limit:
            raise AssertionError(f"{version} {w.shape} {tokens}: relative error {error:.3g}")
        if version != "bf16" and not torch.equal(result, fn().float()):
            raise AssertionError(f"{version} {w.shape} {tokens}: two runs differ")
        del result, wanted
        t = time_graph(fn, cold=False, budget_ms=2.0, replays=9 if quick else 15)
        base = t.median if version == "bf16" else base
        row |= {"us": t.median, "p20": t.p20, "p80": t.p80, "error": error}
        row["speedup"] = base / t.median if base else None
        if version != "bf16":
            row["tb_per_s"] = nbytes / t.median / 1e6
        writer.row(**row)


# --- report ----------------------------------------------------------------------------------------------------------
def report(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tables, as Markdown."""
    parts = [env_line(env)]
    found = {(tuple(r["shape"]), r["tokens"], r["version"]): r for r in rows if r["version"] != "copy"}
    names = [v for v in ("bf16", "decode", "mxfp8", "no facts", "expand", "swiglu") if any(k[2] == v for k in found)]
    columns = ["N, K, experts", "tokens per expert", *(f"{v} us" for v in names), "decode over bf16", "asked", "TB/s"]
    table = []
    for shape, tokens, version in found:
        if version != "decode":
            continue
        r = found[shape, tokens, "decode"]
        times = [found.get((shape, tokens, v), {}).get("us") for v in names]
        asked = TARGETS.get((shape, tokens))
        label = f"1 of {round(1 / tokens)}" if tokens < 1 else str(int(tokens))
        wanted = "" if asked is None else f"{asked[0]}x" + (f", {asked[1]} TB/s" if asked[1] else "")
        table.append([", ".join(map(str, shape)), label, *times, f"{r['speedup']:.2f}x", wanted, r["tb_per_s"]])
    parts += ["### All", markdown(columns, table)]
    parts += [_crossover(found, shape) for shape in dict.fromkeys(key[0] for key in found)]
    asked_for = [[line[i] for i in (0, 1, 2, 3, -3, -2, -1)] for line in table if line[-2]]
    short = [columns[i] for i in (0, 1, 2, 3, -3, -2, -1)]
    parts += ["### Summary: where a speed was asked for", markdown(short, asked_for)] if asked_for else []
    return "\n\n".join(p for p in parts if p)


def _crossover(found: dict[tuple[Any, ...], dict[str, Any]], shape: tuple[int, ...]) -> str:
    """Tokens per expert from which expanding first is faster."""
    tokens = sorted({t for s, t, v in found if s == shape and v == "expand"})
    for t in tokens:
        if found[shape, t, "expand"]["us"] < found[shape, t, "decode"]["us"]:
            return f"{shape}: expanding the weights first is faster from {t:g} tokens per expert."
    if not tokens:
        return ""
    return f"{shape}: decoding is faster than expanding the weights up to {tokens[-1]:g} tokens per expert."


def plot(env: dict[str, Any], rows: list[dict[str, Any]], path: Path | str) -> None:
    """Time over tokens per expert, one panel per weight shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(tuple(r["shape"]) for r in rows if r["version"] != "copy"))
    figure, axes = plt.subplots(1, len(shapes), figsize=(4.2 * len(shapes), 3.6), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for version in ("bf16", "decode", "mxfp8", "expand"):
            mine = [r for r in rows if r["version"] == version and tuple(r["shape"]) == shape]
            points = sorted((r["tokens"], r["us"]) for r in mine)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=version)
        axis.set(xscale="log", yscale="log", xlabel="tokens per expert")
        axis.set_title(f"N={shape[0]} K={shape[1]} E={shape[2]}")
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("us")
    axes[0][0].legend()
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the rows with a target only, fewer replays")
    parser.add_argument("--out", help="JSONL file to write")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    args = parser.parse_args()
    require_gpu()
    import mxmoe  # noqa: F401  (defines the ops)

    writer = Writer(args.out, KIND)
    writer.row(version="copy", tb_per_s=copy_rate())
    torch.manual_seed(0)
    for shape in progress(SHAPES, "weights"):
        w = Weights(*shape)
        for tokens in TOKENS:
            if args.quick and (shape, tokens) not in TARGETS:
                continue
            measure(w, tokens, writer, args.quick)
        del w
        torch.cuda.empty_cache()
    print(report(writer.env, writer.rows))
    if args.plot:
        plot(writer.env, writer.rows, args.plot)


if __name__ == "__main__":
    main()
