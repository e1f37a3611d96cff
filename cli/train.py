"""`treepack train`: train a model on packed rows, or verify its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treepack.files.remote.address import AnyPath
from treepack.train.options import TrainOptions

from .config import common_options, from_run_option
from .devices import check_device
from .lora import lora_options
from .objective import objective_options
from .option_groups import field_options, option_group
from .output import show
from .paths import PACKED_TEXT, WRITE
from .run_options import RunOptions, run_options
from .sections import SectionedCommand
from .sizes import RankCount
from .stages import import_torch, stage_lines
from .training import row_ranks, show_plan, train_model, use_cache

if TYPE_CHECKING:
    from treepack.data.batch import Batch
    from treepack.errors import TreepackError
    from treepack.model.adapters.lora_options import LoraOptions
    from treepack.objectives.objective import Objective
    from treepack.train.run import TrainingRun
    from treepack.train.verification import RowsReport


def _parse_mix(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    try:
        return None if value is None else tuple(float(share) for share in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0.7,0.3", param=parameter) from error


def _auto(_: click.Context, __: click.Parameter, value: bool | None) -> bool | str:
    return "auto" if value is None else value


# A flag that the run chooses if neither of its forms is given.
_SWITCH: dict[str, Any] = {"type": bool, "default": None, "show_default": "auto", "callback": _auto}
_training_options = option_group(
    "training",
    field_options(
        TrainOptions,
        mix={"type": str, "metavar": "SHARE,SHARE", "callback": _parse_mix},
        init_from={"metavar": "RUN|CHECKPOINT|MODEL"},
        betas={"show_default": "0.9,0.95"},
        min_lr_ratio={"type": click.FloatRange(0, 1)},
        router_aux={"metavar": "COEF"},
        compile=_SWITCH | {"name": "compile/--no-compile"},
        offload_checkpoints=_SWITCH | {"name": "offload-checkpoints/--no-offload-checkpoints"},
        offload_optimizer=_SWITCH | {"name": "offload-optimizer/--no-offload-optimizer"},
        whole_weights=_SWITCH | {"name": "whole-weights/--no-whole-weights"},
        sequence_ranks={"type": RankCount(), "metavar": RankCount.name},
        expert_ranks={"type": RankCount(), "metavar": RankCount.name},
    ),
    dict,
)


@click.command(cls=SectionedCommand)
# Not a Path, which would make "s3://bucket/rows" "s3:/bucket/rows".
@click.argument("packed", nargs=-1, required=True, type=PACKED_TEXT)
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Causal LM directory, its address, hub name, or config file (random weights); or an adapter of PEFT.",
)
# Required, except with --verify and --dry-run; checked in the command.
@click.option("--out", type=WRITE, help="Directory to write the trained model to, or its address in s3:// or gs://.")
@objective_options
@_training_options
@run_options
@lora_options
@click.option(
    "--verify",
    is_flag=True,
    help="Do not train; compare the gradients of some rows with the gradients of their trajectories one by one.",
)
@click.option(
    "--verify-rows",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of rows for --verify, the shortest first, or with --carry N the shortest of more than N tokens; "
    "compared in part if memory is too small.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output before the first step.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    help="Folder for copies of remote parts and models, and for files on their way to a remote --out; by default "
    "TREEPACK_CACHE, or treepack/ in XDG_CACHE_HOME or ~/.cache.",
)
@click.option(
    "--cache-size",
    metavar="BYTES",
    help="Maximum size of all copies of remote inputs, such as 100G; by default half of the disk's free space.",
)
@from_run_option
@common_options
def train(
    packed: tuple[str, ...],
    model: str,
    out: AnyPath | None,
    objective: Objective,
    training: dict[str, Any],
    run: RunOptions,
    lora: LoraOptions | None,
    verify: bool,
    verify_rows: int,
    overwrite: bool,
    cache: Path | None,
    cache_size: str | None,
) -> None:
    """Train a Hugging Face causal language model on packed rows.

    PACKED is a packed directory, on this machine or at an address (s3://, gs://, hf://), or several. The output is a
    model directory for from_pretrained, with metrics.jsonl (a line per optimiser step). The loss of a step is one mean
    over all its rows. The rows define how --loss sft is normalised; for other losses --denominator defines it. Options
    of these losses default to the usual values of each loss.

    With --resume a run that was interrupted, or stopped by a signal, continues from its newest checkpoint; with more
    --steps or --epochs also a run that is finished. On several GPUs: torchrun --nproc-per-node 8 --no-python treepack
    train ...
    """
    use_cache(cache, cache_size)
    options = TrainOptions(**training, objective=objective, lora=lora)
    if options.patience and run.held_out is None:
        raise click.UsageError("--patience counts evaluations; give held-out rows with --eval.")
    if run.dry_run and run.resume:
        raise click.UsageError("--dry-run shows the plan of a new run; omit it or --resume.")
    if verify:
        _verify(packed, model, options, verify_rows)
    elif run.dry_run:
        show_plan(packed, model, options, run)
    elif out is None:
        raise click.UsageError("Missing option '--out'.")
    elif run.resume and overwrite:
        raise click.UsageError("--resume continues the run that --overwrite would remove; give one of them.")
    else:
        train_model(packed, model, options, out, run, overwrite=overwrite)


def _verify(packed: tuple[str, ...], model: str, options: TrainOptions, num_rows: int) -> None:
    """Compare packed with one-by-one gradients of the shortest rows, and print the result.

    Raises:
        TreepackError: they differ by more than the tolerance.
    """
    from treepack.train.early_checks import check_training
    from treepack.train.input_checks import refuse_ranks

    if options.ranks_of_row == 1:
        refuse_ranks("--verify")
    check_device(options.device, options.attention)
    headers, _ = check_training(packed, model, options)
    capacity = max(each.manifest["capacity"] for each in headers)
    if options.piece_limit is not None and options.piece_limit >= capacity:
        raise _none_cut(options.piece_limit, "rows hold", capacity)
    import_torch()
    from treepack.train.setup.opening import open_verification

    with row_ranks(options.device, options.ranks_of_row, "--verify") as ranks:
        with stage_lines(shown=ranks.leads):
            run = open_verification(packed, model, options)
        rows, batches, result = _compare(run, num_rows, shown=ranks.leads)
    if ranks.leads:
        _show_comparison(model, run, rows, batches, result)


def _compare(run: TrainingRun, num_rows: int, *, shown: bool) -> tuple[list[int], list[Batch], RowsReport]:
    """Compare the shortest rows; return their numbers, the rows and the result."""
    from treepack.carry.verify import in_pieces
    from treepack.train.teacher import taught
    from treepack.train.verification import verify_rows

    limit = run.options.piece_limit
    # The shortest rows, because every trajectory of a row is computed alone too, in float64 if possible; with --carry
    # the shortest ones that are cut.
    lengths = run.dataset.num_tokens.tolist()
    rows = sorted(run.trainable_rows, key=lambda row: (lengths[row] <= (limit or 0), lengths[row]))[:num_rows]
    batches = [taught(run, run.dataset[row]) for row in rows]
    _count_cut(batches, limit)  # refuses before the long comparison
    with stage_lines(shown=shown):
        result = verify_rows(
            run.loaded,
            batches,
            objective=run.options.objective,
            factors=run.factors(rows),
            backward=None if limit is None else in_pieces(limit),
        )
    return rows, batches, result


def _show_comparison(
    model: str, run: TrainingRun, rows: list[int], batches: Sequence[Batch], result: RowsReport
) -> None:
    """Print the result of a comparison.

    Raises:
        TreepackError: the gradients differ by more than the tolerance.
    """
    from treepack.errors import TreepackError

    limit = run.options.piece_limit
    report, cut = result.gradients, _count_cut(result.batches, limit)
    name, error = report.worst
    show(
        {
            "compared rows": ", ".join(str(run.dataset.row_ids[row]) for row in rows),
            "trajectories": _part(report.num_trajectories, sum(len(batch.trajectory_ids) for batch in batches)),
            "tokens": _part(*(sum(batch.num_tokens for batch in each) for each in (result.batches, batches))),
            "attention": f"{report.attention} in {report.dtype}",
            **({} if run.options.ranks_of_row == 1 else {"ranks of a row": run.options.ranks_of_row}),
            **({} if limit is None else {"pieces": f"of at most {limit:,} tokens, in {cut} of {len(rows)} rows"}),
            "loss of the rows": report.loss_packed,
            "loss one by one": report.loss_alone,
            "loss error": f"{report.loss_error:.1e}",
            "largest gradient error": f"{error:.1e} ({name})",
            "tolerance": f"{report.tolerance:.0e}",
            **({} if result.slope_error is None else {"error of the slope": f"{result.slope_error:.1e}"}),
        }
    )
    if not report.passed:  # after the table, which shows by how much
        different = f"packed gradients differ from one-by-one gradients by {error:.1e} at {name}"
        if error <= report.tolerance:
            different = f"the packed loss differs from the one-by-one loss by {report.loss_error:.1e}"
        raise TreepackError(f"{model}: {different}; do not train this model on packed rows with this --attention")


def _count_cut(batches: Sequence[Batch], limit: int | None) -> int:
    """Return how many rows have more than `limit` tokens, 0 without a limit.

    Raises:
        TreepackError: none has, so nothing would be compared in pieces.
    """
    cut = 0 if limit is None else sum(batch.num_tokens > limit for batch in batches)
    if limit is not None and not cut:
        longest = max((batch.num_tokens for batch in batches), default=0)
        raise _none_cut(limit, "the longest has", longest)
    return cut


def _none_cut(limit: int, rows: str, longest: int) -> TreepackError:
    """Return the error about rows of which none would be compared in pieces."""
    from treepack.errors import TreepackError

    return TreepackError(
        f"--verify: no compared row has more than {limit:,} tokens, {rows} {longest:,}; give a smaller number to "
        "--carry"
    )


def _part(count: int, total: int) -> str:
    # 7 of 16 -> "7 of 16, limited by tokens of a row"; 16 of 16 -> "16"
    return f"{count:,}" if count == total else f"{count:,} of {total:,}, limited by tokens of a row"
