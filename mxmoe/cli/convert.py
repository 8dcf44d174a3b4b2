"""``python -m mxmoe convert SRC DST``: an MXFP8 checkpoint from a bf16 one; the work is in ``mxmoe.checkpoint``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..formats import SCALE_MODES
from ..recipe import MXRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, destination, format."""
    parser.add_argument("src", type=Path, metavar="SRC", help="folder with config.json and *.safetensors")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write; must not hold a finished checkpoint")
    parser.add_argument("--format", choices=("hf", "compressed-tensors"), default="hf", help="keys and config written")
    parser.add_argument("--scale-mode", choices=SCALE_MODES, default=MXRecipe().scale_mode, help="rounding of scales")


def run(args: argparse.Namespace) -> int:
    """Convert; 1 with the reason on stderr if that is not possible."""
    from . import need

    need("hf", "transformers", "safetensors", "rich")
    from ..checkpoint import convert_checkpoint

    try:
        convert_checkpoint(args.src, args.dst, format=args.format, scale_mode=args.scale_mode)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    return 0
