"""Put the tables of results/ into README.md and docs/: between their markers, rendered by the benchmark scripts.

    <!-- table:quantize results/quantize_h200.jsonl -->  ...  <!-- /table -->

becomes what ``python benchmarks/plot.py --table results/quantize_h200.jsonl`` prints. With ``| WORDS`` after the file,
only the sections whose heading holds these words, without the heading. ``table:demo FILE`` renders a summary.json of
the demo. A file that is not there leaves "(no results yet)".

    python scripts/update_readme.py             # rewrite README.md and docs/*.md
    python scripts/update_readme.py --check     # exit 1 if a page is not what results/ gives
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(
    r"<!-- table:(?P<name>\w+) (?P<file>\S+)(?: \| (?P<heading>[^>]*?))? -->\n(?:.*?\n)??<!-- /table -->", re.DOTALL
)
NOTHING = "(no results yet)"


def pages() -> list[Path]:
    """README.md and the pages under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(name: str, file: str, heading: str) -> str:
    """The table of one marker, Markdown. Raises: ``RuntimeError`` with the script's own message if it fails."""
    if not (ROOT / file).is_file():
        return NOTHING
    if name == "demo":
        return demo_table(json.loads((ROOT / file).read_text()))
    run = subprocess.run(
        [sys.executable, "benchmarks/plot.py", "--table", file], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        raise RuntimeError(f"benchmarks/plot.py --table {file} failed:\n{run.stderr.strip()}")
    return select(run.stdout, heading) if heading else run.stdout.strip()


def select(report: str, heading: str) -> str:
    """The bodies of the ``###`` sections whose heading holds ``heading``. Raises: ``RuntimeError`` if there is none."""
    sections = re.split(r"^#{2,4} (.*)\n", report, flags=re.MULTILINE)
    bodies = [body.strip() for title, body in zip(sections[1::2], sections[2::2], strict=True) if heading in title]
    if not bodies:
        raise RuntimeError(f"no section {heading!r} in the report; there are: {', '.join(sections[1::2])}")
    return "\n\n".join(bodies)


def demo_table(summary: dict) -> str:
    """What a demo run measured."""
    runs = summary["runs"]
    window = summary["window"]
    lines = ["| | " + " | ".join(runs) + " |", "|---|" + "---:|" * len(runs)]

    def row(title: str, cell) -> None:
        lines.append(f"| {title} | " + " | ".join(cell(r) for r in runs.values()) + " |")

    row(f"training loss, nats/byte (last {window} steps)", lambda r: f"{sum(r['losses'][-window:]) / window:.4f}")
    row("loss on held-out files, nats/byte", lambda r: f"{r['valid_nats']:.4f}")
    row("tokens/s, training step", lambda r: f"{r['tokens_per_second']:,.0f}")
    row("kept for backward by the expert layers, MB", lambda r: f"{r['saved_bytes'] / 1e6:.2f}")
    sqnr = ", ".join(f"{op} {value:.1f}" for op, value in sorted(summary["sqnr_db"].items()))
    gemms = ", ".join(f"{count} {name}" for name, count in sorted(summary["gemms"].items()))
    lines += [
        "",
        f"Largest distance of the curves, smoothed over {window} steps: {summary['largest_gap_nats']:.4f} nats "
        f"(step {summary['largest_gap_step']}; bound {summary['bound_nats']}). "
        f"SQNR of the last step's GEMMs, dB: {sqnr}. GEMMs that ran: {gemms}.",
        "",
        f"{summary['device']}, torch {summary['torch']}, Python {summary['python']}, {summary['steps']} steps of "
        f"{summary['tokens_per_step']} bytes; `{summary['command']}`",
    ]
    return "\n".join(lines)


def updated(text: str) -> str:
    """``text`` with every table rendered anew."""

    def replace(match: re.Match[str]) -> str:
        name, file, heading = match["name"], match["file"], match["heading"]
        head = f"<!-- table:{name} {file}" + (f" | {heading}" if heading else "") + " -->"
        return f"{head}\n{render(name, file, heading or '')}\n<!-- /table -->"

    return MARKER.sub(replace, text)


def main() -> int:
    """Rewrite or check every page."""
    parser = argparse.ArgumentParser(description="Put the tables of results/ into README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        before = page.read_text()
        after = updated(before)
        if after != before:
            stale.append(page)
            if not check:
                page.write_text(after)
                print(f"updated {page.relative_to(ROOT)}")
    if check and stale:
        names = ", ".join(str(p.relative_to(ROOT)) for p in stale)
        print(f"not what results/ gives: {names}; run python scripts/update_readme.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
