"""`treepack stats`: what rollouts, a trie or a packed directory share; and whether files are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .origin import manifest_of, origin_of, read_origin
from .output import progress, token_progress
from .planning import MOST_TOKENS, read_search, search_options
from .reading import read_options, reading_options
from .stats_table import print_report

if TYPE_CHECKING:
    from treepack.analysis.forecast import Line
    from treepack.trie.trie import Trie

QUICK = "contiguous"
"""How to plan for capacities that nobody asked for."""


class Capacities(click.ParamType[list[int]]):
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
        if max(numbers) > MOST_TOKENS:
            self.fail(f"{value!r} holds a number above {MOST_TOKENS}", param, ctx)
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
@click.option(
    "--capacity",
    type=Capacities(),
    help="Predict the packing, and forecast for it; what does not fit is left out and counted.",
)
@click.option("--effective-ratio", is_flag=True, help="Show how many groups and prefixes have mixed outcomes (TRACE).")
@click.option(
    "--predictions",
    type=click.Path(path_type=Path),
    help="Predicted values, as for treepack allocate: show how well they rank groups and prefixes.",
)
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="For these two: after what a prefix ends, as for treepack advantages.",
)
@click.option(
    "--model",
    metavar="NAME|PATH",
    default="qwen3-8b",
    show_default=True,
    help="Forecast for this model: a preset or a config.json; see docs/forecast.md.",
)
@click.option(
    "--device",
    metavar="NAME|TFLOP/S",
    default="h200",
    show_default=True,
    help="Hours of the forecast: a100, h100, h200, b200, or the rate of bfloat16 products.",
)
@search_options("low")
@reading_options
def stats(
    paths: tuple[str, ...],
    as_json: bool,
    check: bool,
    trie_path: Path | None,
    capacity: list[int] | None,
    share: str,
    **others: Any,
) -> None:
    """Show what rollouts share, what a packing keeps of it, and how much faster training on it is.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie.

    The forecast compares floating-point operations on the tree with flat packing, of whole trajectories and of one
    sample per turn. Without --capacity it plans quickly for 16384 and 65536, or what the longest trajectory needs.
    """
    import json

    report = _report(paths, check=check, trie_path=trie_path, capacities=capacity, share=share, others=others)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        print_report(report)


def _report(
    paths: tuple[str, ...],
    *,
    check: bool,
    trie_path: Path | None,
    capacities: list[int] | None,
    share: str,
    others: dict[str, Any],
) -> dict[str, Any]:
    from treepack.analysis.forecast import read_device
    from treepack.analysis.forecast import report as forecast
    from treepack.analysis.model_cost import read_shape
    from treepack.analysis.stats import (
        describe,
        forecast_lines,
        plan_capacities,
        predict,
        trie_totals,
        usual_capacities,
    )
    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.pack.check import check_totals
    from treepack.trie.check import check_trie
    from treepack.trie.files import read_trie

    shape, device = read_shape(others["model"]), read_device(others["device"])
    directory = Path(paths[0])
    manifest = manifest_of(paths)
    if manifest and manifest["format"] == schema.PACKED_FORMAT:
        if capacities:
            raise TreepackError(f"{directory}: is packed already; give --capacity with its trie")
        if others["effective_ratio"] or others["predictions"]:
            raise TreepackError(
                f"{directory}: is packed already; give --effective-ratio and --predictions with its trie"
            )
        report, lines = _packed(directory, manifest, check=check, trie_path=trie_path)
        return report | {"forecast": forecast(lines, shape, device)}
    if manifest:
        trie, counts, kind = read_trie(directory), manifest["counts"], "trie"
    else:
        trie, counts = _raw(paths, share=share, reading=others)
        kind = "trajectories"
    report = describe(trie, kind=kind) | {"counts": counts}
    if check:
        check_trie(trie)
        if manifest:
            check_totals(manifest["totals"], trie_totals(trie))
        report["checked"] = {"num_trajectories": trie.num_trajectories, "num_nodes": trie.num_nodes}
    search, method = read_search(others), others["method"]
    if not capacities:
        method = QUICK
    sought = capacities or usual_capacities(trie)
    planned = list(plan_capacities(trie, sought, method=method, too_long="drop", search=search))
    if capacities:
        report["predicted"] = predict(planned)
    if others["effective_ratio"] or others["predictions"]:
        report |= _contrast(trie, others["predictions"], segment=others["segment"])
    lines = forecast_lines(trie, planned, method=method, search=search)
    report["sharing"] = _sharing(trie, manifest, others["tokenizer"])
    return report | {"forecast": forecast(lines, shape, device)}


def _sharing(trie: Trie, manifest: dict[str, Any] | None, name: str | None) -> dict[str, Any]:
    """Why tokens were laid down; the causes of what was lost are told apart where a tokenizer is at hand."""
    from treepack.analysis.lost_sharing import explain
    from treepack.errors import TreepackError
    from treepack.ingest.tokenization import load_tokenizer

    known = (manifest or {}).get("tokenizer")
    where: str = name or (known["name"] if known else "")

    def decode(windows: list[list[int]]) -> list[str]:
        tokenizer = load_tokenizer(where, download=bool(name))
        found: list[str] = tokenizer.batch_decode(windows, clean_up_tokenization_spaces=False)
        return found

    if where:
        try:
            return explain(trie, decode)
        except TreepackError:
            if name:
                raise
    return explain(trie)


def _contrast(trie: Trie, predictions: Path | None, *, segment: str) -> dict[str, Any]:
    from treepack.rl.trace.predictions import correlations, read_predictions
    from treepack.rl.trace.targets import anchors, binary_rewards, effective_ratios

    reward, found = binary_rewards(trie), anchors(trie, segment=segment)
    report = {"effective_ratio": {name: ratio._asdict() for name, ratio in effective_ratios(found, reward).items()}}
    if predictions:
        levels = correlations(read_predictions(predictions), trie, found, reward)
        report["spearman"] = {name: level._asdict() for name, level in levels.items()}
    return report


def _raw(paths: tuple[str, ...], *, share: str, reading: dict[str, Any]) -> tuple[Trie, dict[str, int]]:
    from collections import Counter

    from treepack.ingest import stream as ingest
    from treepack.trie.out_of_core import build_large_trie

    counts: Counter[str] = Counter()
    batches = ingest.read_columns(paths, read_options(reading, shapes=True), counts)
    trie = build_large_trie(token_progress(batches, description="reading"), share=share).trie
    return trie, dict(sorted(counts.items()))


def _packed(
    directory: Path, manifest: dict[str, Any], *, check: bool, trie_path: Path | None
) -> tuple[dict[str, Any], list[Line]]:
    """The report on a packed directory, and what it saves."""
    from treepack.analysis.forecast import RowCounter
    from treepack.analysis.stats import describe_packed
    from treepack.pack.check import checked_rows
    from treepack.pack.files import read_rows

    totals, counter = manifest["totals"], RowCounter()
    rows = counter.over(progress(read_rows(directory), description="reading", total=totals["num_rows"]))
    trie = _origin(directory, manifest, trie_path) if check else None
    report = describe_packed(checked_rows(rows, manifest, trie) if check else rows, manifest)
    if check:
        counts = {name: totals[name] for name in ("num_rows", "tokens_packed", "num_trajectories", "tokens_flat")}
        report["checked"] = counts | {"against_trie": trie is not None}
    return report, [counter.line(manifest)]


def _origin(directory: Path, manifest: dict[str, Any], trie_path: Path | None) -> Trie | None:
    """The trie that the rows of `directory` lay out, cut to its capacity; None if it is not there."""
    from treepack.pack.plan.planning import packed_trie

    path = origin_of(directory, manifest, trie_path)
    return None if path is None else packed_trie(read_origin(path, manifest), str(manifest["options"].get("method")))
