"""Values that modules of a folder define, and values of the same kind that other packages register.

    treepack/formats/data_sets/chat.py           FORMAT = Format(name="chat", ...)
    treepack/formats/data_sets/columns.py        FORMATS = (Format(name="tau-bench", ...), ...)
    [project.entry-points."treepack.formats"]    of any package; the group has the name of the folder
    diary = "diary_logs.treepack_format:FORMAT"

Nothing imports these modules by name, so a new value is one new file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeVar

from treepack.errors import TreepackError, foreign_code

_T = TypeVar("_T")
REMEDY = "repair or uninstall the package"


class _InstalledPackage(NamedTuple):
    """The package of an entry point, such as diary-logs 1.0, and the text that names the entry point in a message."""

    title: str
    source: str

    def refuse_name(self, kind: str, name: str) -> TreepackError:
        """Return the error for a value whose name exists already; `kind` is "format", for example."""
        return TreepackError(
            f"{self.source}: has the {kind} '{name}', which exists already; uninstall the package or rename it"
        )


def folder_values(folder: str, name: str) -> Iterator[Any]:
    """Yield the value `name`, or the values of the tuple `name`S, of each module below the package `folder`."""
    for module in pkgutil.walk_packages(import_module(folder).__path__, f"{folder}."):
        found = vars(import_module(module.name))
        # A folder has neither, and nor has a module that belongs to the module beside it.
        yield from found.get(f"{name}S", (found[name],) if name in found else ())


def installed_values(group: str, kind: type[_T], home: str) -> Iterator[tuple[_T, _InstalledPackage]]:
    """Yield the values that other packages register in the group.

    Args:
        group: the group of entry points.
        kind: the type of a value.
        home: the module that has this type, for messages.

    Raises:
        TreepackError: a value cannot be loaded, or has another type.
    """
    for point in entry_points(group=group):
        title = "another package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        package = _InstalledPackage(title, f"{title}, entry point '{point.name}' of {group}")
        found = _load(point, package.source)
        if not isinstance(found, kind):
            raise TreepackError(
                f"{package.source}: has the type {type(found).__name__}; expected a {kind.__name__} of {home}"
            )
        yield found, package


def _load(point: EntryPoint, source: str) -> Any:
    with foreign_code(f"{source}: cannot be loaded", REMEDY):
        return point.load()
