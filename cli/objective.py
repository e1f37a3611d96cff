"""Options of `treepack train` that define the loss."""

from __future__ import annotations

from typing import Any

import click

from .option_groups import option_group

# `model.objectives.objective.PRESETS` in the same order, repeated because that module imports torch; a test compares
# them.
LOSSES = tuple("sft ppo grpo dapo dr_grpo gspo cispo dpo value".split())

_NOT_NEGATIVE = click.FloatRange(min=0)
# Without defaults, because each loss has its own, and an option that the loss does not use is refused.
_OPTIONS = [
    click.option(
        "--loss",
        type=click.Choice(LOSSES),
        default="sft",
        show_default=True,
        help="Loss to minimise: weighted cross-entropy (sft), an objective over terms, or the value loss of a critic "
        "alone (value).",
    ),
    click.option("--clip-low", type=_NOT_NEGATIVE, help="Clip ratios below 1 minus this."),
    click.option("--clip-high", type=_NOT_NEGATIVE, help="Clip ratios above 1 plus this."),
    click.option("--dual-clip", type=click.FloatRange(min=1), help="Maximum ratio if the advantage is negative."),
    click.option(
        "--denominator",
        type=click.Choice(["token", "trajectory", "group", "global", "edge"]),
        help="Unit that has equal weight in a step; global divides by trajectories times --response-length, and edge "
        "is the objective of TreeRPO, for advantages with --edges.",
    ),
    click.option(
        "--response-length",
        type=click.IntRange(min=1),
        help="Constant of --denominator global, the maximum length of Dr. GRPO; 1 if it is not given.",
    ),
    click.option("--kl", type=_NOT_NEGATIVE, help="Coefficient of the KL divergence from the reference."),
    click.option("--kl-estimator", type=click.Choice(["k1", "k2", "k3"]), help="Estimator of the KL divergence."),
    click.option("--entropy", type=_NOT_NEGATIVE, help="Coefficient of the entropy bonus."),
    click.option(
        "--importance-cap",
        type=_NOT_NEGATIVE,
        help="Weight terms by old / sampling probability, with this maximum.",
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        help="The sampler's temperature, if the data does not have it; it is an error if the data has another one.",
    ),
    click.option("--beta", type=_NOT_NEGATIVE, help="Inverse temperature of dpo."),
    click.option(
        "--value-coef",
        type=_NOT_NEGATIVE,
        help="Coefficient of the value loss beside a policy loss; one model then learns policy and values.",
    ),
    click.option(
        "--value-clip",
        type=_NOT_NEGATIVE,
        help="Maximum distance of a value from its old value in the value loss, 0.2 by default; 0 clips nothing.",
    ),
]


def _make_objective(loss: str, **changes: float | str | None) -> Any:
    """Return the `Objective` of a loss; a change of None leaves the usual value of the loss."""
    from .training import stage_lines

    with stage_lines("importing torch"):
        from treepack.model.objectives.objective import choose_objective

    return choose_objective(loss, **changes)


objective_options = option_group("objective", _OPTIONS, _make_objective)
