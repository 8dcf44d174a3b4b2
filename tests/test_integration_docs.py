"""The examples of the integration pages run as they are printed."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted((DOCS / "integrations").glob("*.md"))
BLOCK = re.compile(r"^```python( requires=(\w+))?\n(.*?)^```", re.M | re.S)
EXAMPLES = [
    pytest.param(page, needs, code, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, (_, needs, code) in enumerate(BLOCK.findall(page.read_text()))
]


def test_there_are_examples():
    assert len(EXAMPLES) >= 8


@pytest.mark.parametrize("page, needs, code", EXAMPLES)
def test_example_runs(page, needs, code):
    needs = needs or ("transformers" if page.stem == "huggingface" else "torch")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    exec(compile(code, f"{page.name}", "exec"), {"__name__": "example"})
