"""What commands print: aligned tables on stdout, progress on stderr when it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click

T = TypeVar("T")


def progress(items: Iterable[T], *, description: str, total: int | None = None) -> Iterator[T]:
    """`items`, with a progress bar on stderr; silent when that is no terminal."""
    from tqdm import tqdm

    return iter(tqdm(items, desc=description, total=total, unit="", disable=not sys.stderr.isatty()))


def token_progress(trajectories: Iterable[T], *, description: str) -> Iterator[T]:
    """Trajectories (anything with `content.tokens`), with a bar of tokens read and tokens per second on stderr."""
    from tqdm import tqdm

    with tqdm(desc=description, unit="tok", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for item in trajectories:
            bar.update(len(getattr(getattr(item, "content", None), "tokens", ())))
            yield item


def show(rows: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        click.echo(f"{name:<{width}}  {text(value)}")


def show_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a right-aligned table under a header."""
    cells = [list(header), *([text(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def text(value: Any) -> str:
    """A value for a person: thousands separated, four significant digits."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"
