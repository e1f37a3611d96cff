"""`treepack formats`: the formats that rollouts are read in, and what of each survives."""

from __future__ import annotations

import click


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def formats(name: str | None, as_json: bool) -> None:
    """List the formats that rollouts are read in, and what each keeps; of one NAME, in full.

    A format is recognised by content; --format NAME of build-trie and stats insists on one.
    """
    import json

    from treepack.ingest.readers.registry import READERS, check_format

    if name:
        check_format(name)
    chosen = {each: reader.ABOUT for each, reader in READERS.items() if name in (None, each)}
    if as_json:
        fields = ("program", "recognised_by", "used", "dropped")
        listed = {
            each: {field: getattr(about, field) for field in fields} | {"keeps": sorted(about.keeps)}
            for each, about in chosen.items()
        }
        click.echo(json.dumps(listed))
    elif name:
        _print_one(name)
    else:
        _print_all()


def _print_all() -> None:
    from treepack.ingest.readers.about import KEEPS
    from treepack.ingest.readers.registry import READERS

    short = ("ids", "masks", "logprobs", "rewards", "lineage")
    width = max(map(len, READERS))
    click.echo(f"{'':<{width}}  {'  '.join(short)}  written by")
    for name, reader in READERS.items():
        about = reader.ABOUT
        kept = "  ".join(
            ("x" if keep in about.keeps else "-").center(len(head)) for keep, head in zip(KEEPS, short, strict=True)
        )
        click.echo(f"{name:<{width}}  {kept}  {about.program}")


def _print_one(name: str) -> None:
    from treepack.ingest.readers.about import KEEPS
    from treepack.ingest.readers.registry import READERS

    from .output import show

    about = READERS[name].ABOUT
    show(
        {
            "written by": about.program,
            "recognised by": about.recognised_by,
            "fields used": ", ".join(about.used),
            "fields dropped": ", ".join(about.dropped) or "none",
            "keeps": ", ".join(keep for keep in KEEPS if keep in about.keeps) or "text or lengths only",
        }
    )
