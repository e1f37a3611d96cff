"""`treepack simulate`: what a way to spend rollouts is worth, before any model is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .output import show, show_table

HEADER = ("roots", "prefixes", "effective ratio, %", "above uniform", "mixed prompts", "flipped prefixes, %", "cost")
KNOBS = ("max_turns", "success", "spread", "persistence")


@click.group()
def simulate() -> None:
    """Simulate rollouts, to see what a way to spend them is worth."""


@simulate.command()
@click.argument("trie", type=click.Path(path_type=Path), required=False)
@click.option("--budget", type=int, default=1024, show_default=True, help="Rollouts of prompts in a step, M.")
@click.option("--expand", type=int, default=2, show_default=True, help="Continuations for each of them, N.")
@click.option("--candidates", type=int, default=512, show_default=True, help="Prompts to choose from in a step.")
@click.option("--selected", type=int, help="Prompts that uniform allocation rolls out; default: half of them.")
@click.option(
    "--root-noise",
    type=float,
    default=3.0,
    show_default=True,
    help="Of predicted values of prompts: standard deviation of their log-odds.",
)
@click.option("--prefix-noise", type=float, default=1.5, show_default=True, help="The same, of prefixes.")
@click.option("--steps", type=int, default=100, show_default=True, help="Simulated training steps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--max-turns", type=int, help="Without TRIE: most turns of a rollout.  [default: 5]")
@click.option("--success", type=float, help="Without TRIE: mean chance of success.  [default: 0.5]")
@click.option(
    "--spread",
    type=float,
    help="Without TRIE: concentration of prompts' chances; below 2 most are easy or hard.  [default: 0.5]",
)
@click.option(
    "--persistence", type=float, help="How little a turn decides; with TRIE 0 redraws its rollouts.  [default: 4]"
)
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="With TRIE: after what a prefix ends, as for treepack advantages.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def allocation(trie: Path | None, segment: str, as_json: bool, **options: Any) -> None:
    """Compare uniform and TRACE allocation of rollouts and continuations under one budget.

    The effective ratio is the share of the prompts rolled out that had both outcomes. Rollouts come from a Markov model
    of success, or are drawn from those recorded in TRIE. Intervals are of 95 % over steps.
    """
    import json

    from treepack.rl.trace.simulation import Experiment
    from treepack.rl.trace.simulation import simulate as run

    knobs = {name: value for name in KNOBS if (value := options.pop(name)) is not None}
    experiment = Experiment(**options)
    arms, rank_correlation = run(_world(trie, segment, knobs), experiment)
    report = _report(arms)
    if as_json:
        click.echo(json.dumps({"options": options | knobs, "rank_correlation": rank_correlation, "arms": report}))
        return
    show(
        {
            "rollouts of prompts": experiment.budget,
            "continuations": experiment.budget * experiment.expand,
            "rank correlation of predicted prompts": rank_correlation,
        }
    )
    click.echo()
    show_table(HEADER, [_line(arm) for arm in report])


def _world(trie: Path | None, segment: str, knobs: dict[str, Any]) -> Any:
    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.files.manifest import read_manifest
    from treepack.rl.trace.worlds import MarkovWorld, recorded_world
    from treepack.trie.files import read_trie

    if trie is None:
        return MarkovWorld(**knobs)
    for name in KNOBS[:-1]:
        if name in knobs:
            raise TreepackError(f"--{name.replace('_', '-')} describes the Markov model; leave it out with a trie")
    read_manifest(trie, schema.TRIE_FORMAT)
    return recorded_world(read_trie(trie), segment=segment, **knobs)


def _report(arms: list[Any]) -> list[dict[str, Any]]:
    """Means and half widths of intervals of every measure of every arm; "above_uniform" is the gain in root_ratio."""
    from treepack.rl.trace.simulation import MEASURES, interval

    found = []
    for arm in arms:
        measures = {name: interval(getattr(arm, name)) for name in MEASURES}
        above = interval(arm.root_ratio - arms[0].root_ratio)
        stages = {"active_roots": arm.active_roots, "active_prefixes": arm.active_prefixes}
        found.append(stages | measures | {"above_uniform": above})
    return found


def _line(arm: dict[str, Any]) -> tuple[str, ...]:
    def shown(name: str, scale: float = 1.0, sign: str = "") -> str:
        mean, half = (scale * part for part in arm[name])
        return f"{mean:{sign}.1f} +- {half:.1f}"

    uniform = not (arm["active_roots"] or arm["active_prefixes"])
    return (
        "TRACE" if arm["active_roots"] else "uniform",
        "TRACE" if arm["active_prefixes"] else "uniform",
        shown("root_ratio", 100),
        "-" if uniform else shown("above_uniform", 100, "+"),
        shown("mixed_prompts"),
        shown("prefix_ratio", 100),
        f"{arm['cost'][0]:,.0f}",
    )
