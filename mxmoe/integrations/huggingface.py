"""transformers 5.x: an experts function named "mxmoe" in its registry, and which modules of a model would call it.

    mxmoe.integrations.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="mxmoe")

or, per module and with a report, ``mxmoe.convert(model)``. transformers looks the name up on every forward pass in
``module.config._experts_implementation``; nothing is written to ``config.json``.
Source: ``transformers/integrations/moe.py`` (``ExpertsInterface``, ``use_experts_implementation``), 5.17.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

import mxmoe

from ..nn.experts import ExpertWeights, experts_forward, swiglu_experts
from ..recipe import MXRecipe
from ..tensor import MXTensor

logger = logging.getLogger(__name__)

NAME = "mxmoe"
RECIPE_ATTRIBUTE = "mxmoe_recipe"
"""Where a converted module keeps its recipe: a plain attribute, in deepcopies and pickles, not in state_dict."""

_PROBE = "mxmoe.probe"

# Families that do not ask the registry, and the class of ours that a module gets instead of its own.
_OWN_SEAMS = {
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts": ("llama4", "MXLlama4TextExperts"),
    "transformers.models.step3p7.modeling_step3p7.Step3p7Experts": ("step3p7", "MXStep3p7Experts"),
}


def register(name: str = NAME, *, recipe: MXRecipe | None = None) -> None:
    """Make ``experts_implementation=name`` known to transformers. Idempotent.

    Args: ``recipe``: used by modules that have none of their own (``mxmoe.convert`` gives each module its own);
    ``MXRecipe()`` by default, and weight-only for experts of an MXFP8 checkpoint.
    Raises: ``TypeError``; ``ImportError`` without transformers 5.x; ``ValueError`` if something else has the name.
    """
    if recipe is not None and not isinstance(recipe, MXRecipe):
        raise TypeError(f"recipe must be an mxmoe.MXRecipe, got {type(recipe).__name__}")
    interface = _interface()
    forward = functools.partial(mxmoe_experts_forward, recipe=recipe)
    present = interface._global_mapping.get(name)
    if present is not None:
        ours = isinstance(present, functools.partial) and present.func is mxmoe_experts_forward
        if not ours:
            raise ValueError(f"experts implementation {name!r} exists in transformers already: choose another name")
        if present.keywords != forward.keywords:
            raise ValueError(
                f"experts implementation {name!r} is registered with recipe {present.keywords['recipe']}, "
                f"now asked for {recipe}: register the second recipe under a name of its own"
            )
        return
    from . import huggingface_fp8

    interface.register(name, forward)
    huggingface_fp8.register(name, recipe=recipe)  # the table that serves MXFP8 checkpoints


def mxmoe_experts_forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    recipe: MXRecipe | None = None,
) -> Tensor:
    """The experts function: ``self`` is any experts module of transformers, whatever its storage, biases and gate.

    | name | shape | dtype |
    |---|---|---|
    | ``hidden_states`` | ``(T, H)`` | bf16, fp16, fp32 |
    | ``top_k_index`` | ``(T, k)`` | int64; ids of ``num_experts`` or more belong to another rank |
    | ``top_k_weights`` | ``(T, k)`` | floating |

    Returns: ``(T, H)``. Sync: none. Gradient: to the tokens, the routing weights, weights and biases.
    """
    recipe = getattr(self, RECIPE_ATTRIBUTE, None) or recipe
    dtype = hidden_states.dtype
    up = "gate_up_proj" if self.has_gate else "up_proj"
    weights = ExpertWeights(
        up=getattr(self, up),
        down=self.down_proj,
        up_bias=getattr(self, f"{up}_bias") if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        transposed=self.is_transposed,
    )
    x = _as_weight_dtype(hidden_states, weights.up)
    reason = unfused_reason(self)
    if reason is None:
        return swiglu_experts(x, top_k_index, top_k_weights, weights, recipe=recipe).to(dtype)
    if not torch.compiler.is_compiling():
        _say_once(type(self).__name__, reason)
    return experts_forward(
        x,
        top_k_index,
        top_k_weights,
        weights,
        num_experts=self.num_experts,
        activate=self._apply_gate if self.has_gate else self.act_fn,
        grouped_mm=functools.partial(_grouped_mm, recipe=recipe),
    ).to(dtype)


@functools.cache
def _say_once(module_class: str, reason: str) -> None:
    logger.info("%s runs step by step, not as one fused op: %s", module_class, reason)


def unfused_reason(module: Any) -> str | None:
    """Why the fused SwiGLU layer does not fit an experts module; None where it does."""
    if not hasattr(module, "has_gate"):
        return None  # a seam of our own, which says what it does
    if not module.has_gate:
        return "no gate"
    if module.has_bias:
        return "biases"
    if not module.is_concatenated:
        return "gate and up interleaved"
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return "a gate of its own"
    if not isinstance(module.act_fn, nn.SiLU) and type(module.act_fn).__name__ != "SiLUActivation":
        return f"activation {type(module.act_fn).__name__}"
    return None


def _grouped_mm(x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, *, recipe: MXRecipe | None) -> Tensor:
    return mxmoe.grouped_mm(x, w, offs, bias=bias, recipe=recipe)


def _as_weight_dtype(x: Tensor, w: Tensor | MXTensor) -> Tensor:
    # Some models normalise in fp32 in front of bf16 experts; their own loop would promote, grouped_mm takes one dtype.
    if not isinstance(w, Tensor) or w.dtype.itemsize == 1:
        return x
    if x.dtype != w.dtype and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        return x.to(w.dtype)
    return x


# --- which modules dispatch ------------------------------------------------------------------------------------------
def own_seam(module: nn.Module) -> type[nn.Module] | None:
    """Our class for a module whose class transformers never dispatches; None if there is none."""
    cls = type(module)
    if "forward" in module.__dict__:
        return None
    found = _OWN_SEAMS.get(f"{cls.__module__}.{cls.__qualname__}")
    if found is None:
        ours = cls.__module__.startswith(f"{__package__}.") and (cls.__module__.split(".")[-1], cls.__name__)
        return cls if ours in _OWN_SEAMS.values() else None
    file, name = found
    return getattr(importlib.import_module(f".{file}", __package__), name)  # type: ignore[no-any-return]


def dispatches(module: nn.Module) -> bool:
    """Whether this module's forward asks the registry: tried, not guessed.

    Its forward is called once with a placeholder under a registered probe. A decorated class hands the placeholder to
    the probe and computes nothing; any other class does not reach it.
    """
    config = getattr(module, "config", None)
    if config is None or not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts")):
        return False
    interface = _interface()
    reached: list[nn.Module] = []

    def probe(self: nn.Module, *args: object) -> None:
        reached.append(self)

    interface._global_mapping[_PROBE] = probe
    before = module.config
    try:
        module.config = config_with(config, _PROBE)
        # An instance may carry its own forward (Liger binds one); accelerate keeps what it wraps in _old_forward.
        forward = module.__dict__.get("_old_forward", module.forward)
        forward(None, None, None)
    except Exception:  # whatever a foreign forward raises on a placeholder, it did not dispatch
        return False
    finally:
        module.config = before
        del interface._global_mapping[_PROBE]
    return reached == [module]


def config_with(config: Any, name: str) -> Any:
    """A shallow copy of a transformers config that selects another experts implementation.

    The switch lives in the config, which all layers share: a copy per model is what makes it per module. The internal
    attribute is set, since the public one would write through to the shared sub-configs.
    """
    config = copy.copy(config)
    config._experts_implementation_internal = name
    return config


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of experts: by its class name, or by 3-D parameters beside ``num_experts``."""
    own = [p.ndim for p in (*module.parameters(recurse=False), *_bytes_of(module))]
    name = type(module).__name__.lower()
    if "expert" in name and "shared" not in name:
        return bool(own) or isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return 3 in own and hasattr(module, "num_experts")


def _bytes_of(module: nn.Module) -> list[Tensor]:
    """The 8-bit weights of a module: parameters, or buffers as ``quantize_experts`` leaves them."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return [t for t in own if t.ndim == 3 and t.dtype.itemsize == 1]


def is_8_bit(module: nn.Module) -> bool:
    """Whether the expert weights of a module are quantized already, by whoever."""
    return bool(_bytes_of(module)) or any(p.dtype.itemsize == 1 for p in module.parameters(recurse=False))


def why_not(module: nn.Module) -> str:
    """Why a module that looks like experts is left alone, and what to do."""
    name = type(module).__name__
    if is_8_bit(module):
        return f"{name} holds 8-bit weights already: load the model in bf16 to train it"
    if getattr(type(module), "__module__", "").startswith("liger_kernel"):
        return f"{name} comes from Liger, which replaced the experts class: load the model with Liger's swiglu=False"
    if hasattr(module, "has_gate"):
        return f"{name} has a forward that does not ask the transformers registry: undo that replacement first"
    return f"{name} does not use the transformers experts interface: the switch would be ignored silently"


def _interface() -> Any:
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(
            f"mxmoe.integrations.huggingface needs transformers >= 5.17 with its experts interface ({error}): "
            'pip install "mxmoe[hf]"'
        ) from error
    return ExpertsInterface
