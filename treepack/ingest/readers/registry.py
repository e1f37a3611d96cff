"""The formats of this installation: the modules below `treepack.formats`, and the formats of other packages.

    treepack/formats/data_sets/chat.py           FORMAT = Format(name="chat", ...)
    treepack/formats/data_sets/columns.py        FORMATS = (Format(name="tau-bench", ...), ...)
    [project.entry-points."treepack.formats"]    of any package
    diary = "diary_logs.treepack_format:FORMAT"

    all_formats()    all of them, in the order in which a record is compared with them: by rank, then by name

A format is imported only when the first file is read.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from treepack.errors import TreepackError
from treepack.ingest.readers.format import Format

_PACKAGE = "treepack.formats"
_GROUP = "treepack.formats"  # of the entry points of other packages


@cache
def all_formats() -> tuple[Format, ...]:
    """Return all formats, in the order in which a record is compared with them.

    Raises:
        TreepackError: a format of a package cannot be loaded, or two formats have one name.
    """
    own = {each.name: each for each in _own_formats()}
    for found, source in _installed_formats():
        if found.name in own:
            raise TreepackError(
                f"{source}: has the format '{found.name}', which exists already; uninstall the package or rename it"
            )
        own[found.name] = found
    return tuple(sorted(own.values(), key=lambda each: (each.rank, each.name)))


@cache
def formats_by_name() -> Mapping[str, Format]:
    """Return all formats by their names, in the order of `all_formats`.

    Raises:
        TreepackError: as `all_formats`.
    """
    return MappingProxyType({each.name: each for each in all_formats()})


def check_format(name: str) -> None:
    """Refuse a name that is neither `auto` nor the name of a format.

    Raises:
        TreepackError: the name is unknown.
    """
    if name != "auto" and name not in formats_by_name():
        raise TreepackError(f"format '{name}' is not known; expected auto or a name that 'treepack formats' lists")


def _own_formats() -> Iterator[Format]:
    # Imported by name: no module of the readers depends on a format.
    for module in pkgutil.walk_packages(import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
        found = vars(import_module(module.name))
        # A folder has neither, and nor has a module that belongs to the format beside it.
        yield from found.get("FORMATS", (found["FORMAT"],) if "FORMAT" in found else ())


def _installed_formats() -> Iterator[tuple[Format, str]]:
    """Yield the formats of other packages, each with the text that names its entry point in a message."""
    for point in entry_points(group=_GROUP):
        package = "another package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        source = f"{package}, entry point '{point.name}' of {_GROUP}"
        yield _load(point, source), source


def _load(point: EntryPoint, source: str) -> Format:
    try:
        found = point.load()
    except Exception as error:  # any fault of a foreign module
        fault = f"{type(error).__name__}: {error}"
        raise TreepackError(f"{source}: cannot be loaded ({fault}); repair or uninstall the package") from error
    if not isinstance(found, Format):
        raise TreepackError(
            f"{source}: has the type {type(found).__name__}; expected a Format of treepack.ingest.readers"
        )
    return found
