"""Compile every kernel of the package without a GPU and say what the machine code holds.

    python scripts/offline_compile.py                                  # cuda:90 cuda:100 cuda:120, and hip:gfx950
    python scripts/offline_compile.py --target cuda:90 --only bf16     # one target, kernels whose name holds "bf16"
    python scripts/offline_compile.py --dump DIR                       # keep the PTX / GCN

Each module of ``mxmoe.kernels`` lists calls of its launchers (``OFFLINE``, see ``mxmoe/kernels/_offline.py``). They run
on CPU tensors with a stand-in driver: every launch is compiled with its real argument types, none is executed.

Reports per launch: registers and spilled bytes per thread, shared memory, matrix and bulk-copy instructions, widths of
global loads and stores. Exits 1 if a launch does not compile, needs more shared memory than the target has, lacks an
expected instruction, or spills more than the case accepts. Failures on ``hip`` targets only warn: those are compiled
where Triton can. Gluon kernels are launched by the same launchers where the target takes them (the quantizers from
sm_90 on, the warp-specialized GEMM on sm_90).
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "mxmoe_offline_cache"))
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import offline_cases
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import mxmoe.device
import mxmoe.kernels

DEFAULT_TARGETS = ("cuda:90", "cuda:100", "cuda:120", "hip:gfx950")
SHARED_LIMIT = {"cuda:80": 166912, "cuda:90": 232448, "cuda:100": 232448, "cuda:103": 232448, "cuda:120": 101376}
SHARED_LIMIT |= {"hip:gfx942": 65536, "hip:gfx950": 163840}  # bytes a program can have
# A launcher that names an option of another backend: known, and no fault of the kernel.
KNOWN = {("hip", "maxnreg was specified but unrecognised"): "a limit on registers exists for cuda only"}
INSTRUCTIONS = {
    "cuda": (
        r"wgmma\.mma_async[\w.]*m\d+n\d+k\d+[\w.]*",
        r"tcgen05\.mma[\w.:]*",
        r"mma\.sync[\w.]*m\d+n\d+k\d+[\w.:]*",
        r"cp\.async\.bulk\.tensor\.\dd\.(?:shared|global)",
        r"cp\.async\.c[ag]\.shared\.global",
        r"ld\.global[\w.:]*\.(?:v\d\.)?[bfsu]\d+",
        r"st\.global[\w.:]*\.(?:v\d\.)?[bfsu]\d+",
        r"(?:red|atom)\.global[\w.:]*",
    ),
    "hip": (r"v_mfma_\w+", r"v_wmma_\w+", r"global_load_\w+", r"global_store_\w+", r"buffer_(?:load|store)_\w+"),
}


class StandInDriver:
    """What Triton asks of a driver before it compiles. Every target is a device of its own, with its own kernels."""

    def __init__(self) -> None:
        self.targets: list[GPUTarget] = []
        self.current = 0

    def use(self, target: GPUTarget) -> None:
        if target not in self.targets:
            self.targets.append(target)
        self.current = self.targets.index(target)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.targets[self.current]

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def parse_target(text: str) -> GPUTarget:
    """``cuda:90`` or ``hip:gfx950``."""
    backend, _, arch = text.partition(":")
    if backend == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    if backend == "hip":
        return GPUTarget("hip", arch, 64)
    raise SystemExit(f"--target must be cuda:N or hip:gfxN, got {text!r}")


def offers() -> dict[str, list]:
    """Cases of every kernel module, by its stem: its own ``OFFLINE`` list, else those of ``offline_cases.py``."""
    found = {}
    for name in sorted(m.name for m in pkgutil.iter_modules(mxmoe.kernels.__path__)):
        if not name.startswith("_"):
            module = importlib.import_module(f"mxmoe.kernels.{name}")
            found[name] = getattr(module, "OFFLINE", None) or offline_cases.CASES.get(name, [])
    return found


def resources(kernel) -> tuple[int, int]:
    """Registers per thread and spilled bytes per thread (stack plus local memory)."""
    if "cubin" not in kernel.asm:
        text = kernel.asm.get("amdgcn", "")
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
        return (int(registers[1]) if registers else -1, int(spills[1]) * 4 if spills else -1)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    return (int(found[1]), int(found[2]) + int(found[3])) if found else (-1, -1)


def instructions(kernel, backend: str) -> dict[str, int]:
    """Instructions worth knowing, and how often each appears in the code."""
    text = kernel.asm.get("ptx") or kernel.asm.get("amdgcn", "")
    count: collections.Counter[str] = collections.Counter()
    for pattern in INSTRUCTIONS[backend]:
        count.update(re.findall(pattern, text))
    short = collections.Counter()
    for name, n in count.items():
        short[name.replace(".sync.aligned", "").replace(".shared::cluster", "").replace("::cta", "")] += n
    return dict(short)


def main() -> int:
    """Compile everything asked for; the exit status says whether all is as expected."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", action="append", help="cuda:90, hip:gfx950, ...; repeat for more")
    parser.add_argument("--only", default="", help="only cases whose 'module name' holds this text")
    parser.add_argument("--dump", type=Path, help="folder for PTX / GCN")
    parser.add_argument("-v", "--verbose", action="store_true", help="full compiler errors")
    args = parser.parse_args()
    targets = {text: parse_target(text) for text in args.target or DEFAULT_TARGETS}
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)

    driver = StandInDriver()
    triton.runtime.driver.set_active(driver)
    launched: list = []
    run = JITFunction.run

    def compile_only(self, *a, grid, warmup, **k):
        launched.append((self, run(self, *a, grid=grid, warmup=True, **k)))

    JITFunction.run = compile_only
    failed, warned, compiled, seen = [], [], 0, set()
    everything = offers()
    used: set[str] = set()
    for text, target in targets.items():
        driver.use(target)
        # Launchers that choose a tile by device ask mxmoe.device, which answers for the target.
        arch = divmod(target.arch, 10) if target.backend == "cuda" else (0, 0)
        mxmoe.device.capability = lambda where, arch=arch: arch
        for stem, cases in everything.items():
            for case in cases:
                name = f"{stem} {case.name}"
                if args.only not in name:
                    continue
                if text in case.skip:
                    print(f"skip {text:11s} {name}: {case.skip[text]}")
                    continue
                launched.clear()
                began = time.time()
                try:
                    case.launch()
                    problem = "" if launched else "launched nothing"
                except Exception as error:
                    message = str(error).strip() or type(error).__name__
                    problem = message if args.verbose else message.splitlines()[-1][:200]
                known = [why for (of, what), why in KNOWN.items() if of == target.backend and what in problem]
                if known:
                    print(f"skip {text:11s} {name}: {known[0]}")
                    continue
                found = False
                for function, kernel in launched:
                    used.add(function.__module__.rsplit(".", 1)[1])
                    found = found or bool(re.search(case.expect.get(text, ""), "\n".join(_texts(kernel))))
                    if kernel.hash in seen:
                        continue
                    seen.add(kernel.hash)
                    compiled += 1
                    registers, spills = resources(kernel)
                    if kernel.metadata.shared > SHARED_LIMIT.get(text, 1 << 30):
                        problem = problem or f"{kernel.metadata.shared} B of shared memory, {SHARED_LIMIT[text]} exist"
                    if spills > case.spills:
                        problem = problem or f"{spills} bytes per thread spilled (accepted: {case.spills})"
                    kernel_name = f"{function.__module__.rsplit('.', 1)[1]}.{function.__name__}"
                    print(
                        f"ok   {text:11s} {name} / {kernel_name}: {registers} regs, {spills} B spilled, "
                        f"{kernel.metadata.shared} B shared, {kernel.metadata.num_warps} warps, "
                        f"{time.time() - began:.1f} s\n       {instructions(kernel, target.backend)}",
                        flush=True,
                    )
                    if args.dump:
                        title = re.sub(r"\W+", "_", f"{name}_{function.__name__}_{text}")
                        for kind in ("ttgir", "ptx", "amdgcn"):
                            if kind in kernel.asm:
                                (args.dump / f"{title}.{kind}").write_text(kernel.asm[kind])
                if not problem and not found:
                    problem = f"expected instruction missing: {case.expect[text]}"
                if problem:
                    (warned if target.backend == "hip" else failed).append((text, name, problem))
                    print(f"FAIL {text:11s} {name}: {problem}", flush=True)
    JITFunction.run = run
    for stem in sorted(set(everything) - used if not args.only else ()):
        if not _has_kernels(stem):
            continue
        failed.append(("any", stem, "no case launches a kernel of this module: give it an OFFLINE list"))
    print(f"\n{compiled} kernels compiled for {', '.join(targets)}; {len(failed)} failed, {len(warned)} warnings")
    for text, name, problem in failed + warned:
        print(f"  {text} {name}: {problem}")
    if not compiled:
        print("nothing was compiled: that is a failure")
    return 1 if failed or not compiled else 0


def _has_kernels(stem: str) -> bool:
    module = importlib.import_module(f"mxmoe.kernels.{stem}")
    return any(isinstance(f, JITFunction) and f.__module__ == module.__name__ for f in vars(module).values())


def _texts(kernel) -> list[str]:
    return [kernel.asm[kind] for kind in ("ptx", "amdgcn") if kind in kernel.asm]


if __name__ == "__main__":
    sys.exit(main())
