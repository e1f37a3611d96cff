"""Rows of a training run that are longer than `TrainOptions.carry` and so run in pieces (`carry`).

run --choose_pieces--> the run with a number in place of "auto", and with memory for what is carried
rows of a step --has_long_rows--> True if any row of it is longer than a piece; all ranks get the same answer
batch --row_runner--> its runner: in pieces if the row is longer than a piece, else as a whole
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from treepack.carry.backward import CarryOptions, runner_of
from treepack.carry.limit import CarryPlan, plan_carry
from treepack.carry.offload import CarryMemory
from treepack.carry.refusal import check_carry
from treepack.data.batch import Batch
from treepack.data.mixture import AnyDataset
from treepack.errors import TreepackError
from treepack.memory.shortage import memory_errors
from treepack.model.forward import RowRunner, WholeRows
from treepack.model.layer_memory import update_bytes
from treepack.model.loaded import LoadedModel
from treepack.train.layer_choice import host_room, state_bytes
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.sharding import summing_gradients, whole_weights

if TYPE_CHECKING:
    from treepack.train.run import TrainingRun

_log = logging.getLogger("treepack")

# On the CPU, where torch counts no memory.
CPU_PIECE = 8192
_NO_ROOM = (
    "while the memory of pieces was measured",
    "train with --gradient-checkpointing, --dtype bf16 or a smaller --loss-chunk",
)


def choose_pieces(run: TrainingRun) -> TrainingRun:
    """Return the run with the tokens of a piece, and with memory for what is carried; all ranks must call this.

    Raises:
        TreepackError: the model cannot run rows in pieces, or memory is too small.
    """
    options = choose_piece_size(run.options, run.loaded)
    if options.carry is None:
        return run
    memory, notes = None, run.notes
    if run.loaded.device.type == "cuda" and (run.options.carry == "auto" or _longest_row(run) > int(options.carry)):
        _log.info("measuring the memory of pieces")
        limit, memory, note = _measured(run)
        options, notes = replace(options, carry=limit), (*notes, note)
    elif run.options.carry == "auto":
        notes = (*notes, f"carry auto is {CPU_PIECE:,} tokens on a CPU, where torch counts no memory")
    held_out = run.held_out and replace(run.held_out, options=options, carry_memory=memory)
    return replace(run, options=options, notes=notes, held_out=held_out, carry_memory=memory)


def choose_piece_size(options: TrainOptions, loaded: LoadedModel) -> TrainOptions:
    """Return the options with the tokens of a piece as a number that needs no measurement.

    Raises:
        TreepackError: the model cannot run rows in pieces.
    """
    if options.carry is None:
        return options
    check_carry(loaded)
    return replace(options, carry=CPU_PIECE) if options.carry == "auto" else options


def _measured(run: TrainingRun) -> tuple[int, CarryMemory, str]:
    """Return the tokens of a piece on all ranks, the memory of this rank, and a note.

    Raises:
        TreepackError: memory is too small on any rank.
    """
    loaded, ranks, training = run.loaded, run.ranks, run.loaded.model.training
    reserved = update_bytes(loaded.model, state_bytes=state_bytes(run.options))
    loaded.model.train()  # transformers recomputes layers only in this mode
    plan, problem = None, None
    with whole_weights(loaded):
        if loaded.root is not None:
            reserved += update_bytes(loaded.model, state_bytes=0)  # the whole gradients, besides those of this rank
        try:
            with memory_errors(*_NO_ROOM):
                plan = _plan(run, reserved)
        except TreepackError as error:
            problem = error  # raised after the ranks have met, because the others would wait for ever
        if loaded.root is not None:
            _sum_over_ranks(run)
    loaded.model.zero_grad(set_to_none=True)
    loaded.model.train(training)
    limit = smallest(ranks, 0 if plan is None else plan.limit)
    if problem is not None:
        raise problem
    if plan is None or limit == 0:
        raise TreepackError(
            f"rank {ranks.rank} stops because another rank has too little memory for pieces; "
            "the error of that rank names the remedy"
        )
    outputs = "" if plan.keep_outputs else ", and outputs of trunk are computed again"
    note = f"rows of more than {limit:,} tokens run in pieces; {plan.resident_layers} layers carry on the GPU{outputs}"
    return limit, CarryMemory(loaded.device, plan.budget), note


def _plan(run: TrainingRun, reserved: int) -> CarryPlan:
    """Measure the longest row of the run and plan for it.

    Raises:
        TreepackError: the row does not fit.
    """
    limit = run.options.carry if isinstance(run.options.carry, int) else None
    datasets = _datasets(run)
    dataset = max(datasets, key=lambda each: int(each.num_tokens.max()))
    return plan_carry(
        run.loaded,
        dataset[int(dataset.num_tokens.argmax())],
        CarryOptions(
            limit or CPU_PIECE, chunk=run.options.loss_chunk, autocast=functools.partial(lower_precision, run)
        ),
        limit=limit,
        longest_path=max(each.max_position() for each in datasets) + 1,
        reserved=reserved,
        host_bytes=host_room(),
    )


def _datasets(run: TrainingRun) -> list[AnyDataset]:
    return [run.dataset] if run.held_out is None else [run.dataset, run.held_out.dataset]


def _longest_row(run: TrainingRun) -> int:
    return max(int(each.num_tokens.max()) for each in _datasets(run))


def _sum_over_ranks(run: TrainingRun) -> None:
    """Sum the gradients of passes inside `whole_weights`, which would otherwise wait for the first step."""
    runner = WholeRows(run.loaded, autocast=functools.partial(lower_precision, run))
    with summing_gradients(run.loaded):
        runner.backward(run.dataset.padding())


def smallest(ranks: Ranks, number: int) -> int:
    """Return the smallest `number` of all ranks."""
    numbers = torch.zeros(ranks.size, dtype=torch.int64)
    numbers[ranks.rank] = number
    return int(ranks.sum(numbers).min())


def has_long_rows(run: TrainingRun, rows: list[int]) -> bool:
    """Return True if any of `rows`, on whichever rank, is longer than a piece of the run."""
    limit = _piece_size(run)
    return limit is not None and int(run.dataset.num_tokens[rows].max()) > limit


def _piece_size(run: TrainingRun) -> int | None:
    limit = run.options.carry
    assert limit != "auto", "open_run chooses a number"
    return None if limit is None else int(limit)


def row_runner(run: TrainingRun, batch: Batch) -> RowRunner:
    """Return the runner of a row, or of joined rows: in pieces if it is longer than a piece of the run."""
    # A context for each pass and none around them: autocast keeps a weight that it has cast until the outermost context
    # ends. The cast of a push has no graph, and a later pass that took it would give the weight no gradient.
    return runner_of(
        run.loaded,
        batch,
        _piece_size(run),
        chunk=run.options.loss_chunk,
        memory=run.carry_memory,
        autocast=functools.partial(lower_precision, run),
    )


def lower_precision(run: TrainingRun) -> torch.autocast:
    """Return the autocast context of one forward pass."""
    return torch.autocast(run.loaded.device.type, torch.bfloat16, enabled=run.options.dtype == "bf16")
