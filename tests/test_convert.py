"""convert and revert: exactly the named modules change, parameters and state_dict do not, nothing is silent."""

import copy
import io
import types

import pytest
import torch
from cases import DEVICE

transformers = pytest.importorskip("transformers")

from tiny_models import FAMILIES, IGNORED, tiny, token_ids

import mxmoe
from mxmoe import MXRecipe
from mxmoe.integrations import huggingface


def snapshot(model):
    """Every module's class, config and forward: what a conversion could touch."""
    return {
        name: (
            type(m),
            getattr(m, "config", None),
            m.__dict__.get("forward"),
            m.__dict__.get(huggingface.RECIPE_ATTRIBUTE),
        )
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_set_of_converted_modules(family):
    model = tiny(family)
    before = snapshot(model)
    report = mxmoe.convert(model)
    after = snapshot(model)
    changed = [name for name in before if before[name] != after[name]]
    assert changed == list(report.names) == FAMILIES[family][3]
    assert not report.skipped


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_parameters_and_state_dict_are_untouched(family):
    model = tiny(family)
    parameters = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    keys = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    mxmoe.convert(model)
    assert {name: (t.shape, t.dtype) for name, t in model.state_dict().items()} == keys
    for name, p in model.named_parameters():
        assert p is parameters[name]
        assert torch.equal(p, values[name])


def test_optimizer_built_before_keeps_working():
    model = tiny("qwen3_moe").to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mxmoe.convert(model)
    ids = token_ids().to(DEVICE)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_reload_deepcopy_and_pickle():
    model = tiny("qwen3_moe").to(DEVICE)
    mxmoe.convert(model, recipe=MXRecipe(scale_mode="floor"))
    ids = token_ids().to(DEVICE)
    expected = model(ids, use_cache=False).logits

    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids, use_cache=False).logits, expected)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(ids, use_cache=False).logits, expected)

    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain = tiny("qwen3_moe", seed=5).to(DEVICE)
    plain.load_state_dict(torch.load(buffer, weights_only=True))
    assert not torch.equal(plain(ids, use_cache=False).logits, expected)  # unconverted: high precision
    mxmoe.convert(plain, recipe=MXRecipe(scale_mode="floor"))
    assert torch.equal(plain(ids, use_cache=False).logits, expected)


def test_save_pretrained_says_nothing_of_us(tmp_path):
    model = tiny("qwen3_moe")
    mxmoe.convert(model)
    model.save_pretrained(tmp_path)
    assert "mxmoe" not in (tmp_path / "config.json").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_twice_is_a_no_op_and_another_recipe_is_not():
    model = tiny("qwen3_moe")
    mxmoe.convert(model)
    state = snapshot(model)
    again = mxmoe.convert(model)
    assert snapshot(model) == state
    assert list(again.names) == FAMILIES["qwen3_moe"][3]
    assert not any(entry.changed for entry in again.replaced)
    other = mxmoe.convert(model, recipe=MXRecipe(wgrad="bf16"))
    assert all(entry.changed for entry in other.replaced)
    mxmoe.revert(other)
    assert snapshot(model) == state
    mxmoe.revert(again)  # it changed nothing, so it undoes nothing
    assert snapshot(model) == state


def test_revert():
    model = tiny("qwen3_moe").to(DEVICE)
    ids = token_ids().to(DEVICE)
    before, logits = snapshot(model), model(ids, use_cache=False).logits
    report = mxmoe.convert(model)
    assert not torch.equal(model(ids, use_cache=False).logits, logits)
    mxmoe.revert(report)
    assert snapshot(model) == before
    assert torch.equal(model(ids, use_cache=False).logits, logits)
    mxmoe.revert(report)
    assert snapshot(model) == before
    with pytest.raises(TypeError, match="ConversionReport"):
        mxmoe.revert(model)


def test_include_and_exclude_are_names_or_globs_never_substrings():
    def deep():
        config = tiny("qwen3_moe").config
        config.num_hidden_layers = 12
        config._experts_implementation = "eager"
        with torch.device("meta"):
            return transformers.Qwen3MoeForCausalLM(config)

    name = "model.layers.{}.mlp.experts".format
    assert mxmoe.convert(deep(), include=name(1)).names == (name(1),)
    assert mxmoe.convert(deep(), include="*.layers.1.*").names == (name(1),)
    assert mxmoe.convert(deep(), include=[name(1), "model.layers.1[01].*"]).names == (name(1), name(10), name(11))
    report = mxmoe.convert(deep(), exclude=[name(1)])
    assert report.names == tuple(name(i) for i in range(12) if i != 1)
    assert [(s.name, s.reason) for s in report.skipped] == [(name(1), f"excluded by {name(1)!r}")]
    for pattern in ("model.layers.1", "experts", "layers.1.mlp.experts", "lm_head"):
        with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts"):
            mxmoe.convert(deep(), include=pattern)
        with pytest.raises(ValueError, match="matches no expert module"):
            mxmoe.convert(deep(), exclude=pattern)


def test_only_included_modules_run_in_mxfp8():
    model = tiny("qwen3_moe").to(DEVICE)
    report = mxmoe.convert(model, include="model.layers.1.*")
    with mxmoe.observe() as records:
        model(token_ids().to(DEVICE), use_cache=False)
    assert len(records) == 2
    assert model.config._experts_implementation == "eager"
    assert report.skipped[0].reason == "not in include"


def test_nothing_to_convert_raises_and_names_the_reason():
    with pytest.raises(ValueError, match="nothing to convert in Linear"):
        mxmoe.convert(torch.nn.Linear(4, 4))
    assert len(mxmoe.convert(torch.nn.Linear(4, 4), allow_none=True)) == 0
    model = tiny("qwen3_moe")
    with pytest.raises(ValueError, match="excluded by"):
        mxmoe.convert(model, exclude="*")


def test_families_the_switch_ignores_are_named():
    model = tiny("jetmoe")
    with pytest.raises(ValueError, match="JetMoeParallelExperts does not use the transformers experts interface"):
        mxmoe.convert(model)
    report = mxmoe.convert(model, allow_none=True)
    assert len(report) == 0
    assert {s.module_class for s in report.skipped} == {"JetMoeParallelExperts"}


def test_replaced_classes_are_detected():
    """Liger swaps the experts class for an undecorated one, or binds its forward to the instance."""

    class LigerExperts(torch.nn.Module):
        __module__ = "liger_kernel.transformers.swiglu"

        def __init__(self, experts):
            super().__init__()
            self.num_experts = experts.num_experts
            self.config = experts.config
            self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    model = tiny("qwen3_moe")
    layers = model.model.layers
    layers[0].mlp.experts = LigerExperts(layers[0].mlp.experts)
    layers[1].mlp.experts.forward = types.MethodType(LigerExperts.forward, layers[1].mlp.experts)
    report = mxmoe.convert(model, allow_none=True)
    assert not report.replaced
    assert "Liger" in report.skipped[0].reason
    assert "does not ask the transformers registry" in report.skipped[1].reason


def test_report_prints():
    text = str(mxmoe.convert(tiny("qwen3_moe"), exclude="*.1.mlp.experts"))
    assert "1 of 2 expert modules run in MXFP8" in text
    assert "replaced" in text
    assert "gate_up_proj (8, 64, 64)" in text
    assert "excluded by '*.1.mlp.experts'" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_bad_arguments():
    with pytest.raises(TypeError, match="torch.nn.Module"):
        mxmoe.convert("model")
    with pytest.raises(TypeError, match="MXRecipe"):
        mxmoe.convert(tiny("qwen3_moe"), recipe="mxfp8")
    with pytest.raises(TypeError, match="include"):
        mxmoe.convert(tiny("qwen3_moe"), include=[3])


def test_llama4_by_a_seam_of_our_own():
    model = tiny("llama4").to(DEVICE)
    ids = token_ids().to(DEVICE)
    before, logits = snapshot(model), model(ids, use_cache=False).logits
    parameters = dict(model.named_parameters())
    report = mxmoe.convert(model)
    assert list(report.names) == IGNORED["llama4"][3]
    assert {r.module_class for r in report.replaced} == {"Llama4TextExperts"}
    assert all(p is parameters[name] for name, p in model.named_parameters())
    again = mxmoe.convert(model)
    assert list(again.names) == IGNORED["llama4"][3]
    assert not any(r.changed for r in again.replaced)
    with mxmoe.observe() as records:
        assert not torch.equal(model(ids, use_cache=False).logits, logits)
    assert len(records) == 4
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert len(mxmoe.convert(torch.load(buffer, weights_only=False))) == 2
    mxmoe.revert(report)
    assert snapshot(model) == before
    assert torch.equal(model(ids, use_cache=False).logits, logits)


def test_fallbacks_are_named_in_the_report():
    reasons = {"gpt_oss": "biases", "nemotron_h": "no gate", "phimoe": None, "qwen3_moe": None}
    for family, reason in reasons.items():
        report = mxmoe.convert(tiny(family))
        assert {r.unfused for r in report.replaced} == {reason}
        assert (f"not fused: {reason}" in str(report)) == (reason is not None)
