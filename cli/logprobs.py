"""`treepack logprobs`: a model's log-probabilities of every trained token, as a column of packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .output import progress, show


@click.command()
@click.argument("packed", type=click.Path(path_type=Path))
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Causal LM directory, hub name, or config file (random weights).",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Packed directory to write.")
@click.option(
    "--column",
    type=click.Choice(["old", "ref"]),
    default="old",
    show_default=True,
    help="old: the policy before training, which ratios are taken to. ref: the reference of KL and dpo.",
)
@click.option("--entropies", is_flag=True, help="Also write the entropy of each token's distribution.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="bf16 keeps fp32 weights and computes under autocast.",
)
@click.option(
    "--attention",
    type=click.Choice(["auto", "reference", "flex", "flash", "triton"]),
    default="auto",
    show_default=True,
    help="As in treepack train.",
)
@click.option(
    "--loss-chunk",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Tokens whose logits exist at a time.",
)
@click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda or cuda:N; auto takes a GPU if there is one."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of random weights.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def logprobs(packed: Path, model: str, out: Path, overwrite: bool, **options: Any) -> None:
    """Write a model's log-probabilities of every trained token into a copy of packed rows.

    A row is one forward pass, so every prefix is computed once. treepack train --loss reads the columns: old for the
    ratios of grpo and its like, ref for their KL divergence and for dpo.
    """
    from treepack.files.directory import finished_directory, refuse_existing
    from treepack.pack.files import write_packed
    from treepack.train.logprobs import ScoreOptions, open_scoring, scored_provenance, scored_rows
    from treepack.train.ranks import refuse_ranks

    refuse_ranks("treepack logprobs")
    chosen = ScoreOptions(**options)
    refuse_existing(out, overwrite=overwrite, inputs=[packed, model])
    scoring = open_scoring(packed, model, chosen)
    for note in scoring.notes:
        click.echo(f"note: {note}", err=True)
    rows = progress(scored_rows(scoring), description="scoring", total=len(scoring.dataset))
    with finished_directory(out, overwrite=overwrite) as temporary:
        capacity = scoring.dataset.manifest["capacity"]
        provenance = scored_provenance(scoring)
        totals = write_packed(rows, temporary, capacity=capacity, provenance=provenance)["totals"]
    show(
        {
            "rows": totals["num_rows"],
            "trajectories": totals["num_trajectories"],
            "attention": scoring.loaded.attention,
            "tokens computed": totals["tokens_packed"],
            "tokens if each trajectory stood alone": totals["tokens_flat"],
            "written": f"term_{chosen.column}_logprob" + (", term_entropy" if chosen.entropies else ""),
        }
    )
