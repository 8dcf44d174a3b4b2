"""The transformers experts function: parity with eager on every family, sentinels, no tokens, registration."""

import functools
import types

import pytest
import torch
import torch._dynamo.testing
from cases import DEVICE, sqnr

transformers = pytest.importorskip("transformers")

from tiny_models import FAMILIES, IGNORED, tiny, token_ids

import mxmoe
from mxmoe.integrations import huggingface


def exact_grouped_mm(x, w, offs, bias, *, recipe=None):
    """Per-group products in x's dtype; rows without a group are zeros. What a GEMM without quantization gives."""
    pieces, start = [], 0
    for group, end in enumerate(offs.tolist()):
        piece = x[start:end] @ w[group]
        pieces.append(piece if bias is None else piece + bias[group])
        start = end
    pieces.append(x.new_zeros(x.shape[0] - start, w.shape[-1]))
    return torch.cat(pieces)


@pytest.fixture
def high_precision(monkeypatch):
    """The GEMM seam without quantization: what is left must agree with eager to rounding."""
    monkeypatch.setattr(huggingface, "_grouped_mm", exact_grouped_mm)
    monkeypatch.setattr(huggingface, "unfused_reason", lambda module: "a test")


def run(model, ids):
    """Logits and all gradients of one step."""
    model.zero_grad(set_to_none=True)
    logits = model(ids.to(DEVICE), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten().to(DEVICE))
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_eager_to_rounding(family, high_precision):
    model = tiny(family).to(DEVICE).eval()  # eval: phimoe's router adds noise in training
    ids = token_ids()
    logits, grads = run(model, ids)
    report = mxmoe.convert(model)
    assert list(report.names) == FAMILIES[family][3]
    got_logits, got_grads = run(model, ids)
    torch.testing.assert_close(got_logits, logits, rtol=1e-4, atol=1e-4)
    assert got_grads.keys() == grads.keys()
    for name, grad in grads.items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(
            got_grads[name], grad, rtol=1e-3, atol=1e-4 * scale + 1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


# Module by module: in a whole model a rounding can flip a router's choice, which is not an error of the experts.
# Measured on the CPU: 23.1 dB or more for results and gradients, except 21.9 for one family's routing weights.
@pytest.mark.parametrize("family", FAMILIES)
def test_mxfp8_within_budget_of_eager(family):
    model = tiny(family).to(DEVICE).eval()
    experts = model.get_submodule(FAMILIES[family][3][0])
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = torch.randn(64, hidden, device=DEVICE, requires_grad=True)
    weights = torch.rand(64, 2, device=DEVICE, requires_grad=True)
    ids = torch.rand(64, experts.num_experts, device=DEVICE).topk(2).indices
    grad = torch.randn(64, hidden, device=DEVICE)

    def step():
        out = experts(x, ids, weights)
        return [out, *torch.autograd.grad(out, [x, weights, *experts.parameters()], grad)]

    names = ["out", "x", "weights", *(name for name, _ in experts.named_parameters())]
    expected = step()
    mxmoe.convert(model)
    for name, got, want in zip(names, step(), expected, strict=True):
        assert sqnr(got, want) > 20, name


def test_llama4_within_budget_of_eager():
    """Rows of zeros are not computed; where they arise and what comes back for them stays as it was."""
    model = tiny("llama4").to(DEVICE).eval()
    moe = model.get_submodule(IGNORED["llama4"][3][0].removesuffix(".experts"))
    x = torch.randn(24, 64, device=DEVICE, requires_grad=True)
    grad = torch.randn(24, 64, device=DEVICE)

    def step():
        out, _ = moe(x)
        return [out, *torch.autograd.grad(out, [x, *moe.parameters()], grad)]

    names = ["out", "x", *(name for name, _ in moe.named_parameters())]
    expected = step()
    mxmoe.convert(model)
    for name, got, want in zip(names, step(), expected, strict=True):
        assert sqnr(got, want) > 20, name


def test_step3p7_within_budget_of_eager():
    """A clamped gate and no decorator: a seam of our own, step by step."""
    step3p7 = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    sizes = {"num_local_experts": 4, "hidden_size": 64, "moe_intermediate_size": 32, "hidden_act": "silu"}
    layer = torch.nn.Module()
    layer.experts = step3p7.Step3p7Experts(types.SimpleNamespace(**sizes), swiglu_limit=2.0).to(DEVICE)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, p.shape[-1] ** -0.5)
    x = torch.randn(24, 64, device=DEVICE, requires_grad=True)
    ids = torch.rand(24, 4, device=DEVICE).topk(2).indices
    weights = torch.rand(24, 2, device=DEVICE)
    grad = torch.randn_like(x)
    expected = layer.experts(x, ids, weights)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    report = mxmoe.convert(layer)
    assert [(r.name, r.unfused) for r in report.replaced] == [("experts", "a gate of its own")]
    out = layer.experts(x, ids, weights)
    assert sqnr(out, expected) > 20
    assert sqnr(torch.autograd.grad(out, x, grad)[0], expected_grad) > 15  # the clamp's edge moves with the rounding
    mxmoe.revert(report)
    assert torch.equal(layer.experts(x, ids, weights), expected)


def test_mxfp8_really_runs():
    model = tiny("qwen3_moe").to(DEVICE)
    mxmoe.convert(model)
    with mxmoe.observe() as records:
        run(model, token_ids())
    assert sorted(r.op for r in records) == ["dgrad"] * 4 + ["fprop"] * 4 + ["wgrad"] * 4


def experts_module(family="qwen3_moe"):
    model = tiny(family).to(DEVICE).eval()
    report = mxmoe.convert(model)
    return model.get_submodule(report.names[0])


def test_expert_parallel_sentinels(high_precision):
    """Ids equal to num_experts belong to another rank: weight 0, no contribution, whatever the rest of the row is."""
    experts = experts_module()
    x = torch.randn(12, 64, device=DEVICE, requires_grad=True)
    ids = torch.randint(0, 8, (12, 2), device=DEVICE)
    weights = torch.rand(12, 2, device=DEVICE)
    there = torch.rand(12, 2, device=DEVICE) < 0.5
    there[3] = False  # a token none of whose experts is here
    masked = experts(x, ids.where(there, 8), weights * there)
    (grad,) = torch.autograd.grad(masked.sum(), x)
    expected = sum(exact_one(experts, x, ids[:, j]) * (weights * there)[:, j, None] for j in range(2))
    torch.testing.assert_close(masked, expected, rtol=1e-4, atol=1e-5)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
    assert (masked[3] == 0).all()


def exact_one(experts, x, ids):
    gate_up = torch.einsum("th,tnh->tn", x, experts.gate_up_proj[ids])
    gate, up = gate_up.chunk(2, -1)
    return torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, experts.down_proj[ids])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_no_tokens(family):
    experts = experts_module(family)
    hidden = experts.down_proj.shape[1 if not experts.is_transposed else 2]
    x = torch.zeros(0, hidden, device=DEVICE, requires_grad=True)
    out = experts(x, torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, device=DEVICE))
    assert out.shape == (0, hidden)
    out.sum().backward()
    for name, p in experts.named_parameters():
        assert p.grad is not None, name
        assert p.grad.shape == p.shape
        assert (p.grad == 0).all(), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_frozen_weights_and_frozen_tokens(family):
    experts = experts_module(family)
    x = torch.randn(9, 64, device=DEVICE)
    ids = torch.randint(0, 6, (9, 2), device=DEVICE)
    weights = torch.rand(9, 2, device=DEVICE)
    with torch.no_grad():  # evaluation first, then training with the same weights
        experts(x, ids, weights)
    experts.requires_grad_(False)
    y = x.clone().requires_grad_()
    with mxmoe.observe() as records:
        experts(y, ids, weights).sum().backward()
    assert y.grad is not None
    assert not [r for r in records if r.op == "wgrad"]
    experts.requires_grad_(True)
    with mxmoe.observe() as records:
        experts(x, ids, weights).sum().backward()
    assert experts.down_proj.grad is not None
    assert len([r for r in records if r.op == "dgrad"]) == 1  # through the down projection only


def test_bf16_model_and_fp32_tokens():
    experts = experts_module().to(torch.bfloat16)
    ids, weights = torch.randint(0, 8, (5, 2), device=DEVICE), torch.rand(5, 2, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        out = experts(torch.randn(5, 64, device=DEVICE, dtype=dtype), ids, weights)
        assert out.dtype == dtype
        assert out.isfinite().all()


def test_autocast():
    model = tiny("qwen3_moe").to(DEVICE)
    mxmoe.convert(model)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits = model(token_ids().to(DEVICE), use_cache=False).logits
    logits.float().sum().backward()
    grad = model.model.layers[0].mlp.experts.gate_up_proj.grad
    assert grad.dtype == torch.float32
    assert grad.isfinite().all()


def test_generate():
    model = tiny("qwen3_moe").to(DEVICE).eval()
    mxmoe.convert(model)
    out = model.generate(token_ids(2, 5).to(DEVICE), max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 9)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_compiles_without_graph_breaks(family):
    experts = experts_module(family)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, fullgraph=True, backend=counter)
    for tokens in (6, 9, 14):
        args = (torch.randn(tokens, 64), torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2))
        args = [t.to(DEVICE) for t in args]
        out = compiled(*args)
        out.sum().backward()
        torch.testing.assert_close(out, experts(*args))
    assert counter.frame_count <= 2  # the first size, then any


def test_switch_without_convert():
    huggingface.register()
    model = tiny("mixtral").to(DEVICE)
    ids = token_ids().to(DEVICE)
    before = model(ids, use_cache=False).logits
    model.set_experts_implementation("mxmoe")
    with mxmoe.observe() as records:
        after = model(ids, use_cache=False).logits
    assert len(records) == 4
    assert not torch.equal(before, after)
    assert "mxmoe" not in model.config.to_json_string()


def test_register_is_idempotent_and_guards_names():
    huggingface.register()
    huggingface.register()
    with pytest.raises(ValueError, match="own"):
        huggingface.register(recipe=mxmoe.MXRecipe(scale_mode="floor"))
    with pytest.raises(ValueError, match="grouped_mm"):
        huggingface.register("grouped_mm")
    huggingface.register("mxmoe_floor", recipe=mxmoe.MXRecipe(scale_mode="floor"))
    model = tiny("mixtral").to(DEVICE)
    ids = token_ids().to(DEVICE)
    logits = {}
    for name in ("mxmoe", "mxmoe_floor"):
        model.set_experts_implementation(name)
        logits[name] = model(ids, use_cache=False).logits
    assert not torch.equal(logits["mxmoe"], logits["mxmoe_floor"])


def test_seam_is_one_function(monkeypatch):
    calls = []
    original = huggingface._grouped_mm

    @functools.wraps(original)
    def counted(*args, **kwargs):
        calls.append(args[1].shape)
        return original(*args, **kwargs)

    monkeypatch.setattr(huggingface, "_grouped_mm", counted)
    experts = experts_module("gpt_oss")
    experts(
        torch.randn(4, 64, device=DEVICE), torch.randint(0, 6, (4, 2), device=DEVICE), torch.rand(4, 2, device=DEVICE)
    )
    assert [tuple(s) for s in calls] == [(6, 64, 128), (6, 64, 64)]


# --- CUDA graphs -----------------------------------------------------------------------------------------------------
def converted_block(dtype=torch.bfloat16):
    """The MoE block of a converted qwen3_moe, router included, and what it gives for some tokens."""
    model = tiny("qwen3_moe").to(DEVICE, dtype)
    report = mxmoe.convert(model)
    block = model.get_submodule(report.names[0].removesuffix(".experts"))

    def step(x, grad, backward=True):
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        return [out, *(torch.autograd.grad(out, [x, *block.parameters()], grad) if backward else ())]

    return block, step


def block_tokens(seed, dtype=torch.bfloat16):
    """Tokens and a gradient, ``(1, 24, 64)``."""
    gen = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(1, 24, 64, generator=gen).to(DEVICE, dtype) for _ in range(2))
    return x.requires_grad_(), grad


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_cuda_graph_of_a_block(backward):
    """Captured once, replayed with tokens that are routed otherwise: the bits of eager."""
    block, step = converted_block()
    x, grad = block_tokens(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.set_grad_enabled(backward):
        for _ in range(2):
            step(x, grad, backward)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.set_grad_enabled(backward):
        captured = step(x, grad, backward)
    routings = set()
    for seed in (1, 2, 0):
        new_x, new_grad = block_tokens(seed)
        with torch.no_grad():
            x.copy_(new_x)
            grad.copy_(new_grad)
            routings.add(tuple(block.gate(new_x.view(-1, 64))[-1].flatten().tolist()))
        graph.replay()
        with torch.set_grad_enabled(backward):
            expected = step(new_x, new_grad, backward)
        for i, (got, want) in enumerate(zip(captured, expected, strict=True)):
            assert torch.equal(got, want), (seed, i)
    assert len(routings) == 3


@pytest.mark.gpu
def test_block_does_not_sync():
    _, step = converted_block()
    x, grad = block_tokens(0)
    step(x, grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_block_with_a_router():
    """What the graph tests capture, without a GPU: every parameter of the block has a gradient."""
    block, step = converted_block(torch.float32)
    x, grad = block_tokens(0, torch.float32)
    found = step(x, grad)
    names = ["out", "x", *(name for name, _ in block.named_parameters())]
    assert "gate.weight" in names
    for name, t in zip(names, found, strict=True):
        assert t.isfinite().all(), name
        assert t.abs().sum() > 0, name
    ids = {tuple(block.gate(block_tokens(s, torch.float32)[0].view(-1, 64))[-1].flatten().tolist()) for s in (0, 1)}
    assert len(ids) == 2
