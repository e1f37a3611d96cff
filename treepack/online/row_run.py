"""Rows of a batch in memory through a model; if memory runs out, a row runs again with a smaller plan.

    row --RowRun.values--> log-probabilities, entropies        a row without a graph may run again at any time
    row, gradients --RowRun.backward--> the parameters' gradients

The plan gets smaller as in training (`fit.rung`): rows of fewer sequences, then rows in pieces, then smaller
chunks of logits.

A forward pass adds nothing to the gradients, so it may run again with a smaller row. A backward pass that fails has
added the gradients of the row to some parameters and not to others. That is final: the error names a capacity that fits
better. Pieces add to a parameter many times, so they start without gradients, to which the earlier ones are added at
the end, and may run again. No pass runs again if other ranks wait for it.

On a GPU a first pass measures the bytes that its graph keeps for each token. Longer rows than fit are cut beforehand.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from treepack.attention import IMPLEMENTATIONS
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.carry.offload import spare_memory
from treepack.carry.refusal import can_carry
from treepack.data.batch import Batch, TermTensors
from treepack.data.row_parts import RowPart, restrict_row
from treepack.fit.repeat import release_memory, until_it_fits
from treepack.fit.rung import RunPlan, smaller_plan
from treepack.memory.device_memory import free_memory, update_bytes
from treepack.memory.shortage import is_memory_error, memory_errors
from treepack.model.accept.first_batch import sharding_groups
from treepack.model.collation import batch_logprobs, collate
from treepack.model.head.token_loss import filled_temperature
from treepack.model.loaded import LoadedModel
from treepack.objectives.row_numbers import ScoreRequest
from treepack.online.options import OnlineOptions
from treepack.online.ranks import find_replicas, gradient_exchange, uses_deepspeed
from treepack.online.row_cuts import RowShare, row_shares, values_of_shares, whole_row
from treepack.sequence.share import sequence_of

_log = logging.getLogger("treepack")

_T = TypeVar("_T")
Values = tuple[Tensor, Tensor | None]  # log-probabilities, and entropies if they are wanted

# The plan of rows of a model with a graph (True) and without one, after the first one was too large.
_PLANS: weakref.WeakKeyDictionary[nn.Module, dict[bool, RunPlan]] = weakref.WeakKeyDictionary()
# A row must have so many tokens that the bytes of a token can be read from it.
_MEASURABLE = 2048
# Share of the free memory for the tensors of a graph; the rest is for the backward pass of a layer and for fragments.
_USABLE = 0.8
_CHECKED = 16  # tokens of a row that is enough for the checks of a first batch
_REMEDY = "switch gradient checkpointing on, or truncate the sequences"


def row_limit(model: nn.Module, *, has_graph: bool) -> int:
    """Return the maximum tokens of a row that fits, as earlier rows of the model in this process have shown."""
    plan = _PLANS.get(model, {}).get(has_graph)
    return sys.maxsize if plan is None or plan.carry is not None else plan.pass_tokens


def _keep_plan(model: nn.Module, plan: RunPlan, *, has_graph: bool) -> None:
    _PLANS.setdefault(model, {})[has_graph] = plan


def runs_again(model: nn.Module) -> bool:
    """Return True if no other rank waits for a pass of the model."""
    alone = find_replicas(model) is None and sharding_groups(model) is None and not uses_deepspeed(model)
    return alone and all(sequence_of(each) is None for each in model.modules())


@dataclass(frozen=True)
class RowRun:
    """A pass of a model over rows, which the backward pass repeats for some of them.

    `temperature` is that of all tokens, None if it is part of the terms; `autocast` is the state of the forward pass.
    """

    model: nn.Module
    options: OnlineOptions
    temperature: float | None
    autocast: dict[str, Any]
    replicas: DistributedDataParallel | None
    runs_again: bool

    @classmethod
    def of(cls, model: nn.Module, options: OnlineOptions, temperature: float | None, device: torch.device) -> RowRun:
        """Return a pass under the autocast of today."""
        return cls(model, options, temperature, _autocast_state(device.type), find_replicas(model), runs_again(model))

    def attempt(self, row: Batch, chunk: int | None = None) -> Values:
        """Return the values of a row, in one pass."""
        logprobs, entropies = batch_logprobs(
            self.model,
            collate([row]),
            temperature=self.temperature,
            with_entropies=self.options.with_entropies,
            chunk=chunk or self.options.chunk,
        )
        return logprobs, entropies if self.options.with_entropies else None

    def kept_values(self, row: Batch) -> list[Values]:
        """Return the values of a row with their graph, or nothing if memory is too small for it.

        On a GPU, the length of rows that fit is kept for later batches.
        """
        device = row.input_ids.device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        try:
            found = [self.attempt(row)]
        except (RuntimeError, MemoryError) as error:
            self.check(error)
            found = []
        if not found:
            release_memory(device)
        elif device.type == "cuda" and row.num_tokens >= _MEASURABLE and True not in _PLANS.get(self.model, {}):
            bytes_kept = max(1, torch.cuda.memory_allocated(device) - before)
            room = _USABLE * (free_memory(device) + bytes_kept - update_bytes(self.model, state_bytes=0))
            limit = max(1, int(room * row.num_tokens / bytes_kept))
            _keep_plan(self.model, replace(self._first_plan(row, has_graph=True), pass_tokens=limit), has_graph=True)
        return found

    def values(self, row: Batch) -> Values:
        """Return the values of a row without a graph.

        Raises:
            TreepackError: memory is too small for the smallest plan.
        """

        def attempt(plan: RunPlan) -> Values:
            shares = _shares(row, plan)
            return join_values(shares, [self._forward(share.row, plan) for share in shares])

        return self._until_it_fits(attempt, row, has_graph=False)

    def backward(
        self, row: Batch, grads: Sequence[Tensor | None], kept: list[Values], *, exchange: bool = False
    ) -> None:
        """Add the gradients of a row to the gradients of the parameters.

        Args:
            row: the row.
            grads: the gradients of its log-probabilities and entropies.
            kept: the values of the row with their graph, which are taken out; or nothing.
            exchange: True if replicas exchange gradients in this pass.

        Raises:
            TreepackError: as `values`.
        """
        if kept:
            _backward(row, kept.pop(), grads)
            return
        waiting = [(row, grads)]
        while waiting:
            part, own = waiting.pop()
            shares, values = self._with_graph(part, own, exchange=exchange)
            each = [(share.row, [None if grad is None else share.gradient(grad) for grad in own]) for share in shares]
            waiting += each[:0:-1]
            if values is not None:
                _backward(each[0][0], values, each[0][1])

    def _with_graph(
        self, row: Batch, grads: Sequence[Tensor | None], *, exchange: bool
    ) -> tuple[list[RowShare], Values | None]:
        """Return the shares of a row that fit, and the first one's values; None if pieces have added the gradients."""

        def attempt(plan: RunPlan) -> tuple[list[RowShare], Values | None]:
            if _is_cut(row, plan):
                with _added_at_the_end([each for each in self.model.parameters() if each.requires_grad]):
                    self._pieces_backward(row, grads, plan)
                return [whole_row(row)], None
            shares = _shares(row, plan)
            with torch.enable_grad(), torch.autocast(**self.autocast), gradient_exchange(self.replicas, exchange):
                return shares, self.attempt(shares[0].row, plan.loss_chunk)

        return self._until_it_fits(attempt, row, has_graph=True)

    def check(self, error: Exception) -> None:
        """Raise the error again if no smaller row may run."""
        if not is_memory_error(error) or not self.runs_again:
            raise error

    def _forward(self, row: Batch, plan: RunPlan) -> Values:
        if not _is_cut(row, plan):
            return self.attempt(row, plan.loss_chunk)
        reads = ScoreRequest(entropies=self.options.with_entropies)
        scores = self._pieces(plan).scores(row, _terms(row).tokens, reads, **self._law(row))
        assert scores.logprobs is not None
        return scores.logprobs, scores.entropies

    def _pieces_backward(self, row: Batch, grads: Sequence[Tensor | None], plan: RunPlan) -> None:
        tokens, (of_logprobs, of_entropies) = _terms(row).tokens, grads
        slopes = [torch.zeros(len(tokens), device=tokens.device) if of_logprobs is None else of_logprobs]
        slopes += [] if of_entropies is None else [of_entropies]
        reads = ScoreRequest(entropies=of_entropies is not None)
        self._pieces(plan).backward_scores(row, tokens, slopes, reads, **self._law(row))

    def _law(self, row: Batch) -> dict[str, Any]:
        terms = _terms(row)
        return {"temperature": filled_temperature(terms.temperature, self.temperature), "kept": terms.kept_ids}

    def _pieces(self, plan: RunPlan) -> RowsInPieces:
        assert plan.carry is not None
        loaded = self._loaded()
        # A push casts weights without a graph, which no later pass may take from the cache.
        autocast = partial(torch.autocast, **{**self.autocast, "cache_enabled": False})
        memory = spare_memory(loaded.device)
        return RowsInPieces(loaded, CarryOptions(plan.carry, chunk=plan.loss_chunk, memory=memory, autocast=autocast))

    def _loaded(self) -> LoadedModel:
        """Return the model with the wrappers of its trainer, as a loaded one."""
        device = next(self.model.parameters()).device
        loaded = LoadedModel(self.model, type(self.model).__name__, "auto", (), device=device)
        own = loaded.causal.config.get_text_config()._attn_implementation
        return replace(loaded, attention=next(name for name, known in IMPLEMENTATIONS.items() if known == own))

    def _can_carry(self, row: Batch) -> bool:
        if not _adds_once(self.model) or not can_carry(self._loaded()):
            return False
        # The checks of a first batch, which a long row may have had no memory for.
        with torch.no_grad(), torch.autocast(**self.autocast):
            self.attempt(restrict_row(row.to("cpu"), RowPart((0,), 0, _CHECKED)).to(row.input_ids.device))
        return True

    def _first_plan(self, row: Batch, *, has_graph: bool) -> RunPlan:
        known = _PLANS.get(self.model, {}).get(has_graph)
        if known is None:
            return RunPlan(False, 0, False, None, max(1, row.num_tokens), self.options.chunk)
        return replace(known, loss_chunk=min(known.loss_chunk, self.options.chunk))

    def _until_it_fits(self, attempt: Callable[[RunPlan], _T], row: Batch, *, has_graph: bool) -> _T:
        """Return the result of `attempt` for a row with a plan that fits, and keep a smaller plan for later rows.

        Raises:
            TreepackError: memory is too small for the smallest plan.
        """

        def smaller(plan: RunPlan, error: Exception) -> RunPlan | None:
            if not self.runs_again:
                raise error
            longest = int(row.position_ids.max()) + 1  # tokens of a sequence
            less = smaller_plan(plan, longest, 0, can_carry=True, tokens=row.num_tokens)
            if less is not None and less.carry is not None and not self._can_carry(row):
                less = smaller_plan(plan, longest, 0, can_carry=False, tokens=row.num_tokens)
            return less

        first, device = self._first_plan(row, has_graph=has_graph), row.input_ids.device
        place = f"in a row of {row.num_tokens:,} tokens"
        found, plan = until_it_fits(attempt, first, smaller, device, place=place, remedy=_REMEDY, note=_log.warning)
        if plan != first:
            _keep_plan(self.model, plan, has_graph=has_graph)
        return found


def _terms(row: Batch) -> TermTensors:
    assert row.terms is not None
    return row.terms


def _shares(row: Batch, plan: RunPlan) -> list[RowShare]:
    """Return the rows that run in place of a row: rows in pieces need not be cut too."""
    return [whole_row(row)] if plan.carry is not None else row_shares(row, plan.pass_tokens)


def _is_cut(row: Batch, plan: RunPlan) -> bool:
    return plan.carry is not None and row.num_tokens > plan.carry


def join_values(shares: Sequence[RowShare], values: Sequence[Values]) -> Values:
    """Return the values of a row from the values of its shares."""
    entropies = [each for _, each in values if each is not None]
    return values_of_shares(shares, [each for each, _ in values]), values_of_shares(
        shares, entropies
    ) if entropies else None


def _backward(row: Batch, values: Values, grads: Sequence[Tensor | None]) -> None:
    """Add the gradients of a row to the gradients of the parameters.

    Raises:
        TreepackError: memory ran out; some parameters have the gradient of the row, and others do not.
    """
    pairs = [(value, grad) for value, grad in zip(values, grads, strict=True) if value is not None and grad is not None]
    if not pairs:  # all ranks must run the backward passes of all rows, so one without gradients runs with zeros
        pairs = [(values[0], torch.zeros_like(values[0]))]
    shorter = f"set OnlineOptions(capacity={row.num_tokens // 2})" if len(row.trajectory_ends) > 1 else _REMEDY
    remedy = f"drop the gradients, to which a part of the row's is added, and {shorter}"
    with memory_errors(f"in the backward pass of a row of {row.num_tokens:,} tokens", remedy):
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])


def _adds_once(model: nn.Module) -> bool:
    """Return True if pieces may run: nothing else adds to a gradient twice, or acts on it after the first addition."""
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in model.parameters()):
        return False
    checkpoints = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    options = [getattr(getattr(each, "_gradient_checkpointing_func", None), "keywords", {}) for each in checkpoints]
    return not any(each.get("use_reentrant", True) for each in options)


@contextmanager
def _added_at_the_end(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Add the gradients of the block to those of before after it; after an error only these are left."""
    before = [each.grad for each in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        raise
    for parameter, grad in zip(parameters, before, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def _autocast_state(kind: str) -> dict[str, Any]:
    # torch does not restore the autocast of the forward pass in a backward pass.
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
