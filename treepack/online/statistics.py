"""Log-probabilities and entropies of a batch in memory, with the activations of one row in memory at a time.

    forward     rows n - 1 .. 1   values, no graph          row 0   values and graph
    backward    row 0             from its graph            rows 1 .. n - 1   computed again, each with its own backward

Row 0 is the longest one. So a batch of one row is computed once, and the peak of memory is that of row 0. The backward
pass of each row adds to the gradients of the parameters: call `backward()` on the loss. `torch.autograd.grad` does not
see these gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treepack.data.batch import Batch, empty_batch
from treepack.errors import TreepackError
from treepack.fit.repeat import release_memory
from treepack.online.batch import OnlineBatch, plan_batch
from treepack.online.options import OnlineOptions
from treepack.online.ranks import agree_on_rows, gradient_exchange, uses_deepspeed
from treepack.online.row_cuts import row_shares
from treepack.online.row_run import RowRun, Values, join_values, row_limit
from treepack.online.sequences import Flags, Ids
from treepack.option_fields import expect_type


def tree_logprobs_like(
    model: Any,
    input_ids: Ids,
    attention_mask: Flags = None,
    scored: Flags = None,
    options: OnlineOptions = OnlineOptions(),  # noqa: B008  a frozen value
    *,
    temperature: Any = 1.0,
    routes: Any = None,
    kept_ids: Any = None,
) -> tuple[Any, Any]:
    """Return log-probabilities and entropies of the scored tokens, each shared prefix computed once.

    It is `plan_batch` and `batch_statistics`; their arguments and errors are the same.
    """
    expect_type(model, nn.Module, "tree_logprobs_like: model", "load_model(...).model or transformers")
    batch = plan_batch(
        input_ids, attention_mask, scored, options, temperature=temperature, routes=routes, kept_ids=kept_ids
    )
    return batch_statistics(model, batch.to(next(model.parameters()).device), options)


def batch_statistics(
    model: Any,
    batch: OnlineBatch,
    options: OnlineOptions = OnlineOptions(),  # noqa: B008  a frozen value
) -> tuple[Any, Any]:
    """Return the log-probability of each scored token, and the entropy of its distribution, in the form of the batch.

    The distribution is softmax(logits / temperature), over the kept ids if the batch has some. Both results are
    differentiable, and 0 for other tokens. All ranks that share the model must call this function together; they may
    have different numbers of rows.

    Args:
        model: a causal language model of transformers with tree attention, with the wrappers of the trainer.
        batch: on the model's device.
        options: `with_entropies`, `chunk` and `recompute` are used.

    Returns:
        log-probabilities and entropies in nats, in the form of the ids (`OnlineBatch.scatter`); the entropies are None
        if they are not wanted. float64 for models in float64 and float32 for all others.

    Raises:
        TreepackError: as `batch_logprobs`; ids outside the vocabulary; at a second backward pass; or for several rows
            under DeepSpeed with `recompute`.
    """
    expect_type(model, nn.Module, "batch_statistics: model", "load_model(...).model or transformers")
    _check_vocabulary(model, batch.max_token_id)
    device = batch.places.device
    run = RowRun.of(model, options, batch.temperature, device)
    has_graph = torch.is_grad_enabled() and any(each.requires_grad for each in model.parameters())
    limit = row_limit(model, has_graph=has_graph)
    shares = [row_shares(row, limit) for row in batch.rows]
    order = [(i, k) for i, own in enumerate(shares) for k in range(len(own))]
    order.sort(key=lambda at: -shares[at[0]][at[1]].row.num_tokens)  # the longest row first, as in the batch
    rows = [shares[i][k].row for i, k in order]
    rows += [_padding(device)] * (agree_on_rows(model, len(rows)) - len(rows))
    values = _values(run, rows, has_graph=has_graph)
    found = dict(zip(order, values, strict=False))
    joined = [join_values(own, [found[i, k] for k in range(len(own))]) for i, own in enumerate(shares)]
    joined += values[len(order) :]  # of padding
    logprobs, entropies = _columns(joined)
    return batch.scatter(logprobs), None if entropies is None else batch.scatter(entropies)


def _padding(device: torch.device) -> Batch:
    return empty_batch(1, terms=True).to(device)


def _values(run: RowRun, rows: list[Batch], *, has_graph: bool) -> list[Values]:
    """Return the values of rows; with a graph all rows keep it, or the first one (the top of this file)."""
    if not has_graph:
        return [run.values(row) for row in rows]
    if not run.options.recompute or (len(rows) == 1 and not _is_guarded(run, rows[0])):
        try:
            return [run.attempt(row) for row in rows]
        except (RuntimeError, MemoryError) as error:
            run.check(error)
        release_memory(rows[0].input_ids.device)
    if uses_deepspeed(run.model):
        raise TreepackError(
            f"batch_statistics: DeepSpeed reduces gradients once per backward pass, but {len(rows)} rows with "
            "recompute=True have one backward pass each; set recompute=False or a larger capacity"
        )
    # A leaf that requires a gradient makes torch call backward, which gets no parameters.
    leaf = torch.zeros((), requires_grad=True)
    logprobs, entropies, counts = _RowByRow.apply(leaf, run, rows)  # type: ignore[no-untyped-call]
    of_entropies = [None] * len(counts) if entropies is None else entropies.split(counts)
    return list(zip(logprobs.split(counts), of_entropies, strict=True))


def row_statistics(
    model: Any,
    batch: OnlineBatch,
    i: int,
    options: OnlineOptions = OnlineOptions(),  # noqa: B008  a frozen value
) -> Values:
    """Return log-probabilities and entropies [n_i] of row i, for trainers that accumulate gradients row by row.

    They belong to `batch.rows[i].terms.tokens`; term t of the row has the value `terms.index[t]`, and its place in the
    caller's batch is `batch.row_places(i)[t]`. A row after the last one is a row of padding, which a rank runs if
    another rank has more rows: its values are empty, and their gradients are 0.

    Raises:
        TreepackError: as `batch_logprobs`.
    """
    expect_type(model, nn.Module, "batch_statistics: model", "load_model(...).model or transformers")
    _check_vocabulary(model, batch.max_token_id)
    device = batch.places.device
    row = batch.rows[i] if i < len(batch.rows) else _padding(device)
    return RowRun.of(model, options, batch.temperature, device).attempt(row)


def _check_vocabulary(model: nn.Module, max_token_id: int) -> None:
    """Refuse ids that the embeddings or the output layer do not have; on a GPU they would end the process."""
    from transformers import PreTrainedModel

    causal: Any = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if causal is None:
        return  # `batch_logprobs` refuses it
    # The sizes that layers keep as numbers, because FSDP and ZeRO-3 cut the weights.
    sizes = [getattr(causal.get_input_embeddings(), "num_embeddings", None)]
    sizes.append(getattr(causal.get_output_embeddings(), "out_features", None))
    vocabulary = min((size for size in sizes if size is not None), default=max_token_id + 1)
    if max_token_id >= vocabulary:
        raise TreepackError(
            f"{type(causal).__name__}: the batch contains the token id {max_token_id}, and the vocabulary ends at "
            f"{vocabulary - 1}; use the tokenizer of the model, and mask padding out"
        )


def _is_guarded(run: RowRun, row: Batch) -> bool:
    """Return True if the only row of a batch may run again, so that its graph is not the caller's."""
    return run.runs_again and row.input_ids.is_cuda


class _RowByRow(torch.autograd.Function):
    """The values of all rows, one after the other; see the top of this file."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, run: RowRun, rows: list[Batch]) -> tuple[Tensor, Tensor | None, list[int]]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.rows = run, rows
        ctx.exchange = run.replicas is not None and run.replicas.require_backward_grad_sync
        values = [run.values(row) for row in rows[:0:-1]]
        # Autocast of some versions of torch keeps the weights that it converted without a graph, and uses them again in
        # a pass with a graph. There they would get no gradient.
        torch.clear_autocast_cache()
        # Only the last row of the backward pass exchanges gradients, and this row is the first.
        with torch.enable_grad(), gradient_exchange(run.replicas, exchange=False):
            ctx.kept = run.kept_values(rows[0])
        first = ctx.kept[0] if ctx.kept else run.values(rows[0])
        values.append((first[0].detach(), None if first[1] is None else first[1].detach()))
        logprobs, entropies = _columns(values[::-1])
        ctx.counts = [len(each) for each in logprobs]
        return torch.cat(logprobs), None if entropies is None else torch.cat(entropies), ctx.counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        run: RowRun = ctx.run
        if ctx.rows is None:
            raise TreepackError(
                "batch_statistics: backward ran a second time, but the graph was freed by the first one; call it again "
                "for every backward pass"
            )
        rows, ctx.rows = ctx.rows, None
        parts = [None if each is None else torch.split(each, ctx.counts) for each in grads[:2]]
        for i, row in enumerate(rows):
            own = [None if part is None else part[i] for part in parts]
            exchange = ctx.exchange and i == len(rows) - 1
            run.backward(row, own, ctx.kept if i == 0 else [], exchange=exchange)
        return None, None, None


def _columns(values: list[Values]) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return the log-probabilities of all rows, and the entropies of all rows."""
    entropies = [each for _, each in values if each is not None]
    return [each for each, _ in values], entropies or None
