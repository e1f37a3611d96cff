"""`treepack train`: a model trained on packed rows, or the proof that its gradients are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .objective import objective_options, read_objective
from .optimiser import optimiser_options
from .output import show
from .training import run_options, train_model


@click.command()
@click.argument("packed")
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Causal LM directory, hub name, or config file (random weights).",
)
@click.option("--out", type=click.Path(path_type=Path), help="Directory to write the trained model to.")
@objective_options
@run_options
@click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps; overrides --epochs.")
@optimiser_options(epochs=1, lr=1e-5)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="bf16 keeps fp32 weights and computes under autocast.",
)
@click.option("--compile", is_flag=True, help="Fuse what is not attention in every layer by torch.compile.")
@click.option(
    "--attention",
    type=click.Choice(["auto", "reference", "flex", "flash", "triton"]),
    default="auto",
    show_default=True,
    help="reference runs anywhere; flex is FlexAttention, flash its FlashAttention-4 backend, triton treepack's own "
    "kernel; auto takes the first of triton, flash and flex that can run on a GPU, reference elsewhere.",
)
@click.option(
    "--loss-chunk",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Targets whose logits exist at a time.",
)
@click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda or cuda:N; auto takes a GPU if there is one."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of row order and random weights."
)
@click.option(
    "--verify",
    is_flag=True,
    help="Do not train: compare the gradients of some rows with those of their trajectories one by one.",
)
@click.option(
    "--verify-rows",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Rows that --verify takes, the shortest first.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output, before the first step.")
def train(packed: str, model: str, out: Path | None, verify: bool, verify_rows: int, **options: Any) -> None:
    """Train a Hugging Face causal language model on packed rows.

    PACKED is a packed directory, on this machine or at a URI that pyarrow or fsspec opens (s3://, gs://, hf://, ...).
    Writes the model's own format, loadable by from_pretrained, with metrics.jsonl (a line per optimiser step). The loss
    of a step is one mean over all its rows: with --loss sft normalised as the rows were packed, else as --denominator
    says. Unless given, the options of the other losses have the values that are usual for each.

    A run that was cut off, or stopped by SIGTERM, goes on from its newest checkpoint with --resume. On several GPUs:
    torchrun --nproc-per-node 8 --no-python treepack train ...
    """
    from treepack.train.options import TrainOptions

    objective = read_objective(options)
    given = {name: options.pop(name) for name in ("resume", "overwrite", "tensorboard", "plot")}
    chosen = TrainOptions(**options, objective=objective)
    if verify:
        _verify(packed, model, chosen, verify_rows)
    elif out is None:
        raise click.UsageError("Missing option '--out'.")
    elif given["resume"] and given["overwrite"]:
        raise click.UsageError("--resume goes on with what --overwrite would remove; give one of them.")
    else:
        train_model(packed, model, chosen, out, **given)


def _verify(packed: str, model: str, options: Any, num_rows: int) -> None:
    from treepack.errors import TreepackError
    from treepack.model.verify import verify_gradients
    from treepack.train.ranks import refuse_ranks
    from treepack.train.run import open_verification

    refuse_ranks("--verify")
    run = open_verification(packed, model, options)
    rows = sorted(run.trainable_rows, key=lambda row: int(run.dataset.num_tokens[row]))[:num_rows]
    batches = [run.dataset[row].to(run.loaded.device) for row in rows]
    report = verify_gradients(run.loaded, batches, objective=options.objective, factors=run.factors(rows))
    name, error = report.worst
    show(
        {
            "rows": ", ".join(str(run.dataset.row_ids[row]) for row in rows),
            "trajectories": report.num_trajectories,
            "attention": f"{report.attention} in {report.dtype}",
            "loss of the rows": report.loss_packed,
            "loss one by one": report.loss_alone,
            "largest gradient error": f"{error:.1e} ({name})",
            "tolerance": f"{report.tolerance:.0e}",
        }
    )
    if not report.passed:
        raise TreepackError(f"{model}: packed gradients differ from one-by-one gradients by {error:.1e} at {name}")
