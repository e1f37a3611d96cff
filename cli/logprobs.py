"""`treepack logprobs`: write log-probabilities of all trained tokens under a model as a column of packed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .compute_options import attention_option, device_option, dtype_option, pass_tokens_option
from .lora import quantize_option
from .option_groups import option_group
from .output import reserve_directory, show
from .paths import READ, WRITE
from .progress import progress, quiet_option
from .sizes import PieceSize
from .training import stage_lines

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.train.logprobs import ScoreOptions


def _make_score_options(**options: str | bool | int | None) -> ScoreOptions:
    from treepack.train.logprobs import ScoreOptions

    return ScoreOptions(**options)  # type: ignore[arg-type]


_score_options = option_group(
    "options",
    [
        click.option(
            "--column",
            type=click.Choice(["old", "ref"]),
            default="old",
            show_default=True,
            help="old: the policy before training, the denominator of ratios. ref: the reference of KL and dpo.",
        ),
        quantize_option,
        click.option("--entropies", is_flag=True, help="Also write the entropy of the distribution of each token."),
        click.option(
            "--temperature",
            type=click.FloatRange(min=0),
            help="As in treepack train: the sampler's temperature, if the data does not have it.",
        ),
        click.option(
            "--ignore-temperature", is_flag=True, help="Compute at the temperature 1, which dpo needs, for all data."
        ),
        click.option(
            "--carry",
            type=PieceSize(),
            default="off",
            show_default=True,
            metavar="N|auto|off",
            help="Run a row of more than N tokens in pieces of at most N, so that memory limits the piece and not the "
            "row; auto is 8192, and off runs every row as a whole.",
        ),
        pass_tokens_option,
        click.option(
            "--routes",
            type=click.Choice(["replay", "ignore"]),
            default="replay",
            show_default=True,
            help="As in treepack train.",
        ),
        dtype_option("As in treepack train."),
        attention_option,
        click.option(
            "--loss-chunk",
            type=click.IntRange(min=1),
            default=2048,
            show_default=True,
            help="Tokens per chunk of logits; a smaller chunk needs less memory.",
        ),
        device_option,
        click.option(
            "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of random weights."
        ),
    ],
    _make_score_options,
)


@click.command()
@click.argument("packed", type=READ)
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Causal LM directory, hub name, or config file (random weights); or an adapter of PEFT.",
)
@click.option("--out", type=WRITE, required=True, help="Packed directory to write.")
@_score_options
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@quiet_option
def logprobs(packed: AnyPath, model: str, out: AnyPath, options: ScoreOptions, overwrite: bool) -> None:
    """Write the log-probability of every trained token under a model into a copy of packed rows.

    Every prefix is computed once, also with --carry. treepack train --loss reads the columns: old for the ratios of
    grpo and similar losses, ref for their KL divergence and for dpo.
    """
    from treepack.files.directory import finished_directory
    from treepack.pack.files import write_packed
    from treepack.train.logprobs import open_scoring, scored_provenance, scored_rows
    from treepack.train.ranks import refuse_ranks

    # All checks that do not need the model come first, because a large model takes minutes to load.
    refuse_ranks("treepack logprobs")
    reserve_directory(out, [packed, model], overwrite=overwrite)
    with stage_lines():
        scoring = open_scoring(str(packed), model, options)
    for note in scoring.notes:
        click.echo(f"note: {note}", err=True)
    # Lazy: each row is scored when it is written.
    rows = progress(scored_rows(scoring), description="scoring", total=len(scoring.dataset))
    with finished_directory(out, overwrite=overwrite) as temporary:  # `out` appears whole, or not if scoring fails
        capacity = scoring.dataset.manifest["capacity"]
        provenance = scored_provenance(scoring)
        totals = write_packed(rows, temporary, capacity=capacity, provenance=provenance)["totals"]
    show(
        {
            "rows": totals["num_rows"],
            "trajectories": totals["num_trajectories"],
            "attention": scoring.loaded.attention,
            "tokens computed": totals["tokens_packed"],
            "tokens if each trajectory is computed alone": totals["tokens_flat"],
            "written": f"term_{options.column}_logprob" + (", term_entropy" if options.entropies else ""),
        }
    )
