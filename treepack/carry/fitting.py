"""Computations whose memory may run out: they run again with a smaller plan, until one fits.

    plan --attempt--> result, plan
      ^         |
      '-- smaller(plan), with a note      None ends with one sentence that names the smallest plan

An attempt that fails must leave nothing to which the next one adds, such as gradients.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from treepack.errors import TreepackError
from treepack.memory.shortage import is_memory_error
from treepack.model.loaded import LoadedModel

_log = logging.getLogger("treepack")

P = TypeVar("P")
T = TypeVar("T")


def until_it_fits(
    attempt: Callable[[P], T],
    plan: P,
    smaller: Callable[[P], tuple[P, str] | None],
    loaded: LoadedModel,
    *,
    place: str,
    remedy: str,
    note: Callable[[str], None] = _log.info,
) -> tuple[T, P]:
    """Return the result of the first attempt that fits, and its plan.

    A model that several ranks compute together has one attempt, because they would wait for the rank that failed.

    Args:
        attempt: computes with a plan.
        plan: of the first attempt.
        smaller: returns the next plan and its description, None if there is none.
        loaded: the model, whose gradients are dropped after an attempt that failed.
        place: "in row 3 of 512 tokens", in the sentences, unless the error has its own.
        remedy: what a user may do if no plan fits.
        note: called with a sentence for each plan that was too large.

    Raises:
        TreepackError: no plan fits.
    """
    words = ""
    while True:
        try:
            return attempt(plan), plan
        except (RuntimeError, MemoryError, TreepackError) as error:
            if not is_memory_error(error.__cause__ or error):
                raise
            start = str(error).partition(";")[0] if isinstance(error, TreepackError) else f"out of memory {place}"
            less = smaller(plan) if loaded.root is None and loaded.sequence is None else None
            if less is None:
                raise TreepackError(f"{start}{words}; {remedy}") from (error.__cause__ or error)
        # Here the error is gone, whose frames keep the tensors of the attempt.
        loaded.model.zero_grad(set_to_none=True)
        release_memory(loaded.device)
        plan, words = less[0], f" with {less[1]}"
        note(f"{start}; it runs again{words}")


def release_memory(device: torch.device) -> None:
    """Free the tensors that only cycles of objects keep, and give unused memory of a GPU back to the driver."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
