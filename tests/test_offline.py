"""Kernels compile for chips that are not here: ``scripts/offline_compile.py`` on one GEMM per target.

In a process of its own: the script needs Triton's compiler, the other tests without a GPU need its interpreter. The
whole script takes minutes; run it by hand after a change to a kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "offline_compile.py"


def _run(*arguments, cache):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "target, only, instruction",
    [
        ("cuda:90", "bf16_grouped_mm fprop odd", "wgmma.mma_async"),
        ("cuda:90", "gluon_grouped_mm fprop", "wgmma.mma_async.m64n256k16"),
        ("cuda:100", "mx_grouped_mm k_groups", "block_scale"),
    ],
)
def test_expected_matrix_instructions(target, only, instruction, tmp_path):
    run = _run("--target", target, "--only", only, cache=tmp_path)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert instruction in run.stdout, run.stdout[-2000:]


def test_nothing_compiled_is_a_failure(tmp_path):
    run = _run("--target", "cuda:90", "--only", "no such kernel", cache=tmp_path)
    assert run.returncode == 1
    assert "nothing was compiled" in run.stdout
