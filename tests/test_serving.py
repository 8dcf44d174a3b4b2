"""quantize_experts: models of every family in MXFP8, what survives, what is reported, what is refused."""

import copy
import io
import pickle
import re

import cases
import pytest
import tiny_models
import torch
from cases import DEVICE, E4M3, assert_bitwise

import mxmoe
from mxmoe import MXRecipe, serving
from mxmoe.integrations import huggingface_fp8
from mxmoe.nn.mx_experts import ServingWeight, mx_experts_forward
from mxmoe.ops import decode
from mxmoe.reference import quantize

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "nemotron_h", "minimax_m2")


def logits(model, ids=None):
    ids = tiny_models.token_ids() if ids is None else ids
    with torch.no_grad():
        return model(ids.to(next(model.parameters()).device)).logits.float()


def quantized(family="qwen3_moe", *, dtype=torch.float32, **kwargs):
    model = tiny_models.tiny(family, dtype=dtype).eval().to(DEVICE)
    return model, mxmoe.quantize_experts(model, progress=False, **kwargs)


def with_rounded_experts(family, report, dtype=torch.float32):
    """The same model, its experts rounded to MXFP8 in high precision and run by transformers."""
    model = tiny_models.tiny(family, dtype=dtype).eval().to(DEVICE)
    for name in report.names:
        module = model.get_submodule(name)
        for weight in serving.weights_of(module):
            w = getattr(module, weight).data
            source = w.mT if module.is_transposed else w
            rounded = quantize.fake_quantize(source, "rowwise", None, E4M3, "rceil", torch.float32)
            w.copy_(rounded.mT if module.is_transposed else rounded)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family):
    """Equal to transformers on rounded weights; within the budget of the model in high precision."""
    model, report = quantized(family)
    assert list(report.names) == tiny_models.FAMILIES[family][3]
    rounded = logits(with_rounded_experts(family, report))
    actual = logits(model)
    # On a GPU activations are bf16; a token whose best experts lie close together may choose others (mixtral: 4.4e-2).
    tolerance = 1e-4 if DEVICE == "cpu" else 6e-2
    assert (actual - rounded).norm() <= tolerance * rounded.norm()
    exact = logits(tiny_models.tiny(family).eval().to(DEVICE))
    assert cases.sqnr(actual, exact) >= 20  # measured: 24 to 33


@pytest.mark.parametrize("recipe", [MXRecipe(activations="bf16"), MXRecipe()], ids=["weight_only", "mxfp8"])
def test_recipes(recipe):
    model, report = quantized(recipe=recipe)
    assert report.recipe == recipe
    exact = logits(tiny_models.tiny("qwen3_moe").eval().to(DEVICE))
    assert cases.sqnr(logits(model), exact) >= 18  # measured: 28 and 25


def test_report():
    model, report = quantized()
    assert [layer.weight for layer in report.layers] == ["gate_up_proj", "down_proj"] * 2
    for layer in report.layers:
        module = model.get_submodule(layer.module)
        assert layer.bytes_before == 4 * module.num_experts * layer.shape[1] * layer.shape[2]
        assert layer.bytes_after * 128 == layer.bytes_before * 33  # 1 + 1/32 bytes instead of 4
        assert 31 <= layer.sqnr_db <= 32.5
    text = str(report)
    assert re.search(r"2 expert modules are MXFP8: .* -> .* \(0\.26x\)", text)
    assert "model.layers.1.mlp.experts  down_proj" in text
    with pytest.raises(ValueError, match="cannot be reverted: load the model again"):
        mxmoe.revert(report)


def test_what_survives():
    """``.to(dtype)``, deepcopy, pickle, state_dict, switching the implementation of the model: the same bytes."""
    model, _ = quantized(dtype=torch.bfloat16)
    expected = logits(model)
    before = {k: v.clone() for k, v in model.state_dict().items() if "experts" in k}
    buffers = ("down_proj", "down_proj_scale", "gate_up_proj", "gate_up_proj_scale")
    assert sorted(before)[:4] == [f"model.layers.0.mlp.experts.{name}" for name in buffers]
    assert all(v.dtype == torch.uint8 for v in before.values())
    model.to(torch.float32).to(torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    for k, v in before.items():
        cases.assert_bitwise(model.state_dict()[k], v, k)
    cases.assert_bitwise(logits(model), expected)
    cases.assert_bitwise(logits(copy.deepcopy(model)), expected)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = tiny_models.tiny("qwen3_moe", dtype=torch.bfloat16, seed=1).eval().to(DEVICE)
    mxmoe.quantize_experts(other, progress=False)
    logits(other)  # on a GPU: facts about weights that are about to change
    other.load_state_dict(torch.load(buffer, weights_only=True))
    cases.assert_bitwise(logits(other), expected)


def test_twice_is_a_no_op():
    model, first = quantized()
    again = mxmoe.quantize_experts(model, progress=False)
    assert again.names == first.names
    assert not any(entry.changed for entry in again.replaced)
    assert again.layers == ()


def test_include_exclude_and_nothing():
    model = tiny_models.tiny("qwen3_moe")
    report = mxmoe.quantize_experts(model, exclude="*.0.mlp.experts", progress=False)
    assert report.names == ("model.layers.1.mlp.experts",)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, torch.nn.Parameter)
    assert report.skipped[0].reason == "excluded by '*.0.mlp.experts'"
    with pytest.raises(ValueError, match="matches no expert module"):
        mxmoe.quantize_experts(tiny_models.tiny("qwen3_moe"), include="layers.0", progress=False)
    with pytest.raises(ValueError, match="found nothing to quantize in Linear"):
        mxmoe.quantize_experts(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="float8_e4m3fn in 1 x 32 blocks"):
        mxmoe.quantize_experts(model, recipe=MXRecipe(elem_dtype=torch.float8_e5m2))
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got dict"):
        mxmoe.quantize_experts({})


def test_save_pretrained_is_refused(tmp_path):
    """Its files would hold bytes under the names of weights, and load without an error."""
    model, _ = quantized()
    for one in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"use mxmoe\.save_checkpoint"):
            one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    cases.assert_bitwise(logits(torch.load(buffer, weights_only=False)), logits(model))


def test_weights_without_memory_are_not_quantized():
    model = tiny_models.tiny("qwen3_moe").to("meta")
    with pytest.raises(ValueError, match="weights without memory"):
        mxmoe.quantize_experts(model, progress=False, measure=False)
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.float32


def test_generate_uses_the_kernel():
    model, _ = quantized(dtype=torch.bfloat16)
    ids = tiny_models.token_ids(2, 5).to(DEVICE)
    with mxmoe.observe() as seen:
        out = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
    assert out.shape == (2, 9)
    assert len(seen) == 4 * 2 * 2  # steps, layers, projections
    assert {record.backend for record in seen} == {"triton" if DEVICE == "cuda" else "reference"}
    assert seen[-1].m == 2 * 2  # one token of two sequences, top 2


def test_gradients_to_tokens():
    model, _ = quantized()
    embedding = model.get_input_embeddings().weight
    model(tiny_models.token_ids().to(DEVICE)).logits.float().square().mean().backward()
    assert embedding.grad.norm() > 0
    assert not any("experts" in name for name, p in model.named_parameters() if p.grad is not None)


def serving_weights(experts=4, hidden=64, inner=32, seed=0):
    def one(n, k):
        w = cases.scaled_randn(experts, n, k, dtype=torch.float32, device="cpu", seed=seed) * 2.0**-4
        q, s = quantize.quantize_rowwise(w, None, False, E4M3, "rceil")
        return ServingWeight(q.to(DEVICE), s.to(DEVICE))

    return one(2 * inner, hidden), one(hidden, inner)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_layer_with_ids_of_other_ranks(tokens):
    """Fused and step by step give the same; ids of other ranks count for nothing; no tokens at all."""
    up, down = serving_weights()
    x = cases.scaled_randn(tokens, 64, seed=1)
    ids = torch.randint(0, 6, (tokens, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def forward(ids, activate):
        recipe = MXRecipe(activations="bf16")
        return mx_experts_forward(x, ids, weights, up, down, num_experts=4, activate=activate, recipe=recipe)

    def swiglu(h):
        gate, value = h.chunk(2, -1)
        return torch.nn.functional.silu(gate) * value

    fused = forward(ids, None)
    assert fused.shape == x.shape
    assert fused.dtype == x.dtype
    assert (fused.float() - forward(ids, swiglu).float()).norm() <= 2e-2 * fused.float().norm()
    nothing = torch.full_like(ids, 4)
    assert not forward(nothing, None).any()


@pytest.mark.parametrize("fused", [True, False])
def test_operands_that_do_not_belong_together(fused):
    """Kernels would read beyond the tokens, the routing weights or the bias; ``(2I,)`` was added in part on a CPU."""
    up, down = serving_weights()
    x, ids = cases.scaled_randn(5, 64), torch.zeros(5, 2, dtype=torch.int64, device=DEVICE)
    arguments = {"x": x, "top_k_index": ids, "top_k_weights": torch.rand(5, 2, device=DEVICE)}

    def swiglu(h):
        gate, value = h.chunk(2, -1)
        return torch.nn.functional.silu(gate) * value

    def forward(num_experts=4, **changes):
        return mx_experts_forward(
            **{"up": up, "down": down, "recipe": MXRecipe(activations="bf16"), **arguments, **changes},
            num_experts=num_experts,
            activate=None if fused else swiglu,
        )

    assert forward().shape == x.shape
    for error, message, changes in (
        (ValueError, r"top_k_index must be \(T, k\) with T = 5", {"top_k_index": ids.new_zeros(6, 2)}),
        (ValueError, r"top_k_index must be \(T, k\) with T = 5", {"top_k_index": ids[:, 0]}),
        (TypeError, "top_k_index must be int64 or int32", {"top_k_index": ids.float()}),
        (ValueError, r"top_k_weights must be \(T, k\) = \(5, 2\)", {"top_k_weights": torch.rand(5, 1, device=DEVICE)}),
        (TypeError, "x must be bfloat16", {"x": x.double()}),
        (ValueError, r"x must be 2-D", {"x": x[None]}),
        (ValueError, "up holds 4 experts, num_experts is 3", {"num_experts": 3}),
        (ValueError, r"up_bias must have shape \(G, N\) = \(4, ", {"up_bias": torch.zeros(up.qdata.shape[1])}),
        (ValueError, r"down_bias must have shape \(G, N\) = \(4, ", {"down_bias": torch.zeros(1, 64)}),
    ):
        with pytest.raises(error, match=message):
            forward(**changes)


def test_compiles_in_one_graph():
    up, down = serving_weights()
    recipe = MXRecipe(activations="bf16")

    def layer(x, ids, weights):
        return mx_experts_forward(x, ids, weights, up, down, num_experts=4, activate=None, recipe=recipe)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5):
        x = cases.scaled_randn(tokens, 64, seed=1)
        ids = torch.tensor([[0, 1], [3, 2], [1, 3], [0, 2], [2, 1]], device=DEVICE)[:tokens]
        weights = torch.rand(tokens, 2, device=DEVICE)
        with torch.no_grad():
            cases.assert_bitwise(compiled(x, ids, weights), layer(x, ids, weights))


def test_registering_is_idempotent_and_says_who_is_there():
    huggingface_fp8.register()
    huggingface_fp8.register()
    with pytest.raises(ValueError, match="'grouped_mm' is registered in transformers already"):
        huggingface_fp8.register("grouped_mm")


def test_registering_keeps_a_recipe_that_was_asked_for():
    """quantize_experts() registers too: that must not change how another model runs."""
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface

    from mxmoe.integrations import huggingface

    table = FP8ExpertsInterface._global_mapping
    names = ("mxmoe_recipe_test", "mxmoe_recipe_test_2")
    try:
        huggingface_fp8.register(names[0], recipe=MXRecipe())
        huggingface_fp8.register(names[0])
        huggingface.register(names[1], recipe=MXRecipe(scale_mode="floor"))
        assert table[names[0]].keywords["recipe"] == MXRecipe()
        assert table[names[1]].keywords["recipe"] == MXRecipe(scale_mode="floor")
    finally:
        for name in names:
            table.pop(name, None)
            huggingface._interface()._global_mapping.pop(name, None)


def test_serving_weight_of_an_mx_tensor():
    """Every layout and block that has the contraction last; the rest is refused with what to do."""
    w = torch.randn(2, 96, 64, device=DEVICE)
    plain = ServingWeight.of(mxmoe.quantize(w))
    assert plain.packed is not None
    assert ServingWeight.of(mxmoe.quantize(w), pack=False).packed is None
    same = (
        mxmoe.quantize(w, layout="blocked"),
        mxmoe.quantize(w.mT.contiguous(), block="colwise").mT,
        mxmoe.quantize(w.mT.contiguous(), block="colwise", layout="blocked").mT,
    )
    for other in same:
        found = ServingWeight.of(other)
        for name in ("qdata", "scale", "packed", "top"):
            a, b = getattr(found, name), getattr(plain, name)
            cases.assert_bitwise(a.view(torch.uint8), b.view(torch.uint8), name)
    square = mxmoe.quantize(w, block="square")
    back = mxmoe.dequantize(ServingWeight.of(square).as_mx(torch.float32), torch.float32)
    cases.assert_bitwise(back, mxmoe.dequantize(square, torch.float32))
    with pytest.raises(ValueError, match=r'block="rowwise"\), or pass its \.mT'):
        ServingWeight.of(mxmoe.quantize(w, block="colwise"))
    with pytest.raises(ValueError, match=r"must be \(experts, N, K\)"):
        ServingWeight.of(mxmoe.quantize(w[0]))
    with pytest.raises(TypeError, match="must be an MXTensor"):
        ServingWeight.of(w)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
def test_layer_in_a_graph(activations):
    """The chain of early launches, replayed with other tokens and other experts, gives what it gives eagerly."""
    hidden, inner, experts, top_k, tokens = 512, 256, 16, 4, 70
    up, down = (
        ServingWeight.of(mxmoe.quantize(torch.randn(experts, n, k, device=DEVICE) / k**0.5))
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    x = torch.zeros(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.zeros(tokens, top_k, device=DEVICE, dtype=torch.int64)
    weights = torch.rand(tokens, top_k, device=DEVICE)
    recipe = MXRecipe(activations=activations)

    def layer():
        return mx_experts_forward(x, ids, weights, up, down, num_experts=experts, activate=None, recipe=recipe)

    def step_by_step():
        def swiglu(h):
            gate, value = h.chunk(2, -1)
            return torch.nn.functional.silu(gate.float()).mul(value.float()).to(h.dtype)

        return mx_experts_forward(x, ids, weights, up, down, num_experts=experts, activate=swiglu, recipe=recipe)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer() for _ in range(4)]
    for seed in range(4):
        gen = torch.Generator(device=DEVICE).manual_seed(seed)
        x.copy_(torch.randn(x.shape, device=DEVICE, generator=gen))
        ids.copy_(torch.randint(0, experts + seed % 2, ids.shape, device=DEVICE, generator=gen))
        graph.replay()
        torch.cuda.synchronize()
        expected = layer()
        for out in outs:
            cases.assert_bitwise(out, expected)
        assert cases.sqnr(expected, step_by_step()) >= 25


@pytest.mark.gpu
def test_facts_follow_the_weights():
    """A weight written in place is looked at again; moving to another device keeps logits."""
    model, _ = quantized(dtype=torch.bfloat16)
    expected = logits(model)
    module = model.model.layers[0].mlp.experts
    assert module.gate_up_proj_packed.device.type == "cuda"
    assert not any("packed" in k or k.endswith("_top") for k in model.state_dict())
    module.gate_up_proj_scale.add_(1)
    changed = logits(model)
    assert not torch.equal(changed, expected)
    module.gate_up_proj_scale.sub_(1)
    cases.assert_bitwise(logits(model), expected)


# --- what is kept of a weight ----------------------------------------------------------------------------------------
class Holder(torch.nn.Module):
    """A module with one quantized weight, as ``serving_weight`` takes it."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        t = mxmoe.quantize(torch.randn(2, 64, 64) * 2.0 ** (6 * seed))
        self.register_buffer("w", t.qdata.view(torch.uint8))
        self.register_buffer("w_scale", t.scale_bytes.clone())

    def facts(self):
        found = huggingface_fp8.serving_weight(self, "w", "w_scale")
        return found.packed, found.top

    def right(self):
        return decode.pack_weight(self.w.view(torch.float8_e4m3fn), self.w_scale)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Facts are kept on a GPU only."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def assert_facts(module):
    for a, b in zip(module.facts(), module.right(), strict=True):
        assert_bitwise(a, b)


def test_facts_follow_the_weight(as_on_a_gpu):
    module = Holder(0).to(DEVICE)
    assert_facts(module)
    first = module.facts()[0]
    assert module.facts()[0] is first  # not found again
    with torch.no_grad():
        module.w.copy_(Holder(1).w)
        module.w_scale.copy_(Holder(1).w_scale)
    assert_facts(module)
    module.w_scale = Holder(2).w_scale.to(DEVICE)  # replaced, version 0 again
    assert_facts(module)
    module.load_state_dict(Holder(3).state_dict())
    assert "w_packed" not in module._buffers  # what compiled code would read
    assert_facts(module)
    other = pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        other.w_scale += 1
    assert_facts(other)


def test_facts_do_not_outlive_their_weight(as_on_a_gpu):
    """A new tensor at the address of a freed one, with the same version, is another weight."""
    if DEVICE != "cpu":
        pytest.skip("places tensors in memory of the host")
    weights = [Holder(seed) for seed in (0, 1)]
    memory = {name: bytearray(t.numel()) for name, t in weights[0].named_buffers()}
    module = torch.nn.Module()

    def place(source):
        for name, t in source.named_buffers():
            memory[name][:] = t.numpy().tobytes()
            module._buffers.pop(name, None)  # frees the tensor that was there, not its memory
            module.register_buffer(name, torch.frombuffer(memory[name], dtype=torch.uint8).view(t.shape))
        return module.w.data_ptr(), module.w._version

    def facts():
        found = huggingface_fp8.serving_weight(module, "w", "w_scale")
        return found.packed, found.top

    first = place(weights[0])
    for a, b in zip(facts(), weights[0].right(), strict=True):
        assert_bitwise(a, b)
    assert place(weights[1]) == first
    for a, b in zip(facts(), weights[1].right(), strict=True):
        assert_bitwise(a, b)


def test_no_facts_of_inference_tensors(as_on_a_gpu):
    with torch.inference_mode():
        module = Holder(0).to(DEVICE)
        assert module.facts() == (None, None)
        module.load_state_dict(Holder(1).state_dict())
        assert module.facts() == (None, None)


def test_remembered_facts_are_of_one_element_type(as_on_a_gpu):
    t = mxmoe.quantize(torch.randn(2, 64, 64, device=DEVICE))
    for _ in range(3):
        e4m3 = decode.remembered(t.qdata, t.scale_bytes)
    assert e4m3 is not None
    assert decode.remembered(t.qdata.view(torch.float8_e5m2), t.scale_bytes) is None
