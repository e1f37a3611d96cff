"""The loss of held-out rows during training; `train.saving.position` decides whether a run still improves it.

    run.held_out --evaluate--> {"eval_loss": 1.9, "eval_seconds": 0.4}     as one optimiser step over all held-out rows

The loss is that of the training objective, with its denominator taken over all held-out rows, and without an update:
the weighted mean of the negative log-likelihoods with sft, the loss over all pairs with dpo, and the objective of the
held-out rollouts with the other losses. The means of the objective get the prefix `eval_` too. Nothing that the next
optimiser step depends on changes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from treepack.objectives.losses import step_means
from treepack.train.run import TrainingRun
from treepack.train.setup.smaller_run import fit_forward
from treepack.train.step import forward_rows

_log = logging.getLogger("treepack")


def evaluate(held_out: TrainingRun, note: Callable[[str], None] = _log.info) -> tuple[dict[str, float], TrainingRun]:
    """Return the loss and the means of the rows of a run's first step, over all ranks; all ranks must call this.

    The second result is the run with the plan that fits, which is smaller than that of `held_out` if memory ran out;
    `note` gets a sentence about it. Gradients of the model are dropped then.

    Raises:
        TreepackError: memory is too small, or a row cannot be read.
    """
    start, rows = time.perf_counter(), held_out.schedule[0].rows
    report, held_out = fit_forward(held_out, lambda run: forward_rows(run, rows), rows, note)
    losses, _, sums = report.over_ranks()
    means = {f"eval_{name}": value for name, value in step_means(sums, held_out.constant_means).items()}
    loss = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
    return {"eval_loss": loss, **means, "eval_seconds": time.perf_counter() - start}, held_out
