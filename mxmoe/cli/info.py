"""``python -m mxmoe info``: versions, devices, backends, and a self-test of a few bytes on every device."""

from __future__ import annotations

import argparse
import math
import platform
from importlib import metadata

import torch

import mxmoe

from ..device import name as device_name

PACKAGES = ("torch", "triton", "einops", "numpy", "transformers", "safetensors", "torchao", "compressed-tensors")

# Blocks of 32 equal values: (value, scale mode, scale byte, element byte). Source: docs/numerics.md.
VECTORS = (
    (1.75, "rceil", 119, 0x7E),
    (1.75 + 2**-23, "rceil", 120, 0x76),
    (448.0, "rceil", 127, 0x7E),
    (2.0**-120, "rceil", 0, 0x70),
    (-0.0, "rceil", 0, 0x80),
    (1e-40, "rceil", 0, 0x09),
    (256.0, "floor", 127, 0x78),
    (math.inf, "rceil", 255, 0x7F),
    (math.nan, "rceil", 255, 0x7F),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """Print everything; 1 if a self-test fails."""
    print(f"mxmoe {mxmoe.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print("  ".join(f"{package} {_version(package)}" for package in PACKAGES))
    failed = []
    for device in devices():
        print(f"\n{describe(device)}")
        print(mxmoe.backends(device))
        for title, test in (("bytes", check_bytes), ("layout", check_layout), ("GEMM", check_gemm)):
            try:
                problem = test(device)
            except Exception as error:  # a broken installation fails in many ways; report all of them
                problem = f"{type(error).__name__}: {error}"
            print(f"self-test, {title}: {problem or 'ok'}")
            if problem:
                failed.append(f"{title} on {device}")
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


def devices() -> list[torch.device]:
    """The CPU and every GPU."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def describe(device: torch.device) -> str:
    """One line about a device."""
    if device.type != "cuda":
        return f"{device}: {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    memory, sms = properties.total_memory / 2**30, properties.multi_processor_count
    return f"{device}: {properties.name}, {device_name(device)}, {memory:.0f} GiB, {sms} SMs"


# --- self-tests: None, or what is wrong -----------------------------------------------------------------------------
def check_bytes(device: torch.device) -> str | None:
    """Scale and element bytes of :data:`VECTORS`, rowwise and colwise."""
    for value, mode, scale_byte, elem_byte in VECTORS:
        x = torch.full((32, 32), value, device=device)
        for block in ("rowwise", "colwise"):
            t = mxmoe.quantize(x, block=block, scale_mode=mode)
            found = (int(t.scale_bytes.flatten()[0]), int(t.qdata.view(torch.uint8).flatten()[0]))
            if found != (scale_byte, elem_byte):
                return f"{value} ({mode}, {block}) gave bytes {found}, expected {(scale_byte, elem_byte)}"
    return None


def check_layout(device: torch.device) -> str | None:
    """The worked example of the K-group layout (docs/layouts.md): R = 256, column ends [4, 12]."""
    scale = torch.zeros(256, 12, dtype=torch.uint8, device=device)
    scale[128, 4] = 77
    offs = torch.tensor([4, 12], dtype=torch.int32, device=device)
    blocked = mxmoe.to_blocked_k_groups(scale, offs)
    where = blocked.flatten().nonzero().flatten().tolist()
    return None if where == [2048] else f"byte of scale (128, 4) is at {where}, expected [2048]"


def check_gemm(device: torch.device) -> str | None:
    """A small grouped_mm, forward and backward: auto against the reference backend, relative to the largest value."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(70, 64, generator=make).to(device, torch.bfloat16)
    w = torch.randn(3, 48, 64, generator=make).to(device, torch.bfloat16)
    offs = torch.tensor([33, 33, 65], dtype=torch.int32, device=device)
    results = []
    for backend in ("auto", "reference"):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = mxmoe.grouped_mm(a, b.transpose(-2, -1), offs, recipe=mxmoe.MXRecipe(backend=backend))
        out.float().square().sum().backward()
        results.append((out.detach(), a.grad, b.grad))
    for title, got, wanted in zip(("out", "dX", "dW"), *results, strict=True):
        assert got is not None and wanted is not None
        error = ((got - wanted).abs().max() / wanted.abs().max()).item()
        if not error < 0.02:
            return f"{title} differs from the reference by {error:.4f} of its largest value"
    return None


def _version(package: str) -> str:
    try:
        # torch says with which CUDA it was built, its metadata need not.
        return torch.__version__ if package == "torch" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
