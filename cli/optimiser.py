"""The options of commands that train: passes, rows of an update, learning rate, what AdamW and the backward pass do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def optimiser_options(*, epochs: int, lr: float) -> Callable[[F], F]:
    """Add the options, with these defaults of `--epochs` and `--lr`; names are those of `options.TrainOptions`."""
    at_least_0, at_least_1 = click.IntRange(min=0), click.IntRange(min=1)
    positive = click.FloatRange(min=0)
    options = (
        ("--epochs", at_least_1, epochs, "Passes over the rows."),
        ("--rows-per-step", at_least_1, 8, "Rows whose gradients are summed for one update, over all ranks."),
        ("--lr", positive, lr, "Greatest learning rate of AdamW."),
        ("--min-lr-ratio", click.FloatRange(0, 1), 0.1, "Last learning rate over the greatest, reached by a cosine."),
        ("--warmup-steps", at_least_0, 0, "Steps of linear warm-up."),
        ("--weight-decay", positive, 0.0, "Of weights with two dimensions or more."),
        ("--clip", positive, 1.0, "Greatest gradient norm; 0 for none."),
    )
    checkpointing = click.option(
        "--gradient-checkpointing", is_flag=True, help="Compute activations again in the backward pass."
    )

    def added(command: F) -> F:
        command = checkpointing(command)
        for name, kind, default, text in reversed(options):
            command = click.option(name, type=kind, default=default, show_default=True, help=text)(command)
        return command

    return added
