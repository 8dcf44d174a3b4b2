"""Does MXFP8 train like bf16? A Mixture-of-Experts language model on the Python standard library, byte by byte.

    python benchmarks/convergence.py [--steps 2000] [--out results/convergence.jsonl] [--plot results/convergence.png]

Three runs of one model: bf16 experts with two seeds (other weights, other batches), MXFP8 experts with the first seed
and so the first run's batches. Attention, router and embeddings are the same bf16 autocast in all three. The difference
between MXFP8 and bf16 is then compared with the difference that a seed makes. Larger than the demo's model, for a GPU:
6 layers, 512 wide, 32 experts of 256, top 4, 16384 tokens per step.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from _harness import Writer, env_line, markdown
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

KIND = "convergence"
SLACK = 0.01  # nats
VOCAB, WIDTH, LAYERS, HEADS, EXPERTS, INNER, TOP_K, LENGTH = 256, 512, 6, 8, 32, 256, 4, 256


def text(limit: int = 40_000_000) -> Tensor:
    """The source files of the standard library as bytes."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        data += path.read_bytes() + b"\0"
        if len(data) >= limit:
            break
    return torch.frombuffer(data, dtype=torch.uint8)


class Layer(nn.Module):
    """Attention and a Mixture-of-Experts MLP, pre-norm."""

    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts(EXPERTS, WIDTH, INNER)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the load-balancing loss."""
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, WIDTH))
        tokens = self.norm2(x).reshape(-1, WIDTH)
        probabilities = self.router(tokens).float().softmax(-1)
        weights, ids = probabilities.topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        load = torch.zeros(EXPERTS, device=x.device).index_add_(0, ids.view(-1), torch.ones_like(ids.view(-1)).float())
        balance = EXPERTS * (load / load.sum() * probabilities.mean(0)).sum()
        return x + self.experts(tokens.to(x.dtype), ids, weights).view(x.shape), balance


class Model(nn.Module):
    """A small decoder over bytes."""

    def __init__(self, experts: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy, and the summed balancing loss."""
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        balance = x.new_zeros(())
        for layer in self.layers:
            x, b = layer(x)
            balance = balance + b
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten()), balance


def experts_of(kind: str) -> type[nn.Module]:
    """MXFP8 experts, or the same module with bf16 GEMMs."""
    from mxmoe import nn as mx

    if kind == "mxfp8":
        return mx.Experts

    class Bf16Experts(mx.Experts):
        def _grouped_mm(self, x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
            return torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=offs)

    return Bf16Experts


def train(kind: str, seed: int, data: Tensor, args: argparse.Namespace, writer: Writer) -> None:
    """One run; its final numbers and its curve are rows."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(experts_of(kind)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    held_out, rest = data[-(1 << 18) :].to(device), data[: -(1 << 18)].to(device)
    gen = torch.Generator(device=device).manual_seed(seed)
    span = torch.arange(LENGTH + 1, device=device)

    def batch(source: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, source.shape[0] - LENGTH - 1, (args.batch, 1), device=device, generator=generator)
        rows = source[starts + span].long()
        return rows[:, :-1], rows[:, 1:]

    def loss_of(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            return model(ids, targets)

    losses = torch.zeros(args.steps, device=device)
    began = time.time()
    for step in range(args.steps):
        rate = args.lr * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, balance = loss_of(*batch(rest, gen))
        (loss + 0.01 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
        if (step + 1) % max(args.steps // 20, 1) == 0:
            print(f"{kind} seed {seed}: step {step + 1}, loss {losses[step].item():.4f}", file=sys.stderr, flush=True)
    seconds = time.time() - began
    fixed = torch.Generator(device=device).manual_seed(99)
    with torch.no_grad():
        validation = torch.stack([loss_of(*batch(held_out, fixed))[0] for _ in range(8)]).mean().item()
    curve = losses.tolist()
    tail = curve[-max(args.steps // 10, 1) :]
    result = {"train": sum(tail) / len(tail), "validation": validation, "seconds": seconds}
    writer.row(run=kind, seed=seed, steps=args.steps, tokens=args.batch * LENGTH, **result)
    writer.row(run=kind, seed=seed, curve=[round(v, 4) for v in curve[:: max(args.steps // 400, 1)]])


def plot(env: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    """Loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = next(row["steps"] for row in rows if "steps" in row)
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for row in rows:
        if "curve" in row:
            curve = torch.tensor(row["curve"])
            window = max(len(curve) // 50, 1)
            smooth = curve.unfold(0, window, 1).mean(-1)
            style = {"lw": 1.6} if row["run"] == "mxfp8" else {"lw": 1.0, "ls": "--" if row["seed"] else "-"}
            at = torch.linspace(0, steps, len(smooth))
            axis.plot(at, smooth, label=f"{row['run']}, seed {row['seed']}", **style)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, nats per byte")
    axis.set_ylim(top=2.5)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def judged(rows: list[dict[str, Any]], slack: float = SLACK) -> list[tuple[str, float, float, bool]]:
    """For both losses: its name, MXFP8 to bf16, bf16 seed to bf16 seed, whether the first is within the second."""
    runs = {(row["run"], row["seed"]): row for row in rows if "train" in row}
    base = runs["bf16", 0]
    found = []
    for name in ("train", "validation"):
        noise = abs(base[name] - runs["bf16", 1][name])
        difference = abs(base[name] - runs["mxfp8", 0][name])
        found.append((name, difference, noise, difference <= noise + slack))
    return found


def report(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The runs as a table, and the verdict."""
    runs = [row for row in rows if "train" in row]
    table = [[r["run"], r["seed"], f"{r['train']:.4f}", f"{r['validation']:.4f}", f"{r['seconds']:.1f}"] for r in runs]
    columns = ["experts", "seed", "training loss, last tenth", "held-out loss", "seconds"]
    model = f"{LAYERS} layers, {WIDTH} wide, {EXPERTS} experts of {INNER}, top {TOP_K}"
    about = f"{model}; {runs[0]['steps']} steps of {runs[0]['tokens']} bytes. Losses in nats per byte."
    lines = [env_line(env), "", about, "", markdown(columns, table), ""]
    for name, difference, noise, within in judged(rows):
        verdict = f"{'within' if within else 'BEYOND'} (slack {SLACK})"
        lines.append(f"* {name}: MXFP8 to bf16 {difference:.4f}, bf16 seed to seed {noise:.4f}: {verdict}")
    return "\n".join(lines)


def main() -> int:
    """Run and judge: 1 if MXFP8 parts from bf16 by more than a seed does, plus ``--slack``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help=f"sequences of {LENGTH} bytes")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--slack", type=float, default=SLACK, help="nats")
    parser.add_argument("--out", help="JSONL results")
    parser.add_argument("--plot", help="PNG of the curves")
    args = parser.parse_args()
    writer = Writer(args.out, KIND)
    data = text()
    for kind, seed in (("bf16", 0), ("mxfp8", 0), ("bf16", 1)):
        train(kind, seed, data, args, writer)
    if args.plot:
        plot(writer.env, writer.rows, args.plot)
    print(report(writer.env, writer.rows))
    return 0 if all(within for *_, within in judged(writer.rows, args.slack)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
