"""Directories that treepack wrote among what a command is given, and the trie that a packed one lays out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treepack.files.manifest import Manifest
    from treepack.trie.trie import Trie


def manifest_of(paths: tuple[str, ...]) -> Manifest | None:
    """The manifest of the one trie or packed directory that `paths` name; None if they name raw rollouts.

    Raises:
        TreepackError: the manifest is damaged.
    """
    from treepack.files.directory import MANIFEST
    from treepack.files.manifest import read_manifest

    try:
        built = len(paths) == 1 and (Path(paths[0]) / MANIFEST).is_file()
    except OSError:  # a name too long for the file system, say; reading it will tell
        return None
    return read_manifest(Path(paths[0])) if built else None


def origin_of(directory: Path, manifest: dict[str, Any], trie_path: Path | None) -> Path | None:
    """The trie directory that `directory` was packed from: `trie_path` if given; None if it is not there.

    Raises:
        TreepackError: what is there is another trie.
    """
    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.files.directory import MANIFEST
    from treepack.files.manifest import file_sha256, read_manifest

    stored = manifest.get("trie") or {}
    candidates = [Path(stored["path"]), directory.parent / stored["path"]] if "path" in stored else []
    found = [path for path in candidates if (path / MANIFEST).is_file()]
    chosen = trie_path or next(iter(found), None)
    if chosen is None:
        return None
    read_manifest(chosen, schema.TRIE_FORMAT)
    if file_sha256(chosen / MANIFEST) != stored.get("sha256"):
        raise TreepackError(f"{chosen}: is not the trie that {directory} was packed from; give that one with --trie")
    return chosen


def read_origin(path: Path, manifest: dict[str, Any]) -> Trie:
    """The trie at `path`, cut to the capacity of the packed directory that `manifest` describes."""
    from treepack.pack.capacity import fit_capacity
    from treepack.pack.plan.problem import Limits
    from treepack.trie.files import read_trie

    options = manifest["options"]
    pairs = options.get("pairs_budget")
    longest = Limits(manifest["capacity"], pairs if isinstance(pairs, int) and pairs > 0 else None).longest
    fitted, _ = fit_capacity(read_trie(path), longest, too_long=str(options.get("too_long", "error")))
    return fitted
