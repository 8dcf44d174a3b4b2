"""The demo: its text, its measuring, its exit status. A tiny model and few steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import mxmoe
from mxmoe.cli import main

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from mxmoe.cli import demo, training
from mxmoe.cli.text import HELD_OUT, Text, stdlib_text
from mxmoe.cli.training import SIZES, Run, build_model

CPU = torch.device("cpu")
TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def text() -> Text:
    return stdlib_text(limit=600_000)


@pytest.fixture(autouse=True)
def _little_text(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxmoe.cli.text.stdlib_text", lambda: text)


def _demo(out: Path, *words: str, steps: int = 5) -> int:
    return main(["demo", "--size", "tiny", "--device", "cpu", "--steps", str(steps), "--out", str(out), *words])


# --- the whole of it -------------------------------------------------------------------------------------------------
def test_demo_runs_and_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _demo(tmp_path / "out", "--control") == 0
    out = capsys.readouterr().out
    for words in ("fp32 experts", "MXFP8 experts", "tokens/s", "SQNR", "wgrad", "Largest distance", "other weights"):
        assert words in out
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")

    summary = json.loads((tmp_path / "out/summary.json").read_text())
    gemms = 5 * TINY.layers * 2
    assert summary["gemms"] == {"dgrad dequant": gemms, "fprop dequant": gemms, "wgrad dequant": gemms}
    plain, mx, control = summary["runs"].values()
    assert plain["losses"][0] == pytest.approx(mx["losses"][0], abs=0.02)
    assert plain["losses"] != mx["losses"]
    assert control["losses"][0] != plain["losses"][0]
    for value in summary["sqnr_db"].values():
        assert 15 < value < 60  # independent random operands: 28.5; early gradients cancel and have less


@pytest.mark.parametrize("backend", ["reference", "dequant"])
def test_recipe_options_reach_the_gemms(backend: str, tmp_path: Path) -> None:
    assert _demo(tmp_path, "--save", "mxfp8", "--weight-block", "32x32", "--backend", backend, steps=2) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["gemms"]) == {f"{op} {backend}" for op in ("fprop", "dgrad", "wgrad")}
    plain, mx = summary["runs"].values()
    assert mx["saved_bytes"] < plain["saved_bytes"]
    assert set(summary["sqnr_db"]) == {"fprop", "dgrad", "wgrad"}


def test_demo_fails_if_the_curves_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _demo(tmp_path, "--bound", "0", steps=2) == 1
    assert "FAILED: the curves part by" in capsys.readouterr().out


def test_demo_fails_if_mxfp8_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mxmoe, "convert", lambda model, **_: None)
    assert _demo(tmp_path, steps=2) == 1
    out = capsys.readouterr().out
    assert f"FAILED: 0 MXFP8 wgrad GEMMs ran, expected {2 * TINY.layers * 2}" in out


def test_demo_fails_on_a_loss_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Run, "step", lambda self, pieces: math.nan)
    assert _demo(tmp_path, steps=2) == 1
    assert "FAILED: fp32 experts: loss nan at step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("--device", "nonsense"), ("--save", "mxfp8", "--wgrad", "bf16"), ("--out", "/dev/null/x")]
)
def test_wrong_use_is_told_before_training(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--size", "tiny", *words]) == 2
    assert capsys.readouterr().out.startswith("demo: ")


# --- text ------------------------------------------------------------------------------------------------------------
def test_text_is_source_and_the_split_is_by_file(tmp_path: Path) -> None:
    for i in range(64):
        (tmp_path / f"m{i:02}.py").write_bytes(bytes([i]) * 2000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test/skipped.py").write_bytes(b"\xff" * 2000)
    found = stdlib_text(tmp_path)
    assert found.files == 64
    held_out = set(found.valid.tolist())
    assert held_out == {i for i in range(64) if i % HELD_OUT == HELD_OUT - 1}
    assert held_out.isdisjoint(found.train.tolist())


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="too little text"):
        stdlib_text(tmp_path)


def test_batches_are_the_next_bytes_and_repeat_with_the_seed(text: Text) -> None:
    make = lambda seed: text.batch("train", torch.Generator().manual_seed(seed), 4, 16)  # noqa: E731
    assert torch.equal(make(0), make(0))
    assert not torch.equal(make(0), make(1))
    pieces = make(0)
    assert pieces.shape == (4, 17)
    assert bytes(pieces[0].tolist()) in bytes(text.train.tolist())


# --- measuring -------------------------------------------------------------------------------------------------------
def test_largest_gap() -> None:
    assert training.smooth([1.0, 2.0, 3.0, 4.0], 2) == [1.5, 2.5, 3.5]
    gap, step = training.largest_gap([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 3.0, 1.0], 2)
    assert (gap, step) == (1.0, 3)
    gap, step = training.largest_gap([9.0, 1.0, 1.0], [1.0, 1.0, math.nan], 1)
    assert math.isnan(gap)
    assert step == 3


def test_saved_bytes_count_each_storage_once_and_no_parameter() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.randn(2, 4, 4))
            self.down_proj = torch.nn.Parameter(torch.randn(2, 4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.gate_up_proj[0] @ self.down_proj[0]).sigmoid()

    layer = Layer()
    x = torch.randn(8, 4)
    with training.count_saved_bytes(layer) as saved:
        layer(x).sum().backward()
    # x, the first product and the result of the sigmoid: 8 x 4 fp32 each.
    assert saved.total == 3 * 8 * 4 * 4
    outside = saved.total
    (x.requires_grad_() * 2).sum().backward()
    assert saved.total == outside


def test_gemm_sqnr_of_every_gemm() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 64, requires_grad=True)
    w = torch.randn(3, 48, 64, requires_grad=True)
    offs = torch.tensor([40, 40, 90], dtype=torch.int32)
    for recipe in (mxmoe.MXRecipe(), mxmoe.MXRecipe(save="mxfp8")):
        with mxmoe.observe(tensors=True) as records:
            out = mxmoe.grouped_mm(x, w.transpose(-2, -1), offs, recipe=recipe)
            out.backward(torch.randn_like(out))
        for values in training.gemm_sqnr(records).values():
            assert values[0] == pytest.approx(28.5, abs=1.0)


def test_low_precision_weights_are_trained_through_fp32_copies(text: Text) -> None:
    """bf16 weights near 1 do not move by a rate of 1e-4 a step; their fp32 copies do."""
    model = build_model(TINY, 0, CPU, torch.bfloat16)
    run = Run("bf16", model, TINY, 1000)
    pieces = text.batch("train", torch.Generator().manual_seed(0), 2, 32)
    before = [m.clone() for m in run._masters]
    run.step(pieces)
    assert any(not torch.equal(a, b) for a, b in zip(before, run._masters, strict=True))
    for master, param in zip(run._masters, model.parameters(), strict=True):
        assert torch.equal(master.bfloat16(), param)


def test_training_learns(text: Text) -> None:
    run = Run("fp32", build_model(TINY, 0, CPU, torch.float32), TINY, 20)
    batches = torch.Generator().manual_seed(0)
    for _ in range(20):
        run.step(text.batch("train", batches, TINY.batch, TINY.length))
    assert run.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert run.losses[-1] < 4.0


def test_bytes_of_the_table() -> None:
    assert demo._bytes(2_500_000) == "2.50 MB"
