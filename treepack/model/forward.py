"""Run packed rows through a model: the runner of rows, and its first strategy, rows as a whole.

    RowRunner    batch --loss------> RowResult: the part of a step's loss, without gradients of parameters
                       --backward--> the same, and its gradients are added to the gradients of parameters
                       --scores----> TokenScores: log-probabilities, entropies and values of chosen tokens
                       --values----> values of a critic after every token

    WholeRows                     one pass over a row, or over joined rows (`data.joined`); `loss` keeps a graph
    carry.backward.RowsInPieces   several passes over parts of a long row

    Batch --prepare_batch--> Batch with the attention's schedule, on the model's device
          --hidden_states--> [T, D], and --run_with_head--> the result of a function of them and the output layer

`row_loss` and `row_logprobs` are short names for `WholeRows` in other trainers. The logits of a row never exist as a
whole: `model.head.output_head` applies the output layer to the hidden states in chunks. `model.collation` has the
counterparts for models that another trainer has wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from treepack.attention import IMPLEMENTATIONS, BatchSchedules, KeptOutputs, TreePass
from treepack.data.batch import Batch
from treepack.data.ragged_tensor import RaggedTensor
from treepack.errors import TreepackError
from treepack.model.accept.first_batch import check_positions
from treepack.model.accept.vocabulary import check_vocabulary
from treepack.model.dropout import check_dropout
from treepack.model.experts.replay import check_routes, use_routes
from treepack.model.foreign_errors import one_line
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.output_head import check_sets, head_replaced
from treepack.model.head.token_loss import CHUNK, nll_of_rows
from treepack.model.layers import find_decoder, recomputes, takes_packed
from treepack.model.loaded import LoadedModel
from treepack.model.term_objective import (
    TermObjective,
    loss_sets,
    loss_temperature,
    require_value_head,
    score,
    values_before,
)
from treepack.model.text_half import check_text
from treepack.objectives.row_numbers import LossPart, RowResult, ScoreRequest, TokenScores
from treepack.option_fields import expect_type
from treepack.sequence.share import TokenShare

_T = TypeVar("_T")


def prepare_batch(loaded: LoadedModel, batch: Batch) -> Batch:
    """Return the row on the model's device, with the schedules of the model's attention.

    Raises:
        TreepackError: if the model lacks a token id, cannot compute positions of the row exactly, has no vision tower
            for its images, or cannot replay its recorded routes.
    """
    if batch.num_tokens and not batch.input_ids.is_cuda:  # on a GPU it would wait
        check_vocabulary(loaded.source, int(batch.input_ids.max()), len(loaded.causal.get_input_embeddings().weight))
    check_positions(batch.position_ids, loaded.causal, loaded.source)
    check_text(loaded.causal, batch.input_ids, loaded.source)
    if batch.terms is not None:
        check_sets(batch.terms.kept_ids, loaded.causal, loaded.source)
    if batch.routes is not None:
        check_routes(loaded.causal, loaded.source, batch.routes)
    # Before the move: from a tensor on the CPU the schedule is computed without waiting for the GPU.
    schedules = BatchSchedules(batch.subtree_end, device=loaded.device, varlen=loaded.varlen)
    made = {
        kind.reach: schedules.of(loaded.attention, kind.reach, varlen=loaded.varlen and kind.is_plain)[1]
        for kind in sorted(set(loaded.kinds), key=str)
    }
    if takes_packed(loaded.causal) and loaded.sequence is None:
        schedules.pack(made)
    return replace(batch.to(loaded.device), schedule=schedules)


def hidden_states(loaded: LoadedModel, batch: Batch, **options: Any) -> Tensor:
    """Return the hidden states [T, D] of a packed row, after the final norm; of the own tokens, if ranks share them.

    A batch without a schedule is prepared first. `options` are further arguments of the model.

    Raises:
        TreepackError: if positions of the row are beyond the model's table of positions, a dropout is active, or the
            model was switched to another attention.
    """
    states: Tensor = _call(loaded, batch, find_decoder(loaded.causal), options).last_hidden_state
    return states[0]


def _call(loaded: LoadedModel, batch: Batch, module: Any, options: dict[str, Any]) -> Any:
    """Run a packed row through `module`: the model, or its part without the output layer. Return the output."""
    # Another attention implementation would ignore subtree_end and give wrong gradients without an error.
    config = loaded.causal.config.get_text_config()
    current, expected = config._attn_implementation, IMPLEMENTATIONS[loaded.attention]
    if current != expected:
        raise TreepackError(
            f"{loaded.source}: its attention was switched to {current!r}, which ignores subtree_end; switch back with "
            f"model.set_attn_implementation({expected!r})"
        )
    check_dropout(loaded.model)
    if batch.schedule is None:
        batch = prepare_batch(loaded, batch)
    share, columns, routes = _share_of(loaded, batch), [batch.input_ids, batch.position_ids], batch.routes
    if share is not None:
        columns = [share.cut(column) for column in columns]
        routes = None if routes is None else share.cut(routes)
    use_routes(loaded.causal, loaded.source, routes)
    inside = isinstance(batch.schedule, BatchSchedules) and takes_packed(loaded.causal)
    packed = batch.schedule.packed if inside else None
    kept = KeptOutputs() if packed is None and recomputes(loaded.causal) else None
    tree_pass = options.pop("tree_pass", None) or TreePass(kept, packed=packed)
    tree_pass.share = share
    try:
        # [None]: transformers expects a batch dimension, [T] -> [1, T]
        return module(
            input_ids=columns[0][None],
            position_ids=columns[1][None],
            subtree_end=batch.subtree_end[None],
            schedule=batch.schedule,
            use_cache=False,
            tree_pass=tree_pass,
            **options,
        )
    except IndexError as error:  # position_limit finds most tables beforehand; this is one that it did not recognise
        raise TreepackError(
            f"{loaded.source}: it cannot run {batch.name}, whose positions reach {int(batch.position_ids.max())} "
            f"({one_line(error)}); truncate the trajectories to the number of positions that the model has"
        ) from error


def run_with_head(
    loaded: LoadedModel, batch: Batch, compute: Callable[[Tensor, OutputLayer], _T], **options: Any
) -> _T:
    """Return compute(states [T, D], output layer) of a packed row; `options` are further arguments of the model.

    If ranks share the row, the states are those of the own tokens, and the layer has its `share`.

    Raises:
        TreepackError: as `hidden_states`.
    """
    share = _share_of(loaded, batch)
    own = compute if share is None else lambda states, layer: compute(states, replace(layer, share=share))
    with head_replaced(loaded.causal, own) as call:
        _call(loaded, batch, loaded.model, options)
    result: _T = call.result
    return result


def _share_of(loaded: LoadedModel, batch: Batch) -> TokenShare | None:
    sequence = loaded.sequence
    return None if sequence is None else sequence.share(len(batch.input_ids))


class RowRunner(Protocol):
    """A way to run rows through a model; no method depends on how a row is run, except for rounding."""

    def loss(self, batch: Batch, part: LossPart = ...) -> RowResult:
        """Return the part of a step's loss."""

    def backward(self, batch: Batch, part: LossPart = ...) -> RowResult:
        """Add the gradients of the part of a step's loss to the parameters' gradients, and return it."""

    def scores(
        self,
        batch: Batch,
        tokens: Tensor,
        reads: ScoreRequest = ...,
        *,
        temperature: Tensor | float = 1.0,
        kept: RaggedTensor | None = None,
    ) -> TokenScores:
        """Return numbers about `tokens` of the batch, int64 [n]; see `token_loss.tree_logprobs`."""

    def values(self, batch: Batch) -> Tensor:
        """Return the values of the states after all tokens [num_tokens]."""

    def forward(self, batch: Batch) -> None:
        """Run the layers over each token once, without gradients, for hooks that count something."""


@dataclass(frozen=True)
class WholeRows:
    """Each row, or joined rows, in one pass; a `RowRunner`.

    Attributes:
        loaded: the model.
        chunk: tokens whose logits are in memory at a time.
        autocast: makes the context in which the pass runs forward.
    """

    loaded: LoadedModel
    chunk: int = CHUNK
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def loss(self, batch: Batch, part: LossPart = LossPart()) -> RowResult:  # noqa: B008  # a frozen value
        """Return the part of a step's loss, with a graph if gradients are enabled.

        Raises:
            TreepackError: as `hidden_states`, and if the model has no value head and values are read.
        """
        batch = self._prepared(batch)
        compute = self._weighted_loss(batch, part) if part.factors is None else self._term_loss(batch, part)
        return self._run(batch, compute)._replace(tokens_forward=batch.num_tokens)

    def backward(self, batch: Batch, part: LossPart = LossPart()) -> RowResult:  # noqa: B008
        """Add the gradients of the part of a step's loss to the parameters' gradients; return it without a graph.

        Raises:
            TreepackError: as `loss`.
        """
        result = self.loss(batch, part)
        torch.autograd.backward(result.loss)
        return result._replace(loss=result.loss.detach(), tokens_backward=batch.num_tokens)

    def scores(
        self,
        batch: Batch,
        tokens: Tensor,
        reads: ScoreRequest = ScoreRequest(),  # noqa: B008
        *,
        temperature: Tensor | float = 1.0,
        kept: RaggedTensor | None = None,
    ) -> TokenScores:
        """Return numbers about `tokens` of the batch, int64 [n]; differentiable, see `token_loss.tree_logprobs`.

        Raises:
            TreepackError: as `loss`.
        """
        batch = self._prepared(batch)
        targets = tokens, batch.input_ids, batch.parent

        def compute(states: Tensor, layer: OutputLayer) -> TokenScores:
            law: dict[str, Any] = {"temperature": temperature, "kept": kept}
            return score(self.loaded, reads, states, layer, targets, **law, chunk=self.chunk)

        return self._run(batch, compute)

    def values(self, batch: Batch) -> Tensor:
        """Return the values of the states after all tokens [num_tokens], float32 or float64.

        Raises:
            TreepackError: as `hidden_states`, and if the model has no value head.
        """
        require_value_head(self.loaded)
        # Targets that would be predicted by each of the states
        after = torch.arange(len(batch.input_ids), device=self.loaded.device)
        targets = after[: batch.num_tokens], after, after
        return self._run(
            self._prepared(batch), lambda states, layer: values_before(self.loaded, states, layer, targets)
        )

    @torch.no_grad()
    def forward(self, batch: Batch) -> None:
        """Run the layers over each token once, without gradients, for hooks that count something.

        Raises:
            TreepackError: as `hidden_states`.
        """
        with self.autocast():
            self.loaded.compute(partial(hidden_states, self.loaded, self._prepared(batch)))

    def _prepared(self, batch: Batch) -> Batch:
        return prepare_batch(self.loaded, batch) if batch.schedule is None else batch

    def _run(self, batch: Batch, compute: Callable[[Tensor, OutputLayer], _T]) -> _T:
        with self.autocast():
            return self.loaded.compute(partial(run_with_head, self.loaded, batch, compute))

    def _weighted_loss(self, batch: Batch, part: LossPart) -> Callable[[Tensor, OutputLayer], RowResult]:
        edges = None if batch.edges is None else batch.edges.targets

        def compute(states: Tensor, layer: OutputLayer) -> RowResult:
            loss, rows = nll_of_rows(states, layer, batch.targets, edges=edges, chunk=self.chunk)
            return RowResult(loss / part.denominator, rows.detach() / part.denominator, {})

        return compute

    def _term_loss(self, batch: Batch, part: LossPart) -> Callable[[Tensor, OutputLayer], RowResult]:
        terms = batch.terms
        assert terms is not None, "open the dataset with terms=True"
        assert part.factors is not None
        objective = TermObjective(
            objective=part.objective,
            terms=terms,
            factors=part.factors.to(self.loaded.device),
            targets=(terms.tokens, batch.input_ids, batch.parent),
            temperature=loss_temperature(terms, part.objective),
            kept=loss_sets(terms, part.objective),
            chunk=self.chunk,
            edges=batch.edges,
        )
        return partial(objective.loss, self.loaded)


def row_loss(loaded: LoadedModel, batch: Batch, *, chunk: int = CHUNK) -> Tensor:
    """Return the sum over the row's targets of loss_weight * nll, a float64 scalar; see `token_loss.weighted_nll`."""
    expect_type(loaded, LoadedModel, "row_loss: loaded", "load_model")
    expect_type(batch, Batch, "row_loss: batch", "make_batch")
    return WholeRows(loaded, chunk).loss(batch).loss


def row_logprobs(
    loaded: LoadedModel,
    batch: Batch,
    tokens: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [n] of the row's `tokens`, int64 [n]; see `token_loss.tree_logprobs`."""
    reads = ScoreRequest(entropies=True)
    logprobs, entropies, *_ = WholeRows(loaded, chunk).scores(batch, tokens, reads, temperature=temperature)
    assert logprobs is not None
    assert entropies is not None
    return logprobs, entropies
