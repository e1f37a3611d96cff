"""Forward passes of packed rows: from a batch to hidden states, log-probabilities or a loss.

    Batch --prepare_batch--> Batch with the attention's schedule, on the model's device
          --hidden_states--> [T, D] --row_loss-------> scalar: sum of loss_weight * nll
                                    --row_logprobs---> log-probabilities and entropies of chosen tokens
                                    --row_objective--> scalar: the row's part of an objective over terms

The logits of a row never exist as a whole: `model.loss` applies the output layer to the hidden states in chunks.
`model.collation` has the counterparts for models that another trainer has wrapped.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from treepack.attention import IMPLEMENTATIONS, Kept, prepare
from treepack.data.batch import Batch
from treepack.errors import TreepackError
from treepack.model.compatibility import one_line
from treepack.model.first_batch import check_positions
from treepack.model.layers import recomputes
from treepack.model.loaded import LoadedModel
from treepack.model.loss import CHUNK, tree_logprobs, weighted_nll
from treepack.model.objectives import Objective, objective_loss


def prepare_batch(loaded: LoadedModel, batch: Batch) -> Batch:
    """Return the row on the model's device, with the schedule of the model's attention.

    Raises:
        TreepackError: if the model cannot compute positions of the row exactly.
    """
    check_positions(batch.position_ids, loaded.model, loaded.source)
    # Before the move: from a tensor on the CPU the schedule is computed without waiting for the GPU.
    schedule = prepare(batch.subtree_end, loaded.attention, device=loaded.device, varlen=loaded.varlen)
    return replace(batch.to(loaded.device), schedule=schedule)


def hidden_states(loaded: LoadedModel, batch: Batch) -> Tensor:
    """Return the hidden states [T, D] of a packed row, after the final norm.

    A batch without a schedule is prepared first.

    Raises:
        TreepackError: if positions of the row are beyond the model's table of positions, or the model was switched to
            another attention.
    """
    # Another attention implementation would ignore subtree_end and give wrong gradients without an error.
    current, expected = loaded.model.config.get_text_config()._attn_implementation, IMPLEMENTATIONS[loaded.attention]
    if current != expected:
        raise TreepackError(
            f"{loaded.source}: its attention was switched to {current!r}, which ignores subtree_end; switch back with "
            f"model.set_attn_implementation({expected!r})"
        )
    if batch.schedule is None:
        batch = prepare_batch(loaded, batch)
    try:
        # [None]: transformers expects a batch dimension, [T] -> [1, T]
        output = loaded.model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            subtree_end=batch.subtree_end[None],
            schedule=batch.schedule,
            kept=Kept() if recomputes(loaded.model) else None,
            use_cache=False,
        )
    except IndexError as error:  # position_limit finds most tables beforehand; this is one that it did not recognise
        raise TreepackError(
            f"{loaded.source}: it cannot run row {batch.row_id}, whose positions reach {int(batch.position_ids.max())} "
            f"({one_line(error)}); truncate the trajectories to the number of positions that the model has"
        ) from error
    states: Tensor = output.last_hidden_state
    return states[0]


def row_loss(loaded: LoadedModel, batch: Batch, *, chunk: int = CHUNK) -> Tensor:
    """Return the sum over the row's targets of loss_weight * nll, a float64 scalar; see `loss.weighted_nll`."""
    head = loaded.model.get_output_embeddings()
    states = hidden_states(loaded, batch)
    return weighted_nll(states, head.weight, batch.targets, bias=getattr(head, "bias", None), chunk=chunk)


def row_logprobs(loaded: LoadedModel, batch: Batch, tokens: Tensor, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [n] of the row's `tokens`, int64 [n]; see `loss.tree_logprobs`."""
    head = loaded.model.get_output_embeddings()
    states, bias = hidden_states(loaded, batch), getattr(head, "bias", None)
    return tree_logprobs(states, head.weight, tokens, batch.input_ids, batch.parent, bias=bias, chunk=chunk)


def row_objective(
    loaded: LoadedModel, batch: Batch, factors: Tensor, objective: Objective, *, chunk: int = CHUNK
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the row's part of a step's loss, and of the sums for the step's means; see `objectives.objective_loss`.

    Args:
        loaded: the model.
        batch: the row, with its terms, on the model's device.
        factors: float64 [num_trajectories], from `denominators.step_factors`, on the model's device.
        objective: any but sft.
        chunk: tokens whose logits are in memory at a time.
    """
    assert batch.terms is not None, "open the dataset with terms=True"
    logprobs, entropies = row_logprobs(loaded, batch, batch.terms.tokens, chunk=chunk)
    return objective_loss(logprobs, entropies, batch.terms, factors, objective)
