"""Measurement of rows in pieces before the first step.

model, a row --measure_costs--> CarryCosts              bytes of a piece and of carried tokens
model, a row --measured_pieces--> CarryCosts            the same on all ranks, with whole weights and their gradients
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import torch

from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.carry.row import open_row
from treepack.data.batch import Batch
from treepack.fit.limit import SMALLEST_PIECE, CarryCosts
from treepack.memory.device_memory import MemoryMeter
from treepack.memory.shortage import is_memory_error
from treepack.model.forward import WholeRows, hidden_states
from treepack.model.loaded import LoadedModel
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.model_probe import chains
from treepack.train.setup.run_plan import PIECE_LOGITS
from treepack.train.sharding import summing_gradients, whole_bytes, whole_weights


def measure_costs(loaded: LoadedModel, batch: Batch, options: CarryOptions, meter: MemoryMeter) -> CarryCosts:
    """Return the costs of a model, from pieces of 1,024 and 2,048 tokens that run forward and backward.

    The gradients of all parameters are dropped afterwards.

    Args:
        loaded: the model, as it will be trained.
        batch: any row; its first tokens run, again and again if they are few.
        options: the chunk of the loss, and autocast.
        meter: the memory to measure.
    """
    sizes = (SMALLEST_PIECE, 2 * SMALLEST_PIECE)
    num_positions = batch.position_ids.max().cpu() + 1  # the model is known to have these positions
    paths = [chains(batch, size, size) for size in sizes]
    rows = [replace(path, position_ids=path.position_ids % num_positions) for path in paths]

    def run(number: int) -> None:
        RowsInPieces(loaded, replace(options, limit=sizes[number], memory=None)).backward(rows[number])

    run(0)  # makes the gradients of parameters, which do not count as costs
    small, large = (meter.peak_of(partial(run, number)) for number in range(2))
    loaded.model.zero_grad(set_to_none=True)
    # Peaks 1,000 + 3 n of n = 1,024 and 2,048 tokens: 4,072 and 7,144 -> 3 per token, and fixed 1,000
    piece = max(0, large - small) // SMALLEST_PIECE
    row = open_row(loaded, rows[1], SMALLEST_PIECE, with_gradients=True)
    with row.running(row.plan.passes[0]) as trunk, torch.no_grad(), options.autocast():
        loaded.compute(partial(hidden_states, loaded, trunk.batch, **trunk.options))
    shapes, outputs = row.stack.shapes, row.outputs
    return CarryCosts(
        num_layers=len(shapes),
        fixed=max(0, small - SMALLEST_PIECE * piece),
        piece=piece,
        keys_values=max(shape.num_bytes(1, 0) for shape in shapes),
        sums=max(shape.num_bytes(0, 1) for shape in shapes),
        output=-(-outputs.num_bytes.gpu // SMALLEST_PIECE // len(shapes)),
        lse=-(-outputs.lse_bytes // SMALLEST_PIECE // len(shapes)),
        # The piece has one token with a child in another piece: the last one.
        state=row.stack.states.num_bytes,
    )


def measured_pieces(given: MemoryInput, batch: Batch, chunk: int) -> CarryCosts | None:
    """Return the costs of rows in pieces with the layers as they are, the same on all ranks; None if none fits."""
    loaded, ranks, training = given.loaded, given.ranks, given.loaded.model.training
    loaded.model.train()  # transformers recomputes layers only in this mode
    costs = None
    assert given.meter is not None
    carry = CarryOptions(1, chunk=min(chunk, PIECE_LOGITS), autocast=given.compute.lower_precision)
    with whole_weights(loaded):
        try:
            costs = measure_costs(loaded, batch, carry, given.meter)
        except RuntimeError as error:
            if not is_memory_error(error):
                raise
        if loaded.root is not None:
            # The sum over ranks of passes inside `whole_weights`, which would otherwise wait for the first step.
            runner = WholeRows(loaded, autocast=given.compute.lower_precision)
            with summing_gradients(loaded):
                runner.backward(given.data.dataset.padding())
            if costs is not None:
                # The whole weights and their gradients, besides this rank's own.
                costs = replace(costs, fixed=costs.fixed + 2 * whole_bytes(loaded))
    loaded.model.zero_grad(set_to_none=True)
    loaded.model.train(training)
    if ranks.any(costs is None) or costs is None:
        return None
    return CarryCosts(**{name: ranks.largest(value) for name, value in asdict(costs).items()})
