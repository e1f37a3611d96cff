"""`treepack formats`: the formats of rollouts that can be read, and the information that each format keeps."""

from __future__ import annotations

import click

from .config import common_options
from .record import show_record
from .sections import SectionedCommand


@click.command(cls=SectionedCommand)
@click.argument("name", required=False)
@click.option(
    "--record",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Show the first record of this file that has an answer as a tree of fields, with the use of each.",
)
@click.option("--columns", metavar="FILE|KEY=PATH,...", help="With --record: the same as in treepack build-trie.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def formats(name: str | None, record: str | None, columns: str | None, as_json: bool) -> None:
    """List the formats of rollouts and the information that each keeps. With NAME, print all facts of one format.

    With --record, show the first record of a file with an answer: its format, why others do not fit, and for each field
    if it is trained, in the prompt, a reward, a group, metadata or not used. NAME is then the format that the file must
    have.

    The content of a file decides its format. With --format NAME, build-trie, stats, show and report accept
    only that format.
    """
    import json

    from treepack.ingest.readers.registry import all_formats, check_format

    if name:
        check_format(name)
    if columns is not None and record is None:
        raise click.UsageError("--columns maps the record of --record; give --record FILE too")
    if record is not None:
        show_record(record, name, columns, as_json=as_json)
        return
    if as_json:
        fields = ("program", "recognised_by", "used", "dropped")
        facts = {
            each.name: {field: getattr(each, field) for field in fields} | {"keeps": sorted(each.keeps)}
            for each in all_formats()
            if name in (None, each.name)
        }
        click.echo(json.dumps(facts))
    elif name:
        _print_one(name)
    else:
        _print_all()


def _print_all() -> None:
    from treepack.ingest.readers.format import KEEPS
    from treepack.ingest.readers.registry import all_formats

    # Short heads: with the names of KEEPS the table would be wider than a terminal.
    heads = ("ids", "masks", "logprobs", "rewards", "lineage")
    width = max(len(each.name) for each in all_formats())
    click.echo(f"{'':<{width}}  {'  '.join(heads)}  written by")
    for each in all_formats():
        # A mark in the middle of each column: "ids" -> " x ", "masks" -> "  -  ".
        marks = "  ".join(
            ("x" if keep in each.keeps else "-").center(len(head)) for keep, head in zip(KEEPS, heads, strict=True)
        )
        click.echo(f"{each.name:<{width}}  {marks}  {each.program}")


def _print_one(name: str) -> None:
    from treepack.ingest.readers.format import KEEPS
    from treepack.ingest.readers.registry import formats_by_name

    from .output import show

    one = formats_by_name()[name]
    show(
        {
            "written by": one.program,
            "recognised by": one.recognised_by,
            "fields used": ", ".join(one.used),
            "fields dropped": ", ".join(one.dropped) or "none",
            "failures recorded in": ", ".join(one.failed) or "none",
            "keeps": ", ".join(keep for keep in KEEPS if keep in one.keeps) or "text or lengths only",
        }
    )
