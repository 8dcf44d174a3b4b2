"""Real text that every Python has: the source files of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

VOCAB: Final = 256
HELD_OUT: Final = 16
"""Every 16th file is held out for validation."""

# Not part of the library proper: installed packages, and tests, which repeat themselves.
_SKIP: Final = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo", "pydoc_data"}


@dataclass(frozen=True)
class Text:
    """``train`` and ``valid``: uint8 bytes, files one behind the other in the order of their names."""

    train: Tensor
    valid: Tensor
    files: int

    def batch(self, split: str, generator: torch.Generator, count: int, length: int) -> Tensor:
        """``count`` random pieces of ``length + 1`` bytes (inputs and the next byte of each), int64 on the CPU."""
        data = getattr(self, split)
        first = torch.randint(data.numel() - length, (count, 1), generator=generator)
        return data[first + torch.arange(length + 1)].long()


def stdlib_text(root: Path | None = None, limit: int | None = None) -> Text:
    """Read the sources below ``root`` (default: the standard library of the running Python).

    Args: ``limit``: read no more than this many bytes (a quick start for tests).
    Raises: ``RuntimeError`` if there are less than 100,000 bytes of source (a Python without sources).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train, valid, files, total = bytearray(), bytearray(), 0, 0
    for path in sorted(root.rglob("*.py")):
        if _SKIP.intersection(path.relative_to(root).parts[:-1]):
            continue
        try:
            source = path.read_bytes()
        except OSError:
            continue
        (valid if files % HELD_OUT == HELD_OUT - 1 else train).extend(source)
        files, total = files + 1, total + len(source)
        if limit is not None and total >= limit:
            break
    if len(train) < 100_000 or len(valid) < 2_000:
        raise RuntimeError(f"{root} holds {total} bytes of Python source in {files} files: too little text to train on")
    return Text(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8), files)
