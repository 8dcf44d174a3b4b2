"""The command line: every sub-command, its errors and its exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mxmoe.cli import COMMANDS, MissingPackageError, bench, info, main, need
from mxmoe.cli.recipes import add_recipe_arguments, recipe_from
from mxmoe.recipe import MXRecipe

ROOT = Path(__file__).resolve().parent.parent


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "mxmoe", *words], env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_info_as_a_user_runs_it() -> None:
    run = _run("info")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "self-test, bytes: ok" in run.stdout
    assert "self-test, layout: ok" in run.stdout
    assert "self-test, GEMM: ok" in run.stdout
    for backend in ("reference", "dequant", "triton", "native"):
        assert backend in run.stdout
    assert torch.__version__ in run.stdout


def test_info_fails_if_a_self_test_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(info, "VECTORS", ((1.75, "rceil", 120, 0x7E),))
    monkeypatch.setattr(info, "devices", lambda: [torch.device("cpu")])
    assert main(["info"]) == 1
    out = capsys.readouterr().out
    assert "gave bytes (119, 126), expected (120, 126)" in out
    assert "FAILED: bytes on cpu" in out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"python -m mxmoe {name}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["nonsense"], ["demo", "--steps", "0"], ["demo", "--scale-mode", "up"]])
def test_wrong_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingPackageError, match=r"needs no_such_module: pip install 'mxmoe\[hf\]'"):
        need("hf", "json", "no_such_module")

    def without(*_: str) -> None:
        raise MissingPackageError("this command needs rich")

    monkeypatch.setattr("mxmoe.cli.need", without)
    assert main(["convert", "here", "there"]) == 1
    assert "this command needs rich" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", stop)
    assert main(["info"]) == 130


# --- recipes ---------------------------------------------------------------------------------------------------------
def _recipe(*words: str) -> MXRecipe:
    import argparse

    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    return recipe_from(parser.parse_args(list(words)))


def test_recipe_options() -> None:
    assert _recipe() == MXRecipe()
    words = "--scale-mode even --backend reference --save mxfp8 --weight-block 32x32 --grad-elem e5m2".split()
    assert _recipe(*words) == MXRecipe(
        scale_mode="even",
        backend="reference",
        save="mxfp8",
        weight_block=(32, 32),
        grad_elem_dtype=torch.float8_e5m2,
    )
    with pytest.raises(ValueError, match='save="mxfp8"'):
        _recipe("--save", "mxfp8", "--wgrad", "bf16")


# --- bench -----------------------------------------------------------------------------------------------------------
def test_bench_lists_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")} <= set(out.split())


def test_bench_runs_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    (tmp_path / "bench_probe.py").write_text(
        f'"""A probe."""\nimport json, sys\njson.dump(sys.argv[1:], open({str(out)!r}, "w"))\nsys.exit(3)\n'
    )
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    monkeypatch.setattr(bench, "_has_gpu", lambda: False)
    assert main(["bench", "probe", "--quick"]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not out.exists()
    monkeypatch.setattr(bench, "_has_gpu", lambda: True)
    assert main(["bench", "probe", "--quick", "--out", "x"]) == 3
    assert json.loads(out.read_text()) == ["--quick", "--out", "x"]
    assert main(["bench", "nonsense"]) == 2
    assert "there are: probe" in capsys.readouterr().err


def test_bench_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "nowhere")
    assert main(["bench"]) == 1
    assert "source checkout" in capsys.readouterr().out


def test_convert_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("mxmoe.checkpoint")
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    assert "convert: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
