"""Recipe options of the sub-commands: one ``--option`` per field of :class:`mxmoe.MXRecipe`."""

from __future__ import annotations

import argparse

import torch

from ..formats import SCALE_MODES
from ..recipe import BACKENDS, PRECISIONS, MXRecipe

_ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe options, each with the recipe's own default."""
    group = parser.add_argument_group("recipe (see mxmoe.MXRecipe)")
    default = MXRecipe()
    group.add_argument("--scale-mode", choices=SCALE_MODES, default=default.scale_mode, help="rounding of block scales")
    group.add_argument("--backend", choices=BACKENDS, default=default.backend, help="what computes the GEMMs")
    group.add_argument("--save", choices=("bf16", "mxfp8"), default=default.save, help="what backward keeps of x")
    group.add_argument("--wgrad", choices=PRECISIONS, default=default.wgrad, help="precision of the weight gradient")
    group.add_argument("--weight-block", choices=("1x32", "32x32"), default="1x32", help="weights that share a scale")
    group.add_argument("--grad-elem", choices=tuple(_ELEMENTS), default="e4m3", help="elements of gradients")


def recipe_from(args: argparse.Namespace) -> MXRecipe:
    """The recipe that the options name. Raises: ``ValueError`` as :class:`mxmoe.MXRecipe` does."""
    rows, _, cols = args.weight_block.partition("x")
    return MXRecipe(
        scale_mode=args.scale_mode,
        backend=args.backend,
        save=args.save,
        wgrad=args.wgrad,
        weight_block=(int(rows), int(cols)),
        grad_elem_dtype=_ELEMENTS[args.grad_elem],
    )
