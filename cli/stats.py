"""`treepack stats`: what rollouts, a trie or a packed directory share; and whether files are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import percent, progress, show, show_table, token_progress
from .reading import read_options, reading_options

if TYPE_CHECKING:
    from treepack.trie import Trie


class Capacities(click.ParamType):
    """Comma-separated positive integers."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Parse `value`; wrong usage if any part is not a positive integer."""
        try:
            numbers = [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 8192,32768", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{value!r} holds a number below 1", param, ctx)
        return numbers


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Verify hashes, every row invariant, and that rows give back the trie.")
@click.option(
    "--trie",
    "trie_path",
    type=click.Path(path_type=Path),
    help="Trie to check a packed directory against; default: the one it was packed from.",
)
@click.option("--capacity", type=Capacities(), help="Predict the packing for these capacities.")
@click.option(
    "--method",
    type=click.Choice(["contiguous", "heuristic"]),
    default="contiguous",
    show_default=True,
    help="Method of the prediction.",
)
@reading_options
def stats(
    paths: tuple[str, ...],
    as_json: bool,
    check: bool,
    trie_path: Path | None,
    capacity: list[int] | None,
    method: str,
    share: str,
    **reading: Any,
) -> None:
    """Show what rollouts share, and what a packing keeps of it.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie.
    """
    import json

    report = _report(
        paths, check=check, trie_path=trie_path, capacities=capacity, method=method, share=share, reading=reading
    )
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)


def _report(
    paths: tuple[str, ...],
    *,
    check: bool,
    trie_path: Path | None,
    capacities: list[int] | None,
    method: str,
    share: str,
    reading: dict[str, Any],
) -> dict[str, Any]:
    from treepack import schema, shards
    from treepack.check import check_files, check_trie
    from treepack.directory import MANIFEST
    from treepack.errors import TreepackError
    from treepack.stats import describe, predict

    directory = Path(paths[0])
    built = len(paths) == 1 and (directory / MANIFEST).is_file()
    manifest = shards.read_manifest(directory) if built else None
    if manifest and check:
        check_files(directory, manifest)
    if manifest and manifest["format"] == schema.PACKED_FORMAT:
        if capacities:
            raise TreepackError(f"{directory}: is packed already; give --capacity with its trie")
        return _packed(directory, manifest, check=check, trie_path=trie_path)
    if manifest:
        trie, counts, kind = shards.read_trie(directory), manifest["counts"], "trie"
    else:
        trie, counts = _raw(paths, share=share, reading=reading)
        kind = "trajectories"
    report = describe(trie, kind=kind) | {"counts": counts}
    if check:
        check_trie(trie)
        report["checked"] = {"trajectories": trie.num_trajectories, "nodes": trie.num_nodes}
    if capacities:
        report["predicted"] = predict(trie, capacities, method=method, too_long="drop")
    return report


def _raw(paths: tuple[str, ...], *, share: str, reading: dict[str, Any]) -> tuple[Trie, dict[str, int]]:
    from collections import Counter

    from treepack import ingest
    from treepack.columns import collect
    from treepack.trie import build_trie

    counts: Counter[str] = Counter()
    stream = token_progress(ingest.read(paths, read_options(reading)), description="reading")
    return build_trie(collect(ingest.usable(stream, counts)), share=share), dict(sorted(counts.items()))


def _packed(directory: Path, manifest: dict[str, Any], *, check: bool, trie_path: Path | None) -> dict[str, Any]:
    from treepack import shards
    from treepack.check import check_packed
    from treepack.directory import MANIFEST
    from treepack.errors import TreepackError
    from treepack.pack import fit_capacity

    report = {"kind": "packed", **manifest["totals"], "counts": manifest["counts"]}
    if not check:
        return report
    origin = Path(manifest["trie"]["path"])
    trie = None
    if trie_path or (origin / MANIFEST).is_file():
        chosen = trie_path or origin
        if shards.file_sha256(chosen / MANIFEST) != manifest["trie"]["sha256"]:
            raise TreepackError(
                f"{chosen}: is not the trie that {directory} was packed from; give that one with --trie"
            )
        trie, _ = fit_capacity(shards.read_trie(chosen), manifest["capacity"], too_long=manifest["options"]["too_long"])
    rows = progress(shards.read_rows(directory), description="checking", total=manifest["totals"]["num_rows"])
    report["checked"] = check_packed(rows, manifest, trie) | {"against_trie": trie is not None}
    return report


def _print(report: dict[str, Any]) -> None:
    """Print a report as tables."""
    plain = {name: value for name, value in report.items() if not isinstance(value, dict | list)}
    ratios = {name: percent(plain[name]) for name in ("por", "err", "token_ratio", "fill", "gap") if name in plain}
    show(plain | ratios | report.get("counts", {}))
    if "por_by_depth" in report:
        click.echo()
        rows = [
            (f"{r['start']:,}-{r['end']:,}", r["tokens_flat"], r["tokens_tree"], percent(r["por"]))
            for r in report["por_by_depth"]
        ]
        show_table(["depth", "N_flat", "N_tree", "POR"], rows)
        click.echo()
        names = ("count", "min", "median", "p90", "max", "mean")
        spreads = [
            (name, *(report[name].get(column) for column in names)) for name in ("lengths", "group_sizes", "branching")
        ]
        show_table(["", *names], spreads)
    if "predicted" in report:
        click.echo()
        rows = [
            (
                p["capacity"],
                p["num_rows"],
                p["tokens_packed"],
                percent(p["err"]),
                percent(p["fill"]),
                percent(p["gap"]),
                p["num_too_long"],
            )
            for p in report["predicted"]
        ]
        show_table(["capacity", "rows", "N_pack", "ERR", "fill", "gap", "too long"], rows)
    if "checked" in report:
        click.echo()
        checked = dict(report["checked"])
        compared = checked.pop("against_trie", True)
        click.echo("checked: " + ", ".join(f"{value:,} {name}" for name, value in checked.items()) + ": all correct")
        if not compared:
            click.echo("not compared with a trie: the one it was packed from is not there; give --trie")
