"""Options of `treepack train` about the course of a run: resumption, checkpoints, trackers, held-out rows, ranks."""

from __future__ import annotations

from dataclasses import dataclass

import click

from .option_groups import option_group
from .sizes import LayerCount, PassSize, PieceSize


@dataclass(frozen=True)
class RunOptions:
    """Options of `run_options`; those from `resume` to `held_out` are not fields of `train.options.TrainOptions`."""

    resume: bool
    tensorboard: bool
    report_to: tuple[str, ...]
    project: str
    run_name: str | None
    plot: bool
    held_out: str | None
    eval_every: int
    patience: int
    checkpoint_every: int
    keep: int
    max_skipped: int
    gather_dtype: str
    cpu_offload: bool
    carry: int | str | None
    pass_tokens: int | str
    checkpoint_layers: int | str | None
    offload_checkpoints: bool

    @property
    def sinks(self) -> tuple[str, ...]:
        """The names of the trackers that get the metrics."""
        return (*(("tensorboard",) if self.tensorboard else ()), *self.report_to)


run_options = option_group(
    "run",
    [
        click.option(
            "--resume", is_flag=True, help="Continue from the newest whole checkpoint in --out, if there is one."
        ),
        click.option(
            "--checkpoint-every",
            type=click.IntRange(min=0),
            default=100,
            show_default=True,
            help="Optimiser steps from one checkpoint to the next; 0 for none.",
        ),
        click.option(
            "--keep",
            type=click.IntRange(min=1),
            default=2,
            show_default=True,
            help="Number of checkpoints to keep, the newest ones.",
        ),
        click.option(
            "--max-skipped",
            type=click.IntRange(min=0),
            default=5,
            show_default=True,
            help="Maximum number of consecutive steps that are skipped because their loss or gradient is not finite.",
        ),
        click.option(
            "--gather-dtype",
            type=click.Choice(["fp32", "bf16"]),
            default="fp32",
            show_default=True,
            help="Dtype of weights sent between ranks; bf16 halves the traffic and rounds all weights, norms too.",
        ),
        click.option("--cpu-offload", is_flag=True, help="Keep sharded weights and optimiser on the CPU."),
        click.option(
            "--checkpoint-layers",
            type=LayerCount(),
            metavar="N|auto",
            help="Compute only the first N layers again in the backward pass; auto is the smallest number with which "
            "the longest row fits into the GPU's memory.",
        ),
        click.option(
            "--offload-checkpoints",
            is_flag=True,
            help="Compute layers again, and keep their inputs and attention outputs in host memory until then.",
        ),
        click.option(
            "--carry",
            type=PieceSize(),
            default="off",
            show_default=True,
            metavar="N|auto|off",
            help="Run a row of more than N tokens in pieces of at most N, so that memory limits the piece and not the "
            "row; auto chooses N for the free memory, and off runs every row as a whole.",
        ),
        click.option(
            "--pass-tokens",
            type=PassSize(),
            default="auto",
            show_default=True,
            metavar="N|auto",
            help="Join short rows of a step into passes of at most N tokens, which are faster on a GPU; auto chooses N "
            "for speed and the free memory, and 1 runs every row alone, as auto does on a CPU.",
        ),
        click.option(
            "--report-to",
            type=click.Choice(["tensorboard", "wandb", "trackio"]),
            multiple=True,
            help="Send the metrics to this tracker too; may be repeated.",
        ),
        click.option("--tensorboard", is_flag=True, help="The same as --report-to tensorboard."),
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
            metavar="PACKED",
            help="Packed directory of held-out rows, whose loss is computed during training.",
        ),
        click.option(
            "--eval-every",
            type=click.IntRange(min=1),
            default=100,
            show_default=True,
            help="Optimiser steps from one evaluation of --eval to the next; the last step has one too.",
        ),
        click.option(
            "--patience",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="End the run after this number of evaluations without a lower loss, and take the model of the lowest; "
            "0 for never.",
        ),
        click.option("--plot", is_flag=True, help="Draw the curves of metrics.jsonl to metrics.png at the end."),
    ],
    RunOptions,
)
