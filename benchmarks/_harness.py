"""The one benchmark harness: timing, environment stamp, JSONL results, tables.

    writer = Writer(args.out, "scale_layout")                   # first line of the file: the environment
    t = time_graph(lambda s: to_blocked(s), scale, cold=True)   # Timing(median, p20, p80) in us
    writer.row(op="to_blocked", shape=[8192, 4096], l2="cold", us=t.median, p20=t.p20, p80=t.p80)
    print(markdown(["op", "us"], [["to_blocked", t.median]]))

How a time is taken. Calls are captured in a CUDA graph, so host dispatch is not "the kernel"; one replay runs many
calls and is divided by their number. Cold L2: every call of the graph has inputs *and* outputs of its own, together at
least four times the L2, so each call finds its data in DRAM. Warm: the same inputs again and again. ``time_eager`` is
the other number, what a caller pays: host time per call without waiting, and with waiting.

Correctness is the caller's: compare bitwise before timing.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

REPO = Path(__file__).resolve().parent.parent
COLD_BYTES = 4 * 60 * 2**20
"""A cold graph touches at least this much: four times the 60 MB L2 of an H200."""


class Timing(NamedTuple):
    """Microseconds per call: median, 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


class HostTiming(NamedTuple):
    """Microseconds of one eager call: host side only (nothing waited for), and until the result is there."""

    host: float
    wall: float


# --- environment -----------------------------------------------------------------------------------------------------
def commit() -> str:
    """``MXMOE_COMMIT`` where it is set (a copy of a tree may hold an older .git), else of the working tree."""
    if os.environ.get("MXMOE_COMMIT"):
        return os.environ["MXMOE_COMMIT"]
    try:
        run = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=REPO, capture_output=True, text=True)
        if run.returncode == 0 and run.stdout.strip():
            return run.stdout.strip()
    except OSError:
        pass
    return "unknown"


def _nvidia_smi(*fields: str) -> dict[str, str]:
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = run.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if run.returncode == 0 and len(values) == len(fields) else {}


def env_stamp() -> dict[str, Any]:
    """What a result depends on: machine, clocks, versions, commit, command."""
    stamp: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "command": shlex.join(["python", *[os.path.relpath(a, REPO) if os.path.isabs(a) else a for a in sys.argv]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    try:
        import triton

        stamp["triton"] = triton.__version__
    except ImportError:
        stamp["triton"] = None
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        smi = _nvidia_smi("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
        stamp |= {
            "gpu": props.name,
            "capability": f"{props.major}.{props.minor}",
            "sms": props.multi_processor_count,
            "l2_mb": round(getattr(props, "L2_cache_size", 0) / 2**20, 1),
            "cuda": torch.version.cuda,
            "driver": smi.get("driver_version"),
            "clocks_mhz": {k.removeprefix("clocks."): v for k, v in smi.items() if k.startswith("clocks")},
        }
    return stamp


def require_gpu() -> None:
    """Leave with a clear message where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark times CUDA kernels and there is no CUDA device here")


# --- timing ----------------------------------------------------------------------------------------------------------
def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(value))


def _copy(t: Tensor) -> Tensor:
    """A copy with the same strides."""
    byte = t.view(torch.uint8) if t.element_size() == 1 else t
    out = torch.empty_strided(byte.shape, byte.stride(), dtype=byte.dtype, device=byte.device)
    return out.copy_(byte).view(t.dtype)


def time_graph(
    fn: Callable[..., Any], *inputs: Tensor, cold: bool = True, budget_ms: float = 3.0, replays: int = 25
) -> Timing:
    """Time ``fn(*inputs)`` by CUDA-graph replay.

    ``inputs`` are what a cold measurement rotates: pass as inputs the tensors that are large, close over the rest.
    With no inputs and ``cold=True`` the L2 is flushed before every call and the call is timed by events around it,
    which adds about 2 us of event time; use it for long calls only. ``budget_ms``: length aimed at for one replay.
    """
    if cold and not inputs:
        for _ in range(2):  # compile, and let one-off work happen outside
            fn()
        torch.cuda.synchronize()
        return _time_flushed(fn, replays)
    return time_graphs({"it": (fn, inputs)}, cold=cold, budget_ms=budget_ms, replays=replays)["it"]


def time_graphs(
    calls: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]],
    *,
    cold: bool = True,
    budget_ms: float = 3.0,
    replays: int = 25,
) -> dict[str, Timing]:
    """Time several ``(fn, inputs)`` as :func:`time_graph` does, taking turns: clocks drift for all of them alike."""
    graphs = {name: _capture(fn, inputs, cold, budget_ms) for name, (fn, inputs) in calls.items()}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, (graph, count, _) in graphs.items():
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / count)
    return {name: _summary(taken) for name, taken in samples.items()}


def _capture(
    fn: Callable[..., Any], inputs: tuple[Tensor, ...], cold: bool, budget_ms: float
) -> tuple[torch.cuda.CUDAGraph, int, Any]:
    """A graph of several calls, how many, and what must stay alive with it."""
    for _ in range(2):  # compile, and let one-off work happen outside the graph
        result = fn(*inputs)
    torch.cuda.synchronize()  # a capture does not wait for pending work of the current stream
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        fn(*inputs)
    end.record()
    torch.cuda.synchronize()
    estimate_ms = max(start.elapsed_time(end) / 3, 1e-3)
    calls = max(1, min(400, int(budget_ms / estimate_ms)))

    per_call = _bytes(inputs) + _bytes(result)
    del result
    sets = [inputs]
    if cold:
        needed = -(-COLD_BYTES // max(per_call, 1))
        calls = max(calls, needed) if needed > 1 else calls
        sets += [tuple(_copy(t) for t in inputs) for _ in range(needed - 1)]
    torch.cuda.synchronize()

    kept: list[Any] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            out = fn(*sets[i % len(sets)])
            if cold:
                kept.append(out)  # an output that dies gives its memory, still in L2, to the next call
                del kept[: -len(sets)]
        del out
    graph.replay()
    torch.cuda.synchronize()
    return graph, calls, (kept, sets)


def _time_flushed(fn: Callable[..., Any], samples: int) -> Timing:
    flush = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
    for start, end in pairs:
        flush.zero_()  # also keeps the GPU busy while the host enqueues the call
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return _summary([start.elapsed_time(end) * 1e3 for start, end in pairs])


def _summary(samples: Sequence[float]) -> Timing:
    s = torch.tensor(sorted(samples), dtype=torch.float64)
    return Timing(*(torch.quantile(s, q).item() for q in (0.5, 0.2, 0.8)))


def time_eager(fn: Callable[..., Any], *inputs: Tensor, calls: int = 100, rounds: int = 7) -> HostTiming:
    """Host cost of one eager call: enqueued back to back (host), and each waited for (wall); medians."""
    for _ in range(10):
        fn(*inputs)
    torch.cuda.synchronize()
    host, wall = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            fn(*inputs)
        host.append((time.perf_counter() - begin) * 1e6 / calls)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls // 4):
            fn(*inputs)
            torch.cuda.synchronize()
        wall.append((time.perf_counter() - begin) * 1e6 / (calls // 4))
    return HostTiming(_summary(host).median, _summary(wall).median)


def copy_rate(gib: float = 1.3) -> float:
    """Device copy bandwidth now, TB/s counting bytes read and written: the ceiling of every memory-bound row.

    Not a power of two bytes: source and target then meet in the same banks of the memory, 2.7 TB/s instead of 4.26 on
    an H200 (a 16384 x 16384 bf16 matrix suffers likewise).
    """
    src = torch.randn(int(gib * 2**29), dtype=torch.bfloat16, device="cuda")  # zeros copy faster than data
    dst = torch.empty_like(src)
    t = time_graph(lambda: dst.copy_(src), cold=False, replays=10)
    return 2 * src.nbytes / t.median / 1e6


# --- results ---------------------------------------------------------------------------------------------------------
class Writer:
    """Appends JSONL rows to a new file whose first row is the environment; without a path it only keeps them."""

    def __init__(self, path: str | os.PathLike[str] | None, kind: str) -> None:
        self.kind = kind
        self.rows: list[dict[str, Any]] = []
        self._file = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w")  # noqa: SIM115  (closed with the process; every row is flushed)
        self.env = env_stamp()
        self._write({"kind": "env", **self.env})

    def row(self, **fields: Any) -> None:
        """One measurement."""
        row = {"kind": self.kind, **{k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}}
        self.rows.append(row)
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def read_rows(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Environment and rows of a results file."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    env = next((r for r in rows if r.get("kind") == "env"), {})
    return env, [r for r in rows if r.get("kind") != "env"]


def env_line(env: dict[str, Any]) -> str:
    """The environment in one line, for the head of a table."""
    clocks = env.get("clocks_mhz") or {}
    return (
        f"{env.get('gpu')}, driver {env.get('driver')}, SM {clocks.get('sm')} MHz, torch {env.get('torch')}, "
        f"triton {env.get('triton')}, commit {env.get('commit')}, {env.get('date')}; `{env.get('command')}`"
    )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table whose columns line up in a terminal too. Floats: three significant digits or one decimal."""
    cells = [[_cell(v) for v in row] for row in rows]
    width = [max(len(c), *(len(r[i]) for r in cells)) if cells else len(c) for i, c in enumerate(columns)]
    line = lambda values: "| " + " | ".join(v.rjust(w) for v, w in zip(values, width, strict=True)) + " |"  # noqa: E731
    return "\n".join([line(columns), "|" + "|".join("-" * (w + 1) + ":" for w in width) + "|", *map(line, cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def progress(items: Iterable[Any], title: str, total: int | None = None) -> Iterator[Any]:
    """Iterate with a progress bar where there is a terminal and rich; one line per item on standard error otherwise."""
    items = list(items) if total is None else items
    total = len(items) if total is None else total  # type: ignore[arg-type]
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track

            yield from track(items, title, total=total, console=Console(stderr=True))
            return
        except ImportError:
            pass
    for i, item in enumerate(items):
        print(f"{title} {i + 1}/{total}", file=sys.stderr, flush=True)
        yield item
