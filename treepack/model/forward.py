"""Forward passes of packed rows."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from treepack.attention import IMPLEMENTATIONS, Kept, prepare
from treepack.data.batch import Batch
from treepack.errors import TreepackError
from treepack.model.layers import recomputes
from treepack.model.load import LoadedModel
from treepack.model.loss import CHUNK, tree_logprobs, weighted_nll
from treepack.model.objectives import Objective, objective_loss
from treepack.model.probe import one_line


def placed(loaded: LoadedModel, batch: Batch) -> Batch:
    """The row on the model's device with its schedule, which a row on the CPU gets without waiting for the GPU."""
    schedule = prepare(batch.subtree_end, loaded.attention, device=loaded.device, varlen=loaded.varlen)
    return replace(batch.to(loaded.device), schedule=schedule)


def hidden_states(loaded: LoadedModel, batch: Batch) -> Tensor:
    """Hidden states [T, D] of a packed row, after the final norm; one without a schedule gets it here.

    Raises:
        TreepackError: for positions beyond a table that the model keeps.
    """
    # A model switched to another attention would take no notice of subtree_end and train on wrong gradients.
    chosen = loaded.model.config.get_text_config()._attn_implementation
    assert chosen == IMPLEMENTATIONS[loaded.attention], f"the model attends through {chosen}"
    if batch.schedule is None:
        batch = placed(loaded, batch)
    try:
        output = loaded.model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            subtree_end=batch.subtree_end[None],
            schedule=batch.schedule,
            kept=Kept() if recomputes(loaded.model) else None,
            use_cache=False,
        )
    except IndexError as error:
        raise TreepackError(
            f"{loaded.source}: it cannot run row {batch.row_id}, whose positions reach {int(batch.position_ids.max())} "
            f"({one_line(error)}); truncate the trajectories to the positions that it has"
        ) from error
    states: Tensor = output.last_hidden_state
    return states[0]


def row_loss(loaded: LoadedModel, batch: Batch, *, chunk: int = CHUNK) -> Tensor:
    """Sum over the row's targets of loss_weight * nll, a float64 scalar; see `loss.weighted_nll`."""
    head = loaded.model.get_output_embeddings()
    states = hidden_states(loaded, batch)
    return weighted_nll(states, head.weight, batch.targets, bias=getattr(head, "bias", None), chunk=chunk)


def row_logprobs(loaded: LoadedModel, batch: Batch, tokens: Tensor, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [n] of the row's tokens int64 [n], each once; see `loss.tree_logprobs`."""
    head = loaded.model.get_output_embeddings()
    states, bias = hidden_states(loaded, batch), getattr(head, "bias", None)
    return tree_logprobs(states, head.weight, tokens, batch.input_ids, batch.parent, bias=bias, chunk=chunk)


def row_objective(
    loaded: LoadedModel, batch: Batch, factors: Tensor, objective: Objective, *, chunk: int = CHUNK
) -> tuple[Tensor, dict[str, Tensor]]:
    """The row's part of the loss of an optimiser step and of its means; see `objectives.objective_loss`.

    `batch` must hold its terms, and lie with `factors` float64 [num_trajectories] on the model's device.
    """
    assert batch.terms is not None, "open the dataset with terms=True"
    logprobs, entropies = row_logprobs(loaded, batch, batch.terms.tokens, chunk=chunk)
    return objective_loss(logprobs, entropies, batch.terms, factors, objective)
