"""`treepack models`: does a model train exactly, by which kernels, and what does a row cost?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from treepack.analysis.options import StatsOptions

from .config import common_options
from .option_groups import field_options
from .sections import SectionedCommand
from .sizes import TokenCount


def _device(command: Any) -> Any:
    (option,) = field_options(StatsOptions, "device", device={"metavar": "NAME|TFLOP/S"})
    return option(command)


@click.command(cls=SectionedCommand)
@click.argument("model", metavar="[NAME|CONFIG.JSON]", required=False)
@click.option(
    "--tokens", type=TokenCount(), metavar="N", default=65536, show_default=True, help="Tokens of the row to forecast."
)
@_device
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def models(model: str | None, tokens: int, device: str, as_json: bool) -> None:
    """List the families of models and the kernels that they train with; with NAME, the verdict and costs of one model.

    NAME is a family, a model_type, a preset, a name of the hub, or a config.json. No weights are read. `treepack train`
    tests models of other families before its first step.
    """
    from treepack.analysis.model_families import describe_model, families

    if model is not None:
        report = describe_model(model, tokens, device, _find_config)
        click.echo(json.dumps(report)) if as_json else _show(report, device)
    elif as_json:
        click.echo(json.dumps({"families": [asdict(each) for each in families()]}))
    else:
        _list()


def _find_config(model: str) -> dict[str, Any] | None:
    from treepack.model.accept.vocabulary import find_config

    return find_config(model)


def _list() -> None:
    from treepack.analysis.model_families import families

    width = max(len(each.name) for each in families())
    for each in families():
        verdict = f"refused: {each.refused}" if each.refused else f"exact, {each.kernels}"
        beside = f" ({each.beside})" if each.beside else ""
        click.echo(f"{each.name:<{width}}  {each.type:<20}  {verdict}{beside}")


def _show(report: dict[str, Any], device: str) -> None:
    from .output import say, show

    if report["exact"] is False:
        say(f"{report['model']} is refused: {report['reason']}.")
        return
    if report["exact"]:
        say(f"{report['model']} trains exactly.")
    else:
        say(f"{report['model']}: {report['reason']}; treepack train PACKED --model MODEL --verify tests it.")
    rows = {
        "families": ", ".join(report["families"]),
        "attention": f"{report['attention']}, head dimension {report['heads']}",
        "kernels on an H100": report["kernels"],
        "kernels on other GPUs": "Triton",
        "beside it": report["beside"],
    }
    costs = {}
    if "flops" in report:
        costs = {
            "weights": report["weights"],
            f"operations of {report['tokens']:,} tokens": report["flops"],
            f"seconds on one {device}": report["seconds"],
        }
    if shown := {name: value for name, value in rows.items() if value and report["kernels"]} | costs:
        show(shown)
    note = report.get("costs") or report.get("memory") or "give its config.json for operations and memory"
    say(f"{note}.")
