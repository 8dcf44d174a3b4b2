"""Watch the GEMMs that run: which backend, which sizes, on request the operands. For demos, tests and debugging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GemmRecord:
    """One grouped GEMM that ran.

    | field | meaning |
    |---|---|
    | ``op`` | "fprop", "dgrad" or "wgrad" |
    | ``backend``, ``reason`` | what computed it, and why |
    | ``m, n, k, groups`` | rows, outputs, contraction, groups (wgrad: contraction over m) |
    | ``a, b, offs, out`` | high-precision operands as given, and the result; None unless ``observe(tensors=True)`` |
    """

    op: str
    backend: str
    reason: str
    m: int
    n: int
    k: int
    groups: int
    a: Tensor | None = None
    b: Tensor | None = None
    offs: Tensor | None = None
    out: Tensor | None = None


@dataclass(eq=False)  # compared by identity: lists of equal records are equal, and tensors in them compare by element
class _Observer:
    records: list[GemmRecord]
    tensors: bool


_observers: list[_Observer] = []


@contextlib.contextmanager
def observe(*, tensors: bool = False) -> Iterator[list[GemmRecord]]:
    """Collect a :class:`GemmRecord` of every GEMM inside the block, in the order they ran.

    Args: ``tensors``: keep operands and results as well (they stay alive as long as the list).
    Sync: none. Works in eager and compiled code; a replayed CUDA graph runs no Python and adds nothing.
    """
    observer = _Observer([], tensors)
    _observers.append(observer)
    try:
        yield observer.records
    finally:
        _observers.remove(observer)


def record(
    op: str,
    backend: str,
    reason: str,
    sizes: tuple[int, int, int, int],
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Called by the ops; costs an empty loop when nobody observes."""
    for observer in tuple(_observers):  # another thread may end its block meanwhile
        held = tensors if observer.tensors else (None, None, None, None)
        observer.records.append(GemmRecord(op, backend, reason, *sizes, *held))
