"""The output directory of a command, for tasks on other machines that write parts of it.

    with finished_directory(out) as temporary:            the command
        output = TaskOutput.of(temporary)                 picklable
            with output.folder() as folder:               a task, on any machine
                writer = PartWriter(folder, ...)          its entries are for the manifest
        check_visible(temporary, entries of all tasks)
        write_manifest(temporary, ...)

The parts of a task appear whole, when its block ends. A task that runs twice, because its first process died or was
thought dead, writes the same parts again. Parts of an output in an object store go there directly. For a local output,
all machines must see the same folder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.manifest_entries import FileEntry
from treepack.files.remote.remote_output import is_remote_folder, target_of, with_target

_PREFIX = ".task-"


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """A directory of `finished_directory`, as tasks see it: its path, or the `target` in an object store."""

    directory: str
    target: bytes | None

    @classmethod
    def of(cls, temporary: Path) -> TaskOutput:
        """Return the output that `temporary` becomes."""
        return cls(str(temporary), target_of(temporary))

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield an empty folder of this task; its files become parts of the output if the block ends without an error.

        Raises:
            TreepackError: the folder cannot be written.
        """
        if self.target is not None:
            with tempfile.TemporaryDirectory(prefix="treepack-task-") as folder:
                yield with_target(Path(folder), self.target)
            return
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=self.directory)
        except OSError as error:
            raise TreepackError(
                f"{self.directory}: cannot be written by a worker ({error.strerror or error}); give --out an address "
                "(s3://...), or a folder that all machines share"
            ) from error
        try:
            yield Path(folder)
            for path in sorted(Path(folder).iterdir()):
                path.replace(Path(self.directory, path.name))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def check_visible(temporary: Path, entries: Sequence[FileEntry]) -> None:
    """Check that this machine sees the parts of `entries`; remove the folders that killed tasks have left.

    Raises:
        TreepackError: a part is missing, because a task wrote it to a folder that this machine does not see.
    """
    for remains in temporary.glob(f"{_PREFIX}*"):
        shutil.rmtree(remains, ignore_errors=True)
    if is_remote_folder(temporary):
        return  # `remote_directory` compares them with the store before the manifest is written
    for entry in entries:
        path = temporary / entry["name"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise TreepackError(
                f"{path}: a worker wrote it, but this machine does not see it; give --out an address (s3://...), or a "
                "folder that all machines share"
            )
