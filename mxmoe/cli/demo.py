"""``python -m mxmoe demo``: one small Qwen3-MoE, trained twice on the same bytes, with and without MXFP8 experts.

Both runs start from the same weights and see the same batches, step by step. Exit status 1 if the MXFP8 GEMMs did not
all run, if a loss is not finite, or if the smoothed curves part by more than ``--bound``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..recipe import MXRecipe
from .recipes import add_recipe_arguments, recipe_from

if TYPE_CHECKING:
    import torch

    from ..observe import GemmRecord
    from .training import Run, Size

BOUND = 0.15
"""Nats. Measured on two CPU cores, size small, seeds 0, 1, 2: 0.07, 0.02, 0.03 for MXFP8, and 0.06, 0.05, 0.07 for a
second fp32 run from other weights: twice what two fp32 runs part by."""

GEMMS_PER_LAYER = 2  # gate and up in one, down
VALIDATION_BATCHES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo."""
    parser.add_argument("--steps", type=_positive, default=None, metavar="N", help="optimizer steps (None: the size's)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), metavar="DIR", help="for the plot and figures")
    parser.add_argument(
        "--size", choices=("tiny", "small", "base"), default=None, help="model (None: base on a GPU, small on a CPU)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--bound", type=float, default=BOUND, help="largest distance of the smoothed curves, nats")
    parser.add_argument("--control", action="store_true", help="a third run, without MXFP8, from other weights")
    parser.add_argument("--device", default=None, help="None: the GPU if there is one")
    add_recipe_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train, print the table, write the plot. Returns the exit status."""
    from . import need

    need("demo", "transformers", "rich", "matplotlib")
    import torch
    from rich.console import Console

    from .training import SIZES

    console = Console()
    try:
        recipe = recipe_from(args)
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, RuntimeError, OSError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 2
    name = args.size or ("base" if device.type == "cuda" else "small")
    demo = Demo(name, SIZES[name], args.steps or SIZES[name].steps, args.seed, recipe, device, args.control)
    demo.describe(console)
    try:
        demo.train(console)
    except DivergedError as error:
        console.print(f"FAILED: {error}", style="bold red", markup=False)
        return 1
    failures = demo.report(console, args.bound)
    demo.write(args.out, args.bound)
    console.print(f"Curves: {args.out / 'curves.png'}   figures: {args.out / 'summary.json'}", markup=False)
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)
    return 1 if failures else 0


class DivergedError(RuntimeError):
    """A loss that is not finite."""


class Demo:
    """The runs of one demo, and what was measured of them."""

    def __init__(
        self, name: str, size: Size, steps: int, seed: int, recipe: MXRecipe, device: torch.device, control: bool
    ) -> None:
        import torch

        import mxmoe

        from .text import stdlib_text
        from .training import Run, build_model

        _quiet_transformers()
        self.name, self.size, self.steps, self.seed, self.recipe, self.device = name, size, steps, seed, recipe, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.text = stdlib_text()
        plain = build_model(size, seed, device, self.dtype)
        converted = copy.deepcopy(plain)
        other = build_model(size, seed + 1, device, self.dtype) if control else None
        self.conversion = mxmoe.convert(converted, recipe=recipe)
        short = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        self.plain = Run(f"{short} experts", plain, size, steps)
        self.mx = Run("MXFP8 experts", converted, size, steps)
        self.control = None if other is None else Run(f"{short}, other weights", other, size, steps)
        self.gemms: Counter[tuple[str, str]] = Counter()
        self.stray = 0  # MXFP8 GEMMs in the runs that should have none
        self.sqnr: dict[str, list[float]] = {}
        self.valid: dict[str, float] = {}

    @property
    def runs(self) -> list[Run]:
        """The two runs, and the control if there is one."""
        return [r for r in (self.plain, self.mx, self.control) if r is not None]

    @property
    def window(self) -> int:
        """Steps over which the curves are smoothed."""
        return max(1, min(50, self.steps // 5))

    def describe(self, console: Any) -> None:
        """Say what is going to be trained."""
        from .training import TOP_K, expert_weights

        size, text = self.size, self.text
        total = sum(p.numel() for p in self.plain.model.parameters())
        experts = expert_weights(self.plain.model)
        where = _device_name(self.device)
        console.print(
            f"Qwen3-MoE '{self.name}': {total / 1e6:.1f} M parameters ({experts / 1e6:.1f} M in experts), "
            f"{size.layers} layers, {size.experts} experts, top {TOP_K}\n"
            f"Text: {text.files} source files of Python {platform.python_version()}'s standard library, "
            f"{(text.train.numel() + text.valid.numel()) / 1e6:.1f} MB; every 16th file held out\n"
            f"{self.steps} steps of {size.tokens} bytes on {where}\nRecipe: {self.recipe.key}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    # --- training ----------------------------------------------------------------------------------------------------
    def train(self, console: Any) -> None:
        """All steps, both runs in turn on the same batch; the last one measured in detail."""
        import torch

        from ..observe import observe
        from .training import count_saved_bytes, gemm_sqnr

        batches = torch.Generator().manual_seed(self.seed)
        size = self.size
        with _Progress(console, self.steps, self.runs) as progress:
            for step in range(1, self.steps + 1):
                last = step == self.steps
                pieces = self.text.batch("train", batches, size.batch, size.length)
                for r in self.runs:
                    with observe(tensors=last and r is self.mx) as records, count_saved_bytes(r.model) as saved:
                        loss = r.step(pieces)
                    r.saved_bytes = saved.total
                    self._count(r, records)
                    if not math.isfinite(loss):
                        raise DivergedError(f"{r.name}: loss {loss} at step {step}")
                    if last and r is self.mx:
                        self.sqnr = gemm_sqnr(records)
                progress.advance(step)
        held_out = torch.Generator().manual_seed(0)
        pieces_list = [self.text.batch("valid", held_out, size.batch, size.length) for _ in range(VALIDATION_BATCHES)]
        for r in self.runs:
            self.valid[r.name] = r.evaluate(pieces_list)

    def _count(self, r: Run, records: list[GemmRecord]) -> None:
        if r is self.mx:
            self.gemms.update((record.op, record.backend) for record in records)
        else:
            self.stray += len(records)

    # --- results -----------------------------------------------------------------------------------------------------
    def gap(self) -> tuple[float, int]:
        """Largest distance of the two smoothed curves, nats, and its step."""
        from .training import largest_gap

        return largest_gap(self.plain.losses, self.mx.losses, self.window)

    def report(self, console: Any, bound: float) -> list[str]:
        """Print both tables; returns what failed."""
        from rich.table import Table

        from .training import expert_weights, largest_gap, smooth

        table = Table(title=f"After {self.steps} steps")
        table.add_column("")
        for r in self.runs:
            table.add_column(r.name, justify="right")
        experts = expert_weights(self.plain.model)
        width = self.dtype.itemsize
        read = {r.name: experts * width for r in self.runs} | {self.mx.name: experts * 33 // 32}
        window = self.window
        rows = [
            (f"loss of the last {window} steps, nats/byte", lambda r: f"{smooth(r.losses, window)[-1]:.4f}"),
            ("loss on held-out files", lambda r: f"{self.valid[r.name]:.4f}"),
            ("tokens/s, training", lambda r: f"{r.tokens_per_second(self.size.tokens):,.0f}"),
            ("expert weights, trained copy", lambda r: _bytes(experts * width)),
            ("expert weights, as multiplied", lambda r: _bytes(read[r.name])),
            ("kept for backward by experts", lambda r: _bytes(r.saved_bytes)),
        ]
        for title, cell in rows:
            table.add_row(title, *(cell(r) for r in self.runs))
        console.print(table)

        gemms = Table(title="MXFP8 GEMMs that ran")
        for title in ("GEMM", "count", "backend", "SQNR of the last step, dB: mean", "lowest"):
            gemms.add_column(title, justify="left" if title in ("GEMM", "backend") else "right")
        for (op, backend), count in sorted(self.gemms.items()):
            values = self.sqnr.get(op, [math.nan])
            gemms.add_row(op, f"{count}", backend, f"{sum(values) / len(values):.2f}", f"{min(values):.2f}")
        console.print(gemms)

        gap, step = self.gap()
        console.print(
            f"Largest distance of the smoothed curves: {gap:.4f} nats at step {step} (bound {bound})", highlight=False
        )
        if self.control is not None:
            other, at = largest_gap(self.plain.losses, self.control.losses, self.window)
            console.print(f"The same for the run from other weights: {other:.4f} nats at step {at}", highlight=False)
        return self._failures(bound)

    def _failures(self, bound: float) -> list[str]:
        failures = []
        expected = self.steps * self.size.layers * GEMMS_PER_LAYER
        for op in ("fprop", "dgrad", "wgrad"):
            ran = sum(count for (name, _), count in self.gemms.items() if name == op)
            if ran != expected:
                failures.append(f"{ran} MXFP8 {op} GEMMs ran, expected {expected}")
        if self.stray:
            failures.append(f"{self.stray} MXFP8 GEMMs ran outside the MXFP8 run")
        gap, step = self.gap()
        if not gap <= bound:
            failures.append(f"the curves part by {gap:.4f} nats at step {step}, the bound is {bound}")
        return failures

    def write(self, out: Path, bound: float) -> None:
        """``curves.png`` and ``summary.json`` into ``out``."""
        import torch

        gap, step = self.gap()
        summary = {
            "command": " ".join(["python -m mxmoe", *sys.argv[1:]]),
            "device": _device_name(self.device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "size": self.name,
            "steps": self.steps,
            "tokens_per_step": self.size.tokens,
            "recipe": self.recipe.key,
            "window": self.window,
            "largest_gap_nats": gap,
            "largest_gap_step": step,
            "bound_nats": bound,
            "gemms": {f"{op} {backend}": count for (op, backend), count in sorted(self.gemms.items())},
            "sqnr_db": {op: sum(values) / len(values) for op, values in self.sqnr.items()},
            "runs": {
                r.name: {
                    "valid_nats": self.valid[r.name],
                    "tokens_per_second": r.tokens_per_second(self.size.tokens),
                    "saved_bytes": r.saved_bytes,
                    "losses": [round(loss, 5) for loss in r.losses],
                }
                for r in self.runs
            },
        }
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        self._plot(out / "curves.png")

    def _plot(self, path: Path) -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        from .training import smooth

        figure, (loss, distance) = plt.subplots(
            2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        steps = range(1, self.steps + 1)
        smoothed = range(self.window, self.steps + 1)
        for i, r in enumerate(self.runs):
            style = ("-", "--", ":")[i]
            loss.plot(steps, r.losses, color=f"C{i}", alpha=0.2, linewidth=0.8)
            loss.plot(smoothed, smooth(r.losses, self.window), style, color=f"C{i}", label=r.name)
        base = smooth(self.plain.losses, self.window)
        for i, r in enumerate(self.runs[1:], start=1):
            apart = [b - a for a, b in zip(base, smooth(r.losses, self.window), strict=True)]
            distance.plot(smoothed, apart, ("-", "--", ":")[i], color=f"C{i}")
        distance.axhline(0, color="C0", linewidth=0.8)
        distance.set(xlabel="step", ylabel=f"minus {self.plain.name}")
        loss.set(ylabel="training loss, nats per byte", title=f"Qwen3-MoE '{self.name}' on {_device_name(self.device)}")
        loss.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)


class _Progress:
    """A live bar with every run's loss; where the output is no terminal, a line at every tenth of the way."""

    def __init__(self, console: Any, steps: int, runs: list[Run]) -> None:
        from rich import progress as rich

        self._console, self._steps, self._runs = console, steps, runs
        self._bar = rich.Progress(
            rich.TextColumn("step"),
            rich.MofNCompleteColumn(),
            rich.BarColumn(bar_width=None),
            rich.TextColumn("{task.fields[losses]}"),
            rich.TimeElapsedColumn(),
            rich.TextColumn("left"),
            rich.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, losses="")

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def advance(self, step: int) -> None:
        """After step ``step`` of all runs."""
        recent = [sum(r.losses[-10:]) / len(r.losses[-10:]) for r in self._runs]
        losses = "   ".join(f"{r.name} {loss:.3f}" for r, loss in zip(self._runs, recent, strict=True))
        self._bar.update(self._task, completed=step, losses=losses)
        every = max(1, self._steps // 10)
        if not self._console.is_terminal and (step % every == 0 or step == self._steps):
            self._console.print(f"step {step}/{self._steps}   {losses}", highlight=False, soft_wrap=True)
            self._console.file.flush()


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
