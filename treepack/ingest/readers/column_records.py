"""Homemade layouts, by the columns that the user names, or by names that many data sets have.

    {"ask": "2 + 2?", "said": "4", "ok": 1}      with --columns question=ask,answer=said,reward=ok
    {"prompt": "2 + 2?", "response": "4"}        by a line of `aliases.ALIASES`
    {"dialog": [{"speaker": "human", "text": "Hi"}, ..]}

Each record is converted to one or several records of a known format (`columns.mapped_records`), whose reader reads it.
Several answers to one prompt are a group, `<id>/answer-1`, `<id>/answer-2`, ....
"""

from __future__ import annotations

from dataclasses import replace

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import ColumnMap
from treepack.ingest.readers.columns import aliases
from treepack.ingest.readers.columns.mapped_records import has_content, map_record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Outcomes, Skipped, Trajectory

# The formats of new records, in the order of the registry.
_TARGETS = ("alpaca", "sharegpt", "ms-swift", "trl-preference", "trl-labels", "tokens", "chat")


def read_columns(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`: one, or one for each answer.

    Raises:
        TreepackError: a path leads to nothing or to a value of the wrong kind, the layout is ambiguous, or an error of
            the reader of the new record.
    """
    columns = options.columns or aliases.columns_of(record)
    mapped = map_record(record, columns)
    # [{"model": ..}] is left of completions[].completion, and no other answer.
    roots = {str(path.steps[0]) for key in columns.content for path in columns.paths[key] if len(path.steps) > 1}
    options = replace(options, harmless=options.harmless | roots)
    notes = mapped.notes
    for number, one in enumerate(mapped.records, 1):
        if one is None:
            yield Skipped(record.source, "no answer", record.source if mapped.has_answers else None)
            continue
        for item in _read_one(one, options):
            if isinstance(item, Trajectory):
                if mapped.has_answers:
                    name = f"{item.trajectory_id}/answer-{number}"
                    group = record.source if item.group_id is None else item.group_id
                    item = replace(item, trajectory_id=name, group_id=group, notes=item.notes if number == 1 else ())
                item = replace(item, notes=notes + item.notes)
                notes = ()
            yield item


def _read_one(record: Record, options: ReadOptions) -> Outcomes:
    for target in _targets():
        if target.matches(record.value):
            limits = replace(options.limits, skip_bad=False)
            yield from target.trajectories([record], replace(options, columns=None, limits=limits))
            return
    if options.columns is not None and not options.columns.content and aliases.matches(record.value):
        yield from read_columns(record, replace(options, columns=None))
        return
    raise TreepackError(
        f"{record.source}: has no content after the columns are mapped; name it in --columns with messages=PATH, "
        "or prompt=PATH and answer=PATH"
    )


def has_columns(record: Record, columns: ColumnMap) -> bool:
    """Return True if `record` has the content that `columns` names, or a known layout if they name none."""
    if columns.content:
        return has_content(record.value, columns)
    return any(target.matches(record.value) for target in _targets()) or aliases.matches(record.value)


def _targets() -> list[Format]:
    return [formats_by_name()[name] for name in _TARGETS]
