"""Output of the commands: aligned values and tables on stdout, and checks of output files."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .progress import is_quiet
from .streams import printable

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath

_TABLE_WIDTH = 10_000  # wider than any table, so that a cell is never wrapped


def show(rows: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    _print_grid([(name, text(value)) for name, value in rows.items()], justify=("left", "left"))


def show_end(*written: Any, then: str | None = None) -> None:
    """Write the last lines of a command to stderr: the outputs, and the command that usually comes next.

    Args:
        written: paths or addresses of the outputs; None entries are ignored.
        then: the next command, or None.
    """
    if is_quiet():
        return
    outputs = [str(each) for each in written if each is not None]
    if outputs:
        click.echo(f"written {', '.join(outputs)}", err=True)
    if then is not None:
        click.echo(f"next: {then}", err=True)


def next_rollouts(queries: Any, more: str = "") -> str:
    """Return the command that rolls out the file `queries`, which a command has written; `more` are further options."""
    command = f"treepack rollout {quoted(queries)} --engine ENGINE --sampler prefixes"
    return " ".join([command, *([more] if more else []), "--out ROLLOUTS.jsonl"])


def next_training(packed: AnyPath, trie: AnyPath) -> str:
    """Return the command that trains the directory `packed`, which a command has packed from `trie`."""
    from treepack.files.manifest import read_manifest

    # The default, sft, would train good and bad rollouts alike.
    made = read_manifest(trie).get("advantages")
    loss = "" if made is None else f"--loss {'dr_grpo' if made['estimator'] == 'dr-grpo' else 'grpo'} "
    return f"treepack train {quoted(packed)} --model MODEL {loss}--out TRAINED"


def quoted(path: Any) -> str:
    """Return a path for a command of a shell: "my rows" -> "'my rows'"."""
    return shlex.quote(str(path))


def show_figures(figures: Mapping[str, Any], *, verbose: bool) -> None:
    """Print figures by their names in JSON, with their values and labels, in the order of the glossary.

    Without `verbose`, figures that only developers of packing and kernels need are left out.
    """
    from treepack.analysis.glossary import GLOSSARY, INTERNAL, RATIOS

    names = [name for name in GLOSSARY if figures.get(name) is not None and (verbose or name not in INTERNAL)]
    values = [percent(figures[name]) if name in RATIOS else text(figures[name]) for name in names]
    rows = [(name, value, GLOSSARY[name]) for name, value in zip(names, values, strict=True)]
    _print_grid(rows, justify=("left", "right", "left"))


def show_notes(counts: Mapping[str, int], sentences: Iterable[str] = (), *, verbose: bool = False) -> None:
    """Print notes under a table, wrapped to the terminal: how often each one of `counts` applies, and `sentences`.

    Notes on fields that are not used are one short line, except with `verbose`.
    """
    from treepack.ingest.read_log import without_unused

    others, unused = (counts, "") if verbose else without_unused(counts)
    for note, count in others.items():
        say(f"- {note}: {count:,}")
    sentences = [unused, *sentences] if unused else sentences
    for sentence in sentences:
        say(f"- {sentence}")


def say(sentence: str) -> None:
    """Print a sentence; on a terminal it is wrapped between words, and further lines of a note are indented."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    indent = "  " if sentence.startswith("- ") else ""
    lines = textwrap.wrap(printable(sentence), max(width, 20), subsequent_indent=indent, break_on_hyphens=False)
    click.echo("\n".join(lines) if width else printable(sentence))


def show_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a right-aligned table under a header."""
    justify = ("right",) * len(header)
    _print_grid([tuple(header), *(tuple(text(value) for value in row) for row in rows)], justify=justify)


def _print_grid(rows: Sequence[Sequence[str]], *, justify: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), pad_edge=False)
    for side in justify:
        table.add_column(justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # Text, because a name may look like markup
    # rich ignores the width on a terminal that is called dumb, unless it gets a height too.
    console = Console(width=_TABLE_WIDTH, height=1, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().removesuffix("\n").split("\n"):
        click.echo(line.rstrip())


def text(value: Any) -> str:
    """Return a value for a person: thousands separated, four significant digits."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def has_columns(columns: set[str]) -> Callable[[Path], bool]:
    """Return a test for files that this command may have written: empty ones, and tables with all of `columns`."""

    def test(path: Path) -> bool:
        import orjson
        import pyarrow as pa
        from pyarrow import parquet

        try:
            if path.suffix == ".parquet":
                return columns <= set(parquet.read_schema(path).names)
            with path.open("rb") as file:
                line = file.readline()
            record = orjson.loads(line) if line else dict.fromkeys(columns)
            return isinstance(record, dict) and columns <= record.keys()
        except (OSError, ValueError, pa.ArrowException):
            return False

    return test


def reserve_table(out: AnyPath, inputs: list[Any], *, columns: set[str], overwrite: bool) -> None:
    """Lock the table `out` until the command ends, and refuse it if it exists or if it is or is inside an input.

    With `overwrite` a table that has `columns` may be replaced: this command wrote it, as JSON lines or Parquet.

    Raises:
        TreepackError: naming `out` and the remedy.
    """
    from treepack.files.directory import refuse_existing

    refuse_existing(out, overwrite=overwrite, inputs=inputs, is_own_file=has_columns(columns))
    lock_until_end(out)


def reserve_directory(out: AnyPath, inputs: list[Any], *, overwrite: bool) -> None:
    """Lock the directory `out` until the command ends, and refuse it if it exists or if it is inside an input.

    Raises:
        TreepackError: naming `out` and the remedy.
    """
    from treepack.files.directory import refuse_existing

    refuse_existing(out, overwrite=overwrite, inputs=inputs)
    lock_until_end(out)


def lock_until_end(out: AnyPath) -> None:
    """Lock an output until the command ends, so that a second command with this output is refused before any work.

    Raises:
        TreepackError: another process writes `out`.
    """
    from treepack.files.lock import lock

    click.get_current_context().with_resource(lock(out))


def refuse_suffix(out: AnyPath) -> None:
    """Refuse a name of a Parquet file for an output that is written as JSON lines.

    Raises:
        TreepackError: the name ends in .parquet.
    """
    from treepack.errors import TreepackError

    if out.suffix == ".parquet":
        raise TreepackError(f"{out}: is written as JSON lines; let its name end in .jsonl")
