"""What to read: the files that paths, folders and globs name, and one hash of what they hold.

    paths, folders, globs, "-" --list_inputs--> files, in a fixed order

Which files of a folder are read is told from their extensions; what a file holds, from its bytes (records.py).
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from treepack.errors import TreepackError
from treepack.trajectory import Skipped

EXTENSIONS = frozenset({".arrow", ".jsonl", ".json", ".ndjson", ".parquet", ".pt", ".root", ".traj"})
COMPRESSED = frozenset({".gz", ".zst"})
STDIN = "<stdin>"


class InputHash:
    """Collects the sha256 of every input file.

    `hexdigest()` is the sha256 of the files' hex digests, sorted, one per line: it depends on what the files hold, not
    on where they lie or in which order they are read.
    """

    def __init__(self) -> None:
        """Start with no file."""
        self.files: list[tuple[str, str]] = []

    @property
    def num_files(self) -> int:
        """How many files have been read to their end."""
        return len(self.files)

    def add(self, path: str, sha256: str) -> None:
        """Note one file, its bytes as stored (compressed bytes where it is compressed)."""
        self.files.append((path, sha256))

    def hexdigest(self) -> str:
        """One hash of all files so far."""
        return hashlib.sha256(
            "".join(f"{sha256}\n" for sha256 in sorted(sha256 for _, sha256 in self.files)).encode()
        ).hexdigest()


def list_inputs(inputs: Iterable[str | Path]) -> tuple[list[str], list[Skipped], frozenset[str]]:
    """The files that `inputs` name; what of a folder is not read because of its extension; and which files were found.

    The last are those of the files that no input names: they were found by searching a folder.
    A folder is searched recursively; folders and globs are sorted; inputs keep their order.

    Raises:
        TreepackError: an input matches nothing, or a file is named twice.
    """
    files: list[str] = []
    skipped: list[Skipped] = []
    searched: set[str] = set()
    for name in map(str, inputs):
        for path in _expand_glob(name):
            if path != STDIN and Path(path).is_dir():
                found, others = _search_folder(path)
                files += found
                searched.update(found)
                skipped += others
            else:
                files.append(path)
    seen: set[str] = set()
    for path in files:
        # Not Path.resolve, which raises on a link to itself; reading the file will say what is wrong with it.
        real = path if path == STDIN else os.path.realpath(path)
        if real in seen:
            raise TreepackError(f"{displayed(path)}: named twice among the inputs; name it once")
        seen.add(real)
    return files, skipped, frozenset(searched)


def _expand_glob(name: str) -> list[str]:
    if name == "-":
        return [STDIN]
    try:
        if Path(name).exists():
            return [name]
    except OSError as error:
        raise TreepackError(f"{displayed(name)}: cannot be read ({error.strerror}); check the path") from error
    paths = sorted(glob.glob(name, recursive=True, include_hidden=True))  # noqa: PTH207 (keeps the path as given)
    if not paths:
        raise TreepackError(f"{displayed(name)}: no such file or folder, and no glob that matches one; check the path")
    return paths


def displayed(path: str) -> str:
    """`path` with the bytes that are not UTF-8 as backslash escapes, so that it can be printed and stored."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _search_folder(folder: str) -> tuple[list[str], list[Skipped]]:
    files: list[str] = []
    skipped: list[Skipped] = []
    for path in sorted(_files_below(folder)):
        shown = displayed(str(path))
        extension = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
        if path.is_dir():
            skipped.append(Skipped(shown, "link to a folder not followed"))
        elif extension.lower() in EXTENSIONS:
            files.append(str(path))
        else:
            kind = f"file extension {displayed(extension)}" if extension else "file without extension"
            skipped.append(Skipped(shown, f"{kind} not read"))
    if not files:
        known = " ".join(sorted(EXTENSIONS))
        raise TreepackError(
            f"{displayed(folder)}: holds no file to read; expected the extensions {known}, plain, .gz or .zst"
        )
    return files, skipped


def _files_below(folder: str) -> Iterator[Path]:
    """All that is no folder, links to folders among it; unlike Path.rglob, no folder is passed over unread."""

    def refuse(error: OSError) -> None:
        raise TreepackError(
            f"{displayed(str(error.filename))}: cannot be read ({error.strerror}); restore the folder's permissions"
        ) from error

    for root, folders, names in os.walk(folder, onerror=refuse):
        yield from (Path(root, name) for name in names)
        yield from (path for name in folders if (path := Path(root, name)).is_symlink())
