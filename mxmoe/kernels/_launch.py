"""Launching a compiled kernel without Triton's binder.

``kernel[grid](...)`` binds and specializes every argument on every call: 16 us on one CPU, where the call
of the compiled kernel takes 3.7 (2026-11-30, triton 3.6, no GPU behind it). For a kernel of a few microseconds that
is most of the time. What decides which compiled kernel is right is little and known, so it is looked up here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# The second dim of a CUDA grid ends here.
GRID_Y = 65535


class Launcher:
    """Calls one kernel whose arguments are, in order: tensors, ints (all in do_not_specialize), constexprs.

    The key of a compiled kernel is what Triton would specialize on: the device, whether each pointer is a multiple of
    16 bytes, the constexprs and the options. Ints are all int32; one that does not fit takes Triton's own way.
    """

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.compiled = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        constexprs: Sequence[int | bool],
        num_warps: int,
        maxnreg: int | None = None,
    ) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(grid, tensors, ints, constexprs, num_warps, maxnreg)
        aligned = tuple([t.data_ptr() % 16 == 0 for t in tensors])
        key = (device.index, aligned, *constexprs, num_warps, maxnreg)
        compiled = self.compiled.get(key)
        if compiled is not None and max(ints) < 2**31:
            compiled[grid](*tensors, *ints, *constexprs)
            return None
        compiled = self.kernel[grid](*tensors, *ints, *constexprs, num_warps=num_warps, maxnreg=maxnreg)
        if compiled is not None and max(ints) < 2**31:  # None: the interpreter ran it
            self.compiled[key] = compiled
        return None


def pow2(n: int) -> int:
    """Smallest power of two that is at least ``n``. ``triton.next_power_of_2`` takes 3 us."""
    return 1 << max(n - 1, 0).bit_length()


def grid2(fast: int, slow: int) -> tuple[int, int, int]:
    """Grid of ``slow`` x ``fast`` programs; the second dim of a grid holds at most 65535.

    A larger ``slow`` goes into the third dim, too: the kernel takes ``program_id(2) * num_programs(1) + program_id(1)``
    and does nothing beyond ``slow``. Two coordinates out of one program id would be a division, some 30 instructions
    in front of the first load.
    """
    return (fast, slow, 1) if slow <= GRID_Y else (fast, GRID_Y, -(-slow // GRID_Y))
