"""Rows of a batch in memory through a model; if memory runs out, a row runs again as rows of fewer sequences.

    row --RowRun.values--> log-probabilities, entropies        a row without a graph may run again at any time
    row, gradients --RowRun.backward--> the parameters' gradients

A backward pass that fails has added the gradients of the row to some parameters and not to others. They cannot be
dropped, because the same tensors have the gradients of earlier rows and batches, and a copy of these would need the
memory that is missing. But a backward pass adds to a parameter once, when the parameter's whole gradient is known. So
each parameter has the row's gradient or none of it, and a hook records which. The smaller rows run with the finished
parameters frozen, and add the rest. The error is final if a pass may add more than once (reentrant checkpoints), if
something acts on a gradient at once (hooks after the addition), and if other ranks wait for the pass.

On a GPU a first pass measures the bytes that its graph keeps for each token. Longer rows than fit are cut beforehand.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from treepack.carry.fitting import release_memory
from treepack.data.batch import Batch
from treepack.errors import TreepackError
from treepack.memory.device_memory import free_memory, update_bytes
from treepack.memory.shortage import is_memory_error
from treepack.model.accept.first_batch import sharding_groups
from treepack.model.collation import batch_logprobs, collate
from treepack.online.options import OnlineOptions
from treepack.online.ranks import find_replicas, gradient_exchange, uses_deepspeed
from treepack.online.row_cuts import RowShare, row_shares, values_of_shares, whole_row
from treepack.sequence.share import sequence_of

_log = logging.getLogger("treepack")

Values = tuple[Tensor, Tensor | None]  # log-probabilities, and entropies if they are wanted

# Tokens of the longest row of a model with a graph (True) and without one, once that is known.
_LIMITS: weakref.WeakKeyDictionary[nn.Module, dict[bool, int]] = weakref.WeakKeyDictionary()
_SMALLEST_CHUNK = 64
# A row must have so many tokens that the bytes of a token can be read from it.
_MEASURABLE = 2048
# Share of the free memory for the tensors of a graph; the rest is for the backward pass of a layer and for fragments.
_USABLE = 0.8


def row_limit(model: nn.Module, *, has_graph: bool) -> int:
    """Return the maximum tokens of a row that fits, as earlier rows of the model in this process have shown."""
    return _LIMITS.get(model, {}).get(has_graph, sys.maxsize)


def _keep_limit(model: nn.Module, tokens: int, *, has_graph: bool) -> None:
    _LIMITS.setdefault(model, {})[has_graph] = max(1, min(tokens, row_limit(model, has_graph=has_graph)))


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

    def attempt(self, row: Batch) -> Values:
        """Return the values of a row, in one pass."""
        logprobs, entropies = batch_logprobs(
            self.model,
            collate([row]),
            temperature=self.temperature,
            with_entropies=self.options.with_entropies,
            chunk=self.options.chunk,
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
        elif device.type == "cuda" and row.num_tokens >= _MEASURABLE and True not in _LIMITS.get(self.model, {}):
            bytes_kept = max(1, torch.cuda.memory_allocated(device) - before)
            room = _USABLE * (free_memory(device) + bytes_kept - update_bytes(self.model, state_bytes=0))
            _keep_limit(self.model, int(room * row.num_tokens / bytes_kept), has_graph=True)
        return found

    def values(self, row: Batch) -> Values:
        """Return the values of a row without a graph.

        Raises:
            TreepackError: memory is too small for a row that cannot be cut.
        """
        try:
            return self.attempt(row)
        except (RuntimeError, MemoryError) as error:
            self.check(error)
        parts = self._smaller(row, has_graph=False)
        found = [run.values(share.row) for run, share in parts]
        return join_values([share for _, share in parts], found)

    def backward(
        self,
        row: Batch,
        grads: Sequence[Tensor | None],
        kept: list[Values],
        *,
        exchange: bool = False,
        done: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        """Add the gradients of a row to the gradients of the parameters, except for `done`.

        Args:
            row: the row.
            grads: the gradients of its log-probabilities and entropies.
            kept: the values of the row with their graph, which are taken out; or nothing.
            exchange: True if replicas exchange gradients in this pass.
            done: parameters that have the gradient of the row.

        Raises:
            TreepackError: as `values`.
        """
        trained = [each for each in self.model.parameters() if each.requires_grad and each not in done]
        if not trained:
            return
        added: set[nn.Parameter] = set()
        try:
            with _frozen(done), _noting(added, trained if self.runs_again else []):
                if not kept:
                    with (
                        torch.enable_grad(),
                        torch.autocast(**self.autocast),
                        gradient_exchange(self.replicas, exchange),
                    ):
                        kept.append(self.attempt(row))
                _backward(kept.pop(), grads)
            return
        except (RuntimeError, MemoryError) as error:
            if added and not _adds_once(self.model):
                raise
            self.check(error)
        for run, share in self._smaller(row, has_graph=True):
            own = [None if each is None else share.gradient(each) for each in grads]
            run.backward(share.row, own, [], done=done.union(added))

    def check(self, error: Exception) -> None:
        """Raise the error again if no smaller row may run."""
        if not is_memory_error(error) or not self.runs_again:
            raise error

    def _smaller(self, row: Batch, *, has_graph: bool) -> list[tuple[RowRun, RowShare]]:
        """Return the rows that run in place of one whose memory ran out, and the pass of each.

        Call it when the error is gone, whose frames keep the tensors of the pass.

        Raises:
            TreepackError: there are none.
        """
        release_memory(row.input_ids.device)
        shares = row_shares(row, row.num_tokens // 2)
        if len(shares) > 1:
            _keep_limit(self.model, row.num_tokens // 2, has_graph=has_graph)
            _log.warning(
                "out of memory in a row of %s tokens; it runs again as %d rows", f"{row.num_tokens:,}", len(shares)
            )
            return [(self, share) for share in shares]
        chunk = self.options.chunk
        if chunk > _SMALLEST_CHUNK:
            _log.warning("out of memory in a row of %s tokens; it runs again with fewer logits", f"{row.num_tokens:,}")
            smaller = replace(self.options, chunk=max(_SMALLEST_CHUNK, chunk // 2))
            return [(replace(self, options=smaller), whole_row(row))]
        raise TreepackError(
            f"batch_statistics: out of memory in a sequence of {row.num_tokens:,} tokens with logits of {chunk} "
            "targets; switch gradient checkpointing on, or truncate the sequence"
        )


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
