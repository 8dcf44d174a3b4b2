"""Grouped GEMMs: MXFP8 end to end beside bf16, every GEMM and every cast apart and together, rivals in the same run.

    python benchmarks/bench_grouped_mm.py [--quick] [--only dsv3,qwen3] [--torchao] [--out results/grouped_mm.jsonl]

Shapes are (M rows, N outputs, K contraction, G experts) with random unequal groups. Rows of the result: a dense bf16
product of the same size (the ceiling), bf16 grouped GEMMs (torch's and ours) for fprop, dgrad and wgrad, fp8 with one
scale per row (torch), the casts of ``dequant``, and whole steps: forward, forward + backward, with the bytes kept for
backward and the peak memory. torchao's emulated MXFP8 with ``--torchao``: its groups end at multiples of 32, it is
timed against torch's bf16 in rounds of its own, compiled for two shapes only, and gets 40 s in all.

How a time is taken. A large GEMM runs at the chip's power limit: the same kernel is 15 % faster on a cool chip. So
rivals are compared hot and interleaved: each is captured in a CUDA graph, the chip is heated, and in every round each
is replayed for some milliseconds, in an order shuffled by round. Median with 20th and 80th percentile over the rounds.
Operands exceed the L2 many times over. Results are checked against bf16 products of the rounded operands first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from _harness import Timing, Writer, copy_rate, env_line, markdown, progress, require_gpu
from torch import Tensor

KIND = "grouped_mm"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# name: (M, N, K, G, goal fwd+bwd, goal fwd), goals: MXFP8 time over bf16's. The last four are small
# and expected to lose: casts of the weights, or launches, are most of the time.
SHAPES: dict[str, tuple[int, int, int, int, float | None, float | None]] = {
    "dsv3": (16384, 2048, 7168, 8, 1.10, 1.18),
    "dsv3-large": (131072, 2048, 7168, 8, 1.05, 1.10),
    "llama4": (16384, 8192, 5120, 8, 1.08, 1.14),
    "qwen3": (131072, 1536, 2048, 128, 1.12, 1.25),
    "gpt-oss": (16384, 2880, 2880, 32, None, None),
    "dsv2-lite": (16384, 1408, 2048, 64, None, None),
    "qwen3-down": (8192, 2048, 768, 128, None, None),
    "few tokens": (256, 2048, 7168, 8, None, None),
}
QUICK = ("dsv3", "dsv3-large", "llama4", "qwen3")
TORCHAO_COMPILED = ("dsv3", "qwen3")
TORCHAO_SECONDS = 40.0


def random_ends(m: int, groups: int, multiple: int = 1) -> Tensor:
    """Ends of random unequal groups that fill m rows; the seed is fixed."""
    gen = torch.Generator().manual_seed(0)
    cuts = torch.sort(torch.randint(0, m // multiple + 1, (groups - 1,), generator=gen)).values * multiple
    return torch.cat([cuts, torch.tensor([m])]).to(torch.int32).cuda()


# --- timing ----------------------------------------------------------------------------------------------------------
def _capture(fn: Callable[[], Any]) -> Callable[[], Any]:
    """fn as a CUDA graph replay; fn itself where it cannot be captured."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = fn()
    except Exception as error:
        torch.cuda.synchronize()
        print(f"  not captured, timed eagerly: {type(error).__name__}", file=sys.stderr)
        return fn
    replay = lambda: graph.replay()  # noqa: E731
    replay.kept = kept  # type: ignore[attr-defined]
    return replay


def _elapsed(fn: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def interleaved(fns: dict[str, Callable[[], Any]], rounds: int, slice_ms: float, heat_ms: float) -> dict[str, Timing]:
    """Time rivals against each other on a hot chip: shuffled rounds of short slices; us per call."""
    replays = {name: _capture(fn) for name, fn in fns.items()}
    calls = {name: max(1, int(slice_ms * 1e3 / max(_elapsed(fn, 2), 1))) for name, fn in replays.items()}
    first = next(iter(replays))
    _elapsed(replays[first], max(1, int(calls[first] * heat_ms / slice_ms)))
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for i in range(rounds):
        names = list(replays)
        random.Random(i).shuffle(names)
        for name in names:
            samples[name].append(_elapsed(replays[name], calls[name]))
    result = {}
    for name, values in samples.items():
        s = torch.tensor(values, dtype=torch.float64)
        result[name] = Timing(*(torch.quantile(s, q).item() for q in (0.5, 0.2, 0.8)))
    return result


# --- one shape -------------------------------------------------------------------------------------------------------
class Case:
    """Operands of one shape, and what runs on them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.m, self.n, self.k, self.g, self.goal_step, self.goal_fwd = SHAPES[name]
        gen = torch.Generator(device="cuda").manual_seed(1)
        rand = lambda *s: torch.randn(*s, device="cuda", dtype=BF16, generator=gen)  # noqa: E731
        self.x, self.w, self.grad = rand(self.m, self.k), rand(self.g, self.n, self.k), rand(self.m, self.n)
        self.w.mul_(self.k**-0.5)
        self.offs = random_ends(self.m, self.g)
        self.flop = 2.0 * self.m * self.n * self.k

    def gemms(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        """fprop, dgrad, wgrad: version -> call."""
        from mxmoe.ops.bf16_grouped_mm import mm_k_groups, mm_m_groups

        x, w, grad, offs = self.x, self.w, self.grad, self.offs
        return {
            "fprop": {
                "torch bf16": lambda: torch._grouped_mm(x, w.mT, offs=offs),
                "mxmoe bf16": lambda: mm_m_groups(x, w, offs, None, BF16),
                "dense bf16": lambda: torch.mm(x, w[0].t()),
                "torch fp8 rowwise": self._fp8_rowwise(),
            },
            "dgrad": {
                "torch bf16": lambda: torch._grouped_mm(grad, w, offs=offs),
                "mxmoe bf16": lambda: mm_m_groups(grad, w.mT, offs, None, BF16),
                "dense bf16": lambda: torch.mm(grad, w[0]),
            },
            "wgrad": {
                "torch bf16": lambda: torch._grouped_mm(grad.t(), x, offs=offs),
                "mxmoe bf16": lambda: mm_k_groups(grad, x, offs, BF16),
                "dense bf16": lambda: torch.mm(grad.t(), x),
            },
        }

    def _fp8_rowwise(self) -> Callable[[], Tensor]:
        def rows(t: Tensor) -> tuple[Tensor, Tensor]:
            scale = t.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
            return (t / scale).clamp(-448, 448).to(E4M3), scale.squeeze(-1)

        (xq, xs), (wq, ws) = rows(self.x), rows(self.w)
        offs = self.offs
        return lambda: torch._scaled_grouped_mm(xq, wq.mT, xs, ws, offs=offs, out_dtype=BF16, use_fast_accum=True)

    def casts(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """The casts of a dequant step: call, and bytes read plus written."""
        from mxmoe import MXRecipe
        from mxmoe.ops.engines import dequant as engine

        r = MXRecipe()
        x, w, grad, offs = self.x, self.w, self.grad, self.offs
        xb, wb, gb = x.nbytes, w.nbytes, grad.nbytes
        return {
            "x both": (lambda: engine.both_operands(x, offs, E4M3, r), 3 * xb),
            "x rows": (lambda: engine.rows_operand(x, offs, E4M3, r), 2 * xb),
            "x columns": (lambda: engine.cols_operand(x, offs, E4M3, r), 2 * xb),
            "w along K": (lambda: engine.weight_operand(w, r), 2 * wb),
            "w along N": (lambda: engine.weight_operand(w.mT, r), 2 * wb),
            "w 32x32": (lambda: engine.weight_operand(w, r.replace(weight_block=(32, 32))), 2 * wb),
            "grad both": (lambda: engine.both_operands(grad, offs, E4M3, r), 3 * gb),
        }

    def steps(self) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        """Whole calls with autograd: version -> forward function."""
        import mxmoe

        offs = self.offs
        mx = lambda **kw: lambda x, w: mxmoe.grouped_mm(x, w.mT, offs, recipe=mxmoe.MXRecipe(**kw))  # noqa: E731
        return {
            "torch bf16": lambda x, w: torch._grouped_mm(x, w.mT, offs=offs),
            "mxmoe bf16": lambda x, w: mxmoe.bf16_grouped_mm(x, w.mT, offs),
            "mxmoe mxfp8": mx(backend="dequant"),
            "mxmoe mxfp8, save mxfp8": mx(backend="dequant", save="mxfp8"),
            "mxmoe mxfp8, w 32x32": mx(backend="dequant", weight_block=(32, 32)),
            "mxmoe mxfp8, wgrad bf16": mx(backend="dequant", wgrad="bf16"),
        }


def _check(case: Case) -> float:
    """Relative error of the MXFP8 forward against a bf16 product of the same rounded operands; small or an error."""
    import mxmoe
    from mxmoe.ops.engines import dequant as engine

    r = mxmoe.MXRecipe(backend="dequant")
    ours = mxmoe.grouped_mm(case.x, case.w.mT, case.offs, recipe=r)
    a, b = engine.rows_operand(case.x, case.offs, E4M3, r), engine.weight_operand(case.w, r)
    expected = torch._grouped_mm(a, b.mT, offs=case.offs)
    error = ((ours.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error < 2**-8:
        raise AssertionError(f"{case.name}: MXFP8 forward differs from the product of its operands by {error:.2e}")
    return error


def _base(case: Case) -> dict[str, Any]:
    return {"shape": case.name, "m": case.m, "n": case.n, "k": case.k, "g": case.g}


def measure(case: Case, writer: Writer, quick: bool) -> None:
    """All rows of one shape, without torchao's."""
    base = _base(case)
    writer.row(**base, what="check", error=_check(case))
    timing = {"rounds": 7 if quick else 15, "slice_ms": 8.0 if quick else 15.0, "heat_ms": 150.0 if quick else 500.0}
    for gemm, versions in case.gemms().items():
        for version in list(versions):
            try:
                versions[version]()
                torch.cuda.synchronize()
            except Exception as error:  # a rival that cannot run this shape is a row, not the end of the run
                writer.row(**base, what=gemm, version=version, error=f"{type(error).__name__}: {error}"[:160])
                del versions[version]
        for version, t in interleaved(versions, **timing).items():
            writer.row(
                **base, what=gemm, version=version, us=t.median, p20=t.p20, p80=t.p80, tflops=case.flop / t.median / 1e6
            )
        torch.cuda.empty_cache()

    casts = case.casts()
    times = interleaved({name: call for name, (call, _) in casts.items()}, **timing)
    for name, t in times.items():
        moved = casts[name][1]
        writer.row(
            **base, what="cast", version=name, us=t.median, p20=t.p20, p80=t.p80, tb_per_s=moved / t.median / 1e6
        )
    torch.cuda.empty_cache()

    forward: dict[str, Callable[[], Any]] = {}
    step: dict[str, Callable[[], Any]] = {}
    for version, fn in case.steps().items():
        leaves, run_forward, run_step = _calls(case, fn)
        try:
            writer.row(**base, what="memory", version=version, **_memory(fn, leaves, case.grad))
        except Exception as error:
            writer.row(**base, what="step", version=version, error=f"{type(error).__name__}: {error}"[:160])
            continue
        forward[version], step[version] = run_forward, run_step
    for what, fns, flop in (("forward", forward, case.flop), ("step", step, 3 * case.flop)):
        times = interleaved(fns, **timing)
        bf16 = times["torch bf16"].median
        for version, t in times.items():
            row = {
                "us": t.median,
                "p20": t.p20,
                "p80": t.p80,
                "tflops": flop / t.median / 1e6,
                "x_bf16": t.median / bf16,
            }
            goal = case.goal_fwd if what == "forward" else case.goal_step
            writer.row(**base, what=what, version=version, **row, goal=goal if version == "mxmoe mxfp8" else None)
        torch.cuda.empty_cache()


def _calls(
    case: Case, fn: Callable[[Tensor, Tensor], Tensor]
) -> tuple[list[Tensor], Callable[[], Any], Callable[[], Any]]:
    """Leaves, a forward call, a forward and backward call."""
    leaves = [case.x.detach().requires_grad_(), case.w.detach().requires_grad_()]

    def run_forward() -> Tensor:
        with torch.no_grad():
            return fn(case.x, case.w)

    def run_step() -> Any:
        out = fn(*leaves)
        return out, torch.autograd.grad(out, leaves, case.grad)

    return leaves, run_forward, run_step


def measure_torchao(case: Case, writer: Writer, deadline: float) -> None:
    """torchao's emulated MXFP8 against torch's bf16. Whatever fails is a row, and ends its version."""
    import mxmoe

    base, offs = _base(case), random_ends(case.m, case.g, 32)

    def failed(version: str, error: Exception | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        writer.row(**base, what="step", version=version, error=" ".join(text.split())[:160])

    names = ["torchao emulated, eager"] + ["torchao emulated, compiled"] * (case.name in TORCHAO_COMPILED)
    try:
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
        from torchao.quantization.quantize_.common import KernelPreference
    except Exception as error:  # an import that fails in any way is a rival that is not there
        failed("torchao", error)
        return

    def run(x: Tensor, w: Tensor) -> Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(x, w.mT, offs, kernel_preference=KernelPreference.EMULATED)

    _, bf16_forward, bf16_step = _calls(case, lambda x, w: torch._grouped_mm(x, w.mT, offs=offs))
    ours = mxmoe.grouped_mm(case.x, case.w.mT, offs, recipe=mxmoe.MXRecipe(backend="dequant")).float()
    for version in names:
        if time.monotonic() > deadline:
            failed(version, f"the {TORCHAO_SECONDS:.0f} s for torchao are over")
            continue
        torch._dynamo.reset()
        fn = torch.compile(run, dynamic=False) if "compiled" in version else run
        leaves, run_forward, run_step = _calls(case, fn)
        try:
            differs = ((run_forward().float() - ours).norm() / ours.norm()).item()
            for what, bf16, call, flop in (
                ("forward", bf16_forward, run_forward, case.flop),
                ("step", bf16_step, run_step, 3 * case.flop),
            ):
                if what == "step":
                    writer.row(**base, what="memory", version=version, **_memory(fn, leaves, case.grad))
                call()
                rounds = 3 if _elapsed(call, 1) > 50e3 else 7
                times = interleaved({"bf16": bf16, "it": call}, rounds=rounds, slice_ms=8.0, heat_ms=100.0)
                t = times["it"]
                row = {"us": t.median, "p20": t.p20, "p80": t.p80, "tflops": flop / t.median / 1e6}
                row |= {"x_bf16": t.median / times["bf16"].median, "differs_from_ours": differs, "rounds": rounds}
                writer.row(**base, what=what, version=version, **row, goal=None)
        except Exception as error:
            torch.cuda.synchronize()
            failed(version, error)
        torch.cuda.empty_cache()


def _memory(fn: Callable[[Tensor, Tensor], Tensor], leaves: list[Tensor], grad: Tensor) -> dict[str, int]:
    """Bytes that live between forward and backward (the operands themselves not counted twice), and the peak."""
    fn(*leaves)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    own = {t.untyped_storage().data_ptr() for t in leaves}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(*leaves)
    weights = leaves[1].untyped_storage().data_ptr()
    torch.autograd.grad(out, leaves, grad)
    torch.cuda.synchronize()
    return {
        "kept_bytes": sum(size for at, size in kept.items() if at != weights),  # x or what stands for it
        "kept_new_bytes": sum(size for at, size in kept.items() if at not in own),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }


# --- report ----------------------------------------------------------------------------------------------------------
def _rows(rows: list[dict[str, Any]], what: str, shape: str) -> dict[str, dict[str, Any]]:
    return {r["version"]: r for r in rows if r.get("what") == what and r["shape"] == shape and "error" not in r}


def report(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tables, as Markdown."""
    parts = [env_line(env)]
    names = list(dict.fromkeys(r["shape"] for r in rows if "shape" in r))
    size = {r["shape"]: f"{r['m']}, {r['n']}, {r['k']}, {r['g']}" for r in rows if "shape" in r}

    table = []
    for name in names:
        for gemm in ("fprop", "dgrad", "wgrad"):
            by = _rows(rows, gemm, name)
            if "torch bf16" not in by:
                continue
            dense, theirs = by.get("dense bf16", {}).get("us"), by["torch bf16"]["us"]
            for version, r in by.items():
                share = 100 * dense / r["us"] if dense else None
                table.append([name, size[name], gemm, version, r["us"], r["tflops"], share, theirs / r["us"]])
    columns = ["shape", "M, N, K, G", "GEMM", "version", "us", "TFLOP/s", "% of dense", "x torch's speed"]
    parts += ["### GEMMs", markdown(columns, table)]

    table = [[n, v, r["us"], r["tb_per_s"]] for n in names for v, r in _rows(rows, "cast", n).items()]
    parts += ["### Casts of `dequant`", markdown(["shape", "cast", "us", "TB/s"], table)]

    table = []
    for name in names:
        forward, step, memory = (_rows(rows, what, name) for what in ("forward", "step", "memory"))
        for version in dict.fromkeys([*forward, *step]):
            r = step.get(version, {})
            f, kept = forward.get(version, {}), memory.get(version, {})
            base = memory.get("torch bf16", {}).get("kept_bytes")
            ours = [_rows(rows, gemm, name).get("mxmoe bf16", {}).get("us") for gemm in ("fprop", "dgrad", "wgrad")]
            rest = r["us"] - sum(ours) if version.startswith("mxmoe mx") and all(ours) else None
            fields = ("us", "x_bf16", "goal")
            table.append(
                [name, version, *(f.get(c) for c in fields), *(r.get(c) for c in fields), rest]
                + [kept["kept_bytes"] / base if base and kept else None]
                + [kept["peak_bytes"] / 2**20 if kept else None]
            )
    columns = [
        "shape",
        "version",
        "fwd us",
        "x bf16",
        "goal",
        "fwd+bwd us",
        "x bf16",
        "goal",
        "beyond GEMMs us",
        "kept x bf16's",
        "peak MiB",
    ]
    parts += ["### Whole calls, casts included", markdown(columns, table)]
    errors = [r for r in rows if "error" in r and r.get("what") != "check"]
    parts += [f"not measured: {r['shape']} {r['what']} {r['version']}: {r['error']}" for r in errors]
    parts += ["### Summary: MXFP8 over torch bf16", _summary(rows, names, size)]
    return "\n\n".join(parts)


def _summary(rows: list[dict[str, Any]], names: list[str], size: dict[str, str]) -> str:
    """One line per shape: time of MXFP8 over bf16's, what the bf16 GEMM gains, and torchao's emulated path."""
    columns = ["shape", "M, N, K, G", "forward", "goal", "forward + backward", "goal", "with bf16 wgrad"]
    columns += ["our bf16 GEMM alone", "torchao eager", "torchao compiled"]
    table = []
    for name in names:
        forward, step = (_rows(rows, what, name) for what in ("forward", "step"))
        ours = step.get("mxmoe mxfp8", {})
        line: list[Any] = [name, size[name], *(forward.get("mxmoe mxfp8", {}).get(c) for c in ("x_bf16", "goal"))]
        line += [ours.get("x_bf16"), ours.get("goal"), step.get("mxmoe mxfp8, wgrad bf16", {}).get("x_bf16")]
        line.append(step.get("mxmoe bf16", {}).get("x_bf16"))
        line += [step.get(f"torchao emulated, {how}", {}).get("x_bf16") for how in ("eager", "compiled")]
        table.append(line)
    return markdown(columns, table)


def plot(env: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    """Left: roofline of the GEMMs. Right: time of a whole step over bf16's, by shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (roof, bars) = plt.subplots(1, 2, figsize=(13, 5))
    gemms = [r for r in rows if r.get("what") in ("fprop", "dgrad", "wgrad") and "us" in r]
    ceiling = max((r["tflops"] for r in gemms if r["version"] == "dense bf16"), default=800.0)
    copy = max((r["tb_per_s"] for r in rows if r.get("what") in ("copy", "cast")), default=4.2)
    grid = torch.logspace(1.5, 4, 50).tolist()
    roof.plot(
        grid,
        [min(ceiling, copy * i) for i in grid],
        color="#444444",
        lw=1,
        label="fastest pass over memory, dense bf16",
    )
    marks = {"torch bf16": ("o", "#ff7f0e"), "mxmoe bf16": ("D", "#1f77b4"), "torch fp8 rowwise": ("s", "#d62728")}
    for version, (marker, color) in marks.items():
        points = [r for r in gemms if r["version"] == version]
        moved = [2 * (r["m"] * r["k"] + r["m"] * r["n"] + r["g"] * r["n"] * r["k"]) for r in points]
        at = [2 * r["m"] * r["n"] * r["k"] / b for r, b in zip(points, moved, strict=True)]
        roof.scatter(at, [r["tflops"] for r in points], marker=marker, color=color, s=28, label=version)
    roof.set(xscale="log", yscale="log", xlabel="FLOP per byte (bf16 operands and result once)", ylabel="TFLOP/s")
    roof.legend(fontsize=8)
    roof.grid(alpha=0.3)
    names = list(dict.fromkeys(r["shape"] for r in rows if r.get("what") == "step"))
    versions = list(dict.fromkeys(r["version"] for r in rows if r.get("what") == "step" and "us" in r))
    versions = [v for v in versions if v != "torch bf16" and not v.startswith("torchao")]
    for i, version in enumerate(versions):
        heights = [_rows(rows, "step", name).get(version, {}).get("x_bf16", 0) for name in names]
        at = [x + (i - (len(versions) - 1) / 2) * 0.8 / len(versions) for x in range(len(names))]
        bars.bar(at, heights, 0.8 / len(versions), label=version)
    bars.axhline(1, color="#444444", lw=1)
    bars.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    bars.set(ylabel="fwd+bwd time over torch bf16's", ylim=(0.7, None))
    bars.legend(fontsize=7)
    bars.grid(axis="y", alpha=0.3)
    figure.suptitle(f"Grouped GEMM, {env.get('gpu')}, commit {env.get('commit')}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print the tables, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSONL file, for example results/grouped_mm.jsonl")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and only the shapes with a target")
    parser.add_argument("--only", help="shapes, separated by commas")
    parser.add_argument("--torchao", action="store_true", help="also torchao's emulated MXFP8 (40 s more)")
    args = parser.parse_args()
    require_gpu()
    names = args.only.split(",") if args.only else list(QUICK if args.quick else SHAPES)
    writer = Writer(args.out, KIND)
    writer.row(what="copy", tb_per_s=copy_rate())
    spent = 0.0
    for name in progress(names, "grouped GEMM"):
        case = Case(name)
        measure(case, writer, args.quick)
        if args.torchao:
            begin = time.monotonic()
            measure_torchao(case, writer, begin + TORCHAO_SECONDS - spent)
            spent += time.monotonic() - begin
        del case
        torch.cuda.empty_cache()
    print(report(writer.env, writer.rows))


if __name__ == "__main__":
    main()
