"""`treepack train`: train a model on packed rows, or verify its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treepack.files.remote.address import AnyPath

from .compute_options import ATTENTION, device_option
from .lora import lora_options
from .objective import objective_options
from .optimiser import OptimiserOptions, optimiser_options
from .output import show
from .paths import WRITE
from .progress import quiet_option
from .run_options import RunOptions, run_options
from .sections import SectionedCommand
from .training import stage_lines, train_model, use_cache

if TYPE_CHECKING:
    from treepack.data.batch import Batch
    from treepack.model.adapters.adapter import LoraOptions
    from treepack.model.objectives.objective import Objective
    from treepack.train.options import TrainOptions


def _parse_mix(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    try:
        return None if value is None else tuple(float(share) for share in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of numbers such as 0.7,0.3", param=parameter) from error


_SECTIONS = {
    "Data, model and output": "mix blocks model init-from out overwrite resume cache cache-size",
    "Loss": "loss clip-low clip-high dual-clip denominator response-length kl kl-estimator entropy importance-cap "
    "temperature beta value-coef value-clip router-aux routes",
    "Optimiser": "steps epochs rows-per-step lr min-lr-ratio warmup-steps weight-decay clip optimizer seed",
    "LoRA": "lora-rank lora-alpha lora-targets lora-dropout quantize merge",
    "Held-out rows": "eval eval-every patience",
    "Checkpoints": "checkpoint-every keep max-skipped",
    "Metrics": "report-to tensorboard project run-name plot quiet",
    "Speed and memory": "device dtype compile attention gradient-checkpointing checkpoint-layers "
    "offload-checkpoints carry pass-tokens loss-chunk gather-dtype cpu-offload",
    "Verification": "verify verify-rows help",
}


@click.command(cls=SectionedCommand, sections=_SECTIONS)
# Not a Path, which would make "s3://bucket/rows" "s3:/bucket/rows".
@click.argument("packed", nargs=-1, required=True)
@click.option(
    "--mix",
    metavar="SHARE,SHARE",
    callback=_parse_mix,
    help="Share of the rows for each PACKED, in their order, such as 0.7,0.3; by default every row of each of them "
    "comes once per epoch.",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    help="Divide the rows of each training step into this number of blocks of neighbouring rows, so that each machine "
    "downloads only its own; by default the number of machines if PACKED is remote, else 1.",
)
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME|JSON",
    help="Causal LM directory, its address, hub name, or config file (random weights); or an adapter of PEFT.",
)
@click.option(
    "--init-from",
    metavar="RUN|CHECKPOINT|MODEL",
    help="Start with the weights of another run, of one of its checkpoints, or of a model of the same shapes.",
)
# Required, except with --verify; checked in the command.
@click.option("--out", type=WRITE, help="Directory to write the trained model to, or its address in s3:// or gs://.")
@objective_options
@run_options
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Optimiser steps; overrides --epochs. With --resume and a larger number, training continues.",
)
@optimiser_options(epochs=1, lr=1e-5)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "adamw-8bit"]),
    default="adamw",
    show_default=True,
    help="adamw-8bit keeps the states of AdamW in 8 bits (needs bitsandbytes; one process).",
)
@click.option(
    "--router-aux",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="COEF",
    help="Coefficient of the load-balancing loss of a mixture's routers, with --loss sft; 0 leaves it out.",
)
@click.option(
    "--routes",
    type=click.Choice(["replay", "ignore"]),
    default="replay",
    show_default=True,
    help="replay: send each token to the experts that the sampler chose, if build-trie kept them; ignore: do not.",
)
@lora_options
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="bf16 keeps fp32 weights and computes under autocast; auto is bf16 on a GPU that has it, else fp32."
    " --verify always computes in fp64 or fp32.",
)
@click.option("--compile", "compiled", is_flag=True, help="Fuse all of a layer except attention by torch.compile.")
@click.option(
    "--attention",
    type=click.Choice(ATTENTION),
    default="auto",
    show_default=True,
    help="reference runs anywhere; flex is FlexAttention, flash its FlashAttention-4 backend, triton treepack's own "
    "kernel; auto is the first of triton, flash and flex that can run on the GPU, else reference.",
)
@click.option(
    "--loss-chunk",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Targets per chunk of logits; a smaller chunk needs less memory.",
)
@device_option
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of row order and random weights.",
)
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
@quiet_option
def train(
    packed: tuple[str, ...],
    mix: tuple[float, ...] | None,
    blocks: int | None,
    model: str,
    init_from: str | None,
    out: AnyPath | None,
    objective: Objective,
    run: RunOptions,
    steps: int | None,
    optimiser: OptimiserOptions,
    optimizer: str,
    router_aux: float,
    routes: str,
    lora: LoraOptions | None,
    dtype: str,
    compiled: bool,
    attention: str,
    loss_chunk: int,
    device: str,
    seed: int,
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

    With --resume a run that was interrupted, or stopped by SIGTERM, continues from its newest checkpoint; with more
    --steps or --epochs also a run that is finished. On several GPUs: torchrun --nproc-per-node 8 --no-python treepack
    train ...
    """
    from treepack.train.options import TrainOptions

    use_cache(cache, cache_size)
    # `resume`, trackers and `plot` of `run` are for the command and not part of the options that are stored.
    options = TrainOptions(
        steps=steps,
        mix=mix,
        blocks=blocks,
        init_from=init_from,
        **asdict(optimiser),
        optimizer=optimizer,
        router_aux=router_aux,
        routes=routes,
        lora=lora,
        dtype=dtype,
        compile=compiled,
        attention=attention,
        loss_chunk=loss_chunk,
        device=device,
        seed=seed,
        objective=objective,
        gather_dtype=run.gather_dtype,
        cpu_offload=run.cpu_offload,
        checkpoint_layers=run.checkpoint_layers,
        offload_checkpoints=run.offload_checkpoints,
        carry=run.carry,
        pass_tokens=run.pass_tokens,
        checkpoint_every=run.checkpoint_every,
        keep=run.keep,
        max_skipped=run.max_skipped,
        eval_every=run.eval_every,
        patience=run.patience,
    )
    if run.patience and run.held_out is None:
        raise click.UsageError("--patience counts evaluations; give held-out rows with --eval.")
    if verify:
        _verify(packed, model, options, verify_rows)
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
    from treepack.carry.verify import in_pieces
    from treepack.errors import TreepackError
    from treepack.model.verify.verify_rows import verify_rows
    from treepack.train.ranks import refuse_ranks
    from treepack.train.setup.opening import open_verification

    refuse_ranks("--verify")
    with stage_lines():
        run = open_verification(packed, model, options)
    limit = None if run.options.carry is None else int(run.options.carry)
    # The shortest rows, because every trajectory of a row is computed alone too, in float64 if possible; with --carry
    # the shortest ones that are cut.
    lengths = run.dataset.num_tokens.tolist()
    rows = sorted(run.trainable_rows, key=lambda row: (lengths[row] <= (limit or 0), lengths[row]))[:num_rows]
    batches = [run.dataset[row] for row in rows]
    _count_cut(batches, limit)  # refuses before the long comparison
    with stage_lines():
        result = verify_rows(
            run.loaded,
            batches,
            objective=options.objective,
            factors=run.factors(rows),
            backward=None if limit is None else in_pieces(limit),
        )
    report, cut = result.gradients, _count_cut(result.batches, limit)
    name, error = report.worst
    show(
        {
            "rows": ", ".join(str(run.dataset.row_ids[row]) for row in rows),
            "trajectories": _part(report.num_trajectories, sum(len(batch.trajectory_ids) for batch in batches)),
            "tokens": _part(*(sum(batch.num_tokens for batch in each) for each in (result.batches, batches))),
            "attention": f"{report.attention} in {report.dtype}",
            "layers": "computed again in the backward pass" if result.plan.recompute else "computed once",
            **({} if limit is None else {"pieces": f"of at most {limit:,} tokens, in {cut} of {len(rows)} rows"}),
            "loss of the rows": report.loss_packed,
            "loss one by one": report.loss_alone,
            "loss error": f"{report.loss_error:.1e}",
            "largest gradient error": f"{error:.1e} ({name})",
            "tolerance": f"{report.tolerance:.0e}",
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
    from treepack.errors import TreepackError

    cut = 0 if limit is None else sum(batch.num_tokens > limit for batch in batches)
    if limit is not None and not cut:
        longest = max((batch.num_tokens for batch in batches), default=0)
        raise TreepackError(
            f"--verify: no compared row has more than {limit:,} tokens, the longest has {longest:,}; give a smaller "
            "number to --carry"
        )
    return cut


def _part(count: int, total: int) -> str:
    # 7 of 16 -> "7 of 16, as many as memory and some minutes allow"; 16 of 16 -> "16"
    return f"{count:,}" if count == total else f"{count:,} of {total:,}, as many as memory and some minutes allow"
