"""Directories that treepack wrote, among the paths that a user gives; and the trie that a packed one came from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import MANIFEST
from treepack.files.manifest import Manifest, file_sha256, read_manifest
from treepack.files.manifest_entries import TrieEntry
from treepack.files.prepared import PACKED, RATED_TRIE, TRIE, prepared_part
from treepack.files.remote.address import AnyPath, Paths, as_path, is_address, path_names
from treepack.files.remote.cache import local_copy
from treepack.files.remote.stored_files import read_stored
from treepack.ingest.options import BuildOptions
from treepack.pack.capacity import fit_capacity
from treepack.pack.leaf_weights import weigh_leaves
from treepack.pack.plan.planning import packed_trie
from treepack.pack.plan.problem import RowLimits
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie


def local_paths(paths: Paths) -> list[str]:
    """Return `paths` as text, with a local copy in the place of the address of a trie or packed directory.

    An output of `treepack prepare` is read as the packed directory in it.

    Raises:
        TreepackError: there is none, the store cannot be reached, or a part is missing or damaged.
    """
    names = path_names(paths)
    if not names:
        raise TreepackError("there are no paths; give a directory or rollouts")
    if len(names) == 1 and is_address(names[0]):
        path = as_path(names[0])
        if not isinstance(path, Path) and read_stored(path / MANIFEST) is not None:
            return [str(local_copy(path))]
    if len(names) == 1 and not is_address(names[0]):
        path = Path(names[0])
        part = prepared_part(path, (*PACKED, *RATED_TRIE), alone=True)
        return names if part is path else [str(part)]
    return names


def manifest_of(paths: Sequence[str]) -> Manifest | None:
    """Return the manifest if `paths` is one trie or packed directory, or None if they are raw rollouts.

    Raises:
        TreepackError: the manifest is damaged.
    """
    try:
        is_built = len(paths) == 1 and (Path(paths[0]) / MANIFEST).is_file()
    except OSError:  # a name too long for the file system, for example; reading it will give the reason
        return None
    return read_manifest(Path(paths[0])) if is_built else None


def refuse_reading(directory: Path, given: BuildOptions, *, used: Sequence[str]) -> None:
    """Refuse options of reading rollouts with a trie or packed directory, except the options `used`."""
    unread = BuildOptions(workers=given.workers)
    names = [each.name for each in fields(given) if getattr(given, each.name) != getattr(unread, each.name)]
    if names := [name.replace("_", "-") for name in names if name not in used]:
        raise TreepackError(f"{directory}: its rollouts are read already; leave out --{', --'.join(names)}")


def origin_of(directory: Path, manifest: Manifest, trie: AnyPath | None) -> Path | None:
    """Return the trie directory that `directory` was packed from: `trie` if given; None if it cannot be found.

    Raises:
        TreepackError: the directory found is another trie.
    """
    entry = manifest.get("trie")
    chosen = local_copy(prepared_part(trie, TRIE)) if trie else _recorded_origin(entry, directory) if entry else None
    if chosen is None:
        return None
    read_manifest(chosen, schema.TRIE_FORMAT)
    if entry is None or file_sha256(chosen / MANIFEST) != entry["sha256"]:
        raise TreepackError(f"{chosen}: is not the trie that {directory} was packed from; give that one with --trie")
    return chosen


def _recorded_origin(entry: TrieEntry, directory: Path) -> Path | None:
    """Return the trie with the hash of `entry`, or else a trie at its path, or None.

    The path is relative to the folder where `treepack pack` ran, often one of the folders above its output.
    """
    # data/trie of proj/data/packed -> ./data/trie, proj/data/data/trie, proj/data/trie, data/trie, ...
    places = [_copy_of_origin(entry["path"]), *(each / entry["path"] for each in directory.resolve().parents)]
    tries = [each for each in places if (each / MANIFEST).is_file()]
    same = (each for each in tries if file_sha256(each / MANIFEST) == entry["sha256"])
    return next(same, None) or next((each for each in tries if each in places[:2]), None)


def _copy_of_origin(recorded: str) -> Path:
    """Return the path that a manifest records, or a copy if it is an address; there may be nothing at it."""
    if is_address(recorded):
        with suppress(TreepackError):  # another account, or no network: like a folder that is not there
            return local_copy(as_path(recorded))
    return Path(recorded)


def read_origin(path: Path, manifest: Manifest, *, memory: int | None = None) -> Trie:
    """Read the trie at `path`, cut to the capacity of the packed directory with `manifest`, and weighted as it is.

    Arrays that are large for `memory`, in bytes and None for `usual_memory`, are mapped from temporary files.
    """
    trie, options = read_trie(path, memory=memory), manifest["options"]
    if options.get("leaf_weights"):
        trie, _ = weigh_leaves(trie, fallback_leaves=bool(options.get("fallback_leaves")))
    pairs = options.get("pairs_budget")
    longest = RowLimits(manifest["capacity"], pairs if isinstance(pairs, int) and pairs > 0 else None).longest
    fitted, _ = fit_capacity(trie, longest, too_long=str(options.get("too_long", "error")))
    return fitted


def read_packed_origin(
    directory: Path, manifest: Manifest, trie: AnyPath | None, *, memory: int | None = None
) -> Trie | None:
    """Read the trie whose nodes the rows of `directory` contain, or return None if it cannot be found.

    `memory` is that of `read_origin`.

    Raises:
        TreepackError: as `origin_of`, or the trie is damaged.
    """
    path = origin_of(directory, manifest, trie)
    if path is None:
        return None
    return packed_trie(read_origin(path, manifest, memory=memory), str(manifest["options"].get("method")))
