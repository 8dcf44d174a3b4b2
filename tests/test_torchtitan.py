"""The torchtitan override: with torchtitan where it is installed, else with a stand-in that has the same seam."""

import dataclasses
import sys
import types

import pytest
import torch
from cases import DEVICE, sqnr
from torch.nn.functional import silu

import mxmoe


class StandInExperts(torch.nn.Module):
    """What torchtitan 0.3's ``GroupedExperts`` is to an override: three parameters and ``_grouped_mm``."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        hidden_dim: int
        num_experts: int

        def build(self):
            return type(self)._owner(self)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls

    def __init__(self, config):
        super().__init__()
        e, f, d = config.num_experts, config.hidden_dim, config.dim
        self.num_experts = e
        self.w1_EFD = torch.nn.Parameter(torch.empty(e, f, d))
        self.w2_EDF = torch.nn.Parameter(torch.empty(e, d, f))
        self.w3_EFD = torch.nn.Parameter(torch.empty(e, f, d))

    def forward(self, x_RD, num_tokens_per_expert_E):
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x, w1, w2, w3 = (t.bfloat16() for t in (x_RD, self.w1_EFD, self.w2_EDF, self.w3_EFD))
        h = silu(self._grouped_mm(A=x, B_t=w1.transpose(-2, -1), offs=offs))
        h = h * self._grouped_mm(A=x, B_t=w3.transpose(-2, -1), offs=offs)
        return self._grouped_mm(A=h, B_t=w2.transpose(-2, -1), offs=offs).type_as(x_RD)

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


StandInExperts.Config._owner = StandInExperts


def stand_in():
    """Modules named like torchtitan's, with the few names that the integration imports."""

    def module(name, **names):
        found = types.ModuleType(name)
        found.__dict__.update(names)
        return found

    def override(*, target, description=""):
        def decorate(factory):
            factory.target = target
            return factory

        return decorate

    def derive(source, target_cls, **deltas):
        shared = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
        return target_cls(**shared, **deltas)

    names = ("torchtitan", "torchtitan.config", "torchtitan.models", "torchtitan.models.common")
    return {
        **{name: module(name) for name in names},
        "torchtitan.config.override": module("override", override=override, derive=derive),
        "torchtitan.models.common.moe": module("moe", GroupedExperts=StandInExperts),
    }


@pytest.fixture(scope="module")
def seam():
    """(integration module, experts class, whether it is torchtitan itself)."""
    try:
        import torchtitan.models.common.moe as real
    except ImportError:
        real = None
    if real is not None:
        from mxmoe.integrations import torchtitan

        yield torchtitan, real.GroupedExperts, True
        return
    modules = stand_in()
    sys.modules.update(modules)
    try:
        from mxmoe.integrations import torchtitan

        yield torchtitan, StandInExperts, False
    finally:
        for name in (*modules, "mxmoe.integrations.torchtitan"):
            sys.modules.pop(name, None)


def build(config):
    torch.manual_seed(0)
    module = config.build().to(DEVICE)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, p.shape[-1] ** -0.5)
    return module


def test_override_runs_every_gemm_in_mxfp8(seam):
    integration, experts, _ = seam
    config = experts.Config(dim=64, hidden_dim=96, num_experts=4)
    plain, ours = build(config), build(integration.mxfp8_experts(config))
    assert isinstance(ours, experts)
    assert list(ours.state_dict()) == list(plain.state_dict())
    counts = torch.tensor([7, 0, 33, 5], device=DEVICE)  # unaligned groups, and rows beyond the last
    x = torch.randn(50, 64, device=DEVICE)
    x[45:] = float("nan")
    leaf = x.clone().requires_grad_()
    with mxmoe.observe() as records:
        out = ours(leaf, counts)
        out[:45].sum().backward()
    assert [r.op for r in records].count("fprop") == 3
    assert [r.op for r in records].count("wgrad") == 3
    assert sqnr(out[:45], plain(x, counts)[:45]) > 20
    assert (out[45:] == 0).all()
    assert (leaf.grad[45:] == 0).all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


def test_recipe_fields_as_the_command_line_gives_them(seam):
    integration, experts, _ = seam
    config = experts.Config(dim=64, hidden_dim=96, num_experts=4)
    fields = {"save": "mxfp8", "grad_elem_dtype": "float8_e5m2", "weight_block": [32, 32]}
    ours = build(integration.mxfp8_experts(config, **fields))
    expected = mxmoe.MXRecipe(save="mxfp8", grad_elem_dtype=torch.float8_e5m2, weight_block=(32, 32))
    assert ours.mx_recipe == expected
    with pytest.raises(ValueError, match="save"):
        integration.mxfp8_experts(config, save="fp4")
    with pytest.raises(TypeError, match="nonsense"):
        integration.mxfp8_experts(config, nonsense=1)


def test_torchtitan_applies_it(seam):
    integration, experts, real = seam
    if not real:
        pytest.skip("torchtitan is not installed: the seam was tested on a stand-in")
    from torchtitan.config.configurable import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides

    class Root(Configurable):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            inner_experts: experts.Config

    root = Root.Config(inner_experts=experts.Config(dim=64, hidden_dim=96, num_experts=4))
    target = f"{integration.__name__}.mxfp8_experts"
    apply_overrides(OverrideConfig(imports=[(target, {"wgrad": "bf16"})]), root)
    assert build(root.inner_experts).mx_recipe == mxmoe.MXRecipe(wgrad="bf16")
