"""``python -m mxmoe bench``: the benchmark scripts of a source checkout, by name."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The script's name and what is passed on to it."""
    parser.add_argument("name", nargs="?", help="which one; none: list them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script (try --help)")


def run(args: argparse.Namespace) -> int:
    """Run one script in a process of its own, or list all."""
    found = scripts()
    if not found:
        print(f"no benchmark scripts in {FOLDER}: they are part of the source checkout, not of the installed package")
        return 1
    if args.name is None:
        width = max(map(len, found))
        for name, path in found.items():
            print(f"{name.ljust(width)}  {_summary(path)}")
        return 0
    script = found.get(args.name.removeprefix("bench_").removesuffix(".py"))
    if script is None:
        print(f"no benchmark {args.name!r}; there are: {', '.join(found)}", file=sys.stderr)
        return 2
    passed = [word for word in args.arguments if word != "--"]
    if not {"-h", "--help"}.intersection(passed) and not _has_gpu():
        print(
            f"bench {args.name}: there is no CUDA GPU here, and the benchmarks time CUDA kernels.\n"
            "On a CPU, `python -m mxmoe demo` shows the numerics and `python -m mxmoe info` what runs.",
            file=sys.stderr,
        )
        return 1
    return subprocess.run([sys.executable, str(script), *passed], check=False).returncode


def scripts() -> dict[str, Path]:
    """Benchmark scripts by name (``bench_quantize.py`` is "quantize")."""
    return {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
