"""Print the requirements of an extra of pyproject.toml that the running interpreter lacks, one a line.

``python _requirements.py test`` reads the base dependencies and the extra ``test`` (extras of extras followed).
A torch or triton that is installed but too old is printed too. Standard library and pip only.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # every venv has pip

import tomllib

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extra: str) -> list[Requirement]:
    """Base dependencies and those of ``extra``, markers evaluated, without repetition."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found: dict[str, Requirement] = {}
    todo = [*project["dependencies"], f"{project['name']}[{extra}]"] if extra else list(project["dependencies"])
    while todo:
        req = Requirement(todo.pop(0))
        if req.marker is not None and not req.marker.evaluate():
            continue
        if req.name == project["name"]:
            for name in sorted(req.extras):
                todo += project["optional-dependencies"][name]
        else:
            found.setdefault(str(req), req)
    return list(found.values())


def is_met(req: Requirement) -> bool:
    """Whether a distribution of that name and version is installed."""
    try:
        version = metadata.version(req.name)
    except metadata.PackageNotFoundError:
        return False
    return req.specifier.contains(version, prereleases=True)


if __name__ == "__main__":
    for missing in requirements(sys.argv[1] if len(sys.argv) > 1 else ""):
        if not is_met(missing):
            missing.marker = None
            print(missing)
