"""The formats of this installation: the modules below `treepack.formats`, and the formats of other packages.

    all_formats()    all of them, in the order in which a record is compared with them: by rank, then by name

`treepack.entry_points` finds them. A format is imported only when the first file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from treepack.entry_points import folder_values, installed_values
from treepack.errors import TreepackError
from treepack.ingest.readers.foreign_formats import guarded_format
from treepack.ingest.readers.format import Format

_FOLDER = "treepack.formats"  # and the group of entry points of other packages


@cache
def all_formats() -> tuple[Format, ...]:
    """Return all formats, in the order in which a record is compared with them.

    Raises:
        TreepackError: a format of a package cannot be loaded, or two formats have one name.
    """
    own: dict[str, Format] = {each.name: each for each in folder_values(_FOLDER, "FORMAT")}
    for found, package in installed_values(_FOLDER, Format, "treepack.ingest.readers"):
        if found.name in own:
            raise package.refuse_name("format", found.name)
        own[found.name] = guarded_format(found, package.source)
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
