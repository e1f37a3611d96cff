"""Measurement of rows in pieces before the first step.

loaded model, a row --measured_pieces--> CarryCosts     bytes of a piece and of carried tokens, the same on all ranks
"""

from __future__ import annotations

from dataclasses import replace

from treepack.carry.backward import CarryOptions
from treepack.carry.limit import CarryCosts, measure_costs
from treepack.data.batch import Batch
from treepack.memory.shortage import is_memory_error
from treepack.model.forward import WholeRows
from treepack.model.loaded import LoadedModel
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.run_plan import PIECE_LOGITS
from treepack.train.sharding import summing_gradients, whole_weights


def measured_pieces(given: MemoryInput, batch: Batch, chunk: int) -> CarryCosts | None:
    """Return the costs of rows in pieces with the layers as they are, the same on all ranks; None if none fits."""
    loaded, ranks, training = given.loaded, given.ranks, given.loaded.model.training
    loaded.model.train()  # transformers recomputes layers only in this mode
    costs = None
    carry = CarryOptions(1, chunk=min(chunk, PIECE_LOGITS), autocast=given.compute.lower_precision)
    with whole_weights(loaded):
        try:
            costs = measure_costs(loaded, batch, carry, meter=given.meter)
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
    names = ("fixed", "piece", "keys_values", "sums", "output", "lse", "state")
    return replace(costs, **{name: -ranks.smallest(-getattr(costs, name)) for name in names})


def whole_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of all parameters of a model, of which this rank may have a part only."""
    return sum(each.numel() * each.element_size() for each in loaded.model.parameters())
