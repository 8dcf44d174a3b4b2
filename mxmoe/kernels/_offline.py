"""How a kernel module offers its kernels to ``scripts/offline_compile.py``, which compiles them without a GPU.

A module in ``mxmoe/kernels`` defines ``OFFLINE``, a list of :class:`Case`. A case *calls the launcher* on small CPU
tensors; the script records every launch with the real argument types and specialization, compiles it for each target
and launches nothing. So a case costs one line, and what is compiled is what runs::

    OFFLINE = [
        Case("rowwise", lambda: quantize_rowwise(_x(), None, False, torch.float8_e4m3fn, "rceil")),
        Case("m_groups", lambda: mm(...), expect={"cuda:90": r"wgmma", "cuda:100": r"tcgen05\\.mma.*block_scale"}),
    ]

Use sizes that are multiples of 16, as real ones are: whether an integer is divisible by 16 is part of what is compiled.
Every pointer of a CPU tensor is aligned to 64 bytes, so vector widths are those of real tensors. A launcher that
chooses by device calls ``device.capability(...)`` (``from .. import device``): the script answers for its target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One call of a launcher to compile.

    | field | meaning |
    |---|---|
    | ``name`` | what is special about this call |
    | ``launch`` | calls the launcher on CPU tensors; every kernel launch in it is compiled |
    | ``expect`` | target (``"cuda:90"``, ``"hip:gfx950"``) -> regex that its PTX or GCN must contain |
    | ``spills`` | local memory per thread that is accepted, in bytes (ptxas takes 8 for a frame on some targets) |
    | ``skip`` | target -> reason why this case is not compiled there |
    """

    name: str
    launch: Callable[[], object]
    expect: Mapping[str, str] = field(default_factory=dict)
    spills: int = 8
    skip: Mapping[str, str] = field(default_factory=dict)
