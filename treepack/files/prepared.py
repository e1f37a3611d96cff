"""The directories inside an output of `treepack prepare`: what needs one of them takes the output too.

out/trie/  out/packed/  [out/advantages/]

out, PACKED --prepared_part--> out/packed                 a directory that has no manifest itself
out, RATED_TRIE                out/advantages, or without one out/trie
other paths                    the path itself
"""

from __future__ import annotations

from pathlib import Path

from treepack.files.directory import MANIFEST, is_own_directory
from treepack.files.remote.address import AnyPath

TRIE, RATED_TRIE, PACKED = ("trie",), ("advantages", "trie"), ("packed",)
"""Names of the directories that a command or a function can use, the preferred one first."""

_PARTS = {*TRIE, *RATED_TRIE, *PACKED}


def prepared_part(path: AnyPath, names: tuple[str, ...], *, alone: bool = False) -> AnyPath:
    """Return the first directory of these names inside the output `path` of `treepack prepare`, else `path` itself.

    With `alone`, `path` must contain nothing but what treepack writes, because a folder of rollouts that a command
    reads may have a trie beside them. Addresses are not looked at.
    """
    if not names or not isinstance(path, Path):
        return path
    try:
        inside = {each.name for each in path.iterdir() if not each.name.startswith(".")}
    except OSError:  # no directory that can be read; the reader of the path gives the error
        return path
    others = [path / name for name in inside - _PARTS if not name.endswith(".html")] if alone else []
    others = [each for each in others if {file.suffix for file in each.glob("*")} != {".png"}]  # pictures of a report
    if MANIFEST in inside or not all(is_own_directory(each) for each in others):
        return path
    return next((path / name for name in names if name in inside and (path / name / MANIFEST).is_file()), path)
