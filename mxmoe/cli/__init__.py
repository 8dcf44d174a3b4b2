"""The command line: one module per sub-command, imported only when it runs.

A sub-command module has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args) -> int`` (the exit status).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Final

COMMANDS: Final = {
    "info": "versions, devices, which backend runs which operation here and why not, a self-test of a few bytes",
    "demo": "train a small MoE model twice, with bf16/fp32 and with MXFP8 experts, and compare the curves",
    "bench": "run a benchmark script by name",
    "convert": "write an MXFP8 checkpoint of a model, shard by shard",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m mxmoe ARGV`` and return its exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Only the named command's module is imported (and only it adds arguments): `info` must not need transformers.
    named = next((word for word in argv if word in COMMANDS), None)
    parser = argparse.ArgumentParser(
        prog="python -m mxmoe", description="MXFP8 for Mixture-of-Experts: grouped GEMMs in PyTorch and Triton."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", formatter_class=_Formatter
        )
        if name == named:
            module = importlib.import_module(f".{name}", __name__)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except MissingPackageError as error:
        print(error, file=sys.stderr)
        return 1


class MissingPackageError(RuntimeError):
    """A command needs a package of an optional extra."""


def need(extra: str, *modules: str) -> None:
    """Raise :class:`MissingPackageError` naming the extra to install if one of ``modules`` cannot be found."""
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise MissingPackageError(f"this command needs {', '.join(missing)}: pip install 'mxmoe[{extra}]'")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    pass


def _version() -> str:
    from importlib import metadata

    try:
        return "mxmoe " + metadata.version("mxmoe")
    except metadata.PackageNotFoundError:
        return "mxmoe (from source)"
