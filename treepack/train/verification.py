"""Compare the gradients of rows with the gradients of their trajectories, within the available memory and time.

rows, free memory --plan_memory--> limits --choose_part, restrict_row--> rows that fit --verify_gradients--> report
                                      ^                                                  |
                                      '------ half of the tokens <------ out of memory --'
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from treepack.carry.fitting import ranks_wait, until_it_fits
from treepack.data.batch import Batch
from treepack.memory.device_memory import free_memory
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import GradientReport, RunnerMaker, verify_gradients
from treepack.model.verify.slope import check_slope
from treepack.model.verify.verify_memory import MAX_OPERATIONS, MemoryPlan, model_sizes, plan_memory
from treepack.model.verify.verify_subset import choose_part, restrict_row
from treepack.objectives.objective import Objective

_log = logging.getLogger("treepack")

_MIN_TOKENS = 32  # a smaller part of a row proves little, and a model that cannot run it has no memory at all


@dataclass(frozen=True)
class RowsReport:
    """The comparison of some rows: its result, the rows or parts of rows that were compared, and the plan for them.

    `slope_error` is that of `slope.check_slope`.
    """

    gradients: GradientReport
    batches: tuple[Batch, ...]
    plan: MemoryPlan
    slope_error: float | None


def verify_rows(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    *,
    objective: Objective = Objective(),  # noqa: B008
    factors: Sequence[Tensor | None] | None = None,
    free: float | None = None,
    backward: RunnerMaker | None = None,
) -> RowsReport:
    """Compare the gradients of rows, or of parts of them, with the gradients of their trajectories run alone.

    Args:
        loaded: a model in float64 or float32.
        batches: rows on the CPU.
        objective: the objective of the training.
        factors: factors of each row's trajectories; None for sft.
        free: free bytes beside the weights; by default the free memory of the model's device.
        backward: how the packed side runs a row; None for one pass over the whole row.

    Raises:
        TreepackError: as `verify_gradients` and `check_slope`, and if memory runs out for the smallest part.
    """
    given = factors or [None] * len(batches)

    def attempt(plan: MemoryPlan) -> RowsReport:
        parts, part_factors = _restrict(batches, given, plan)
        alone = sum(part.tokens_flat for part in parts)
        _log.info(f"comparing gradients of {_tokens(parts):,} packed tokens with {alone:,} tokens one by one")
        report = verify_gradients(
            loaded,
            [part.to(loaded.device) for part in parts],
            objective=objective,
            factors=[None if each is None else each.to(loaded.device) for each in part_factors],
            plan=plan,
            backward=backward,
        )
        return RowsReport(report, tuple(parts), plan, check_slope(loaded))

    def num_tokens(plan: MemoryPlan) -> int:
        return _tokens(_restrict(batches, given, plan)[0])

    def smaller(plan: MemoryPlan, _: Exception) -> MemoryPlan | None:
        less = plan.halved()
        fewer = less.max_tokens >= _MIN_TOKENS and num_tokens(less) < num_tokens(plan)
        return less if fewer else None

    place, remedy = f"for the gradients of {loaded.source}", "verify on a GPU with more free memory, or a smaller model"
    plan = _first_plan(loaded, batches, free)
    report, _ = until_it_fits(
        attempt,
        plan,
        smaller,
        loaded.device,
        place=place,
        remedy=remedy,
        undo=lambda: loaded.model.zero_grad(set_to_none=True),
        waits=partial(ranks_wait, loaded),
        words=lambda plan: f"{num_tokens(plan):,} tokens",
    )
    return report


def _tokens(batches: Sequence[Batch]) -> int:
    return sum(batch.num_tokens for batch in batches)


def _first_plan(loaded: LoadedModel, batches: Sequence[Batch], free: float | None) -> MemoryPlan:
    longest = max((batch.num_tokens for batch in batches), default=0)
    sizes = model_sizes(loaded.causal, attention=loaded.attention, attention_alone=loaded.attention_alone)
    on_gpu = loaded.device.type == "cuda"
    free = free_memory(loaded.device) if free is None else free
    return plan_memory(
        sizes,
        free if loaded.sequence is None else loaded.sequence.smallest(free),
        longest,
        longest_path=max((int(batch.position_ids.max()) + 1 for batch in batches), default=0),
        max_operations=MAX_OPERATIONS if on_gpu else None,
    )


def _restrict(
    batches: Sequence[Batch], factors: Sequence[Tensor | None], plan: MemoryPlan
) -> tuple[list[Batch], list[Tensor | None]]:
    """Return the rows or parts of rows that the plan allows, and the factors of their trajectories."""
    parts, part_factors = [], []
    max_flat = max(2, plan.max_flat // max(1, len(batches)))  # of each row; the limit is for all of them together
    for batch, factor in zip(batches, factors, strict=True):
        fits = batch.num_tokens <= plan.max_tokens and batch.tokens_flat <= max_flat
        if not batch.total_weight or (fits and int(batch.position_ids.max()) < plan.max_depth):
            parts.append(batch)
            part_factors.append(factor)
            continue
        part = choose_part(batch, max_tokens=plan.max_tokens, max_flat=max_flat, max_depth=plan.max_depth)
        parts.append(restrict_row(batch, part))
        part_factors.append(None if factor is None else factor[list(part.trajectories)])
    return parts, part_factors
