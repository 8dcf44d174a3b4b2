"""Serving: expert weights of a transformers model become MXFP8, in place, layer by layer.

    gate_up_proj  Parameter bf16 (E, 2I, H)      gate_up_proj        buffer uint8 (E, 2I, H)     e4m3 bytes
                                          ---->  gate_up_proj_scale  buffer uint8 (E, 2I, H/32)  e8m0 bytes
    transposed storage (E, H, 2I)                the same: the contraction is last whatever it was

Bytes are kept as uint8, since ``module.to(torch.bfloat16)`` converts fp8 tensors. Modules keep their class, name,
biases and gate; they run ``mxmoe.integrations.huggingface_fp8.mx_module_forward``.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from .convert import ConversionReport, Converted, Skipped, _patterns
from .formats import BLOCK
from .integrations import huggingface, huggingface_fp8
from .integrations.huggingface_fp8 import SERVING_RECIPE, default_gate
from .recipe import MXRecipe
from .shapes import cdiv

MARK: Final = "mxmoe_quantized"
"""Attribute of a module whose expert weights are MXFP8 buffers: names of the weights."""

__all__ = ["LayerReport", "QuantizationReport", "default_gate", "quantize_experts"]


# --- modules ---------------------------------------------------------------------------------------------------------
def is_quantized(module: nn.Module) -> bool:
    """Whether ``quantize_experts`` or ``load_checkpoint`` changed this module."""
    return MARK in module.__dict__


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds stacked expert weights in high precision, run by the transformers experts interface."""
    if not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "config")):
        return False
    own = dict(module.named_parameters(recurse=False))
    return all(
        name in own and own[name].ndim == 3 and own[name].is_floating_point() and own[name].dtype.itemsize > 1
        for name in weights_of(module)
    )


def weights_of(module: nn.Module) -> tuple[str, str]:
    """Names of the two weights of an experts module."""
    return ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"), "down_proj"


def entries(weight: str) -> tuple[str, str]:
    """Names of the buffers that a quantized weight has in a state_dict."""
    return weight, f"{weight}_scale"


def stored(module: nn.Module, weight: str) -> Tensor:
    """The weight as it is stored: a parameter, or uint8 bytes ``(E, N, K)``."""
    value: Tensor = getattr(module, weight)
    return value


def stored_scale(module: nn.Module, weight: str) -> Tensor:
    """uint8 scale bytes ``(E, N, ceil(K/32))`` of a quantized weight."""
    value: Tensor = getattr(module, f"{weight}_scale")
    return value


def logical_shape(module: nn.Module, weight: str) -> tuple[int, int, int]:
    """``(E, N, K)``, the contraction last."""
    e, a, b = stored(module, weight).shape
    return (e, b, a) if not is_quantized(module) and module.is_transposed else (e, a, b)


def quantize_weight(w: Tensor, scale_mode: str) -> tuple[Tensor, Tensor]:
    """``(E, N, K)`` of any strides -> uint8 bytes and scales, expert by expert: the working memory is one expert."""
    e, n, k = w.shape
    qdata = torch.empty((e, n, k), dtype=torch.uint8, device=w.device)
    scale = torch.empty((e, n, cdiv(k, BLOCK)), dtype=torch.uint8, device=w.device)
    for i in range(e):
        q, s = torch.ops.mxmoe.quantize_rowwise(w[i].detach(), None, False, torch.float8_e4m3fn, scale_mode)
        qdata[i] = q.view(torch.uint8)
        scale[i] = s
    return qdata, scale


def set_weight(module: nn.Module, weight: str, qdata: Tensor, scale: Tensor) -> None:
    """Put MXFP8 bytes in the place of a weight. The parameter is dropped."""
    for name, value in zip(entries(weight), (qdata, scale), strict=True):
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module.register_buffer(name, value)
    for suffix in ("packed", "top"):
        module._buffers.pop(f"{weight}_{suffix}", None)


def finish(module: Any, recipe: MXRecipe = SERVING_RECIPE) -> None:
    """Make a module whose weights are MXFP8 buffers run on them."""
    huggingface_fp8.register()
    setattr(module, MARK, weights_of(module))
    setattr(module, huggingface_fp8.RECIPE_ATTRIBUTE, recipe)
    if module.config._experts_implementation != huggingface_fp8.MX_NAME:
        # A copy per module: set_experts_implementation() and generate() switch the model's config, not these weights.
        module.config = huggingface.config_with(module.config, huggingface_fp8.MX_NAME)


def guard(model: nn.Module) -> None:
    """Make ``save_pretrained`` of a model with MXFP8 experts an error: its files would load as numbers, not bytes."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained") and any(is_quantized(m) for m in module.modules()):
            module.__dict__["save_pretrained"] = _refuse_save_pretrained


def _refuse_save_pretrained(*args: object, **kwargs: object) -> None:
    raise ValueError(
        "save_pretrained() knows nothing of MXFP8 experts, and its files would load with wrong weights: "
        "use mxmoe.save_checkpoint(model, path)"
    )


# --- report ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LayerReport:
    """One weight that became MXFP8. ``sqnr_db``: signal to quantization noise; None if it was not measured."""

    module: str
    weight: str
    shape: tuple[int, int, int]
    bytes_before: int
    bytes_after: int
    sqnr_db: float | None


class _Irreversible:
    """Stands where a revertible report keeps what was there before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(
            "quantize_experts() dropped the weights it replaced and cannot be reverted: load the model again"
        )


@dataclass(frozen=True)
class QuantizationReport(ConversionReport):
    """What :func:`quantize_experts` did. ``print(report)`` shows it.

    | field | meaning |
    |---|---|
    | ``layers`` | a :class:`LayerReport` per weight: SQNR, bytes before and after |
    | ``replaced``, ``skipped``, ``recipe`` | as in :class:`mxmoe.ConversionReport` |
    """

    layers: tuple[LayerReport, ...] = field(default=())

    @property
    def bytes_before(self) -> int:
        """Bytes of the replaced weights."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of values and scales."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        ratio = self.bytes_after / max(self.bytes_before, 1)
        lines = [
            f"{len(self.replaced)} expert modules are MXFP8: {_size(self.bytes_before)} -> {_size(self.bytes_after)} "
            f"({ratio:.2f}x), {self.recipe.key}"
        ]
        if self.replaced and not self.layers:
            lines = [f"{len(self.replaced)} expert modules were MXFP8 before: nothing was quantized"]
        rows = [("module", "weight", "(E, N, K)", "SQNR dB")]
        for layer in self.layers:
            sqnr = "-" if layer.sqnr_db is None else f"{layer.sqnr_db:.2f}"
            rows.append((layer.module, layer.weight, str(layer.shape), sqnr))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        if self.layers:
            lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"  skipped  {s.name}  {s.module_class}  {s.reason}" for s in self.skipped]
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000  # type: ignore[assignment]
    raise AssertionError


# --- quantize --------------------------------------------------------------------------------------------------------
def quantize_experts(
    model: nn.Module,
    *,
    recipe: MXRecipe | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    measure: bool = True,
    progress: bool = True,
    allow_none: bool = False,
) -> QuantizationReport:
    """Replace the expert weights of a transformers model by MXFP8, in place: half the memory, faster decoding.

    | name | type | meaning |
    |---|---|---|
    | ``model`` | ``nn.Module`` | any model whose experts use the transformers experts interface, on any device |
    | ``recipe`` | ``MXRecipe`` or None | weight-only by default: ``MXRecipe(activations="bf16")``; e4m3 elements |
    | ``include``, ``exclude`` | names or globs | as for :func:`mxmoe.convert` |
    | ``measure`` | bool | report the SQNR of every weight (reads it once more) |
    | ``progress`` | bool | a bar on stderr |
    | ``allow_none`` | bool | nothing to quantize is no error |

    One weight at a time: never two copies of the model. The result survives ``.to(dtype)``, ``.to(device)``, deepcopy,
    pickle and state_dict; its state_dict loads into another quantized model. It has no gradient to its weights, cannot
    be reverted, and refuses ``save_pretrained`` (:func:`mxmoe.save_checkpoint` instead). Modules that are quantized
    already are reported as they are; weights on the meta device (offloaded ones) are skipped.
    Raises: ``TypeError``; ``ValueError`` if nothing was quantized, for patterns that match nothing, or for a recipe
    that is not e4m3. Sync: one per weight if ``measure``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_experts() takes a torch.nn.Module, got {type(model).__name__}")
    recipe = recipe if recipe is not None else SERVING_RECIPE
    if not isinstance(recipe, MXRecipe):
        raise TypeError(f"recipe must be an mxmoe.MXRecipe, got {type(recipe).__name__}")
    if recipe.elem_dtype != torch.float8_e4m3fn or recipe.weight_block != (1, BLOCK):
        raise ValueError(
            f"serving weights are float8_e4m3fn in 1 x {BLOCK} blocks, which every engine reads; the recipe asks for "
            f"{recipe.elem_dtype} in {recipe.weight_block[0]} x {recipe.weight_block[1]}"
        )
    huggingface_fp8.register()
    before = {name: module for name, module in model.named_modules() if is_quantized(module)}
    candidates = [(n, m) for n, m in model.named_modules() if huggingface.looks_like_experts(m) and n not in before]
    names = [*(name for name, _ in candidates), *before]
    included = _patterns(include, "include", names, allow_none)
    excluded = _patterns(exclude, "exclude", names, allow_none)

    jobs: list[tuple[str, nn.Module]] = []
    skipped: list[Skipped] = []
    for name, module in candidates:
        reason = _reason_to_skip(name, module, included, excluded)
        if reason is None:
            jobs.append((name, module))
        else:
            skipped.append(Skipped(name, type(module).__name__, reason))

    replaced = [_converted(name, module, False) for name, module in before.items()]
    layers: list[LayerReport] = []
    with bar("quantizing experts", len(jobs), progress) as advance:
        for name, module in jobs:
            for weight in weights_of(module):
                layers.append(_replace(name, module, weight, recipe.scale_mode, measure))
            finish(module, recipe)
            replaced.append(_converted(name, module, True))
            advance(1)
    guard(model)
    report = QuantizationReport(
        tuple(replaced),
        tuple(skipped),
        recipe,
        (_Irreversible(),),  # type: ignore[arg-type]
        layers=tuple(layers),
    )
    if not replaced and not allow_none:
        detail = "".join(f"\n  {s.name}: {s.reason}" for s in skipped)
        raise ValueError(f"quantize_experts() found nothing to quantize in {type(model).__name__}{detail}")
    return report


def _reason_to_skip(name: str, module: nn.Module, included: tuple[str, ...], excluded: tuple[str, ...]) -> str | None:
    if included and not any(fnmatch.fnmatchcase(name, pattern) for pattern in included):
        return "not in include"
    if hit := next((pattern for pattern in excluded if fnmatch.fnmatchcase(name, pattern)), None):
        return f"excluded by {hit!r}"
    if any(p.is_meta for p in module.parameters(recurse=False)):
        return f"{type(module).__name__} has weights without memory (meta device, or offloaded): load them first"
    return None if is_experts(module) and huggingface.dispatches(module) else huggingface.why_not(module)


def _replace(name: str, module: nn.Module, weight: str, scale_mode: str, measure: bool) -> LayerReport:
    parameter = stored(module, weight)
    w = parameter.mT if module.is_transposed else parameter
    qdata, scale = quantize_weight(w, scale_mode)
    sqnr = _sqnr(w, qdata, scale) if measure else None
    shape = logical_shape(module, weight)
    before = parameter.nbytes
    set_weight(module, weight, qdata, scale)
    return LayerReport(name, weight, shape, before, qdata.nbytes + scale.nbytes, sqnr)


def _sqnr(w: Tensor, qdata: Tensor, scale: Tensor) -> float:
    """Signal to quantization noise of a whole weight, in dB."""
    total = torch.zeros(2, dtype=torch.float64, device=w.device)
    for i in range(w.shape[0]):
        q = qdata[i].view(torch.float8_e4m3fn)
        back = torch.ops.mxmoe.dequantize(q, scale[i], "rowwise", None, None, q.shape[0], torch.float32)
        exact = w[i].detach().float()
        total += torch.stack([exact.square().sum(), (exact - back).square().sum()]).double()
    signal, noise = total.tolist()
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def _converted(name: str, module: Any, changed: bool) -> Converted:
    sizes = tuple((w, logical_shape(module, w)) for w in weights_of(module))
    unfused = None if huggingface_fp8.fuses_swiglu(module) else "its gate is not SwiGLU of concatenated halves"
    return Converted(name, type(module).__name__, int(module.num_experts), sizes, changed, unfused)


# --- progress --------------------------------------------------------------------------------------------------------
def progress_bar() -> Any:
    """A rich progress bar on stderr. Raises ``ImportError`` without rich."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


@contextlib.contextmanager
def bar(text: str, total: int, show: bool) -> Iterator[Any]:
    """Yields ``advance(n)``; a bar on stderr if rich is there and somebody looks."""
    shown = None
    if show and total:
        with contextlib.suppress(ImportError):
            shown = progress_bar()
    if shown is None:
        yield lambda n: None
        return
    with shown:
        task = shown.add_task(text, total=total)
        yield lambda n: shown.advance(task, n)
