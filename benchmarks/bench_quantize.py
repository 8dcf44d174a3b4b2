"""Quantization kernels: time and share of a copy, beside torch.compile of the plain cast and torchao's kernels.

    python benchmarks/bench_quantize.py [--quick] [--no-rivals] [--only SHAPE,...] [--out results/quantize.jsonl]

"copy" is ``y.copy_(x)`` of the same x in the same run. The share of an op is its bytes, read and written once, per
second, over the same of the copy: 1.0 means the op runs at the speed at which this GPU copies. Every kernel of ours is
compared byte by byte with the reference before it is timed. Times: CUDA-graph replay, cold L2; every op takes turns
with the copy, replay by replay.

The last table is the cast of a square bf16 matrix across dim 0 and dim 1, MXFP8, 32 x 1: speed-up over torch.compile.
("dim0": blocks along the last dim, our rowwise; "dim1": blocks along the rows, result transposed, our colwise.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from _harness import Writer, env_line, markdown, progress, require_gpu, time_graph, time_graphs
from _torchao import Casts, casts
from torch import Tensor

KIND = "quantize"
BF16, E4M3, MODE = torch.bfloat16, torch.float8_e4m3fn, "rceil"
BIG, MIDDLE, SMALL = (131072, 7168), (16384, 5120), (256, 2048)
WEIGHTS = [(8, 2048, 7168), (128, 1536, 2048)]
SEED = [1024, 2048, 4096, 8192, 16384]
ONE, BOTH = 2 + 33 / 32, 2 + 66 / 32  # bytes per bf16 element: one direction, both
TARGETS = {  # share of the copy: (BIG, MIDDLE, weights)
    "rowwise": (0.97, 0.88, 0.93),
    "rowwise blocked": (0.97, 0.88, None),
    "colwise": (0.85, 0.84, 0.82),
    "colwise blocked": (0.85, 0.84, None),
    "both": (0.80, 0.78, 0.76),
    "both blocked": (0.80, 0.78, None),
    "fake_quantize rowwise": (0.95, 0.88, None),
    "fake_quantize colwise": (0.95, 0.88, None),
    "fake_quantize both": (0.95, 0.88, None),
    "dequantize rowwise": (0.95, 0.88, None),
    "dequantize colwise": (0.95, 0.88, None),
}


# --- inputs ----------------------------------------------------------------------------------------------------------
def data(shape: tuple[int, ...]) -> Tensor:
    """bf16 normal values times a random power of two per block of 32."""
    torch.manual_seed(0)
    x = torch.empty(shape, device="cuda", dtype=BF16).normal_()
    power = torch.randint(-12, 13, (*shape[:-1], shape[-1] // 32, 1), device="cuda").to(BF16)
    x.unflatten(-1, (-1, 32)).mul_(torch.exp2(power))
    return x


def uneven_ends(m: int, groups: int) -> Tensor:
    """Ends of random groups that fill ``m`` rows, at no multiple of anything; fixed seed."""
    gen = torch.Generator().manual_seed(m + groups)
    cuts = torch.sort(torch.randint(0, m + 1, (groups - 1,), generator=gen)).values
    return torch.cat([cuts, torch.tensor([m])]).to(torch.int32).cuda()


# --- ours ------------------------------------------------------------------------------------------------------------
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...], float]


def ours(op: str, x: Tensor, offs: Tensor | None, mode: str = MODE) -> Case:
    """(kernel, reference, inputs to rotate, bytes per element of x) of a row name."""
    from mxmoe.kernels import dequantize, fake_quantize, quantize_both, quantize_colwise, quantize_rowwise
    from mxmoe.kernels import quantize_square as square
    from mxmoe.reference import quantize as ref

    blocked = op.endswith("blocked")
    match op.removesuffix(" blocked").split():
        case ["rowwise" | "colwise" | "both" as name]:
            kernels = {"rowwise": quantize_rowwise, "colwise": quantize_colwise, "both": quantize_both}
            kernel, spec = (getattr(module, f"quantize_{name}") for module in (kernels[name], ref))
            return (
                lambda t: kernel(t, offs, blocked, E4M3, mode),
                lambda: spec(x, offs, blocked, E4M3, mode),
                (x,),
                BOTH if name == "both" else ONE,
            )
        case ["square", order]:
            column_major = order == "transposed"
            return (
                lambda t: square.quantize_square(t, column_major, E4M3, MODE),
                lambda: ref.quantize_square(x, column_major, E4M3, MODE),
                (x,),
                3 + 1 / 1024,
            )
        case ["fake_quantize", "both"]:
            return (
                lambda t: fake_quantize.fake_quantize_both(t, offs, E4M3, MODE, BF16),
                lambda: ref.fake_quantize_both(x, offs, E4M3, MODE, BF16),
                (x,),
                6,
            )
        case ["fake_quantize", block]:
            return (
                lambda t: fake_quantize.fake_quantize(t, block, offs, E4M3, MODE, BF16),
                lambda: ref.fake_quantize(x, block, offs, E4M3, MODE, BF16),
                (x,),
                4,
            )
        case ["dequantize", block]:
            if block == "rowwise":
                q, scale = quantize_rowwise.quantize_rowwise(x, offs, False, E4M3, MODE)
                padded = None
            else:
                q, scale, padded = quantize_colwise.quantize_colwise(x, offs, False, E4M3, MODE)
            ends, source = (padded, offs) if block == "colwise" and offs is not None else (None, None)
            m = x.shape[-2]
            return (
                lambda a, b: dequantize.dequantize(a, b, block, ends, source, m, BF16),
                lambda: ref.fake_quantize(x, block, offs, E4M3, MODE, BF16),
                (q, scale),
                ONE,
            )
    raise ValueError(op)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal shape and bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.view(bits), b.view(bits))


# --- rivals ----------------------------------------------------------------------------------------------------------
def plain_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """The cast in plain PyTorch, blocks along the last dim: what torch.compile is given."""
    blocks = x.unflatten(-1, (-1, 32)).float()
    bits = blocks.abs().amax(-1, keepdim=True).view(torch.int32)
    byte = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)).clamp(0, 254)
    inverse = ((254 - byte) << 23).view(torch.float32)
    q = (blocks * inverse).clamp(-448.0, 448.0).to(E4M3)
    return q.flatten(-2), byte.squeeze(-1).to(torch.uint8)


def cast_dim0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rowwise."""
    return plain_cast(x)


def cast_dim1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Colwise, transposed."""
    return plain_cast(x.mT.contiguous())


def cast_both(x: Tensor) -> tuple[Tensor, ...]:
    """Both."""
    return *plain_cast(x), *plain_cast(x.mT.contiguous())


# --- measuring -------------------------------------------------------------------------------------------------------
class Bench:
    """Rows of one input."""

    def __init__(self, writer: Writer, shape: tuple[int, ...], quick: bool) -> None:
        self.writer, self.shape = writer, shape
        self.x = data(shape)
        self.timing = {"budget_ms": 3.0, "replays": 11 if quick else 25}
        y = torch.empty_like(self.x)
        self.copy = (lambda t: y.copy_(t)), (self.x,)
        alone = time_graphs({"copy": self.copy}, **self.timing)["copy"]
        self._row("copy", "copy", {"it": alone, "copy": alone}, 4.0)

    def _beside_copy(self, fn: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, Any]:
        """Cold times of ``fn`` and of the copy, taking turns: the chip slows as it heats."""
        return time_graphs({"it": (fn, inputs), "copy": self.copy}, **self.timing)

    def _row(self, op: str, version: str, times: dict[str, Any], per_element: float, **more: Any) -> None:
        t, copy = times["it"], times["copy"]
        moved = per_element * self.x.numel()
        row = {"op": op, "version": version, "shape": list(self.shape), "groups": more.pop("groups", 0)}
        row |= {"us": t.median, "p20": t.p20, "p80": t.p80, "tb_per_s": moved / t.median / 1e6}
        share = moved / t.median / (4 * self.x.numel() / copy.median)
        self.writer.row(**row, copy_us=copy.median, share=share, **more)

    def ours(self, op: str, groups: int = 0) -> None:
        """One kernel of ours: bytes first, then time."""
        offs = None if groups == 0 else uneven_ends(self.shape[0], groups)
        kernel, spec, inputs, per_element = ours(op, self.x, offs)
        actual, expected = as_tuple(kernel(*inputs)), as_tuple(spec())
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            if not same_bytes(a, b):
                raise AssertionError(f"{op} {self.shape} groups {groups}: result {i} differs from the reference")
        del actual, expected
        cold = self._beside_copy(kernel, *inputs)
        more = {}
        if self.x.numel() < 2**22:  # fits the L2: what a replay with data in it takes
            more["warm_us"] = time_graph(kernel, *inputs, cold=False, **self.timing).median
        self._row(op, "mxmoe", cold, per_element, groups=groups, **more)

    def rival(self, op: str, version: str, fn: Callable[[Tensor], Any], mode: str = MODE, note: str = "") -> None:
        """A rival; one that fails is a row that says so."""
        try:
            result = as_tuple(fn(self.x))
            mine = as_tuple(ours(op, self.x, None, mode)[0](self.x))
            transposed = {"colwise": (0, 1), "both": (2, 3)}.get(op, ())
            same = all(
                same_bytes(a, b) or (i in transposed and same_bytes(a.mT, b))
                for i, (a, b) in enumerate(zip(result, mine, strict=False))
            )
            del result, mine
            t = self._beside_copy(fn, self.x)
            more = {"same_bytes": same} | ({"note": note} if note else {})
            self._row(op, version, t, BOTH if op == "both" else ONE, **more)
        except Exception as error:
            torch.cuda.synchronize()
            text = f"{type(error).__name__}: {error}"[:200]
            self.writer.row(op=op, version=version, shape=list(self.shape), groups=0, error=text)


def measure(writer: Writer, shape: tuple[int, ...], quick: bool, rivals: bool, torchao: Casts) -> None:
    """All rows of one shape."""
    bench = Bench(writer, shape, quick)
    if len(shape) == 3:
        for op in ("rowwise", "colwise", "both", "square plain", "square transposed"):
            bench.ours(op)
        return
    for op in TARGETS:
        bench.ours(op)
    if shape != SMALL:
        for op in ("rowwise blocked", "colwise", "colwise blocked", "both", "both blocked"):
            bench.ours(op, 1)
            bench.ours(op, 128)
        for op in ("fake_quantize rowwise", "fake_quantize colwise", "fake_quantize both", "dequantize colwise"):
            bench.ours(op, 1)
            bench.ours(op, 128)
    if rivals:
        for op, fn in (("rowwise", cast_dim0), ("colwise", cast_dim1), ("both", cast_both)):
            torch._dynamo.reset()  # every shape its own code, as for ours
            bench.rival(op, "torch.compile", torch.compile(fn))
        for op, fn in torchao.calls.items():
            bench.rival(op, "torchao", fn, torchao.mode, torchao.note)


def measure_seed(writer: Writer, size: int, quick: bool, torchao: Casts) -> None:
    """Cast across dim 0 and dim 1 of a square matrix."""
    bench = Bench(writer, (size, size), quick)
    for op, fn in (("rowwise", cast_dim0), ("colwise", cast_dim1), ("both", cast_both)):
        bench.ours(op)
        torch._dynamo.reset()
        bench.rival(op, "torch.compile", torch.compile(fn))
    for op, fn in torchao.calls.items():
        bench.rival(op, "torchao", fn, torchao.mode, torchao.note)


# --- report ----------------------------------------------------------------------------------------------------------
def target(op: str, shape: tuple[int, ...]) -> float | None:
    """Share of the copy that is wanted."""
    at = 2 if len(shape) == 3 else {BIG: 0, MIDDLE: 1}.get(shape)
    return None if at is None or op not in TARGETS else TARGETS[op][at]


def report(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tables, as Markdown."""
    parts = [env_line(env)]
    by_shape: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for r in rows:
        by_shape.setdefault(tuple(r["shape"]), []).append(r)
    for shape, group in by_shape.items():
        if len(shape) == 2 and shape[0] == shape[1]:
            continue
        warm = any("warm_us" in r for r in group)
        columns = ["op", "groups", "us", "p20", "p80", "TB/s", "share of copy", "wanted", "x one group"]
        columns += ["torch.compile us", "torchao us"] + (["warm L2 us"] if warm else [])
        us = {(r["op"], r["version"], r["groups"]): r.get("us") for r in group}
        table = []
        for r in group:
            if r["version"] not in ("mxmoe", "copy"):
                continue
            op, g = r["op"], r["groups"]
            one = us.get((op, "mxmoe", 1))
            rivals = [us.get((op, v, 0)) if g == 0 else None for v in ("torch.compile", "torchao")]
            line = [op, g or None, r["us"], r["p20"], r["p80"], r["tb_per_s"], r["share"], target(op, shape)]
            line += [r["us"] / one if one and g > 1 else None, *rivals]
            table.append([*line, *([r.get("warm_us")] if warm else [])])
        parts += [f"### {' x '.join(map(str, shape))} bf16", markdown(columns, table)]
        notes = [f"{r['version']} {r['op']}: {r['error']}" for r in group if "error" in r]
        notes += [f"{r['version']} {r['op']}: bytes differ from ours" for r in group if r.get("same_bytes") is False]
        parts += ["; ".join(notes)] if notes else []
    parts += ["### Summary: share of a copy", _summary(by_shape)]
    seed = _seed_table(by_shape)
    if seed:
        parts += ["### Cast of an M x K bf16 matrix to MXFP8 across dim 0 and dim 1", seed]
    parts += dict.fromkeys(r["note"] for r in rows if r.get("note"))
    return "\n\n".join(parts)


def _summary(by_shape: dict[tuple[int, ...], list[dict[str, Any]]]) -> str:
    """Ops against inputs, without groups: share of a copy; the same of torch.compile and torchao where they ran."""
    shapes = [s for s in by_shape if target("rowwise", s) is not None]
    columns = ["op", *(" x ".join(map(str, s)) for s in shapes), "torch.compile", "torchao"]
    found = {(s, r["op"], r["version"]): r for s in shapes for r in by_shape[s] if not r["groups"] and "us" in r}
    table = []
    for op in dict.fromkeys(op for _, op, version in found if version == "mxmoe"):
        line: list[Any] = [op, *(found.get((s, op, "mxmoe"), {}).get("share") for s in shapes)]
        for rival in ("torch.compile", "torchao"):
            mine, theirs = found.get((shapes[0], op, "mxmoe"), {}), found.get((shapes[0], op, rival), {})
            line.append(mine["share"] * mine["us"] / theirs["us"] if mine and theirs else None)
        table.append(line)
    return markdown(columns, table)


def _seed_table(by_shape: dict[tuple[int, ...], list[dict[str, Any]]]) -> str:
    columns = ["M = K"]
    for name in ("dim0", "dim1", "both"):
        columns += [f"{name} torch.compile us", f"{name} mxmoe us", "speed-up", "share of copy"]
    columns += ["torchao dim0 us", "torchao dim1 us"]
    table = []
    for shape, group in by_shape.items():
        if len(shape) != 2 or shape[0] != shape[1]:
            continue
        found = {(r["op"], r["version"]): r for r in group}
        line: list[Any] = [shape[0]]
        for op in ("rowwise", "colwise", "both"):
            mine, theirs = found.get((op, "mxmoe"), {}), found.get((op, "torch.compile"), {})
            a, b = mine.get("us"), theirs.get("us")
            line += [b, a, b / a if a and b else None, mine.get("share")]
        table.append([*line, *(found.get((op, "torchao"), {}).get("us") for op in ("rowwise", "colwise"))])
    return markdown(columns, table) if table else ""


def plot(env: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    """Share of the copy, one panel per shape: ours, torch.compile, torchao, and what is wanted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = [s for s in (BIG, MIDDLE) if any(tuple(r["shape"]) == s for r in rows)]
    panels = max(1, len(shapes))
    figure, axes = plt.subplots(1, panels, figsize=(7 * panels, 4.5), squeeze=False, sharey=True)
    colors = {"mxmoe": "#1f77b4", "torch.compile": "#d62728", "torchao": "#ff7f0e"}
    for axis, shape in zip(axes[0], shapes, strict=False):
        here = [r for r in rows if tuple(r["shape"]) == shape and r["groups"] == 0 and "share" in r]
        ops = [op for op in TARGETS if any(r["op"] == op for r in here)]
        for i, (version, color) in enumerate(colors.items()):
            share = {r["op"]: r["share"] for r in here if r["version"] == version}
            axis.bar([n + (i - 1) * 0.27 for n in range(len(ops))], [share.get(op, 0) for op in ops], 0.27, color=color)
        for n, op in enumerate(ops):
            wanted = target(op, shape)
            axis.plot([n - 0.4, n + 0.1], [wanted, wanted], color="black", linewidth=1)
        axis.axhline(1, color="#808080", linewidth=0.8, linestyle="--")
        axis.set_xticks(range(len(ops)), ops, rotation=40, ha="right", fontsize=8)
        axis.set_title(" x ".join(map(str, shape)), fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("share of a copy (bytes per second)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colors.values()]
    axes[0][-1].legend(handles, colors, fontsize=8)
    figure.suptitle(f"Quantization to MXFP8, {env.get('gpu')}, commit {env.get('commit')}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print the tables, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSONL file, for example results/quantize.jsonl")
    parser.add_argument("--quick", action="store_true", help="fewer replays; the square cast at three sizes")
    parser.add_argument("--no-rivals", action="store_true", help="ours and the copy only, no square cast")
    parser.add_argument("--only", help="which inputs: any of big, middle, small, weights, square (comma separated)")
    args = parser.parse_args()
    require_gpu()

    torchao = Casts() if args.no_rivals else casts()
    inputs = {"big": [BIG], "middle": [MIDDLE], "small": [SMALL], "weights": WEIGHTS}
    wanted = args.only.split(",") if args.only else [*inputs, "square"]
    shapes = [s for name, group in inputs.items() if name in wanted for s in group]
    squares = [] if args.no_rivals or "square" not in wanted else SEED[::2] if args.quick else SEED
    writer = Writer(args.out, KIND)
    try:
        for item in progress([*shapes, *squares], "quantize"):
            if isinstance(item, int):
                measure_seed(writer, item, args.quick, torchao)
            else:
                measure(writer, item, args.quick, not args.no_rivals and item != SMALL, torchao)
            torch.cuda.empty_cache()
    finally:
        print(report(writer.env, writer.rows))


if __name__ == "__main__":
    main()
