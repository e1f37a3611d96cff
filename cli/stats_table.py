"""Print the report of `treepack stats` as tables on stdout, one function per part."""

from __future__ import annotations

import json
from typing import Any

import click

from treepack.analysis.glossary import BASELINES, REASONS, readable_time

from .output import percent, say, show_figures, show_notes, show_table, text
from .skipped import print_control_tokens, print_many_skipped, print_skipped

_CONTRASTS = {
    "effective_ratio": ("num_anchors", "of_anchors", "of_rollouts"),
    "spearman": ("num_pairs", "num_unpredicted", "rho", "p_value"),
}
_MIN_LOST = 0.05  # share of lost tokens that is worth a line
_SPREADS = ("lengths", "group_sizes", "branching", "row_tokens", "row_pairs", "row_trajectories")


def print_report(report: dict[str, Any], *, verbose: bool, is_model_given: bool = True) -> None:
    """Print a report: the verdict, the capacities, memory and optional parts; with `verbose` everything else.

    If the user has given no model, one line names that of the figures instead of the memory that it needs.
    """
    forecast = report["forecast"]
    print_many_skipped(report.get("skipped"))
    say(report["summary"])
    say(f"{forecast['verdict']}.")
    click.echo()
    _print_capacities(report)
    num_gpus = forecast["num_gpus"]
    each = "" if num_gpus == forecast["ranks"] else f" (the table has the memory of each of {num_gpus})"
    if is_model_given:
        say(f"{forecast['memory']}{each}.")
    else:
        say(f"Speedup and memory are those of {forecast['model']}{each}; give --model for yours.")
    if lost := report.get("sharing", {}).get("lost"):
        tokens = report["sharing"]["laid_down"]["lost"]
        share, most = tokens / report["tokens_tree"], max(lost, key=lambda cause: int(cause["tokens"]))
        if share >= _MIN_LOST:
            say(f"{percent(share)} of the tokens lost their sharing, most by {most['cause']}; see --verbose.")
        if share >= _MIN_LOST and most["cause"] == "template":
            kept = 1 - int(most["tokens"]) / report["tokens_tree"]
            gain = forecast["gain"]["speedup"]
            say(
                f"A template that keeps earlier turns (docs/templates.md) computes up to {percent(1 - kept)} fewer "
                f"tokens: up to {gain / kept:.2f}x instead of {gain:.2f}x."
            )
    if tools := report.get("tools"):
        before, after = (gain["speedup"] for gain in (forecast["gain"], tools["gain"]))
        say(
            f"{tools['file']} has tool schemas, which the prompts lack: the gain is {before:.2f}x without them and "
            f"{after:.2f}x with --tools {tools['file']}."
        )
    if report.get("counts") or report.get("skipped") or report.get("control_tokens"):
        click.echo()
        show_notes(report.get("counts", {}), verbose=verbose)
        print_skipped(report.get("skipped"))
        print_control_tokens(report.get("control_tokens"))
    if verbose:
        _print_details(report)
    for name, columns in _CONTRASTS.items():
        if name in report:
            click.echo()
            _print_contrast(name, columns, report[name])
    if "checked" in report:
        click.echo()
        _print_checked(dict(report["checked"]))


def _print_capacities(report: dict[str, Any]) -> None:
    """Print one line for each capacity whose plan differs; the one of the verdict has a mark."""
    forecast = report["forecast"]
    baseline = next(line for line in forecast["baselines"] if line["baseline"] == forecast["gain"]["baseline"])
    chosen = forecast["gain"]["capacity"]
    lines: dict[tuple[int, int], list[str]] = {}
    for each in forecast["capacities"]:
        is_chosen, plan = each["capacity"] == chosen, (each["num_rows"], each["tokens_packed"])
        if plan in lines and not is_chosen:
            continue
        is_known = each["num_left_out"] == 0
        lines[plan] = [
            text(each["capacity"]) + ("*" if is_chosen else " "),
            text(each["num_rows"]),
            text(each["tokens_packed"]),
            percent(1 - each["tokens_packed"] / baseline["tokens_flat"]) if is_known else "-",
            f"{baseline['flops_flat'] / each['flops']:.2f}x" if is_known else "-",
            "-" if each["num_bytes"] is None else f"{_gib(each['num_bytes'])} GiB",
            text(each["num_left_out"]),
        ]
    header = ["capacity ", "rows", "tokens", "sharing", "speedup", "memory", "left out"]
    if all(each["num_left_out"] == 0 for each in forecast["capacities"]):
        header, lines = header[:-1], {plan: line[:-1] for plan, line in lines.items()}
    show_table(header, [*lines.values()])


def _print_details(report: dict[str, Any]) -> None:
    """Print the figures, distributions, lost sharing, and the forecast against every baseline."""
    click.echo()
    show_figures(report | report.get("options", {}), verbose=True)
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
    spreads = [name for name in _SPREADS if name in report]
    show_table(["", *columns], [(name, *(report[name].get(column) for column in columns)) for name in spreads])
    if "predicted" in report:
        click.echo()
        _print_predictions(report["predicted"])
    if "sharing" in report:
        click.echo()
        _print_sharing(report["sharing"], report["tokens_tree"])
    click.echo()
    _print_forecast(report["forecast"])


def _print_contrast(name: str, columns: tuple[str, ...], levels: dict[str, dict[str, Any]]) -> None:
    lines = [
        (level, *(percent(values[key]) if key.startswith("of_") else values[key] for key in columns))
        for level, values in levels.items()
    ]
    show_table([name.replace("_", " "), *(key.removeprefix("num_") for key in columns)], lines)


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
    if not checked.pop("against_trie", True):
        click.echo("not compared with a trie: the one it was packed from cannot be found; give --trie")
    click.echo("checked: " + ", ".join(f"{name} {value:,}" for name, value in checked.items()) + ": all correct")


def _print_forecast(forecast: dict[str, Any]) -> None:
    header = ("baseline", "capacity", "num_left_out", "sharing", "speedup", "flat", "tree")
    names: dict[tuple[Any, ...], list[str]] = {}
    for line in forecast["lines"]:
        values = (
            line["capacity"],
            line["num_left_out"],
            percent(line["sharing"]),
            f"{line['speedup']:.2f}",
            readable_time(3600 * line["hours_flat"]),
            readable_time(3600 * line["hours"]),
        )
        names.setdefault((line["tokens_flat"], line["flops_flat"], *values), []).append(line["baseline"])
    # Baselines with equal sequences are one line.
    show_table(header, [(", ".join(baselines), *values[2:]) for values, baselines in names.items()])
    used = dict.fromkeys(line["baseline"] for line in forecast["lines"])
    rate = f"{percent(forecast['mfu'])} of {forecast['flops_per_second'] / 1e12:.0f} TFLOP/s"
    device = f", one {forecast['device']}" if forecast["device"] else ""
    times = f"flat, tree: times of {forecast['model']} at {rate}{device}"
    show_notes({}, [*(f"{name}: {BASELINES[name]}" for name in used), *forecast["notes"], times])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f}"
