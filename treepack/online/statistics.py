"""Log-probabilities and entropies of a batch in memory, with the activations of one row in memory at a time.

    forward     rows n - 1 .. 1   values, no graph          row 0   values and graph
    backward    row 0             from its graph            rows 1 .. n - 1   computed again, each with its own backward

Row 0 is the longest one. So a batch of one row is computed once, and the peak of memory is that of row 0. The backward
pass of each row adds to the gradients of the parameters: call `backward()` on the loss. `torch.autograd.grad` does not
see these gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from treepack.data.batch import empty_batch
from treepack.errors import TreepackError
from treepack.model.collation import batch_logprobs, collate
from treepack.online.batch import OnlineBatch, plan_batch
from treepack.online.options import OnlineOptions
from treepack.online.ranks import agree_on_rows, find_replicas, gradient_exchange, uses_deepspeed
from treepack.online.sequences import Flags, Ids

Values = tuple[Tensor, Tensor | None]  # log-probabilities, and entropies if they are wanted


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
    run = _BatchRun(model, batch, options, agree_on_rows(model, len(batch.rows)), find_replicas(model))
    has_graph = torch.is_grad_enabled() and any(each.requires_grad for each in model.parameters())
    if not has_graph or not options.recompute or run.num_rows == 1:
        logprobs, entropies = _columns([run.values(i) for i in range(run.num_rows)])
    else:
        if uses_deepspeed(model):
            raise TreepackError(
                f"batch_statistics: DeepSpeed reduces gradients once per backward pass, but {run.num_rows} rows with "
                "recompute=True have one backward pass each; set recompute=False or a larger capacity"
            )
        # A leaf that requires a gradient makes torch call backward, which gets no parameters.
        leaf = torch.zeros((), requires_grad=True)
        joined, joined_entropies, counts = _RowByRow.apply(leaf, run)  # type: ignore[no-untyped-call]
        logprobs = list(joined.split(counts))
        entropies = None if joined_entropies is None else list(joined_entropies.split(counts))
    return batch.scatter(logprobs), None if entropies is None else batch.scatter(entropies)


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
    _check_vocabulary(model, batch.max_token_id)
    row = batch.rows[i] if i < len(batch.rows) else empty_batch(1, terms=True).to(batch.places.device)
    logprobs, entropies = batch_logprobs(
        model,
        collate([row]),
        temperature=batch.temperature,
        with_entropies=options.with_entropies,
        chunk=options.chunk,
    )
    return logprobs, entropies if options.with_entropies else None


def _check_vocabulary(model: nn.Module, max_token_id: int) -> None:
    """Refuse ids that the embeddings or the output layer do not have; on a GPU they would end the process.

    Raises:
        TreepackError: with the largest id.
    """
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


@dataclass(frozen=True)
class _BatchRun:
    """A pass of a model over a batch, which the backward pass repeats for some rows."""

    model: nn.Module
    batch: OnlineBatch
    options: OnlineOptions
    num_rows: int
    replicas: DistributedDataParallel | None

    def values(self, i: int) -> Values:
        return row_statistics(self.model, self.batch, i, self.options)


class _RowByRow(torch.autograd.Function):
    """The values of all rows, one after the other; see the top of this file."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, run: _BatchRun) -> tuple[Tensor, Tensor | None, list[int]]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        ctx.autocast = _autocast_state(run.batch.places.device.type)
        ctx.exchange = run.replicas is not None and run.replicas.require_backward_grad_sync
        values = [run.values(i) for i in range(run.num_rows - 1, 0, -1)]
        # Autocast of some versions of torch keeps the weights that it converted without a graph, and uses them again in
        # a pass with a graph. There they would get no gradient.
        torch.clear_autocast_cache()
        # Only the last row of the backward pass exchanges gradients, and this row is the first.
        with torch.enable_grad(), gradient_exchange(run.replicas, exchange=False):
            ctx.kept = run.values(0)
        values.append((ctx.kept[0].detach(), None if ctx.kept[1] is None else ctx.kept[1].detach()))
        logprobs, entropies = _columns(values[::-1])
        ctx.counts = [len(each) for each in logprobs]
        return torch.cat(logprobs), None if entropies is None else torch.cat(entropies), ctx.counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        run: _BatchRun = ctx.run
        if ctx.kept is None:
            raise TreepackError(
                "batch_statistics: backward ran a second time, but the graph was freed by the first one; call it again "
                "for every backward pass"
            )
        kept, ctx.kept = ctx.kept, None
        parts = [None if each is None else torch.split(each, ctx.counts) for each in grads[:2]]
        _backward(kept, [None if part is None else part[0] for part in parts])
        del kept
        for i in range(1, run.num_rows):
            exchange = ctx.exchange and i == run.num_rows - 1
            with torch.enable_grad(), _restored(ctx.autocast), gradient_exchange(run.replicas, exchange):
                values = run.values(i)
            _backward(values, [None if part is None else part[i] for part in parts])
            del values
        return None, None


def _backward(values: Values, grads: list[Tensor | None]) -> None:
    """Add the gradients of a row to the gradients of the parameters."""
    pairs = [(value, grad) for value, grad in zip(values, grads, strict=True) if value is not None and grad is not None]
    if not pairs:  # all ranks must run the backward passes of all rows, so one without gradients runs with zeros
        pairs = [(values[0], torch.zeros_like(values[0]))]
    torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])


def _columns(values: list[Values]) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return the log-probabilities of all rows, and the entropies of all rows."""
    entropies = [each for _, each in values if each is not None]
    return [each for each, _ in values], entropies or None


def _autocast_state(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


@contextmanager
def _restored(autocast: dict[str, Any]) -> Iterator[None]:
    """Run the block under the autocast of the forward pass, which torch does not restore in a backward pass."""
    with torch.autocast(**autocast):
        yield
