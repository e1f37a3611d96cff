"""Rows of a training run that are longer than `TrainOptions.carry` and so run in pieces (`carry`).

rows of a step --has_long_rows--> True if any row of it is longer than a piece; all ranks get the same answer
rows of a step --runs_apart----> True if ranks wait for each other only at the end of the step
batch --row_runner--> its runner: in pieces if the row is longer than a piece, else as a whole
"""

from __future__ import annotations

from treepack.carry.backward import runner_of
from treepack.data.batch import Batch
from treepack.model.forward import RowRunner
from treepack.train.run import TrainingRun
from treepack.train.setup.compute import ComputeSetting


def has_long_rows(run: TrainingRun, rows: list[int]) -> bool:
    """Return True if any of `rows`, on whichever rank, is longer than a piece of the run."""
    limit = run.options.piece_limit
    return limit is not None and int(run.dataset.num_tokens[rows].max()) > limit


def runs_apart(run: TrainingRun, rows: list[int]) -> bool:
    """Return True if each rank has whole weights for the passes of `rows`, which then wait for no other rank."""
    return has_long_rows(run, rows) or (run.loaded.root is not None and run.options.whole_weights is True)


def row_runner(run: TrainingRun, batch: Batch) -> RowRunner:
    """Return the runner of a row, or of joined rows: in pieces if it is longer than a piece of the run."""
    assert run.options.carry != "auto", "open_run chooses a number"
    # A context for each pass and none around them: autocast keeps a weight that it has cast until the outermost context
    # ends. The cast of a push has no graph, and a later pass that took it would give the weight no gradient.
    return runner_of(
        run.loaded,
        batch,
        run.options.piece_limit,
        chunk=int(run.options.loss_chunk),
        memory=run.carry_memory,
        autocast=ComputeSetting(run.loaded.device, run.options.dtype).lower_precision,
    )
