"""The project's own rules: floors, docstrings, the README, words that do not belong in it."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import mxmoe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mxmoe"
MODULES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))

# Floor of a module by its first path component below mxmoe/. docs/design.md draws it.
FLOORS = {
    "formats": 0, "shapes": 0, "checks": 0, "device": 0,
    "groups": 1, "recipe": 1, "tensor": 1, "observe": 1,
    "reference": 2, "kernels": 2,
    "ops": 3,
    "autograd": 4,
    "nn": 5, "distributed": 5,
    "integrations": 6, "convert": 6, "checkpoint": 6, "serving": 6, "cli": 6, "__main__": 6,
}  # fmt: skip
TOP = {"__init__"}  # mxmoe/__init__.py gathers every floor; floors 5 and 6 may use the public API through it


def _component(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def _imports(module: Path) -> list[tuple[str, int]]:
    """Components of mxmoe that a module imports, anywhere in its source, with the line."""
    package = ("mxmoe", *module.parts[:-1])
    found = []
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "mxmoe":
                found.append((parts[1] if len(parts) > 1 else "__init__", node.lineno))
    return found


@pytest.mark.parametrize("module", [m for m in MODULES if _component(m) not in TOP], ids=str)
def test_a_module_imports_only_from_lower_floors(module: Path) -> None:
    own = _component(module)
    assert own in FLOORS, f"{module} has no floor: add it to FLOORS and to docs/design.md"
    for other, line in _imports(module):
        where = f"mxmoe/{module}:{line} (floor {FLOORS[own]})"
        if other not in FLOORS:
            assert FLOORS[own] >= 5, f"{where} imports mxmoe itself, which imports every floor"
            continue
        assert FLOORS[other] <= FLOORS[own], f"{where} imports {other}, floor {FLOORS[other]}"
        if FLOORS[own] == 2:
            assert other == own or FLOORS[other] < 2, f"{where} imports {other}: the halves of floor 2 are strangers"


def test_floors_are_those_of_the_design_page() -> None:
    page = (ROOT / "docs/design.md").read_text()
    drawn = {}
    for line in page.splitlines():
        if match := re.match(r" F(\d)   (\S.*?)(?:    .*)?$", line):
            for word in re.findall(r"(\w+)(?:\.py|/)", match[2]):
                drawn[word] = int(match[1])
    assert drawn == {name: floor for name, floor in FLOORS.items() if name != "__main__"}


# --- docstrings ------------------------------------------------------------------------------------------------------
PUBLIC = sorted(mxmoe.__all__)


def _public(name: str) -> object:
    try:
        return getattr(mxmoe, name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("mxmoe"):
            pytest.skip(f"needs {error.name}")
        raise


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_the_house_form(name: str) -> None:
    """A first sentence, and every argument of the signature named in the text (in a table or in prose)."""
    thing = _public(name)
    text = inspect.getdoc(thing)
    assert text, f"mxmoe.{name} has no docstring"
    assert text.splitlines()[0].rstrip().endswith((".", ":")), f"mxmoe.{name}: the first line is no sentence"
    if inspect.isclass(thing):
        return
    code = " ".join(re.findall(r"``([^`]+)``", text))
    for argument in inspect.signature(thing).parameters:
        assert re.search(rf"\b{argument}\b", code), f"mxmoe.{name}: argument {argument!r} is not in its docstring"


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_names_no_argument_that_is_gone(name: str) -> None:
    thing = _public(name)
    if inspect.isclass(thing):
        return
    table = [line for line in inspect.getdoc(thing).splitlines() if line.startswith("| ``")]  # type: ignore[union-attr]
    known = set(inspect.signature(thing).parameters)  # type: ignore[arg-type]
    for line in table:
        first = line.split("|")[1]
        for argument in re.findall(r"``(\w+)``", first):
            found = argument in known or argument == "returns"
            assert found, f"mxmoe.{name}: its table speaks of {argument!r}, its signature does not"


@pytest.mark.parametrize("module", [m for m in MODULES if (PACKAGE / m).stat().st_size], ids=str)
def test_module_docstring(module: Path) -> None:
    assert ast.get_docstring(ast.parse((PACKAGE / module).read_text())), f"mxmoe/{module} has no docstring"


# --- README ----------------------------------------------------------------------------------------------------------
README = ROOT / "README.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_readme_python_runs(tmp_path: Path) -> None:
    """All python blocks, one after the other, in an empty folder, in a process without the tests' interpreter."""
    pytest.importorskip("transformers")
    source = "\n".join(_blocks("python"))
    assert source.count("mxmoe.") > 10
    (tmp_path / "tour.py").write_text(source)
    run = subprocess.run(
        [sys.executable, "tour.py"], cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_readme_commands_exist() -> None:
    from mxmoe.cli import COMMANDS

    lines = [line.split("#")[0].strip() for block in _blocks("(?:bash|sh)") for line in block.splitlines()]
    lines += re.findall(r"`((?:python|scripts/|pip|bash)[^`]*)`", README.read_text())
    checked = 0
    for line in filter(None, lines):
        words = line.split()
        for word in words:
            if "/" in word and word.endswith((".sh", ".py")):
                assert (ROOT / word).is_file(), f"README: {line!r} runs {word}, which does not exist"
                checked += 1
        if words[:3] == ["python", "-m", "mxmoe"] and len(words) > 3 and words[3].isalpha():
            assert words[3] in COMMANDS, f"README: {line!r}"
            checked += 1
    assert checked >= 5


def test_readme_links_exist() -> None:
    for page in [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_readme_tables_are_those_of_the_results() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/update_readme.py", "--check"],
        cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def _environment() -> dict[str, str]:
    import os

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


# --- words -----------------------------------------------------------------------------------------------------------
# Names that mean two things, or that other projects use in opposite senses: house style has one word per idea.
AMBIGUOUS = {"dim0", "dim1", "cu_seqlens", "swizzled", "x_q", "w_q", "varlen_m", "offs_m", "offs_n", "offs_k", "axis"}
AMBIGUOUS_ALLOWED = {"tensor.py": {"dim0", "dim1"}}  # the signature of Tensor.transpose


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_one_word_per_idea(module: Path) -> None:
    names = {
        token.string
        for token in tokenize.generate_tokens(io.StringIO((PACKAGE / module).read_text()).readline)
        if token.type == tokenize.NAME
    }
    # tl.max(..., axis=) and friends are Triton's own keyword.
    allowed = AMBIGUOUS_ALLOWED.get(module.name, set()) | ({"axis"} if module.parts[0] == "kernels" else set())
    assert not names & (AMBIGUOUS - allowed)


def test_no_private_path_in_the_repository() -> None:
    """Nothing that only makes sense on one machine: absolute paths, hosts of registries."""
    listing = subprocess.run("git ls-files", shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    files = listing.stdout.split()
    if not files:
        pytest.skip("no git repository here")
    private = re.compile("/" + r"(?:work|root|home)/\w|/tmp/\w+/bin|(?:pypi|pytorch)\.org|pythonhosted|index-url")
    for name in files:
        path = ROOT / name
        if not path.is_file():
            continue
        if path.suffix in {".py", ".md", ".sh", ".toml", ".cfg", ".yml"} or path.name == "run":
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if path.name != "test_project.py":
                    assert not private.search(line), f"{name}:{number}: {line.strip()}"


# --- packaging -------------------------------------------------------------------------------------------------------
def test_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert mxmoe.__version__ == project["version"]


def test_everything_public_exists() -> None:
    for name in PUBLIC:
        assert _public(name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mxmoe.nonsense  # noqa: B018


def test_import_needs_no_optional_package() -> None:
    """``import mxmoe`` works, and imports neither transformers nor matplotlib."""
    code = "import sys, mxmoe; assert not {'transformers', 'matplotlib', 'safetensors'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", [m for m in MODULES if m.parts[0] == "cli"], ids=str)
def test_commands_import(module: Path) -> None:
    importlib.import_module(".".join(["mxmoe", *module.with_suffix("").parts]).removesuffix(".__init__"))
