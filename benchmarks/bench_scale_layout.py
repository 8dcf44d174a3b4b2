"""Scale layout: naive against parallel form, beside a torch loop, torchao's Triton kernel and a plain clone.

    python benchmarks/bench_scale_layout.py [--quick] [--out results/scale_layout.jsonl]

K groups at eight shapes (rows x 512 and x 4096 columns), M groups at token-sized shapes, experts. Every form is
compared byte by byte with the reference before it is timed. Bandwidth counts the bytes of the scales read plus the
bytes of the buffer written. "clone" is ``scale.clone()`` of the same input in the same run: what the traffic costs.

Times: eager = one call until the result is there, host dispatch included; warm and cold = CUDA-graph replay with the L2
holding the data, or not. The torch loop reads offs on the host; under graph replay it is given the group ends for free.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from _harness import Writer, copy_rate, env_line, markdown, progress, require_gpu, time_eager, time_graph
from torch import Tensor

KIND = "scale_layout"
K_SHAPES = [(rows, cols) for cols in (512, 4096) for rows in (2048, 5120, 7168, 8192)]
M_SHAPES = [(131072, 224), (131072, 64), (131072, 160), (16384, 160)]
# What MoE training produces: groups that end anywhere, many experts, hidden 2880 (90 scale columns).
K_OTHER = [(8192, 4096, 8, 1), (5120, 4096, 8, 1), (2048, 512, 8, 1), (2048, 4096, 128, 1), (2880, 4096, 32, 1)]
M_OTHER = [(131072, 90, 32), (131072, 44, 8), (131072, 224, 128)]
EXPERTS = [(8, 2048, 224), (8, 8192, 160), (128, 1536, 64), (32, 2880, 90)]


def random_ends(total: int, groups: int, multiple: int) -> Tensor:
    """Ends of random groups at multiples of ``multiple`` that fill ``total``; the seed is fixed."""
    gen = torch.Generator().manual_seed(total * 31 + groups)
    cuts = torch.sort(torch.randint(0, total // multiple + 1, (groups - 1,), generator=gen)).values
    return torch.cat([cuts, torch.tensor([total // multiple])]).mul(multiple).to(torch.int32).cuda()


def torchao_kernels() -> Any:
    """torchao's kernels, or None."""
    try:
        from torchao.prototype.moe_training.kernels import mxfp8

        return mxfp8 if hasattr(mxfp8, "triton_mx_block_rearrange_2d_K_groups") else None
    except Exception as error:  # an import that fails in any way is a rival that is not there
        print(f"torchao is not measured: {type(error).__name__}: {error}", file=sys.stderr)
        return None


class Case:
    """One input and the rivals that run on it."""

    def __init__(self, op: str, shape: tuple[int, ...], groups: int, multiple: int, torchao: Any) -> None:
        import mxmoe
        from mxmoe.reference import blocked as reference

        self.op, self.shape, self.groups, self.multiple = op, shape, groups, multiple
        self.scale = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
        self.rivals: dict[str, Callable[[Tensor], Tensor]] = {}
        self.exact: set[str] = set()
        if op == "experts":
            self.expected = reference.to_blocked_experts(self.scale)
            self.used = self.expected.numel()
            self.rivals["parallel"] = mxmoe.to_blocked_experts
            self.torch_eager = self.torch_graph = reference.to_blocked_experts
            if torchao:
                self.rivals["torchao"] = torchao.triton_mx_block_rearrange_per_group_3d
        else:
            along_rows = op == "m_groups"
            offs = random_ends(shape[0] if along_rows else shape[1], groups, multiple)
            on_host = offs.cpu()
            ours = mxmoe.to_blocked_m_groups if along_rows else mxmoe.to_blocked_k_groups
            loop = reference.to_blocked_m_groups if along_rows else reference.to_blocked_k_groups
            self.expected = loop(self.scale, offs)
            sizes = on_host.diff(prepend=on_host.new_zeros(1)).long()
            unit, other = (128, self.expected.shape[1]) if along_rows else (4, self.expected.shape[0])
            self.used = int(((sizes + unit - 1) // unit * unit).sum()) * other
            self.rivals["naive"] = lambda s: ours(s, offs, method="naive")
            self.rivals["parallel"] = lambda s: ours(s, offs)
            self.torch_eager = lambda s: loop(s, offs)
            self.torch_graph = lambda s: loop(s, on_host)
            if torchao:
                name = f"triton_mx_block_rearrange_2d_{'M' if along_rows else 'K'}_groups"
                rival = getattr(torchao, name)
                self.rivals["torchao"] = lambda s: rival(s, offs)

    @property
    def name(self) -> str:
        return f"({', '.join(map(str, self.shape))})"

    def bytes(self, result: Tensor) -> int:
        return self.scale.numel() + result.numel()

    def check(self, version: str) -> bool:
        """Ours: every byte. torchao's: every byte of the groups (the bound of its buffer is another one)."""
        result = self.rivals[version](self.scale)
        if version != "torchao":
            return torch.equal(result, self.expected)
        return torch.equal(result.flatten()[: self.used], self.expected.flatten()[: self.used])


def measure(case: Case, writer: Writer, quick: bool) -> None:
    """Rows of one case: clone, torch loop, and every rival, eager, warm and cold."""
    budget = {"budget_ms": 2.0, "replays": 9 if quick else 15}
    base = {"op": case.op, "shape": list(case.shape), "groups": case.groups, "multiple": case.multiple}
    versions: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "clone": (torch.clone, torch.clone),
        "torch": (case.torch_eager, case.torch_graph),
    }
    for version, fn in case.rivals.items():
        try:
            correct = case.check(version)
        except Exception as error:  # a rival that cannot run this input is a row, not the end of the run
            writer.row(**base, version=version, error=f"{type(error).__name__}: {error}"[:200])
            continue
        if not correct and version != "torchao":
            raise AssertionError(f"{case.op} {case.name} {version}: bytes differ from the reference")
        if not correct:
            writer.row(**base, version=version, error="bytes differ from the reference")
            continue
        versions[version] = (fn, fn)
    for version, (eager, graph) in versions.items():
        try:
            moved = 2 * case.scale.numel() if version == "clone" else case.bytes(case.expected)
            slow = version == "torch"
            host = time_eager(eager, case.scale, calls=8 if slow else 60, rounds=3 if quick or slow else 5)
            row = {"eager_us": host.wall, "host_us": host.host}
            for l2 in ("warm",) if slow and quick else ("warm", "cold"):
                t = time_graph(graph, case.scale, cold=l2 == "cold", **budget)
                row |= {f"{l2}_us": t.median, f"{l2}_p20": t.p20, f"{l2}_p80": t.p80}
                row |= {f"{l2}_gbps": moved / t.median / 1e3}
            writer.row(**base, version=version, bytes=moved, **row)
        except Exception as error:
            writer.row(**base, version=version, error=f"{type(error).__name__}: {error}"[:200])


# --- report ----------------------------------------------------------------------------------------------------------
def report(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tables, as Markdown."""
    parts = [env_line(env)]
    titles = {"warm": "CUDA-graph replay, warm L2", "cold": "CUDA-graph replay, cold L2", "eager": "eager"}
    for kind, title in titles.items():
        table = _seed_table(rows, kind)
        if table:
            parts += [f"### K groups, {title}", table]
    for op, title in (("k_groups", "K groups"), ("m_groups", "M groups"), ("experts", "experts")):
        table = _ratio_table(rows, op)
        if table:
            parts += [f"### {title}: time and share of the clone", table]
    return "\n\n".join(parts)


def _by_case(rows: list[dict[str, Any]], op: str) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for r in rows:
        if r.get("op") == op:
            key = (tuple(r["shape"]), r["groups"], r["multiple"])
            cases.setdefault(key, {})[r["version"]] = r
    return cases


def _seed_table(rows: list[dict[str, Any]], kind: str) -> str:
    columns = ["kernel_version", "input_shape", "torch_time_us", "triton_time_us", "torch_mem_bw_gbps"]
    columns += ["triton_mem_bw_gbps", "triton_speedup", "torchao_time_us", "clone_time_us"]
    table = []
    for (shape, groups, multiple), case in _by_case(rows, "k_groups").items():
        if shape not in K_SHAPES or groups != 8 or multiple != 4:
            continue
        us = {version: r.get(f"{kind}_us") for version, r in case.items()}
        for version in ("naive", "parallel"):
            torch_us, ours = us.get("torch"), us.get(version)
            if ours is None:
                continue
            moved = case[version]["bytes"]
            bandwidth = lambda t, moved=moved: moved / t / 1e3 if t else None  # noqa: E731
            speedup = torch_us / ours if torch_us else None
            line = [version, shape, torch_us, ours, bandwidth(torch_us), bandwidth(ours), speedup]
            table.append([*line, us.get("torchao"), us.get("clone")])
    return markdown(columns, sorted(table, key=lambda r: r[0])) if table else ""


def _ratio_table(rows: list[dict[str, Any]], op: str) -> str:
    columns = ["shape", "groups", "ends at", "version", "host_us", "eager_us"]
    columns += ["warm_us", "x clone", "cold_us", "x clone", "cold GB/s"]
    table = []
    for (shape, groups, multiple), case in _by_case(rows, op).items():
        clone = case.get("clone", {})
        for version, r in case.items():
            if "error" in r:
                table.append([shape, groups, f"x{multiple}", f"{version}: {r['error'][:40]}", *[None] * 7])
                continue
            line: list[Any] = [shape, groups, f"x{multiple}", version, r["host_us"], r["eager_us"]]
            for l2 in ("warm", "cold"):
                t, c = r.get(f"{l2}_us"), clone.get(f"{l2}_us")
                line += [t, t / c if t and c else None]
            table.append([*line, r.get("cold_gbps")])
    return markdown(columns, table) if table else ""


def plot(env: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    """Bandwidth by shape, cold L2: one panel per op, one bar per version."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ops = [op for op in ("k_groups", "m_groups", "experts") if _by_case(rows, op)]
    widths = [max(3, len(_by_case(rows, op))) for op in ops]
    figure, axes = plt.subplots(
        1, len(ops), figsize=(3 + 0.9 * sum(widths), 4.5), width_ratios=widths, squeeze=False, sharey=True
    )
    colors = {"clone": "#b0b0b0", "parallel": "#1f77b4", "naive": "#9ecae1", "torchao": "#ff7f0e", "torch": "#d62728"}
    for axis, op in zip(axes[0], ops, strict=True):
        cases = _by_case(rows, op)
        present = [v for v in colors if any("cold_gbps" in c.get(v, {}) for c in cases.values())]
        for i, version in enumerate(present):
            heights = [c.get(version, {}).get("cold_gbps", 0) for c in cases.values()]
            at = [x + (i - (len(present) - 1) / 2) * 0.8 / len(present) for x in range(len(cases))]
            axis.bar(at, heights, 0.8 / len(present), label=version, color=colors[version])
        labels = ["x".join(map(str, shape)) + f"\nG={g}, x{m}" for shape, g, m in cases]
        axis.set_xticks(range(len(cases)), labels, rotation=60, ha="right", fontsize=7)
        axis.set_title({"k_groups": "K groups", "m_groups": "M groups", "experts": "experts"}[op], fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("GB/s (read + written), cold L2")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"Scale layout, {env.get('gpu')}, commit {env.get('commit')}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print the tables, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSONL file, for example results/scale_layout.jsonl")
    parser.add_argument("--quick", action="store_true", help="fewer replays and only the shapes with a target")
    args = parser.parse_args()
    require_gpu()

    torchao = torchao_kernels()
    specs = [("k_groups", shape, 8, 4) for shape in K_SHAPES]
    specs += [("m_groups", shape, 8, 1) for shape in M_SHAPES]
    specs += [("k_groups", (r, c), g, m) for r, c, g, m in (K_OTHER[:1] if args.quick else K_OTHER)]
    specs += [] if args.quick else [("m_groups", (r, c), g, 1) for r, c, g in M_OTHER]
    specs += [("experts", shape, shape[0], 1) for shape in (EXPERTS[:2] if args.quick else EXPERTS)]

    writer = Writer(args.out, KIND)
    writer.row(op="copy", tb_per_s=copy_rate())
    for op, shape, groups, multiple in progress(specs, "scale layout"):
        measure(Case(op, shape, groups, multiple, torchao), writer, args.quick)
    print(report(writer.env, writer.rows))


if __name__ == "__main__":
    main()
