"""transformers 5.x with MXFP8 expert weights: experts functions for both of its registries.

    mxmoe.integrations.huggingface_fp8.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="mxmoe")     # a checkpoint of format "hf"

``FP8ExpertsInterface`` serves modules that transformers built for an fp8 checkpoint (``FP8Experts``);
``ExpertsInterface`` serves modules whose weights ``mxmoe.quantize_experts`` replaced, under the name ``MX_NAME``.
Source: ``transformers/integrations/finegrained_fp8.py``, ``moe.py``, 5.17.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import BLOCK, SCALE_DTYPE
from ..nn.mx_experts import ServingWeight, mx_experts_forward
from ..ops.decode import remembered
from ..recipe import MXRecipe
from . import huggingface

NAME = "mxmoe"
MX_NAME = "mxmoe_mxfp8"
"""Name of the experts implementation that modules changed by ``quantize_experts`` carry."""
RECIPE_ATTRIBUTE = "mxmoe_recipe"
SERVING_RECIPE = MXRecipe(activations="bf16")
"""Weight-only: activations stay in bf16. ``MXRecipe()`` rounds them too, as a chip with MXFP8 tensor cores does."""


def register(name: str = NAME, *, recipe: MXRecipe | None = None) -> None:
    """Make both experts functions known to transformers. Idempotent.

    Args: ``recipe``: of modules that carry none; None: what an earlier call said, weight-only at first.
    Raises: ``ImportError`` without transformers 5.x; ``ValueError`` if the name is taken.
    """
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(
            f"mxmoe.integrations.huggingface_fp8 needs transformers >= 5.17 ({error}): pip install 'mxmoe[hf]'"
        ) from error
    forward = functools.partial(fp8_experts_forward, recipe=recipe)
    present = FP8ExpertsInterface._global_mapping.get(name)
    ours = isinstance(present, functools.partial) and present.func is fp8_experts_forward
    if present is not None and not ours:
        raise ValueError(
            f"fp8 experts implementation {name!r} is registered in transformers already: take another name"
        )
    if present is None or recipe is not None:
        FP8ExpertsInterface.register(name, forward)
    ExpertsInterface.register(MX_NAME, mx_module_forward)
    # Where transformers reads an fp8 checkpoint as bf16 (no GPU), it looks for the name among the ordinary ones.
    if name not in ExpertsInterface._global_mapping:
        huggingface.register(name)


# --- modules of quantize_experts -------------------------------------------------------------------------------------
def mx_module_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts function of a module whose weights are MXFP8 buffers: ``(T, H)`` -> ``(T, H)``."""
    up = "gate_up_proj" if self.has_gate else "up_proj"
    has_bias = getattr(self, "has_bias", False)
    return _forward(
        self,
        hidden_states,
        top_k_index,
        top_k_weights,
        serving_weight(self, up, f"{up}_scale"),
        serving_weight(self, "down_proj", "down_proj_scale"),
        getattr(self, f"{up}_bias") if has_bias else None,
        self.down_proj_bias if has_bias else None,
        getattr(self, RECIPE_ATTRIBUTE, SERVING_RECIPE),
    )


# --- modules of an fp8 checkpoint ------------------------------------------------------------------------------------
def fp8_experts_forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    recipe: MXRecipe | None = None,
) -> Tensor:
    """The experts function of transformers' ``FP8Experts`` with 1 x 32 blocks and e8m0 scales: an MXFP8 checkpoint.

    Raises: ``NotImplementedError`` for another block size, scale format or activation scheme, naming it.
    """
    up = "gate_up_proj" if self.has_gate else "up_proj"
    weight = getattr(self, up)
    if weight.element_size() > 1:
        raise NotImplementedError("this fp8 model was expanded when it was loaded: its experts are not MXFP8 any more")
    block = tuple(self.block_size or ())
    scale = getattr(self, f"{up}_scale_inv")
    if block != (1, BLOCK) or scale.dtype not in (SCALE_DTYPE, torch.uint8) or weight.dtype != torch.float8_e4m3fn:
        raise NotImplementedError(
            f'experts_implementation="{NAME}" reads MXFP8 (e4m3, weight_block_size [1, 32], scale_fmt "ue8m0"); this '
            f"checkpoint has {weight.dtype}, block size {list(block)}, scales {scale.dtype}"
        )
    if self.activation_scheme != "dynamic":
        raise NotImplementedError(f"activation_scheme {self.activation_scheme!r}: MXFP8 scales are dynamic")
    return _forward(
        self,
        hidden_states,
        top_k_index,
        top_k_weights,
        serving_weight(self, up, f"{up}_scale_inv"),
        serving_weight(self, "down_proj", "down_proj_scale_inv"),
        None,
        None,
        getattr(self, RECIPE_ATTRIBUTE, None) or recipe or SERVING_RECIPE,
    )


# --- both ------------------------------------------------------------------------------------------------------------
def _forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: ServingWeight,
    down: ServingWeight,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    recipe: MXRecipe,
) -> Tensor:
    if fuses_swiglu(self):
        activate = None
    else:
        activate = self._apply_gate if self.has_gate else self.act_fn
    return mx_experts_forward(
        hidden_states,
        top_k_index,
        top_k_weights,
        up,
        down,
        num_experts=self.num_experts,
        activate=activate,
        up_bias=up_bias,
        down_bias=down_bias,
        recipe=recipe,
    )


def default_gate(module: Any) -> bool:
    """Whether the module's gate is ``act_fn(gate) * up`` of concatenated halves, or it has no gate at all."""
    from transformers.integrations.finegrained_fp8 import FP8Experts
    from transformers.integrations.moe import _default_apply_gate

    if not getattr(module, "has_gate", True):
        return True
    if isinstance(module, FP8Experts):
        return module.swiglu_alpha is None and module.limit is None
    return type(module)._apply_gate is _default_apply_gate and bool(getattr(module, "is_concatenated", True))


def fuses_swiglu(module: nn.Module) -> bool:
    """Whether the gate is SwiGLU in the order that the fused kernel computes."""
    if not getattr(module, "has_gate", True) or not default_gate(module):
        return False
    act = getattr(module, "act_fn", None)
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"


def serving_weight(module: Any, weight: str, scale: str) -> ServingWeight:
    """Weight and scale of a module as the decode kernel takes them.

    On a GPU, what it must know about them is found at the first eager call and kept in two buffers that no state_dict
    has. It is found anew when weight or scale were written to, replaced or moved, and dropped by load_state_dict.
    Of tensors made under inference mode, whose writes leave no trace, nothing is kept. Inside ``torch.compile`` nothing
    can be compared: after a write in place other than load_state_dict, call the module once without it.
    """
    qdata, scales = getattr(module, weight), getattr(module, scale)
    q, s = qdata.detach().view(torch.float8_e4m3fn), scales.detach().view(torch.uint8)
    packed, top = getattr(module, f"{weight}_packed", None), getattr(module, f"{weight}_top", None)
    if torch.compiler.is_compiling() or not q.is_cuda:
        return ServingWeight(q, s, packed, top)
    facts = remembered(q, s, at_once=True)
    if module not in _hooked:
        _hooked.add(module)
        module.register_load_state_dict_pre_hook(_drop_facts)
    if facts is None:
        if not torch.cuda.is_current_stream_capturing():  # made under inference mode
            _drop_facts(module)
        return ServingWeight(q, s)
    if packed is not facts[0]:  # what compiled code reads
        for name, value in zip((f"{weight}_packed", f"{weight}_top"), facts, strict=True):
            module.register_buffer(name, value, persistent=False)
    return ServingWeight(q, s, *facts)


_hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _drop_facts(module: nn.Module, *_: object) -> None:
    """The weights are about to be overwritten: compiled code, which compares nothing, does without facts from here."""
    for name in [n for n in module._buffers if n.endswith(("_packed", "_top"))]:
        del module._buffers[name]
