"""Without a GPU the kernels run in Triton's interpreter, repaired by ``interp_shim``: set up before mxmoe is imported.

The closing count says how many tests need a GPU and did not run.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import interp_shim

    interp_shim.install()

import pytest

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "needs a GPU" in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests need a GPU and were skipped here")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
