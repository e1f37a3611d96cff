"""`treepack simulate`: comparison of ways to spend rollouts, before any model is run.

The simulation is `treepack.research.trace.simulation`. This file reads options and prints a table or JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treepack.research.trace.options import BudgetExperiment

from .config import common_options
from .option_groups import field_options, option_group
from .output import quoted, show, show_end, show_table
from .paths import TRIE
from .sections import SectionedCommand

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.research.trace.simulation import ExperimentArm
    from treepack.research.trace.worlds import World

# Titles of the columns of `_line`.
HEADER = ("roots", "prefixes", "effective ratio, %", "above uniform", "mixed prompts", "flipped prefixes, %", "cost")
# Fields of BudgetExperiment, in the order of the options and of the JSON report.
_EXPERIMENT_FIELDS = "budget expand candidates selected root_noise prefix_noise steps seed"
# Fields of MarkovWorld; a recorded world has only the last.
_WORLD_FIELDS = "max_turns success spread persistence".split()


def _world_fields(
    max_turns: int | None, success: float | None, spread: float | None, persistence: float | None
) -> dict[str, float]:
    """Return only the fields that the user gave, so that the library's defaults apply to the others."""
    fields = dict(zip(_WORLD_FIELDS, (max_turns, success, spread, persistence), strict=True))
    return {name: value for name, value in fields.items() if value is not None}


_WORLD_OPTIONS = [
    click.option("--max-turns", type=int, help="Without TRIE: maximum turns of a rollout.  [default: 5]"),
    click.option("--success", type=float, help="Without TRIE: mean chance of success.  [default: 0.5]"),
    click.option(
        "--spread",
        type=float,
        help="Without TRIE: concentration of the prompts' chances; below 2, most are easy or hard.  [default: 0.5]",
    ),
    click.option(
        "--persistence",
        type=float,
        help="The higher, the less one turn changes the chance of success; with TRIE and 0, "
        "continuations are recorded ones.  [default: 4]",
    ),
]


@click.group()
def simulate() -> None:
    """Simulate rollouts to compare ways to spend them."""


@simulate.command(cls=SectionedCommand, short_help="Compare uniform and TRACE allocation of one budget.")
@click.argument("trie", type=TRIE, required=False)
@option_group("experiment", field_options(BudgetExperiment, _EXPERIMENT_FIELDS), BudgetExperiment)
@option_group("world_fields", _WORLD_OPTIONS, _world_fields)
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="With TRIE: end of a prefix; the same values as in treepack advantages.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def allocation(
    trie: AnyPath | None, experiment: BudgetExperiment, world_fields: dict[str, float], segment: str, as_json: bool
) -> None:
    """Compare uniform and TRACE allocation of rollouts and continuations under one budget.

    The effective ratio is the share of the rolled-out prompts that had both outcomes. Rollouts come from a Markov model
    of success, or are drawn from the rollouts of TRIE. Intervals are 95 % intervals over steps.
    """
    import json

    # The group of this file is named simulate too.
    from treepack.research.trace.simulation import simulate as run

    arms, rank_correlation = run(_world(trie, segment, world_fields), experiment)
    report = _report(arms)
    if as_json:
        options = {name: getattr(experiment, name) for name in _EXPERIMENT_FIELDS.split()} | world_fields
        click.echo(json.dumps({"options": options, "rank_correlation": rank_correlation, "arms": report}))
    else:
        _show(experiment, rank_correlation, report)
    show_end(then=f"treepack values fit {'TRIE' if trie is None else quoted(trie)} --model MODEL --out VALUES")


def _show(experiment: BudgetExperiment, rank_correlation: float | None, report: list[dict[str, Any]]) -> None:
    show(
        {
            "rollouts of prompts": experiment.budget,
            "continuations": experiment.budget * experiment.expand,
            "rank correlation of predicted prompts": rank_correlation,
        }
    )
    click.echo()
    show_table(HEADER, [_line(arm) for arm in report])


def _world(trie: AnyPath | None, segment: str, fields: dict[str, Any]) -> World:
    """Build the Markov world, or with a trie the world of its recorded rollouts.

    Raises:
        TreepackError: a field of the Markov model with a trie, or any error of the worlds.
    """
    from treepack.errors import TreepackError
    from treepack.research.trace.worlds import MarkovWorld, recorded_world
    from treepack.trie.store.trie_files import read_trie

    if trie is None:
        return MarkovWorld(**fields)
    for name in _WORLD_FIELDS[:-1]:
        if name in fields:
            raise TreepackError(f"--{name.replace('_', '-')} describes the Markov model; leave it out with a trie")
    return recorded_world(read_trie(trie), segment=segment, **fields)


def _report(arms: list[ExperimentArm]) -> list[dict[str, Any]]:
    """Return mean and half width of the interval of every measure of every arm.

    "above_uniform" is the gain of root_ratio over the first arm, which is uniform.
    """
    from treepack.research.trace.simulation import MEASURES, interval

    report = []
    for arm in arms:
        measures = {name: interval(getattr(arm, name)) for name in MEASURES}
        # Arms share the prompts of a step, so differences are taken step by step, and the interval is over these.
        above = interval(arm.root_ratio - arms[0].root_ratio)
        stages = {"active_roots": arm.active_roots, "active_prefixes": arm.active_prefixes}
        report.append(stages | measures | {"above_uniform": above})
    return report


def _line(arm: dict[str, Any]) -> tuple[str, ...]:
    """Format one row of the table, with the columns of `HEADER`."""

    # Intervals are (mean, half width); scale 100 prints a ratio in percent: (0.437, 0.007) -> "43.7 +- 0.7".
    def plus_minus(name: str, scale: float = 1.0, sign: str = "") -> str:
        mean, half = (scale * part for part in arm[name])
        return f"{mean:{sign}.1f} +- {half:.1f}"

    uniform = not (arm["active_roots"] or arm["active_prefixes"])
    return (
        "TRACE" if arm["active_roots"] else "uniform",
        "TRACE" if arm["active_prefixes"] else "uniform",
        plus_minus("root_ratio", 100),
        "-" if uniform else plus_minus("above_uniform", 100, "+"),
        plus_minus("mixed_prompts"),
        plus_minus("prefix_ratio", 100),
        f"{arm['cost'][0]:,.0f}",
    )
