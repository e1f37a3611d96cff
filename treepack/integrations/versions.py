"""The versions of other programs that the tests run, and checks of others before training.

    trainer class or module, required names --check_program--> nothing, a note, or an error with the missing name

A subclass of a trainer overrides methods and reads fields that are not public. In another version they may be
renamed, and an override that is never called would train without treepack. So each name is looked up. If all are there,
an untested version gets a note. `TESTED` are the bounds of the versions that the tests run; the table of
docs/your-trainer.md and the pins of the test environments are compared with them.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from packaging.version import Version

from treepack.errors import TreepackError

_log = logging.getLogger("treepack")
_noted: set[str] = set()

TESTED = {
    "trl": ("1.16", "1.17"),
    "verl": ("0.9.1", "0.10"),
    "transformers": ("5.10", "5.25"),
    "verifiers": ("0.4", "0.5"),
    "vllm": ("0.32", "0.33"),
}
"""Smallest version, and the first larger one that no test has run."""


def check_program(program: str, owner: Any, names: Sequence[str], *, user: str) -> None:
    """Refuse a version of `program` whose `owner` lacks one of `names`; note an untested version once.

    Args:
        program: a name of `TESTED`; if it is not installed, only the names are checked.
        owner: a class, module or object of the program.
        names: attributes, "module.attribute", or "method(argument)" for an argument that a method must have.
        user: the class or function that needs them; the message names it.

    Raises:
        TreepackError: with the version, the missing name and the versions to install.
    """
    low, high = TESTED[program]
    version = installed_version(program)
    tested = f"{program}>={low},<{high}"
    shown = f"{program} {version}" if version else program
    for name in names:
        if not _has(owner, name):
            where = getattr(owner, "__name__", type(owner).__name__)
            raise TreepackError(
                f"{user}: {where} of {shown} has no {name}, which treepack needs; install '{tested}', the versions "
                "that treepack is tested with"
            )
    if version and not Version(low) <= Version(version) < Version(high) and shown not in _noted:
        _noted.add(shown)
        _log.warning("note: %s is not tested with treepack, whose tests run %s", shown, tested)


def installed_version(program: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(program)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has(owner: Any, name: str) -> bool:
    # "packing.TreeRow" -> owner.packing.TreeRow; "compute_loss(inputs)" -> compute_loss, and its argument inputs.
    path, _, argument = name.rstrip(")").partition("(")
    for part in path.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return not argument or argument in inspect.signature(owner).parameters
