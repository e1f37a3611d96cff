"""Options of the commands that train: epochs, rows per update, learning rate, AdamW and gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from .option_groups import option_group

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class OptimiserOptions:
    """The fields of `train.options.TrainOptions` that `treepack train` and `treepack values fit` share."""

    epochs: int
    rows_per_step: int
    lr: float
    min_lr_ratio: float
    warmup_steps: int
    weight_decay: float
    clip: float
    gradient_checkpointing: bool


def optimiser_options(*, epochs: int, lr: float) -> Callable[[F], F]:
    """Return a decorator that adds the options as the argument `optimiser`; `epochs` and `lr` are defaults."""
    at_least_0, at_least_1 = click.IntRange(min=0), click.IntRange(min=1)
    not_negative = click.FloatRange(min=0)  # 0 is allowed for --lr: a run that only measures losses
    numbers = (
        ("--epochs", at_least_1, epochs, "Passes over the rows."),
        ("--rows-per-step", at_least_1, 8, "Rows whose gradients are summed for one update, over all ranks."),
        ("--lr", not_negative, lr, "Maximum learning rate of AdamW."),
        ("--min-lr-ratio", click.FloatRange(0, 1), 0.1, "Last learning rate / maximum; the decay is a cosine."),
        ("--warmup-steps", at_least_0, 0, "Steps of linear warm-up."),
        ("--weight-decay", not_negative, 0.0, "Weight decay of parameters with two dimensions or more."),
        ("--clip", not_negative, 1.0, "Maximum gradient norm; 0 for no clipping."),
    )
    options = [
        click.option(name, type=kind, default=default, show_default=True, help=text)
        for name, kind, default, text in numbers
    ]
    checkpointing = click.option(
        "--gradient-checkpointing", is_flag=True, help="Compute activations again in the backward pass, to save memory."
    )
    # Betas are not an option, because (0.9, 0.95) is usual for language models.
    return option_group("optimiser", [*options, checkpointing], OptimiserOptions)
