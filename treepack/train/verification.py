"""Compare the gradients of rows with the gradients of their trajectories, of a limited number of tokens.

rows, limit --neighbours_within, restrict_row--> rows of whole trajectories --verify_gradients--> report
        ^                                                                            |
        '--------------------------- half of it <------ out of memory ---------------'
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from treepack.data.batch import Batch
from treepack.data.row_parts import RowPart, neighbours_within, restrict_row
from treepack.fit.repeat import ranks_wait, until_it_fits
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import GradientReport, RunnerMaker, verify_gradients
from treepack.model.verify.slope import check_slope
from treepack.objectives.objective import Objective
from treepack.trie.nodes import path_to

_log = logging.getLogger("treepack")

# Maximum tokens of a row, and of its trajectories one by one. Without it a lack of memory kills a process on a CPU, and
# a million tokens take an hour with 8 billion weights on a GPU.
_MAX_TOKENS = {"cpu": (2_048, 16_384), "cuda": (16_384, 65_536)}
_MIN_TOKENS = 32  # a smaller part of a row proves little, and a model that cannot run it has no memory at all


@dataclass(frozen=True)
class RowsReport:
    """The comparison of some rows: its result, and the rows or parts of rows that were compared.

    `slope_error` is that of `slope.check_slope`.
    """

    gradients: GradientReport
    batches: tuple[Batch, ...]
    slope_error: float | None


def verify_rows(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    *,
    objective: Objective = Objective(),  # noqa: B008
    factors: Sequence[Tensor | None] | None = None,
    max_tokens: int | None = None,
    backward: RunnerMaker | None = None,
) -> RowsReport:
    """Compare the gradients of rows, or of parts of them, with the gradients of their trajectories run alone.

    Args:
        loaded: a model in float64 or float32.
        batches: rows on the CPU.
        objective: the objective of the training.
        factors: factors of each row's trajectories; None for sft.
        max_tokens: maximum tokens of a row, by default 2,048 on a CPU and 16,384 on a GPU; of a longer row some
            neighbouring trajectories are compared.
        backward: how the packed side runs a row; None for one pass over the whole row.

    Raises:
        TreepackError: as `verify_gradients` and `check_slope`, and if memory runs out for the smallest part.
    """
    given = factors or [None] * len(batches)
    most, max_alone = _MAX_TOKENS["cuda" if loaded.device.type == "cuda" else "cpu"]

    def parts_of(limit: int) -> list[tuple[Batch, Tensor | None]]:
        return [_restrict(*each, limit, max_alone) for each in zip(batches, given, strict=True)]

    def num_tokens(limit: int) -> int:
        return sum(batch.num_tokens for batch, _ in parts_of(limit))

    def attempt(limit: int) -> RowsReport:
        parts = parts_of(limit)
        alone = sum(batch.tokens_flat for batch, _ in parts)
        _log.info(f"comparing gradients of {num_tokens(limit):,} packed tokens with {alone:,} tokens one by one")
        report = verify_gradients(
            loaded,
            [batch.to(loaded.device) for batch, _ in parts],
            objective=objective,
            factors=[None if factor is None else factor.to(loaded.device) for _, factor in parts],
            backward=backward,
        )
        return RowsReport(report, tuple(batch for batch, _ in parts), check_slope(loaded))

    def smaller(limit: int, _: Exception) -> int | None:
        return limit // 2 if limit >= 2 * _MIN_TOKENS and num_tokens(limit // 2) < num_tokens(limit) else None

    report, _ = until_it_fits(
        attempt,
        min(max_tokens or most, max((batch.num_tokens for batch in batches), default=0)),
        smaller,
        loaded.device,
        place=f"for the gradients of {loaded.source}",
        remedy="verify on a GPU with more free memory, or a smaller model",
        undo=lambda: loaded.model.zero_grad(set_to_none=True),
        waits=partial(ranks_wait, loaded),
        words=lambda limit: f"{num_tokens(limit):,} tokens",
    )
    return report


def _restrict(batch: Batch, factors: Tensor | None, max_tokens: int, max_alone: int) -> tuple[Batch, Tensor | None]:
    """Return a row, or a part of it within the limits, with the factors of its trajectories."""
    if not batch.total_weight or (batch.num_tokens <= max_tokens and batch.tokens_flat <= max_alone):
        return batch, factors
    part = _part(batch, max_tokens, max_alone)
    return restrict_row(batch, part), None if factors is None else factors[list(part.trajectories)]


def _part(batch: Batch, max_tokens: int, max_alone: int) -> RowPart:
    """Return the largest group of neighbours that train, whole, or of a longer one the end of its first trained token.

    Trajectories that train nothing are left out.
    """
    first, lengths = _first_trained(batch), (batch.position_ids[batch.trajectory_ends] + 1).tolist()
    groups = [[i for i in group if i in first] for group in neighbours_within(batch, max_tokens)]
    group = max(groups, key=len)
    alone = np.cumsum([lengths[i] for i in group])
    chosen = group[: max(1, int((alone <= max_alone).sum()))]
    longest = max(lengths[i] for i in chosen)
    if longest <= max_tokens:
        return RowPart(tuple(sorted(chosen)), 0, longest)
    # A single trajectory is too long: its first tokens, or the last ones up to the first trained token.
    end = max(max_tokens, first[chosen[0]] + 1)
    return RowPart((chosen[0],), end - max_tokens, end)


def _first_trained(batch: Batch) -> dict[int, int]:
    """Return the position of the first trained token of each trajectory that trains one."""
    first: dict[int, int] = {}
    if batch.terms is None:
        parent, trained = batch.parent.numpy(), batch.loss_weight.numpy() > 0
        for i, end in enumerate(batch.trajectory_ends.tolist()):
            own = np.flatnonzero(trained[path_to(parent, end)])
            first |= {i: int(own[0])} if len(own) else {}
        return first
    positions = batch.position_ids[batch.terms.tokens[batch.terms.index.long()]]
    for i, position in zip(batch.terms.trajectory.tolist(), positions.tolist(), strict=True):
        first[i] = min(position, first.get(i, position))
    return first
