"""Types of the parameters of commands that name files: a path on this machine, or an address in an object store.

click.Path would make "s3://bucket/rows" the local path "s3:/bucket/rows".

    FILE: READ           Path, or the address of s3://, gs:// and hf://
    TRIE: TRIE           the same for a trie; an output of treepack prepare is read as the trie in it, with a note
    PACKED: PACKED       the same for packed rows
    PATH...: LOOK        raw rollouts, a trie or packed rows; a string, because it may be a glob or "-"
    --out: WRITE         a path or an address that can be written, so not hf://
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from treepack.errors import TreepackError
from treepack.files import prepared
from treepack.files.prepared import prepared_part
from treepack.files.remote.address import AnyPath, as_output, as_path, is_address

from .launch import is_first_process


class _InputType(click.ParamType[AnyPath]):
    """A path or an address; another scheme is an error of one sentence.

    Of an output of treepack prepare, the first directory of the names `inside` is taken, as Python does.
    """

    name = "path"

    def __init__(self, inside: tuple[str, ...] = ()) -> None:
        self.inside = inside

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> AnyPath:
        """Parse `value`, which may have been parsed already."""
        _refuse_empty(value, param)
        return _part(as_path(value), self.inside)


class _TextType(_InputType):
    """The same as a string; with `alone`, a folder that has other files too stays as it is."""

    def __init__(self, inside: tuple[str, ...], *, alone: bool) -> None:
        super().__init__(inside)
        self.alone = alone

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return `value`, or the directory in it."""
        _refuse_empty(value, param)
        path = Path(value)
        part = path if is_address(value) else _part(path, self.inside, alone=self.alone)
        return value if part is path else str(part)


class _OutputType(click.ParamType[AnyPath]):
    """A path or an address to write."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> AnyPath:
        """Parse `value`, which may have been parsed already."""
        _refuse_empty(value, param)
        option = param.opts[0] if param is not None else "--out"
        out = as_output(value, option=option)
        if not isinstance(out, Path) and out.scheme == "memory":
            raise TreepackError(f"{out}: memory:// ends with this command; choose another {option}")
        return out


def _refuse_empty(value: Any, param: click.Parameter | None) -> None:
    """Refuse an empty text, such as a variable of the shell that is not set; Path("") would be this folder."""
    if value == "" and param is not None:
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        raise TreepackError(f"{name} is empty; give a path, or . for this folder")


def _part(path: AnyPath, names: tuple[str, ...], *, alone: bool = False) -> AnyPath:
    """Return the directory of `names` inside `path` with a note, or `path` itself without one."""
    part = prepared_part(path, names, alone=alone)
    if part is not path and is_first_process():
        click.echo(f"note: {path} is an output of treepack prepare; {part} is read", err=True)
    return part


def refuse_missing(paths: Iterable[str]) -> None:
    """Refuse a path that does not exist, before a command imports what reads it; addresses and globs are not looked at.

    Raises:
        TreepackError: naming the first one.
    """
    for path in paths:
        if path == "-" or is_address(path) or glob.has_magic(path):
            continue
        with suppress(ValueError):  # a null byte; this and other errors of the disk have sentences of their own
            try:
                Path(path).lstat()
            except (FileNotFoundError, NotADirectoryError) as error:
                name = os.fsencode(path).decode("utf-8", "backslashreplace")
                sentence = f"{name}: no such file or folder, and no glob that matches one; check the path"
                raise TreepackError(sentence) from error
            except OSError:
                continue


READ = _InputType()
"""The type of an input that is one file or directory."""

TRIE = _InputType(prepared.TRIE)
"""The type of a trie."""

RATED_TRIE = _InputType(prepared.RATED_TRIE)
"""The type of a trie to pack: with the advantages, if treepack prepare has computed them."""

PACKED = _InputType(prepared.PACKED)
"""The type of a packed directory."""

PACKED_TEXT = _TextType(prepared.PACKED, alone=False)
"""The type of a packed directory that stays a string."""

LOOK = _TextType((*prepared.PACKED, *prepared.RATED_TRIE), alone=True)
"""The type of raw rollouts, a trie or packed rows."""

WRITE = _OutputType()
"""The type of an output."""
