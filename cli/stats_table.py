"""Print the report of `treepack stats` as tables on stdout, one function per part."""

from __future__ import annotations

import json
from typing import Any

import click

from treepack.analysis.glossary import BASELINES, REASONS

from .output import percent, say, show_figures, show_notes, show_table
from .skipped import print_control_tokens, print_many_skipped, print_skipped

CARRY_NOTES = (
    "rows: maximum tokens, or whole trees; without --carry, but with --checkpoint-layers auto",
    "path: GiB of the longest carried path; memory is estimated, for one GPU",
)
SPREADS = ("lengths", "group_sizes", "branching", "row_tokens", "row_pairs", "row_trajectories")


def print_report(report: dict[str, Any], *, verbose: bool) -> None:
    """Print a report: one sentence with the samples and the verdict, then tables; `verbose` adds figures of packing."""
    print_many_skipped(report.get("skipped"))
    say(headline(report["summary"], report["forecast"]["verdict"]))
    show_figures(report | report.get("options", {}), verbose=verbose)
    show_notes(report.get("counts", {}))
    print_skipped(report.get("skipped"))
    print_control_tokens(report.get("control_tokens"))
    for name, column, ratio in (("por_by_depth", "tokens_tree", "por"), ("err_by_depth", "tokens_packed", "err")):
        if name in report:
            click.echo()
            lines = [
                (f"{part['start']:,}-{part['end']:,}", part["tokens_flat"], part[column], percent(part[ratio]))
                for part in report[name]
            ]
            show_table(["depth", "tokens_flat", column, ratio], lines)
    click.echo()
    columns = ("count", "min", "median", "p90", "max", "mean")
    spreads = [name for name in SPREADS if name in report]
    show_table(["", *columns], [(name, *(report[name].get(column) for column in columns)) for name in spreads])
    if "effective_ratio" in report:
        click.echo()
        lines = [
            (name, ratio["num_anchors"], percent(ratio["of_anchors"]), percent(ratio["of_rollouts"]))
            for name, ratio in report["effective_ratio"].items()
        ]
        show_table(["effective ratio", "anchors", "of_anchors", "of_rollouts"], lines)
    if "spearman" in report:
        click.echo()
        ranks = [
            (name, *(level[key] for key in ("num_pairs", "num_unpredicted", "rho", "p_value")))
            for name, level in report["spearman"].items()
        ]
        show_table(["spearman", "pairs", "unpredicted", "rho", "p_value"], ranks)
    if "predicted" in report:
        click.echo()
        _print_predictions(report["predicted"])
    if "checked" in report:
        click.echo()
        _print_checked(dict(report["checked"]))
    if "sharing" in report:
        click.echo()
        _print_sharing(report["sharing"], report["tokens_tree"])
    click.echo()
    _print_forecast(report["forecast"])


def headline(summary: str, verdict: str) -> str:
    """Return the summary of the input and the verdict as one sentence."""
    # "614 conversations, 614 samples: tree ..." and "614 conversations, 6,321 samples: the template ...; tree ..."
    return f"{summary}{';' if ':' in summary else ':'} {verdict}"


def _print_sharing(sharing: dict[str, Any], tokens_tree: int) -> None:
    lines = [
        (REASONS[name], tokens, percent(tokens / tokens_tree))
        for name, tokens in sharing["laid_down"].items()
        if tokens
    ]
    show_table(["why tokens are there", "tokens", "of N_tree"], lines)
    if sharing["num_alone"]:
        click.echo(f"{sharing['num_alone']:,} trajectories are alone in their group and were compared with none")
    if not sharing["lost"]:
        return
    click.echo()
    causes = [
        (cause["cause"], cause["tokens"], percent(cause["tokens"] / tokens_tree), cause["num_partings"])
        for cause in sharing["lost"]
    ]
    show_table(["sharing is lost by", "tokens", "of N_tree", "partings"], causes)
    for cause in sharing["lost"]:
        example = cause["example"]
        click.echo(
            f"{cause['cause']}: {quoted(example['trajectory_id'])} parts from {quoted(example['other'])} "
            f"at token {example['position']:,}"
        )
        for name in ("before", "expected", "found"):
            if name in example:
                click.echo(f"  {name:<8}  {quoted(example[name])}")
    if any("differs" in cause["cause"] for cause in sharing["lost"]):
        click.echo("a tokenizer distinguishes the causes; give --tokenizer")


def quoted(value: str) -> str:
    """Return text of a rollout in quotes, on one line, with everything escaped that could drive a terminal."""
    return json.dumps(value)


def _print_predictions(predicted: list[dict[str, Any]]) -> None:
    ratios = ("err", "fill", "gap")
    counts = ("capacity", "num_rows", "tokens_packed", "num_too_long")
    lines = [[*(part[name] for name in counts), *(percent(part[name]) for name in ratios)] for part in predicted]
    show_table([*counts, *ratios], lines)


def _print_checked(checked: dict[str, Any]) -> None:
    compared = checked.pop("against_trie", True)
    click.echo("checked: " + ", ".join(f"{name} {value:,}" for name, value in checked.items()) + ": all correct")
    if not compared:
        click.echo("not compared with a trie: the one it was packed from cannot be found; give --trie")


def _print_forecast(forecast: dict[str, Any]) -> None:
    header = ("baseline", "capacity", "num_left_out", "sharing", "speedup", "hours_flat", "hours")
    lines = [
        (
            line["baseline"],
            line["capacity"],
            line["num_left_out"],
            percent(line["sharing"]),
            f"{line['speedup']:.2f}",
            line["hours_flat"],
            line["hours"],
        )
        for line in forecast["lines"]
    ]
    show_table(header, lines)
    used = dict.fromkeys(line["baseline"] for line in forecast["lines"])
    show_notes({}, [*(f"{name}: {BASELINES[name]}" for name in used), *forecast["notes"]])
    click.echo()
    _print_carry(forecast["carry"])
    click.echo()
    rate = f"{percent(forecast['mfu'])} of {forecast['flops_per_second'] / 1e12:.0f} TFLOP/s"
    device = f", one {forecast['device']}" if forecast["device"] else ""
    say(f"{forecast['verdict']}; for {forecast['model']}, hours at {rate}{device}")


def _print_carry(carry: dict[str, Any]) -> None:
    header = "rows gib_rows hours_rows carry trunk path gib_carry hours_carry".split()  # fits 80 columns
    lines = [
        (
            "whole" if line["capacity"] is None else line["capacity"],
            _gib(line["bytes_rows"]),
            line["hours_rows"],
            line["carry"],
            percent(line["tokens_trunk"] / line["tokens_computed"]),
            _gib(line["bytes_path"]),
            _gib(line["bytes_carry"]),
            line["hours_carry"],
        )
        for line in carry["lines"]
    ]
    if lines:
        show_table(header, lines)
        show_notes({}, [*CARRY_NOTES, *carry["notes"]])
    say(carry["verdict"])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f}"
