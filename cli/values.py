"""`treepack values`: fit a predictor of success from prompts and prefixes, and write its predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from treepack.train.options import TrainOptions

from .choices import WordChoice
from .config import common_options
from .devices import check_device
from .option_groups import field_options, option_group
from .output import quoted, reserve_directory, reserve_table, show, show_end
from .paths import READ, TRIE, WRITE
from .progress import INTERVAL, step_progress
from .sections import SectionedCommand
from .sizes import TokenCount

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.research.predictor.fit import FitStep


@dataclass(frozen=True)
class _ComputeOptions:
    """Options of both commands about the computation of the backbone."""

    dtype: str
    attention: str
    device: str


_compute_options = option_group(
    "compute",
    field_options(
        TrainOptions,
        "dtype attention device",
        dtype={
            "type": WordChoice(["fp32", "bf16"]),
            "default": "fp32",
            "help": "bf16 keeps fp32 weights and computes the backbone under autocast.",
        },
        attention={"help": "As in treepack train."},
    ),
    _ComputeOptions,
)
_optimiser_options = option_group(
    "training",
    field_options(
        TrainOptions,
        "epochs rows_per_step lr min_lr_ratio warmup_steps weight_decay clip checkpoint_layers seed",
        epochs={"default": 2},
        lr={"default": 3e-5},
        min_lr_ratio={"type": click.FloatRange(0, 1)},
        checkpoint_layers={"default": 0},
        seed={"help": "Seed of the drawn prefixes, row order and random weights."},
    ),
    dict,
)
# Not one of the group: it is about the output, and not part of the computation.
_overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing output.")


@click.group()
def values() -> None:
    """Predict how likely success is from a prompt, or from a prefix of a rollout (TRACE)."""


@values.command(cls=SectionedCommand, short_help="Fit a predictor of success on the rollouts in TRIE.")
@click.argument("trie", type=TRIE)
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Backbone: causal LM directory, hub name or config file (random weights); an earlier --out is fitted further.",
)
@click.option("--out", type=WRITE, required=True, help="Directory to write the predictor to.")
@click.option(
    "--prefix-share",
    type=click.FloatRange(0, 1),
    default=0.06,
    show_default=True,
    help="Share of prefixes among the supervised prompts and prefixes; all prompts are supervised, and prefixes shared "
    "by two or more rollouts are drawn first; 1 is every prefix.",
)
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="Segment after which a prefix ends; the same values as in treepack advantages.",
)
@click.option("--capacity", type=TokenCount(), default=8192, show_default=True, help="Maximum tokens of a row.")
@click.option("--freeze", is_flag=True, help="Fit only the head; the backbone runs once per row.")
@_optimiser_options
@_compute_options
@_overwrite_option
@common_options
def fit(
    trie: AnyPath,
    model: str,
    out: AnyPath,
    prefix_share: float,
    segment: str,
    capacity: int,
    freeze: bool,
    training: dict[str, Any],
    compute: _ComputeOptions,
    overwrite: bool,
) -> None:
    """Fit a prefix value predictor on the rollouts in TRIE, whose rewards are 0 or 1.

    A linear head on the hidden state at the end of a prompt or prefix learns the share of successes among the rollouts
    that continue from there, by the mean squared error. Prefixes are packed into rows, so each is encoded once.
    """
    from treepack.files.remote.cache import local_copy
    from treepack.train.early_checks import check_trie_model
    from treepack.train.input_checks import refuse_ranks, require_torch

    refuse_ranks("treepack values fit")
    train = TrainOptions(**training, **asdict(compute))
    reserve_directory(out, [trie, model], overwrite=overwrite)
    check_device(train.device, train.attention)
    check_trie_model(trie, model)
    from treepack.research.predictor.fit_data import FitOptions, read_fit_data

    options = FitOptions(
        train=train,
        capacity=capacity,
        segment=segment,
        prefix_share=prefix_share,
        freeze=freeze,
    )
    data = read_fit_data(local_copy(trie), options)
    require_torch("treepack values fit")
    from treepack.research.predictor.fit import fit as fit_steps
    from treepack.research.predictor.fit import open_fit

    run = open_fit(data, model)
    for note in run.notes:
        click.echo(f"note: {note}", err=True)
    steps = _run_steps(fit_steps(run, out, overwrite=overwrite), total=len(run.schedule))
    show(
        {
            "prompts": data.num_prompts,
            "prefixes": run.num_anchors - data.num_prompts,
            "rows": len(data.rows),
            "steps": len(steps),
            "attention": run.model.loaded.attention,
            "first loss": steps[0].loss,
            "last loss": steps[-1].loss,
            "loss of the best constant": run.constant_loss,
            # Packing saves the difference between these two numbers in every epoch.
            "tokens of an epoch": sum(row.row.num_tokens for row in data.rows),
            "tokens if each prefix is computed alone": data.tokens_alone,
        }
    )
    show_end(out, then=f"treepack values predict {quoted(trie)} --values {quoted(out)} --out PREDICTIONS.jsonl")


def _run_steps(steps: Iterator[FitStep], *, total: int) -> list[FitStep]:
    """Carry out all steps with progress on stderr, and return their measurements."""
    results = []
    # All are kept in memory, because the summary shows the first and the last loss: nine numbers a step.
    with step_progress("fitting", total, interval=INTERVAL) as report:
        for step in steps:
            results.append(step)
            report(len(results), {"loss": f"{step.loss:.4f}"})
    return results


@values.command(cls=SectionedCommand, short_help="Write the value of every prompt and prefix in TRIE.")
@click.argument("trie", type=TRIE)
@click.option(
    "--values",
    "predictor",
    type=READ,
    required=True,
    help="Predictor that treepack values fit wrote.",
)
@click.option("--out", type=WRITE, required=True, help="File to write, .jsonl or .parquet.")
@click.option(
    "--segment", metavar="turn|recorded|node|N", help="Segment after which a prefix ends; by default that of the fit."
)
@click.option("--capacity", type=TokenCount(), help="Maximum tokens of a row; by default that of the fit.")
@_compute_options
@_overwrite_option
@common_options
def predict(
    trie: AnyPath,
    predictor: AnyPath,
    out: AnyPath,
    segment: str | None,
    capacity: int | None,
    compute: _ComputeOptions,
    overwrite: bool,
) -> None:
    """Write the value of every prompt and prefix in TRIE to a file for treepack allocate and treepack stats.

    Rewards are not needed. Prefixes are packed into rows, so each is encoded once.
    """
    from treepack.files.remote.cache import local_copy
    from treepack.research.predictor.record import read_values_record
    from treepack.research.trace.expansion import refuse_name, write_prefix_table
    from treepack.train.early_checks import check_trie_model
    from treepack.train.input_checks import refuse_ranks, require_torch

    refuse_ranks("treepack values predict")
    refuse_name(out)  # the name selects the format, .jsonl or .parquet
    # --overwrite replaces only a file with these columns, which treepack wrote.
    reserve_table(out, [trie, predictor], columns={"group_id", "value"}, overwrite=overwrite)
    directory = local_copy(predictor)
    fitted = read_values_record(directory)["options"]
    check_device(compute.device, compute.attention)
    check_trie_model(trie, str(directory))
    from treepack.research.predictor.prediction_data import read_prediction_data

    data = read_prediction_data(
        local_copy(trie), segment=segment or fitted["segment"], capacity=capacity or fitted["capacity"]
    )
    require_torch("treepack values predict")
    from treepack.research.predictor import model as value_model

    model = value_model.load_values(directory, **asdict(compute))
    for note in model.loaded.notes:
        click.echo(f"note: {note}", err=True)
    table = value_model.predict_values(model, data, dtype=compute.dtype)
    # Written at the end and at once, because allocate and stats refuse a file that lacks prefixes.
    write_prefix_table(table, out, overwrite=overwrite)
    column = table["value"].to_numpy()
    show(
        {
            "prompts": data.num_prompts,
            "prefixes": data.num_prefixes,
            "lines": table.num_rows,
            "values": f"{column.min():.4f} to {column.max():.4f}, mean {column.mean():.4f}",
            "attention": model.loaded.attention,
            "tokens computed": data.tokens_computed,
            "tokens if each prefix is computed alone": data.tokens_alone,
        }
    )
    show_end(
        out, then=f"treepack allocate prefixes {quoted(trie)} --predictions {quoted(out)} --expand N --out QUERIES"
    )
