"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs (sm_90 and later).

``gdc_launch_dependents`` says "the next kernel may start", ``gdc_wait`` blocks until the kernel before is complete and
its writes are visible. Kernels here keep four rules, and with them a chain of launches is as safe as without:

1. Nothing is written before ``gdc_wait``: an output may lie in memory that the kernel before still reads (PyTorch
   hands the memory of a tensor out again as soon as it is freed on the host).
2. Before ``gdc_wait`` only inputs of the chain are read, which were complete when its first kernel started, or what
   was written by a kernel that is known to be complete (rule 4).
3. Every program of every kernel that is started early executes ``gdc_wait``: then a kernel that is complete implies
   that all kernels before it are.
4. A kernel that calls ``gdc_wait`` before ``gdc_launch_dependents`` lets all later ones read, before they wait,
   whatever was written in front of it.

A kernel that starts the ordinary way waits for everything, whoever called ``gdc_launch_dependents``.
Source   PTX ISA, griddepcontrol.
"""

from __future__ import annotations

import torch

from .. import device


def dependent_launch(where: torch.device) -> bool:
    """Whether kernels on ``where`` can start early. Compile-time argument PDL of the kernels."""
    return device.capability(where) >= (9, 0)


def early(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel that starts early and waits itself."""
    return {"launch_pdl": True} if pdl else {}
