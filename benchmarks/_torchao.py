"""torchao's MXFP8 cast kernels as rivals, also on a chip that torchao does not offer them on.

torchao defines its Triton casts on sm_100 (and MI350) only: elsewhere their names raise "needs triton". The kernels
compile for sm_90 as well, all but the "rceil" mode, whose instruction (cvt.rp.ue8m0x2) exists from sm_100 on. So below
sm_100 the check is answered with yes while the module is imported, never after, and the mode is "floor".
Checked against torchao 0.18.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_KERNELS = "torchao.prototype.mx_formats.kernels"
_NAMES = {
    "rowwise": ("triton_to_mxfp8_dim0", "to_mxfp8_dim0_kernel"),
    "colwise": ("triton_to_mxfp8_dim1", "to_mxfp8_dim1_kernel"),
}


@dataclass
class Casts:
    """Casts by our names, the scale mode they run in, and what a table must say about them."""

    calls: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    mode: str = "rceil"
    note: str = ""


def _import_enabled() -> ModuleType:
    """torchao's kernels module, imported while torchao believes that it runs on sm_100."""
    utils = importlib.import_module("torchao.utils")
    if _KERNELS in sys.modules:  # it has made up its mind already
        return sys.modules[_KERNELS]
    honest, yes = utils.is_sm_at_least_100, lambda: True
    utils.is_sm_at_least_100 = yes
    try:
        return importlib.import_module(_KERNELS)
    finally:
        for name, module in list(sys.modules.items()):  # every module that took the name meanwhile
            if name.startswith("torchao") and getattr(module, "is_sm_at_least_100", None) is yes:
                module.is_sm_at_least_100 = honest  # type: ignore[attr-defined]


def _quick_bench(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    """Milliseconds of one call out of three, in the place of Triton's 125 ms per configuration."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        call()
    end.record()
    end.synchronize()
    return [start.elapsed_time(end) / 3] * 3


def _compile_in_parallel(tuners: list[Any], mode: str) -> None:
    """Compile every configuration of the autotuners, on all cores: 50 s in a row."""
    import triton

    x = torch.zeros(512, 512, dtype=torch.bfloat16, device="cuda")
    out, scale = x.to(torch.float8_e4m3fn), torch.zeros(512, 16, dtype=torch.uint8, device="cuda")
    with ThreadPoolExecutor(16) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for tuner in tuners:
            pointers = [name for name in tuner.arg_names if name.endswith("_ptr")]
            args = dict(zip(pointers, (x, out, scale), strict=True)) | {"n_rows": 512, "n_cols": 512}
            args[next(name for name in tuner.arg_names if name.endswith("BLOCK_SIZE"))] = 32
            tuner.warmup(**args, SCALING_MODE=mode, grid=(1,))


def casts() -> Casts:
    """torchao's Triton casts, as far as there are any; what is missing is said on standard error."""
    offered = torch.cuda.get_device_capability() >= (10, 0)
    mode = "rceil" if offered else "floor"
    try:
        kernels = importlib.import_module(_KERNELS) if offered else _import_enabled()
        found = {op: (getattr(kernels, call), getattr(kernels, tuner)) for op, (call, tuner) in _NAMES.items()}
        version = importlib.import_module("torchao").__version__
    except Exception as error:  # an import that fails in any way is a rival that is not there
        print(f"torchao is not measured: {type(error).__name__}: {error}", file=sys.stderr)
        return Casts()
    tuners = [tuner for _, tuner in found.values()]
    try:  # torchao's own choice among its own configurations, only sooner
        for tuner in tuners:
            # The kernels have no loop, so the number of stages changes nothing.
            tuner.configs = [c for c in tuner.configs if c.num_stages == tuner.configs[0].num_stages]
            tuner.do_bench = _quick_bench
        _compile_in_parallel(tuners, mode)
    except Exception as error:
        print(f"torchao's kernels tune one by one: {type(error).__name__}: {error}", file=sys.stderr)
    note = f"torchao is {version}"
    if not offered:
        note += (
            ", which does not offer these casts on this chip by itself: its check for sm_100 was answered with yes "
            'while it was imported. Scale mode "floor": its "rceil" needs an instruction of sm_100.'
        )
    calls = {op: (lambda x, cast=cast: cast(x, 32, mode)) for op, (cast, _) in found.items()}
    return Casts(calls, mode, note)
