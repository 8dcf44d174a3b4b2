"""Plots and tables of results files.

    python benchmarks/plot.py results/scale_layout.jsonl [--out FILE.png] [--table]

The rows of a file say what they are (``kind``); ``bench_<kind>.py`` or ``<kind>.py`` beside this file has the functions
that show them: ``plot(env, rows, path)`` and ``report(env, rows)``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from _harness import read_rows


def main() -> None:
    """Read, plot, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="JSONL files")
    parser.add_argument("--out", help="picture; default: beside the results, as .png")
    parser.add_argument("--table", action="store_true", help="print the tables instead")
    args = parser.parse_args()
    for path in map(Path, args.results):
        env, rows = read_rows(path)
        if not rows:
            raise SystemExit(f"{path} has no rows")
        kind = rows[0]["kind"]
        beside = Path(__file__).with_name(f"bench_{kind}.py")
        bench = importlib.import_module(beside.stem if beside.is_file() else kind)
        if args.table:
            print(bench.report(env, rows))
            continue
        target = args.out or str(path.with_suffix(".png"))
        bench.plot(env, rows, target)
        print(target)


if __name__ == "__main__":
    main()
