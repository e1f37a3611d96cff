"""Options of `treepack train` about the command: resumption, trackers, held-out rows."""

from __future__ import annotations

from dataclasses import dataclass

import click

from .choices import WordChoice
from .option_groups import option_group
from .paths import PACKED_TEXT


@dataclass(frozen=True)
class RunOptions:
    """Options of the command that `train.options.TrainOptions` does not have, so that a run does not record them."""

    resume: bool
    dry_run: bool
    report_to: tuple[str, ...]
    project: str
    run_name: str | None
    held_out: str | None
    log_every: int


run_options = option_group(
    "run",
    [
        click.option(
            "--resume", is_flag=True, help="Continue from the newest whole checkpoint in --out, if there is one."
        ),
        click.option(
            "--dry-run",
            is_flag=True,
            help="Print the choices of the run, on a GPU also its memory and time, and stop; nothing is written.",
        ),
        click.option(
            "--report-to",
            type=WordChoice(["tensorboard", "wandb", "trackio", "page"]),
            multiple=True,
            help="Send the metrics to this tracker too; may be repeated. page is a page with curves "
            "and rollouts for browsers of this machine, until the run ends.",
        ),
        click.option(
            "--project",
            default="treepack",
            show_default=True,
            envvar="WANDB_PROJECT",
            show_envvar=True,
            help="Project of the run in wandb and trackio.",
        ),
        click.option("--run-name", help="Name of the run in wandb and trackio; by default the name of --out."),
        click.option(
            "--eval",
            "held_out",
            type=PACKED_TEXT,
            metavar="PACKED",
            help="Packed directory of held-out rows, whose loss is computed during training.",
        ),
        click.option(
            "--log-every",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="N",
            help="Without a terminal, write a line to stderr every N steps; metrics.jsonl has each step.",
        ),
    ],
    RunOptions,
)
