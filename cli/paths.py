"""Types of the parameters of commands that name files: a path on this machine, or an address in an object store.

click.Path would make "s3://bucket/rows" the local path "s3:/bucket/rows".

    trie: READ       Path, or the address of s3://, gs:// and hf://
    --out: WRITE     the same without hf://, which is read only
    INPUT...: str    raw rollouts stay strings, because they may be globs and "-"
"""

from __future__ import annotations

from typing import Any

import click

from treepack.files.remote.address import AnyPath, as_output, as_path


class _PathType(click.ParamType[AnyPath]):
    """A path or an address; another scheme is an error of one sentence."""

    name = "path"

    def __init__(self, *, is_output: bool) -> None:
        self.is_output = is_output

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> AnyPath:
        """Parse `value`, which may have been parsed already."""
        if self.is_output:
            return as_output(value, option=param.opts[0] if param is not None else "--out")
        return as_path(value)


READ = _PathType(is_output=False)
"""The type of an input that is one file or directory."""

WRITE = _PathType(is_output=True)
"""The type of an output."""
