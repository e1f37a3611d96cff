"""Rows of a batch in memory through a model; if memory runs out, a row runs again with a smaller plan.

    row --RowRun.values--> log-probabilities, entropies        a row without a graph may run again at any time
    row, gradients --RowRun.backward--> the parameters' gradients

The plan gets smaller as in training (`carry.smaller_plan`): rows of fewer sequences, then rows in pieces, then smaller
chunks of logits.

A backward pass that fails has added the gradients of the row to some parameters and not to others. They cannot be
dropped, because the same tensors have the gradients of earlier rows and batches, and a copy of these would need the
memory that is missing. But a backward pass adds to a parameter once, when the parameter's whole gradient is known. So
each parameter has the row's gradient or none of it, and a hook records which. The smaller rows run with the finished
parameters frozen, and add the rest. The error is final if a pass may add more than once (reentrant checkpoints), if
something acts on a gradient at once (hooks after the addition), and if other ranks wait for the pass.

Pieces add to a parameter many times, so they start without gradients, to which the earlier ones are added at the end.

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
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from treepack.attention import IMPLEMENTATIONS
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.carry.fitting import release_memory, until_it_fits
from treepack.carry.offload import spare_memory
from treepack.carry.refusal import can_carry
from treepack.carry.smaller_plan import RunPlan, smaller_plan
from treepack.data.batch import Batch, TermTensors
from treepack.memory.device_memory import free_memory, update_bytes
from treepack.memory.shortage import is_memory_error
from treepack.model.accept.first_batch import sharding_groups
from treepack.model.collation import batch_logprobs, collate
from treepack.model.head.token_loss import filled_temperature
from treepack.model.loaded import LoadedModel
from treepack.model.verify.verify_subset import RowPart, restrict_row
from treepack.objectives.row_numbers import ScoreRequest
from treepack.online.options import OnlineOptions
from treepack.online.ranks import find_replicas, gradient_exchange, uses_deepspeed
from treepack.online.row_cuts import RowShare, row_shares, values_of_shares, whole_row
from treepack.sequence.share import sequence_of

_log = logging.getLogger("treepack")

T = TypeVar("T")
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

        return self._until_it_fits(attempt, lambda: row, has_graph=False)

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
        # Rows to run, the gradients of their values, and the parameters that have their gradient.
        waiting: list[tuple[Batch, Sequence[Tensor | None], frozenset[nn.Parameter]]] = [(row, grads, frozenset())]
        added: set[nn.Parameter] = set()

        def attempt(plan: RunPlan) -> None:
            while waiting:
                part, own, done = waiting[0]
                done = done.union(added)
                added.clear()
                shares = [whole_row(part)] if kept else _shares(part, plan)
                waiting[:1] = [
                    (each.row, [None if grad is None else each.gradient(grad) for grad in own], done) for each in shares
                ]
                part, own, done = waiting[0]
                trained = [each for each in self.model.parameters() if each.requires_grad and each not in done]
                if trained and _is_cut(part, plan):
                    with _frozen(done), _added_at_the_end(trained):
                        self._pieces_backward(part, own, plan)
                elif trained:
                    with _frozen(done), _noting(added, trained if self.runs_again else []):
                        self._whole_backward(part, own, kept, plan.loss_chunk, exchange=exchange)
                added.clear()
                del waiting[0]

        def is_final() -> bool:
            return bool(added) and not _adds_once(self.model)

        self._until_it_fits(attempt, lambda: waiting[0][0], has_graph=True, is_final=is_final)

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

    def _whole_backward(
        self, row: Batch, grads: Sequence[Tensor | None], kept: list[Values], chunk: int, *, exchange: bool
    ) -> None:
        if not kept:
            with torch.enable_grad(), torch.autocast(**self.autocast), gradient_exchange(self.replicas, exchange):
                kept.append(self.attempt(row, chunk))
        _backward(kept.pop(), grads)

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

    def _until_it_fits(
        self,
        attempt: Callable[[RunPlan], T],
        row: Callable[[], Batch],
        *,
        has_graph: bool,
        is_final: Callable[[], bool] = lambda: False,
    ) -> T:
        """Return what `attempt` returns with a plan that fits, and keep a smaller plan for later rows.

        Args:
            attempt: computes with a plan.
            row: returns the row that it computes now.
            has_graph: True for a backward pass.
            is_final: returns True if nothing may run again after the error.

        Raises:
            TreepackError: memory is too small for the smallest plan.
        """

        def smaller(plan: RunPlan, error: Exception) -> RunPlan | None:
            if not self.runs_again or is_final():
                raise error
            now = row()
            longest = int(now.position_ids.max()) + 1  # tokens of a sequence
            less = smaller_plan(plan, longest, 0, can_carry=True, tokens=now.num_tokens)
            if less is not None and less.carry is not None and not self._can_carry(now):
                less = smaller_plan(plan, longest, 0, can_carry=False, tokens=now.num_tokens)
            return less

        first, device = self._first_plan(row(), has_graph=has_graph), row().input_ids.device
        place = f"in a row of {row().num_tokens:,} tokens"
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


def _backward(values: Values, grads: Sequence[Tensor | None]) -> None:
    """Add the gradients of a row to the gradients of the parameters."""
    pairs = [(value, grad) for value, grad in zip(values, grads, strict=True) if value is not None and grad is not None]
    if not pairs:  # all ranks must run the backward passes of all rows, so one without gradients runs with zeros
        pairs = [(values[0], torch.zeros_like(values[0]))]
    torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])


def _adds_once(model: nn.Module) -> bool:
    """Return True if a backward pass adds to the gradient of a parameter once, and nothing acts on it at once."""
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in model.parameters()):
        return False
    checkpoints = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    options = [getattr(getattr(each, "_gradient_checkpointing_func", None), "keywords", {}) for each in checkpoints]
    return not any(each.get("use_reentrant", True) for each in options)


@contextmanager
def _noting(added: set[nn.Parameter], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Put the parameters to whose gradients a backward pass inside of the block adds into `added`."""
    # The pass of the caller, which waits for this one, has another number.
    outer = torch._C._current_graph_task_id()

    def note(parameter: Tensor) -> None:
        if torch._C._current_graph_task_id() != outer:
            added.add(cast(nn.Parameter, parameter))

    hooks = [each.register_post_accumulate_grad_hook(note) for each in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


@contextmanager
def _frozen(parameters: frozenset[nn.Parameter]) -> Iterator[None]:
    """Compute no gradients of some parameters in the block."""
    for each in parameters:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in parameters:
            each.requires_grad_(True)


def _autocast_state(kind: str) -> dict[str, Any]:
    # torch does not restore the autocast of the forward pass in a backward pass.
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
