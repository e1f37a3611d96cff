"""The file of tool schemas among the files of an input, which a chat template may print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import list_inputs
from treepack.files.input_files.records import Record
from treepack.files.remote.address import is_address
from treepack.ingest.options import BuildOptions
from treepack.ingest.readers.unread_programs import ToolSchemasError, unread_program


def with_tools_of(inputs: Iterable[str | Path], options: BuildOptions) -> BuildOptions | None:
    """Return `options` with the only file of tool schemas among the `inputs`.

    None if there is none or more than one, or if `options` have schemas already, or no tokenizer to print them.
    """
    if options.tools is not None or options.tokenizer is None:
        return None
    found = [replace(options, tools=path) for path in list_inputs(inputs)[0] if _has_schemas(path)]
    return found[0] if len(found) == 1 else None


def _has_schemas(path: str) -> bool:
    if is_address(path) or not path.endswith(".json"):
        return False
    try:
        schemas = BuildOptions(tools=path).tool_schemas()
    except TreepackError:  # not a list of objects
        return False
    if not schemas:
        return False
    return isinstance(unread_program(Record(path, path, schemas[0]), particular=False), ToolSchemasError)
