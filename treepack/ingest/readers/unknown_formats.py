"""The error about a record of no known format, with a remedy that was tried on the record.

{"mesages": [..]}                     rename 'mesages' if it is 'messages'
{"train": [{..}, ..], "test": [..]}   write each element of train or test as one record
{"ask": "2 + 2?", "said": "4"}        if its fields mean this, add --columns question=ask,answer=said
config.json beside weights            give the directory of the model as --model
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import displayed
from treepack.files.input_files.records import Record
from treepack.files.remote.address import is_address
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.values import SIMILAR, JsonObject
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.kinds import has_fields
from treepack.ingest.readers.recognition import is_episode, lists_of_objects
from treepack.ingest.readers.suggestions import suggested_columns
from treepack.ingest.readers.unread_programs import UnknownFormatError
from treepack.trajectory import Trajectory

# A refusal lists this many fields of a record, and this many characters of each name: enough to recognise the program,
# and short enough for a terminal. Documents keyed by task have thousands of fields.
_MAX_FIELDS, _MAX_FIELD = 20, 40
_TOKENIZER = "tokenizer_config.json"
_MODEL_FILES = frozenset(
    "config.json generation_config.json adapter_config.json model.safetensors.index.json checkpoint.json run.json "
    f"train.json {_TOKENIZER} tokenizer.json special_tokens_map.json added_tokens.json vocab.json".split()
)
_WEIGHTS = frozenset({".safetensors", ".distcp", ".bin"})
_LISTS_FORMATS = "'treepack formats' lists the formats and their fields, and --columns reads other layouts"


def unknown_format(
    records: Sequence[Record], formats: Sequence[Format], names: Sequence[str], options: ReadOptions
) -> UnknownFormatError:
    """Return the error about `records`, which none of `formats` with the fields `names` matches, with a remedy."""
    record = records[0]
    if _is_of_model(record.path):
        folder = Path(record.path).parent
        can_be_loaded = any((folder / name).is_file() for name in ("config.json", _TOKENIZER))  # a checkpoint cannot
        use = ", and this directory as --model or --tokenizer" if can_be_loaded else ""
        return UnknownFormatError(
            f"{displayed(str(folder))}: is the directory of a saved model, which has no rollouts; give files of "
            f"rollouts{use}"
        )
    fields = f"but the fields {_list_fields(record.value)}" if record.value else "because it has no fields"
    return UnknownFormatError(
        f"{record.source}: has no known format, {fields}; {_remedy(records, formats, names, options)}"
    )


def _is_of_model(path: str) -> bool:
    """Return True if a file is one that transformers or treepack writes beside weights or a tokenizer."""
    if is_address(path) or PurePath(path).name not in _MODEL_FILES:
        return False
    try:
        return any(each.suffix in _WEIGHTS or each.name == _TOKENIZER for each in Path(path).parent.iterdir())
    except OSError:  # standard input, or a folder that cannot be listed
        return False


def with_suggestion(error: TreepackError, records: Sequence[Record], options: ReadOptions) -> TreepackError:
    """Return `error` about the last of `records` with the columns that would read them, if there are some."""
    if options.columns is not None or "--columns" in str(error):
        return error
    if (line := suggested_columns(records, options)) is None:
        return error
    return TreepackError(f"{error}, or add --columns {line}")


def _remedy(records: Sequence[Record], formats: Sequence[Format], known: Sequence[str], options: ReadOptions) -> str:
    record = records[0]
    if (renamed := _misspelt(records, formats, known, options)) is not None:
        return f"rename '{renamed[0]}' if it is '{renamed[1]}'; 'treepack formats' lists the formats and their fields"
    if (line := suggested_columns(records, options)) is not None:
        return f"if its fields mean this, add --columns {line}; 'treepack formats --record FILE' shows the fields"
    if has_fields(record.value, "role|from|speaker:text, content|text|value:text"):
        return f"if it is a message, write each conversation as one record with messages; {_LISTS_FORMATS}"
    names = [name for name in lists_of_objects(record.value) if _has_records(record, name, formats)]
    if episodes := [name for name in names if is_episode(record.value, name)]:
        return (
            f"if {episodes[0]} has the turns of one rollout, write them as the list messages of the record, with its "
            "reward beside it; if its elements are rollouts, write each as one record"
        )
    if names:
        return (
            f"write each element of {' or '.join(names)} as one record, if these are the rollouts; 'treepack formats' "
            "lists the formats and their fields"
        )
    return _LISTS_FORMATS


def _misspelt(
    records: Sequence[Record], formats: Sequence[Format], known: Sequence[str], options: ReadOptions
) -> tuple[str, str] | None:
    """Return a field and its right name, if the records can be read with this name."""
    first = records[0].value
    known = [name for name in known if name not in first]
    for field in first:
        for name in difflib.get_close_matches(field, known, 3, SIMILAR):
            renamed = [replace(each, value=_renamed(each.value, field, name), line=None) for each in records]
            found = next((each for each in formats if each.matches(renamed[0].value)), None)
            if found is not None and _reads(found, renamed, options):
                return field, name
    return None


def _renamed(value: JsonObject, old: str, new: str) -> JsonObject:
    return {new if key == old else key: part for key, part in value.items()}


def _reads(found: Format, records: Sequence[Record], options: ReadOptions) -> bool:
    try:
        return any(isinstance(item, Trajectory) for item in found.trajectories(records, options))
    except TreepackError:
        return False


def _has_records(record: Record, name: str, formats: Sequence[Format]) -> bool:
    """Return True if an element of the list `name` has a known format, and no other record belongs to it."""
    elements = record.value[name][:16]
    return any(each.read is not None and each.matches(element) for element in elements for each in formats)


def _list_fields(fields: Iterable[str]) -> str:
    """Join the names of `fields` on one line, at most `_MAX_FIELDS` of them."""
    names = [" ".join(name.split())[:_MAX_FIELD] for name in fields]
    # 25 fields -> the first 20 "and 5 more"
    more = f" and {len(names) - _MAX_FIELDS:,} more" if len(names) > _MAX_FIELDS else ""
    return ", ".join(names[:_MAX_FIELDS]) + more
