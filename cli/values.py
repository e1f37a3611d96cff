"""`treepack values`: a predictor of success from prompts and prefixes, fitted on packed rows, and its predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from .optimiser import optimiser_options
from .output import refuse_output, show

F = TypeVar("F", bound=Callable[..., Any])

RUNNING = (
    click.option(
        "--dtype",
        type=click.Choice(["fp32", "bf16"]),
        default="fp32",
        show_default=True,
        help="bf16 keeps fp32 weights and computes the backbone under autocast.",
    ),
    click.option(
        "--attention",
        type=click.Choice(["auto", "reference", "flex", "flash", "triton"]),
        default="auto",
        show_default=True,
        help="As in treepack train.",
    ),
    click.option(
        "--device", default="auto", show_default=True, help="cpu, cuda or cuda:N; auto takes a GPU if there is one."
    ),
    click.option("--overwrite", is_flag=True, help="Replace an existing output."),
)


def _running(command: F) -> F:
    for option in reversed(RUNNING):
        command = option(command)
    return command


@click.group()
def values() -> None:
    """Predict how likely success is from a prompt, or from a prefix of a rollout (TRACE)."""


@values.command()
@click.argument("trie", type=click.Path(path_type=Path))
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Backbone: causal LM directory, hub name, or config file (random weights); or an earlier --out, to go on.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write the predictor to.")
@click.option(
    "--prefix-share",
    type=click.FloatRange(0, 1),
    default=0.06,
    show_default=True,
    help="Share of prefixes among what is supervised, all prompts being; those that two or more rollouts share are "
    "drawn first; 1 takes every prefix.",
)
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="After what a prefix ends, as for treepack advantages.",
)
@click.option(
    "--capacity", type=click.IntRange(min=1), default=8192, show_default=True, help="Most tokens a row may hold."
)
@click.option("--freeze", is_flag=True, help="Fit the head alone; the backbone runs once per row.")
@optimiser_options(epochs=2, lr=3e-5)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the drawn prefixes, row order and random weights.",
)
@_running
def fit(trie: Path, model: str, out: Path, overwrite: bool, **options: Any) -> None:
    """Fit a prefix value predictor on the rollouts in TRIE, whose rewards are 0 or 1.

    A linear head on the hidden state at the end of a prompt or prefix learns the share of successes among the rollouts
    that go on from there, by the mean squared error. Prefixes are packed into rows, so each is encoded once.
    """
    from treepack.files.directory import refuse_existing
    from treepack.train.options import TrainOptions
    from treepack.train.predictor.fit import FitOptions, open_fit
    from treepack.train.predictor.fit import fit as fit_steps
    from treepack.train.ranks import refuse_ranks

    refuse_ranks("treepack values fit")
    own = {name: options.pop(name) for name in ("capacity", "segment", "prefix_share", "freeze")}
    chosen = FitOptions(train=TrainOptions(**options), **own)
    refuse_existing(out, overwrite=overwrite, inputs=[trie, model])
    run = open_fit(trie, model, chosen)
    for note in run.notes:
        click.echo(f"note: {note}", err=True)
    steps = _with_bar(fit_steps(run, out, overwrite=overwrite), total=len(run.schedule))
    show(
        {
            "prompts": run.num_prompts,
            "prefixes": run.num_anchors - run.num_prompts,
            "rows": len(run.rows),
            "steps": len(steps),
            "attention": run.model.loaded.attention,
            "first loss": steps[0].loss,
            "last loss": steps[-1].loss,
            "loss of the best constant": run.constant_loss,
            "tokens of an epoch": sum(row.row.num_tokens for row in run.rows),
            "tokens if each prefix stood alone": run.tokens_alone,
            "saved": str(out),
        }
    )


def _with_bar(steps: Any, *, total: int) -> list[Any]:
    import sys

    from tqdm import tqdm

    found = []
    with tqdm(total=total, desc="fitting", unit="step", disable=not sys.stderr.isatty()) as bar:
        for step in steps:
            found.append(step)
            bar.update()
            bar.set_postfix(loss=f"{step.loss:.4f}")
    return found


@values.command()
@click.argument("trie", type=click.Path(path_type=Path))
@click.option(
    "--values",
    "predictor",
    type=click.Path(path_type=Path),
    required=True,
    help="Predictor that treepack values fit wrote.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write, .jsonl or .parquet.")
@click.option(
    "--segment", metavar="turn|recorded|node|N", help="After what a prefix ends; by default as it was fitted."
)
@click.option("--capacity", type=click.IntRange(min=1), help="Most tokens a row may hold; by default as it was fitted.")
@_running
def predict(
    trie: Path,
    predictor: Path,
    out: Path,
    segment: str | None,
    capacity: int | None,
    dtype: str,
    attention: str,
    device: str,
    overwrite: bool,
) -> None:
    """Write the value of every prompt and prefix in TRIE, as treepack allocate and treepack stats read it.

    Rewards are not needed. Prefixes are packed into rows, so each is encoded once.
    """
    from treepack.rl.trace.expansion import refuse_name, write_table
    from treepack.train.predictor import model as value_model
    from treepack.train.ranks import refuse_ranks

    refuse_ranks("treepack values predict")
    refuse_name(out)
    refuse_output(out, [trie, predictor], columns={"group_id", "value"}, overwrite=overwrite)
    model = value_model.load_values(predictor, dtype=dtype, attention=attention, device=device)
    for note in model.loaded.notes:
        click.echo(f"note: {note}", err=True)
    found = value_model.predict(model, trie, segment=segment, capacity=capacity, dtype=dtype)
    write_table(found.table, out)
    column = found.table["value"].to_numpy()
    show(
        {
            "prompts": found.num_prompts,
            "prefixes": found.num_prefixes,
            "lines": found.table.num_rows,
            "values": f"{column.min():.4f} to {column.max():.4f}, mean {column.mean():.4f}",
            "attention": model.loaded.attention,
            "tokens computed": found.tokens_computed,
            "tokens if each prefix stood alone": found.tokens_alone,
        }
    )
