"""What the demo trains and measures: a Qwen3-MoE of bytes, one optimizer step, bytes kept for backward, GEMM error."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..observe import GemmRecord
from .text import VOCAB


@dataclass(frozen=True)
class Size:
    """A model and a training run. ``length`` and ``batch`` are bytes per piece and pieces per step."""

    hidden: int
    layers: int
    experts: int
    intermediate: int
    length: int
    batch: int
    steps: int
    rate: float  # peak learning rate

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.length * self.batch


TOP_K: Final = 2
SIZES: Final = {
    "tiny": Size(64, 2, 8, 64, length=64, batch=8, steps=60, rate=5e-3),
    "small": Size(128, 3, 8, 256, length=128, batch=8, steps=240, rate=2e-3),
    "base": Size(512, 8, 32, 512, length=512, batch=32, steps=600, rate=1e-3),
}


def build_model(size: Size, seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A transformers Qwen3-MoE that predicts bytes, with transformers' own grouped-GEMM experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=VOCAB,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.hidden // 32),
        num_key_value_heads=max(1, size.hidden // 64),
        head_dim=32,
        intermediate_size=size.intermediate,
        moe_intermediate_size=size.intermediate,
        num_experts=size.experts,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(seed)
    model: Any = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model.to(device, dtype).train()  # type: ignore[no-any-return]


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold stacked expert weights."""
    return [m for m in model.modules() if hasattr(m, "gate_up_proj") and getattr(m.gate_up_proj, "ndim", 0) == 3]


def expert_weights(model: nn.Module) -> int:
    """Number of expert weights, elements."""
    return sum(p.numel() for m in expert_modules(model) for p in (m.gate_up_proj, m.down_proj) if isinstance(p, Tensor))


class Run:
    """One model in training: AdamW, warm-up and cosine decay, clipped gradients, fp32 master weights."""

    def __init__(self, name: str, model: nn.Module, size: Size, steps: int) -> None:
        self.name = name
        self.model = model
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.saved_bytes = 0
        self._params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        low = any(p.dtype != torch.float32 for p in self._params)
        # bf16 weights cannot take updates below 2^-9 of their value: the optimizer works on fp32 copies.
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._params] if low else self._params
        self._optimizer = torch.optim.AdamW(self._masters, lr=size.rate, betas=(0.9, 0.95), weight_decay=0.01)
        warmup = max(1, min(steps // 10, 100))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps)))),
        )

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._params[0].device

    def step(self, pieces: Tensor) -> float:
        """One optimizer step on ``(B, L + 1)`` bytes; returns the cross-entropy in nats per byte."""
        _wait(self.device)
        begin = time.perf_counter()
        loss, total = self._loss(pieces)
        total.backward()
        if self._masters is not self._params:
            for master, param in zip(self._masters, self._params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        if self._masters is not self._params:
            with torch.no_grad():
                torch._foreach_copy_(self._params, self._masters)
        self.model.zero_grad(set_to_none=True)
        self._optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(value)
        return value

    @torch.no_grad()
    def evaluate(self, batches: list[Tensor]) -> float:
        """Mean cross-entropy over ``batches``, nats per byte."""
        self.model.eval()
        total = sum(self._loss(pieces)[0].item() for pieces in batches) / len(batches)
        self.model.train()
        return total

    def tokens_per_second(self, tokens: int) -> float:
        """Median speed, the first steps left out."""
        timed = sorted(self.seconds[min(5, len(self.seconds) - 1) :])
        return tokens / timed[len(timed) // 2]

    def _loss(self, pieces: Tensor) -> tuple[Tensor, Tensor]:
        pieces = pieces.to(self.device)
        out = self.model(input_ids=pieces[:, :-1])
        loss = nn.functional.cross_entropy(out.logits.float().flatten(0, 1), pieces[:, 1:].flatten())
        aux = getattr(out, "aux_loss", None)
        coefficient = getattr(self.model.config, "router_aux_loss_coef", 0.0)
        return loss, loss if aux is None else loss + coefficient * aux.to(loss.device)


def smooth(losses: list[float], window: int) -> list[float]:
    """Trailing mean over ``window`` steps; entry i belongs to step ``window - 1 + i``."""
    return [sum(losses[i - window + 1 : i + 1]) / window for i in range(window - 1, len(losses))]


def largest_gap(a: list[float], b: list[float], window: int) -> tuple[float, int]:
    """Largest distance of two smoothed curves, nats, and the step (from 1) where it is."""
    gaps = [abs(x - y) for x, y in zip(smooth(a, window), smooth(b, window), strict=True)]
    # A NaN compares false with everything: look for it first, or max() would pass over it.
    worst = next((i for i, gap in enumerate(gaps) if math.isnan(gap)), None)
    if worst is None:
        worst = max(range(len(gaps)), key=gaps.__getitem__)
    return gaps[worst], worst + window


@contextlib.contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count what the expert layers keep for backward inside the block: distinct storages, parameters left out."""
    counter = SavedBytes({p.untyped_storage().data_ptr() for p in model.parameters()})
    hooks = []
    for module in expert_modules(model):
        hooks.append(module.register_forward_pre_hook(counter.enter))
        hooks.append(module.register_forward_hook(counter.leave, always_call=True))
    try:
        yield counter
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class SavedBytes:
    """See :func:`count_saved_bytes`."""

    known: set[int]
    total: int = 0
    _open: list[torch.autograd.graph.saved_tensors_hooks] = field(default_factory=list)

    def enter(self, *_: object) -> None:
        """Before a layer's forward."""
        context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        context.__enter__()
        self._open.append(context)

    def leave(self, *_: object) -> None:
        """After a layer's forward."""
        self._open.pop().__exit__()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def sqnr_db(value: Tensor, reference: Tensor) -> float:
    """Signal to quantization noise, dB: ``10 log10(|reference|^2 / |value - reference|^2)``."""
    noise = (value.double() - reference.double()).square().sum().item()
    signal = reference.double().square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def gemm_sqnr(records: list[GemmRecord]) -> dict[str, list[float]]:
    """SQNR of every recorded GEMM against the fp32 product of its high-precision operands, by op, dB.

    Under ``save="mxfp8"`` backward has no high-precision x: it is taken from the fprop of the same layer.
    """
    found: dict[str, list[float]] = {}
    forwards = [r for r in records if r.op == "fprop"]
    for r in records:
        b = r.b
        if r.op == "wgrad" and b is None:
            twin = next(f for f in reversed(forwards) if (f.m, f.n, f.k) == (r.m, r.n, r.k))
            forwards.remove(twin)
            b = twin.a
        assert r.a is not None and b is not None and r.offs is not None and r.out is not None
        exact = torch.zeros_like(r.out, dtype=torch.float32)
        begin = 0
        for g, end in enumerate(r.offs.tolist()):
            rows = r.a[begin:end].float()
            match r.op:
                case "fprop":
                    exact[begin:end] = rows @ b[g].float().mT
                case "dgrad":
                    exact[begin:end] = rows @ b[g].float()
                case "wgrad":
                    exact[g] = rows.mT @ b[begin:end].float()
            begin = end
        found.setdefault(r.op, []).append(sqnr_db(r.out, exact))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
