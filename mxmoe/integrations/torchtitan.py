"""torchtitan: the experts of a model in MXFP8, as an override that users name on the command line.

    --override.imports mxmoe.integrations.torchtitan.mxfp8_experts
    --override.imports 'mxmoe.integrations.torchtitan.mxfp8_experts={"save": "mxfp8"}'

The seam is ``GroupedExperts._grouped_mm(self, *, A, B_t, offs)``, which every experts class of torchtitan calls.
Token groups may have any size: no padding dispatcher is needed. Source: ``torchtitan/config/override.py``, 0.3.0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts

import mxmoe

from ..recipe import MXRecipe


@override(target=GroupedExperts.Config, description="MXFP8 grouped GEMMs of mxmoe")
def mxfp8_experts(config: Any, **recipe: Any) -> Any:
    """The configuration of the same experts with MXFP8 GEMMs.

    Args: ``recipe``: fields of ``mxmoe.MXRecipe``; dtypes by name ("float8_e5m2"), tuples as lists.
    Raises: ``TypeError``, ``ValueError`` for fields and values that MXRecipe does not have.
    """
    fields: dict[str, Any] = {
        name: getattr(torch, value, value) if name.endswith("elem_dtype") and isinstance(value, str) else value
        for name, value in recipe.items()
    }
    return derive(config, mx_experts(type(config)._owner).Config, mx_recipe=MXRecipe(**fields).key)


@functools.cache
def mx_experts(experts: type[GroupedExperts]) -> Any:
    """A subclass of an experts class of torchtitan whose GEMMs are MXFP8, with the recipe in its configuration."""

    class MXExperts(experts):  # type: ignore[valid-type, misc]
        @dataclass(kw_only=True, slots=True)
        class Config(experts.Config):  # type: ignore[name-defined, misc]
            mx_recipe: str = MXRecipe().key

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.mx_recipe = MXRecipe.from_key(config.mx_recipe)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:  # noqa: N803 (torchtitan's names)
            return mxmoe.grouped_mm(A, B_t, offs, recipe=self.mx_recipe)

    MXExperts.__name__ = MXExperts.__qualname__ = f"MX{experts.__name__}"
    return MXExperts
