"""The tokens of a piece of rows that run in pieces (`carry`), and the memory of tensors that these rows carry.

carry "auto" or a number, longest row and path, free memory --choose_pieces--> number, CarryMemory
"""

from __future__ import annotations

import logging

from treepack.carry.backward import CarryOptions
from treepack.carry.limit import CarryPlan, plan_carry
from treepack.carry.offload import CarryMemory
from treepack.carry.refusal import check_carry
from treepack.errors import TreepackError
from treepack.memory.device_memory import update_bytes
from treepack.memory.shortage import memory_errors
from treepack.model.forward import WholeRows
from treepack.model.loaded import LoadedModel
from treepack.train.setup.layer_choice import host_room, state_bytes
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.sharding import summing_gradients, whole_weights

_log = logging.getLogger("treepack")

# On the CPU, where torch counts no memory.
CPU_PIECE = 8192
_NO_ROOM = (
    "while the memory of pieces was measured",
    "train with --gradient-checkpointing, --dtype bf16 or a smaller --loss-chunk",
)


def choose_pieces(given: MemoryInput) -> tuple[int | None, CarryMemory | None, tuple[str, ...]]:
    """Return the tokens of a piece, memory for carried tensors, and notes; all ranks must call this.

    The first is None if rows run whole.

    Raises:
        TreepackError: the model cannot run rows in pieces, or memory is too small on any rank.
    """
    wanted, loaded = given.options.carry, given.loaded
    size = piece_size(wanted, loaded)
    if size is not None and loaded.device.type == "cuda" and (wanted == "auto" or given.longest_of_all > size):
        _log.info("measuring the memory of pieces")
        return _measured(given)
    if wanted == "auto":
        return size, None, (f"carry auto is {CPU_PIECE:,} tokens on a CPU, where torch counts no memory",)
    return size, None, ()


def piece_size(carry: int | str | None, loaded: LoadedModel) -> int | None:
    """Return the tokens of a piece that need no measurement; None if rows run whole.

    Raises:
        TreepackError: the model cannot run rows in pieces.
    """
    if carry is None:
        return None
    check_carry(loaded)
    return CPU_PIECE if carry == "auto" else int(carry)


def _measured(given: MemoryInput) -> tuple[int, CarryMemory, tuple[str, ...]]:
    """Return the tokens of a piece on all ranks, the memory of this rank, and a note.

    Raises:
        TreepackError: memory is too small on any rank.
    """
    loaded, ranks, training = given.loaded, given.ranks, given.loaded.model.training
    reserved = update_bytes(loaded.model, state_bytes=state_bytes(given.options))
    loaded.model.train()  # transformers recomputes layers only in this mode
    plan, problem = None, None
    with whole_weights(loaded):
        if loaded.root is not None:
            reserved += update_bytes(loaded.model, state_bytes=0)  # the whole gradients, besides this rank's own
        try:
            with memory_errors(*_NO_ROOM):
                plan = _plan(given, reserved)
        except TreepackError as error:
            problem = error  # raised after the ranks have met, because the others would wait for ever
        if loaded.root is not None:
            _sum_over_ranks(given)
    loaded.model.zero_grad(set_to_none=True)
    loaded.model.train(training)
    limit = ranks.smallest(0 if plan is None else plan.limit)
    if problem is not None:
        raise problem
    if plan is None or limit == 0:
        raise TreepackError(
            f"rank {ranks.rank} stops because another rank has too little memory for pieces; "
            "the error of that rank names the remedy"
        )
    outputs = "" if plan.keep_outputs else ", and outputs of trunk are computed again"
    note = f"rows of more than {limit:,} tokens run in pieces; {plan.resident_layers} layers carry on the GPU{outputs}"
    return limit, CarryMemory(loaded.device, plan.budget), (note,)


def _plan(given: MemoryInput, reserved: int) -> CarryPlan:
    """Measure the longest row of the run and plan for it.

    Raises:
        TreepackError: the row does not fit.
    """
    options, datasets = given.options, given.datasets
    limit = options.carry if isinstance(options.carry, int) else None
    dataset = max(datasets, key=lambda each: int(each.num_tokens.max()))
    return plan_carry(
        given.loaded,
        dataset[int(dataset.num_tokens.argmax())],
        CarryOptions(limit or CPU_PIECE, chunk=options.loss_chunk, autocast=given.compute.lower_precision),
        limit=limit,
        longest_path=max(each.max_position() for each in datasets) + 1,
        reserved=reserved,
        host_bytes=host_room(),
    )


def _sum_over_ranks(given: MemoryInput) -> None:
    """Sum the gradients of passes inside `whole_weights`, which would otherwise wait for the first step."""
    runner = WholeRows(given.loaded, autocast=given.compute.lower_precision)
    with summing_gradients(given.loaded):
        runner.backward(given.data.dataset.padding())
