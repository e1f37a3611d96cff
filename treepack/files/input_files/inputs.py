"""Input files: the files that paths, folders and globs name, one hash of their content, and the bytes read of them.

    paths, folders, globs, "-" --list_inputs--> files, in a fixed order

The extension decides if a file of a folder is read, and the bytes of a file decide how it is read (records.py).
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from threading import Condition, Thread

from treepack.errors import TreepackError
from treepack.files.directory import is_hidden_output
from treepack.files.input_files.remote_inputs import expand_address
from treepack.files.remote.address import as_path, is_address
from treepack.files.remote.cache import addresses_in
from treepack.trajectory import Skipped

# .pt is torch.save, .traj is SWE-agent and .root is DARS. A folder may also have YAML, but mostly as settings.
EXTENSIONS = frozenset({".arrow", ".eval", ".jsonl", ".json", ".ndjson", ".parquet", ".pt", ".root", ".traj"})
COMPRESSED = frozenset({".gz", ".zst"})
_HASH_CHUNK = 1 << 20  # bytes that are hashed at a time by a thread
_HASH_AHEAD = 1 << 26  # bytes by which such a thread may be ahead of the reading of its file
STDIN = "<stdin>"  # the path of standard input, as in messages of Python itself


class BytesRead:
    """Bytes of the input files that were read, as stored: compressed bytes of compressed files."""

    def __init__(self) -> None:
        """Start before any file."""
        self._total: int | None = None  # None while it is unknown
        self._before = 0  # sizes of the files before the current one
        self._size = 0  # of the current file
        self._read = 0  # of the current file
        self._most = 0

    def expect(self, files: Iterable[str]) -> None:
        """Sum up the sizes of the files that will be read; unknown if standard input is one of them."""
        try:
            self._total = sum(Path(path).stat().st_size for path in files)
        except OSError:  # standard input, or a file that does not exist, which reading it will report
            self._total = None

    def begin(self, path: str) -> None:
        """Start the file `path`; the one before is finished."""
        self._before += self._size
        self._size, self._read = 0 if path == STDIN else Path(path).stat().st_size, 0

    def count(self, num_bytes: int) -> None:
        """Add bytes of the current file."""
        self._read += num_bytes

    @property
    def share(self) -> float | None:
        """Share of the bytes that were read, which never falls; None if it is unknown."""
        # A document is read as a whole before its rollouts are tokenised. So a file that is read to its end counts only
        # when the next one begins. Files of 10 and 30 bytes, 4 read: 4 / 40; 10 read: still 4 / 40; then 10 / 40.
        current = self._read if self._read < self._size else 0
        self._most = max(self._most, self._before + current)
        return self._most / self._total if self._total and 0 < self._most < self._total else None


class FileHash:
    """The sha256 of a file, computed by a thread that stays close to `end`, the end of the parts read elsewhere.

    So a file is read from the disk once, and then from the page cache.
    """

    def __init__(self, path: str) -> None:
        """Start the thread."""
        self.end = 0
        self._path, self._sha256, self._position = path, hashlib.sha256(), 0
        self._error: OSError | None = None
        self._is_stopped = False
        self._changed = Condition()  # guards `end` and `_is_stopped`
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def follow(self, end: int) -> None:
        """Allow the thread to read to `_HASH_AHEAD` bytes after `end`."""
        with self._changed:
            self.end = end
            self._changed.notify()

    def stop(self) -> None:
        """End the thread without a result."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def hexdigest(self) -> str:
        """Wait for the hash of the whole file.

        Raises:
            TreepackError: the file cannot be read.
        """
        self.follow(sys.maxsize - _HASH_AHEAD)
        self._thread.join()
        if self._error is not None:
            raise unreadable(displayed(self._path), self._error) from self._error
        return self._sha256.hexdigest()

    def _run(self) -> None:
        buffer = memoryview(bytearray(_HASH_CHUNK))
        try:
            with Path(self._path).open("rb", buffering=0) as file:
                while size := file.readinto(buffer):
                    self._sha256.update(buffer[:size])
                    self._position += size
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_stopped or self._position < self.end + _HASH_AHEAD)
                        if self._is_stopped:
                            return
        except OSError as error:
            self._error = error


class InputHash:
    """The sha256 of every input file, and one hash of all of them; `bytes_read` follows the reading.

    `hexdigest()` is the sha256 of the sorted hex digests of the files, one per line. So it depends on the content of
    the files, but not on their paths or on the order of reading.
    """

    def __init__(self) -> None:
        """Start with no file."""
        self._files: list[tuple[str, str | FileHash]] = []
        self.bytes_read = BytesRead()

    @property
    def files(self) -> list[tuple[str, str]]:
        """Path and sha256 of the files that have been read to their end; waits for threads that hash them.

        Raises:
            TreepackError: a file that is hashed by a thread cannot be read.
        """
        return [(path, sha256 if isinstance(sha256, str) else sha256.hexdigest()) for path, sha256 in self._files]

    @property
    def num_files(self) -> int:
        """Number of files that have been read to their end."""
        return len(self._files)

    def add(self, path: str, sha256: str | FileHash) -> None:
        """Add one file, by the sha256 of its bytes as stored (the compressed bytes of a compressed file)."""
        if isinstance(sha256, FileHash):
            sha256.follow(sys.maxsize - _HASH_AHEAD)
        self._files.append((path, sha256))

    def forget(self, path: str) -> None:
        """Remove the file `path`, which turned out not to be an input; a file may be the copy of an address."""
        for name, sha256 in self._files:
            if addresses_in(name) == addresses_in(path) and isinstance(sha256, FileHash):
                sha256.stop()
        self._files = [each for each in self._files if addresses_in(each[0]) != addresses_in(path)]

    def hexdigest(self) -> str:
        """Return one hash of all files so far."""
        return hashlib.sha256(
            "".join(f"{sha256}\n" for sha256 in sorted(each for _, each in self.files)).encode()
        ).hexdigest()


def unreadable(path: str, error: OSError | EOFError) -> TreepackError:
    """Return the error about a file that cannot be read, with the reason that the system gives."""
    # OSError: "No such file or directory" without the number and the path. EOFError comes from truncated gzip.
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    reason = message.strip().partition("\n")[0]
    remedy = "give a file" if isinstance(error, IsADirectoryError) else "restore the file or its permissions"
    return TreepackError(f"{path}: cannot be read ({reason}); {remedy}")


def list_inputs(
    inputs: Iterable[str | Path], *, copy: bool = True, is_whole: Callable[[str], bool] = lambda _: False
) -> tuple[list[str], list[Skipped], frozenset[str]]:
    """Return the files of `inputs`, the files of folders that are not read, and the files that came from a folder.

    The third value lets the caller skip a file of unknown format if it came from a folder, and refuse it if the user
    named it. Folders are searched recursively, except a folder that is whole. Folders and globs are sorted; inputs keep
    their order. With `copy`, the small files below a prefix of an object store are copied to this machine; without it,
    all files are addresses.

    Raises:
        TreepackError: an input matches nothing, or a file occurs twice.
    """
    files: list[str] = []
    skipped: list[Skipped] = []
    searched: set[str] = set()
    for name in map(str, inputs):
        if is_whole(name):
            files.append(name)
            continue
        if is_address(name) and not name.startswith("file:"):
            matches, others, below = expand_address(name, _unread, copy=copy)
            files += matches
            searched.update(below)
            skipped += others
            continue
        for path in _expand_glob(name):
            if path != STDIN and Path(path).is_dir():
                matches, others = _search_folder(path)
                files += matches
                searched.update(matches)
                skipped += others
            else:
                files.append(path)
    seen: set[str] = set()
    for path in files:
        # Two links to one file are one file. Path.resolve would raise on a link to itself; reading that link gives a
        # better message.
        real = path if path == STDIN or is_address(path) else addresses_in(os.path.realpath(path))
        if real in seen:
            raise TreepackError(f"{displayed(path)}: named twice among the inputs; name it once")
        seen.add(real)
    return files, skipped, frozenset(searched)


def _expand_glob(name: str) -> list[str]:
    if name == "-":
        return [STDIN]
    if is_address(name):
        name = str(as_path(name))  # of file://
    try:
        if Path(name).exists():
            return [name]
    except OSError as error:
        raise TreepackError(f"{displayed(name)}: cannot be read ({error.strerror}); check the path") from error
    found = glob.glob(name, recursive=True, include_hidden=True)  # noqa: PTH207 (Path.glob would drop a leading "./")
    given = PurePath(name).parts
    # Hidden outputs that the pattern does not name, as in a search of a folder.
    paths = sorted(
        path for path in found if not any(is_hidden_output(part) for part in PurePath(path).parts if part not in given)
    )
    if not paths:
        raise TreepackError(f"{displayed(name)}: no such file or folder, and no glob that matches one; check the path")
    return paths


def displayed(path: str) -> str:
    """Return `path` with backslash escapes for bytes that are not UTF-8, so that it can be printed and stored."""
    # b"a\xff.jsonl" is "a\udcff.jsonl" in Python, which no file in UTF-8 can contain -> r"a\xff.jsonl".
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _search_folder(folder: str) -> tuple[list[str], list[Skipped]]:
    files: list[str] = []
    skipped: list[Skipped] = []
    for path in sorted(_files_below(folder)):
        shown = displayed(str(path))
        reason = _unread(path.name)
        if path.is_dir():  # only links: `os.walk` enters all other folders
            skipped.append(Skipped(shown, "link to a folder not followed", is_rollout=False))
        elif _is_special(path):
            skipped.append(Skipped(shown, "pipe, socket or device of a folder not read", is_rollout=False))
        elif reason is None:
            files.append(str(path))
        else:
            skipped.append(Skipped(shown, reason, is_rollout=False))
    if not files:
        known = " ".join(sorted(EXTENSIONS))
        raise TreepackError(
            f"{displayed(folder)}: contains no file to read; expected the extensions {known}, plain, .gz or .zst"
        )
    return files, skipped


def _is_special(path: Path) -> bool:
    """Return True if reading the path could wait for ever, as that of a pipe without a writer does."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # a broken link, which reading it will report
        return False


def _unread(name: str) -> str | None:
    """Return why a file of a folder is not read, by its name; None if it is."""
    # rollouts.jsonl.gz -> .jsonl
    path = PurePath(name)
    extension = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if extension.lower() in EXTENSIONS:
        return None
    return f"file extension {displayed(extension)} not read" if extension else "file without extension not read"


def _files_below(folder: str) -> Iterator[Path]:
    """Yield all files and all links to folders; unlike Path.rglob, a folder that cannot be read is an error."""

    def refuse(error: OSError) -> None:
        raise TreepackError(
            f"{displayed(str(error.filename))}: cannot be read ({error.strerror}); restore the folder's permissions"
        ) from error

    for root, folders, names in os.walk(folder, onerror=refuse):
        # Hidden outputs belong to a command that writes into this folder now, or that was killed.
        folders[:] = [name for name in folders if not is_hidden_output(name)]
        yield from (Path(root, name) for name in names if not is_hidden_output(name))
        yield from (path for name in folders if (path := Path(root, name)).is_symlink())
