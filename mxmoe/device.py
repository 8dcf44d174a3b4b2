"""What the device of a tensor can do. Asked at call time, never at import."""

from __future__ import annotations

import functools

import torch


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability of ``device``; ``(0, 0)`` for anything else, also for a GPU that is not here."""
    if device.type != "cuda" or torch.version.hip is not None or (device.index or 0) >= torch.cuda.device_count():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Number of multiprocessors: programs of a persistent grid (1 on a CPU)."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_mxfp8_tensor_cores(device: torch.device) -> bool:
    """Whether ``torch._scaled_grouped_mm`` takes MXFP8 there. Elsewhere the call kills the CUDA context (no error)."""
    return capability(device)[0] == 10


def name(device: torch.device) -> str:
    """Short name for messages: ``cpu``, ``cuda sm_90``."""
    if device.type != "cuda":
        return device.type
    major, minor = capability(device)
    if major == 0 and torch.version.hip is None:
        return f"{device}, which is not on this machine"
    return f"cuda sm_{major}{minor}"
