"""The first record of a file as a tree of fields with their uses, for `treepack formats --record`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .streams import printable

if TYPE_CHECKING:
    from treepack.ingest.readers.record_use import FieldUse, RecordUse

_CLOSEST = 3  # other formats whose reason is printed; --json has all


def show_record(path: str, name: str | None, columns: str | None, *, as_json: bool) -> None:
    """Print the first record of the file `path`, read as the format `name` or as any, or by `columns`.

    Raises:
        TreepackError: the file cannot be read, or `columns` is not valid.
    """
    import json
    from dataclasses import asdict

    from treepack.ingest.options import BuildOptions
    from treepack.ingest.readers.fields.read_options import ReadOptions
    from treepack.ingest.readers.record_use import explain

    build = BuildOptions(format=name or "auto", columns=columns)
    use = explain(path, ReadOptions(build.format, columns=build.column_map(), shapes=True))
    if as_json:
        click.echo(json.dumps(asdict(use), ensure_ascii=False))
    else:
        _print(use)


def _print(use: RecordUse) -> None:
    from treepack.ingest.readers.registry import formats_by_name

    click.echo(printable(f"{use.source}: {'no known format' if use.format is None else f'format {use.format}'}"))
    if use.columns is not None:
        click.echo(printable(f"columns: {use.columns}"))
    if use.error is not None:
        click.echo(printable(f"refused: {use.error}"))
    for line in use.outcome:
        click.echo(printable(f"read as {line}"))
    click.echo()
    rows = list(_rows(use.fields))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for left, value, uses in rows:
        click.echo(f"{left:<{widths[0]}}  {value:<{widths[1]}}  {uses}".rstrip())
    click.echo()
    for note in use.notes:
        click.echo(printable(f"- {note}"))
    for name in use.close[:_CLOSEST]:
        click.echo(printable(f"not {name}: {use.others[name]}"))
    if len(formats_by_name()) > len(use.close[:_CLOSEST]):
        click.echo("treepack formats --record FILE --json has the reasons for all formats")


def _rows(fields: list[FieldUse]) -> list[tuple[str, str, str]]:
    """Return name, value and uses of each line; a line without a value is a field that contains the next ones."""
    rows: list[tuple[str, str, str]] = []
    before: list[str] = []
    for each in fields:
        # "messages[].content" -> messages[], content
        parts = each.path.replace("[].", "[]\0").replace(".", "\0").split("\0")
        common = 0
        while common < min(len(before), len(parts) - 1) and before[common] == parts[common]:
            common += 1
        rows += [(printable("  " * depth + parts[depth]), "", "") for depth in range(common, len(parts) - 1)]
        several = each.num_values > 1
        uses = ", ".join(f"{use} ({number})" if several else use for use, number in each.uses.items())
        rows.append((printable("  " * (len(parts) - 1) + parts[-1]), printable(each.value), uses))
        before = parts[:-1]
    return rows
