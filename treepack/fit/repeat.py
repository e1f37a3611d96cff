"""Computations whose memory may run out: they run again with a smaller plan, until one fits.

    plan --attempt--> result, plan
      ^         |
      '-- smaller(plan), with a note      None ends with one sentence that names the smallest plan

An attempt that fails must leave nothing to which the next one adds, such as gradients: `undo` removes it. Random
generators are restored.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from treepack.errors import TreepackError
from treepack.fit.rung import plan_in_words
from treepack.memory.shortage import MemoryShortageError, is_memory_error, out_of_memory
from treepack.model.loaded import LoadedModel

_log = logging.getLogger("treepack")

_P = TypeVar("_P")
_T = TypeVar("_T")


class SharedShortageError(MemoryShortageError):
    """A lack of memory on some rank, which all ranks raise, so that they can compute again together."""


def until_it_fits(
    attempt: Callable[[_P], _T],
    plan: _P,
    smaller: Callable[[_P, Exception], _P | None],
    device: torch.device,
    *,
    place: str,
    remedy: str,
    undo: Callable[[], None] = lambda: None,
    waits: Callable[[Exception], bool] = lambda _: False,
    words: Callable[[Any], str] = plan_in_words,
    note: Callable[[str], None] = _log.info,
) -> tuple[_T, _P]:
    """Return the result of the first attempt that fits, and its plan.

    Args:
        attempt: computes with a plan.
        plan: of the first attempt.
        smaller: returns the plan to try after one that failed with an error, or None.
        device: the device that computes.
        place: "in row 3 of 512 tokens", in the sentences, unless the error names a place.
        remedy: advice for the user if no plan fits.
        undo: removes the traces of an attempt that failed, such as gradients.
        waits: returns True if other ranks wait inside the attempt that failed, which cannot run again then.
        words: returns a plan in words.
        note: called with a sentence for each plan that was too large.

    Raises:
        TreepackError: no plan fits, or other ranks wait.
    """
    random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    while True:
        before = _allocated(device)
        try:
            return attempt(plan), plan
        except (RuntimeError, MemoryError, TreepackError) as error:
            if not is_memory_error(error.__cause__ or error):
                raise
            where = error.place if isinstance(error, MemoryShortageError) else place
            others_wait = waits(error)
            less = None if others_wait else smaller(plan, error)
            if less is None:
                end = f"{words(plan)}, and other ranks wait" if others_wait else f"the smallest plan ({words(plan)})"
                cause = error.__cause__ or error
                held = max(0, _allocated(device) - before)  # the error has the frames with the tensors of the attempt
                raise out_of_memory(where, remedy, cause, plan=f"with {end}", held=held) from cause
        # Here the error is gone, whose frames keep the tensors of the attempt.
        undo()
        release_memory(device)
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1], device)
        plan = less
        note(f"out of memory {where}; it runs again with a smaller plan: {words(plan)}")


def ranks_wait(loaded: LoadedModel, error: Exception) -> bool:
    """Return True if other ranks wait inside the pass that failed, so that it cannot run again."""
    return not isinstance(error, SharedShortageError) and (loaded.root is not None or loaded.sequence is not None)


def _allocated(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU; 0 on a CPU, where torch counts none."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def release_memory(device: torch.device) -> None:
    """Free the tensors that only cycles of objects keep, and give unused memory of a GPU back to the driver."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
