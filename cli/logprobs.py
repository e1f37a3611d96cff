"""`treepack logprobs`: write log-probabilities of all trained tokens under a model as a column of packed rows."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import click

from treepack.train.scoring_options import ScoreOptions

from .config import common_options
from .devices import check_device
from .launch import is_first_process
from .option_groups import field_options, option_group
from .output import quoted, reserve_directory, show, show_end
from .paths import PACKED, WRITE
from .progress import progress
from .sections import SectionedCommand
from .stages import import_torch, stage_lines
from .training import row_ranks

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.train.logprobs import Scoring


_score_options = option_group(
    "options",
    field_options(
        ScoreOptions,
        temperature={"type": click.FloatRange(min=0)},
        carry={"default": "off", "show_default": True},
    ),
    ScoreOptions,
)


@click.command(cls=SectionedCommand)
@click.argument("packed", type=PACKED)
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Causal LM directory, hub name, or config file (random weights); or an adapter of PEFT.",
)
@click.option("--out", type=WRITE, required=True, help="Packed directory to write.")
@_score_options
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@common_options
def logprobs(packed: AnyPath, model: str, out: AnyPath, options: ScoreOptions, overwrite: bool) -> None:
    """Write the log-probability of every trained token under a model into a copy of packed rows.

    Every prefix is computed once, also with --carry. treepack train --loss reads the columns: old for the ratios of
    grpo and similar losses, ref for their KL divergence and for dpo, teacher for distillation.
    """
    from treepack.train.early_checks import check_scoring
    from treepack.train.input_checks import check_launched, refuse_ranks

    if options.sequence_ranks == 1:
        refuse_ranks("treepack logprobs")
    check_launched(options.sequence_ranks)
    if is_first_process():
        reserve_directory(out, [packed, model], overwrite=overwrite)
    check_device(options.device, options.attention)
    check_scoring(packed, model)
    import_torch()
    from treepack.train.logprobs import open_scoring, scored_rows

    with row_ranks(options.device, options.sequence_ranks, "treepack logprobs") as ranks:
        with stage_lines(shown=ranks.leads):
            scoring = open_scoring(str(packed), model, options)
        if ranks.leads:
            _write(scoring, out, overwrite=overwrite)
        else:
            deque(scored_rows(scoring), maxlen=0)  # with the first rank, which writes them


def _write(scoring: Scoring, out: AnyPath, *, overwrite: bool) -> None:
    """Score the rows, write them, and print a summary."""
    from treepack.files.directory import finished_directory
    from treepack.pack.files import write_packed
    from treepack.train.logprobs import scored_provenance, scored_rows

    options = scoring.options
    for note in scoring.notes:
        click.echo(f"note: {note}", err=True)
    # Lazy: each row is scored when it is written.
    rows = progress(scored_rows(scoring), description="scoring", total=len(scoring.dataset))
    # `out` appears whole, or not if scoring fails
    with stage_lines(), finished_directory(out, overwrite=overwrite) as temporary:
        capacity = scoring.dataset.manifest["capacity"]
        written = write_packed(rows, temporary, capacity=capacity, provenance=partial(scored_provenance, scoring))
    totals = written["totals"]
    show(
        {
            "rows": totals["num_rows"],
            "trajectories": totals["num_trajectories"],
            "attention": scoring.loaded.attention,
            "tokens computed": totals["tokens_packed"],
            "tokens if each trajectory is computed alone": totals["tokens_flat"],
            "written": f"term_{options.column}_logprob"
            + (", term_entropy" if options.entropies else "")
            + ("" if options.top_k is None else ", term_teacher_topk_ids, term_teacher_topk_logprobs"),
        }
    )
    show_end(out, then=f"treepack train {quoted(out)} --model MODEL --loss LOSS --out TRAINED")
