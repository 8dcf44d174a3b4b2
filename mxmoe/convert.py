"""``convert``: the experts of a whole model to MXFP8 in one line, with a report; ``revert`` undoes it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .integrations import huggingface
from .recipe import MXRecipe

_ABSENT: Any = object()


@dataclass(frozen=True)
class Converted:
    """One module that runs in MXFP8 now. ``changed`` is False if it did so before the call, with the same recipe."""

    name: str
    module_class: str
    experts: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    changed: bool
    unfused: str | None  # why the layer runs step by step instead of as one fused op


@dataclass(frozen=True)
class Skipped:
    """One module that holds experts and was left as it was, and why."""

    name: str
    module_class: str
    reason: str


@dataclass(frozen=True)
class _Undo:
    module: nn.Module
    module_class: type[nn.Module]
    attributes: dict[str, Any]  # instance attributes before the conversion; _ABSENT: there was none


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did. ``print(report)`` shows it.

    | field | meaning |
    |---|---|
    | ``replaced`` | modules that run in MXFP8 now, by full name |
    | ``skipped`` | expert modules left alone, with the reason |
    | ``recipe`` | the recipe of the replaced modules |
    """

    replaced: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    recipe: MXRecipe
    _undo: tuple[_Undo, ...] = field(default=(), repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of the replaced modules, in model order."""
        return tuple(entry.name for entry in self.replaced)

    def __len__(self) -> int:
        return len(self.replaced)

    def __str__(self) -> str:
        total = len(self.replaced) + len(self.skipped)
        lines = [f"{len(self.replaced)} of {total} expert modules run in MXFP8 ({self.recipe.key})"]
        rows = [("replaced" if r.changed else "as before", r.name, r.module_class, _sizes(r)) for r in self.replaced]
        rows += [("skipped", s.name, s.module_class, s.reason) for s in self.skipped]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True))
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join(lines)


def convert(
    model: nn.Module,
    *,
    recipe: MXRecipe | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    allow_none: bool = False,
) -> ConversionReport:
    """Run the experts of a transformers model in MXFP8, weights staying in high precision (training).

    Parameters keep their names, dtypes and identity: an optimizer built before goes on working, and a checkpoint of the
    converted model loads into an unconverted one. Routers, shared dense MLPs, attention and ``lm_head`` stay.
    Calling it again with the same recipe changes nothing; with another recipe, the recipe changes.

    | name | type | meaning |
    |---|---|---|
    | ``model`` | ``nn.Module`` | any model whose experts use the transformers experts interface |
    | ``recipe`` | ``MXRecipe`` or None | ``MXRecipe()`` by default |
    | ``include`` | names or globs | convert only these, by full module name: "model.layers.*.mlp.experts" |
    | ``exclude`` | names or globs | leave these |
    | ``allow_none`` | bool | nothing to convert is no error |

    A pattern is the whole name or a glob over it (``*`` also matches dots), never a part of a name.
    Raises: ``TypeError`` for something that is no module; ``ValueError`` if nothing was converted or a pattern matched
    no expert module, listing those there are. Sync: none. Gradient: flows as before, through MXFP8 GEMMs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert() takes a torch.nn.Module, got {type(model).__name__}")
    recipe = recipe if recipe is not None else MXRecipe()
    if not isinstance(recipe, MXRecipe):
        raise TypeError(f"recipe must be an mxmoe.MXRecipe, got {type(recipe).__name__}")
    huggingface.register()

    candidates = list(_candidates(model))
    names = [name for name, _ in candidates]
    included = None if include is None else _patterns(include, "include", names, allow_none)
    excluded = _patterns(exclude, "exclude", names, allow_none)

    replaced: list[Converted] = []
    skipped: list[Skipped] = []
    undo: list[_Undo] = []
    configs: dict[int, Any] = {}
    for name, module in candidates:
        reason = _reason_to_skip(name, module, included, excluded)
        if reason is not None:
            skipped.append(Skipped(name, type(module).__name__, reason))
            continue
        module_class = type(module).__name__
        before = _select(module, recipe, configs)
        if before is not None:
            undo.append(before)
        replaced.append(_converted(name, module_class, module, before is not None))

    report = ConversionReport(tuple(replaced), tuple(skipped), recipe, tuple(undo))
    if not replaced and not allow_none:
        raise ValueError(_nothing(model, report))
    return report


def revert(report: ConversionReport) -> None:
    """Undo one :func:`convert`: every module it changed is as it was before. Twice is a no-op.

    Several conversions of one model are undone in the reverse of their order.
    Args: ``report``: what :func:`convert` returned. Raises: ``TypeError`` for anything else.
    """
    if not isinstance(report, ConversionReport):
        raise TypeError(f"revert() takes the ConversionReport that convert() returned, got {type(report).__name__}")
    for undo in report._undo:
        undo.module.__class__ = undo.module_class
        for name, value in undo.attributes.items():
            if value is _ABSENT:
                undo.module.__dict__.pop(name, None)
            else:
                undo.module.__dict__[name] = value


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if huggingface.looks_like_experts(module):
            yield name, module


def _reason_to_skip(
    name: str, module: nn.Module, included: Sequence[str] | None, excluded: Sequence[str]
) -> str | None:
    if included is not None and not any(fnmatch.fnmatchcase(name, pattern) for pattern in included):
        return "not in include"
    for pattern in excluded:
        if fnmatch.fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    if not huggingface.is_8_bit(module) and (
        huggingface.own_seam(module) is not None or huggingface.dispatches(module)
    ):
        return None
    return huggingface.why_not(module)


def _select(module: nn.Module, recipe: MXRecipe, configs: dict[int, Any]) -> _Undo | None:
    """Point one module at our function; what was there before, or None if nothing changes."""
    seam = huggingface.own_seam(module)
    config = getattr(module, "config", None)
    current = getattr(module, huggingface.RECIPE_ATTRIBUTE, None)
    if seam is not None:
        selected = type(module) is seam
    else:
        selected = config._experts_implementation == huggingface.NAME  # type: ignore[union-attr]
    if selected and current == recipe:
        return None
    names = ("config", huggingface.RECIPE_ATTRIBUTE)
    before = _Undo(module, type(module), {name: module.__dict__.get(name, _ABSENT) for name in names})
    if not selected and seam is not None:
        module.__class__ = seam
    elif not selected:
        if id(config) not in configs:
            configs[id(config)] = huggingface.config_with(config, huggingface.NAME)
        module.config = configs[id(config)]
    setattr(module, huggingface.RECIPE_ATTRIBUTE, recipe)
    return before


def _converted(name: str, module_class: str, module: nn.Module, changed: bool) -> Converted:
    shapes = tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False))
    unfused = huggingface.unfused_reason(module)
    return Converted(name, module_class, int(module.num_experts), shapes, changed, unfused)  # type: ignore[arg-type]


def _patterns(
    value: str | Iterable[str] | None, argument: str, names: Sequence[str], allow_none: bool
) -> tuple[str, ...]:
    if value is None:
        return ()
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} takes full module names or globs, got {type(pattern).__name__}")
        if not allow_none and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
            raise ValueError(
                f"{argument}={pattern!r} matches no expert module: patterns are whole names or globs "
                f'("model.layers.3.mlp.experts", "model.layers.[0-3].*"). Expert modules here: {known or "none"}'
            )
    return patterns


def _nothing(model: nn.Module, report: ConversionReport) -> str:
    lines = [f"convert() found nothing to convert in {type(model).__name__} (allow_none=True makes that no error)"]
    if report.skipped:
        lines += [f"  {s.name}: {s.reason}" for s in report.skipped]
    else:
        lines.append("  no module holds a stack of expert weights (3-D parameters, one slice per expert)")
    return "\n".join(lines)


def _sizes(entry: Converted) -> str:
    shapes = "  ".join(f"{name} {shape}" for name, shape in entry.parameters)
    note = f"  (not fused: {entry.unfused})" if entry.unfused else ""
    return f"{entry.experts} experts  {shapes}{note}"
