"""The options of `treepack train` that say what is minimised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

LOSSES = ("sft", "ppo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "dpo")
OPTIONS = (
    *("clip_low", "clip_high", "dual_clip", "denominator", "response_length"),
    *("kl", "kl_estimator", "entropy", "importance_cap", "beta"),
)


def objective_options(command: F) -> F:
    """Add the options to `command`; all but --loss are None unless given, and then the loss's usual value."""
    number = click.FloatRange(min=0)
    options = [
        click.option(
            "--loss",
            type=click.Choice(LOSSES),
            default="sft",
            show_default=True,
            help="What is minimised: weighted cross-entropy, or an objective over terms.",
        ),
        click.option("--clip-low", type=number, help="Ratios are clipped below 1 minus this."),
        click.option("--clip-high", type=number, help="Ratios are clipped above 1 plus this."),
        click.option(
            "--dual-clip", type=click.FloatRange(min=1), help="Bound of the ratio where advantages are negative."
        ),
        click.option(
            "--denominator",
            type=click.Choice(["token", "trajectory", "group", "global"]),
            help="What counts alike in a step; global divides by trajectories times --response-length.",
        ),
        click.option("--response-length", type=click.IntRange(min=1), help="Constant of --denominator global."),
        click.option("--kl", type=number, help="Coefficient of the divergence from the reference."),
        click.option("--kl-estimator", type=click.Choice(["k1", "k2", "k3"]), help="Of that divergence."),
        click.option("--entropy", type=number, help="Coefficient of the entropy bonus."),
        click.option(
            "--importance-cap", type=number, help="Weight terms by old over sampler's probability, at most this."
        ),
        click.option("--beta", type=number, help="Inverse temperature of dpo."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def read_objective(options: dict[str, Any]) -> Any:
    """Take the options out of `options` and return their `Objective`."""
    from treepack.model.objectives import choose_objective

    return choose_objective(options.pop("loss"), **{name: options.pop(name) for name in OPTIONS})
