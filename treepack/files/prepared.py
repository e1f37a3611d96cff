"""The directories inside an output of `treepack prepare`: a command that needs one of them takes the output too.

out/trie/  out/packed/  [out/advantages/]

out, "packed" --prepared_part--> out/packed                 a directory without a manifest of its own
out, "advantages", "trie"        out/advantages, or without one out/trie
"""

from __future__ import annotations

from pathlib import Path

from treepack.files.directory import MANIFEST

_PARTS = ("trie", "packed", "advantages")


def prepared_part(path: Path, *names: str, alone: bool = False) -> Path | None:
    """Return the first directory of these names inside the output `path` of `treepack prepare`; None if it is none.

    With `alone`, `path` must contain nothing but such directories, because a folder of rollouts that a command reads
    may have a trie beside them.
    """
    try:
        inside = {each.name for each in path.iterdir() if not each.name.startswith(".")}
    except OSError:  # no directory that can be read; the reader of the path gives the error
        return None
    if MANIFEST in inside or (alone and not inside <= {*_PARTS}):
        return None
    return next((path / name for name in names if name in inside and (path / name / MANIFEST).is_file()), None)
