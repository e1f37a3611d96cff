"""Directories that treepack wrote, among the paths that a user gives; and the trie that a packed one came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import MANIFEST
from treepack.files.manifest import Manifest, file_sha256, read_manifest
from treepack.pack.capacity import fit_capacity
from treepack.pack.plan.planning import packed_trie
from treepack.pack.plan.problem import Limits
from treepack.trie.files import read_trie
from treepack.trie.trie import Trie


def manifest_of(paths: Sequence[str | Path]) -> Manifest | None:
    """Return the manifest if `paths` is one trie or packed directory, or None if they are raw rollouts.

    Raises:
        TreepackError: the manifest is damaged.
    """
    try:
        is_built = len(paths) == 1 and (Path(paths[0]) / MANIFEST).is_file()
    except OSError:  # a name too long for the file system, for example; reading it will give the reason
        return None
    return read_manifest(Path(paths[0])) if is_built else None


def origin_of(directory: Path, manifest: Manifest, trie: Path | None) -> Path | None:
    """Return the trie directory that `directory` was packed from: `trie` if given; None if it cannot be found.

    Raises:
        TreepackError: the directory found is another trie.
    """
    entry = manifest.get("trie")
    # The stored path is relative to the directory where `treepack pack` ran, which may be the parent of its output.
    candidates = [Path(entry["path"]), directory.parent / entry["path"]] if entry else []
    chosen = trie or next((path for path in candidates if (path / MANIFEST).is_file()), None)
    if chosen is None:
        return None
    read_manifest(chosen, schema.TRIE_FORMAT)
    if entry is None or file_sha256(chosen / MANIFEST) != entry["sha256"]:
        raise TreepackError(f"{chosen}: is not the trie that {directory} was packed from; give that one with --trie")
    return chosen


def read_origin(path: Path, manifest: Manifest) -> Trie:
    """Read the trie at `path`, cut to the capacity of the packed directory with `manifest`."""
    options = manifest["options"]
    pairs = options.get("pairs_budget")
    longest = Limits(manifest["capacity"], pairs if isinstance(pairs, int) and pairs > 0 else None).longest
    fitted, _ = fit_capacity(read_trie(path), longest, too_long=str(options.get("too_long", "error")))
    return fitted


def read_packed_origin(directory: Path, manifest: Manifest, trie: Path | None) -> Trie | None:
    """Read the trie whose nodes the rows of `directory` contain, or return None if it cannot be found.

    Raises:
        TreepackError: as `origin_of`, or the trie is damaged.
    """
    path = origin_of(directory, manifest, trie)
    return None if path is None else packed_trie(read_origin(path, manifest), str(manifest["options"].get("method")))
