"""The model of a finished run, as files that get their names when the run is complete.

run --stage_before_checkpoint--> the model's files, whose weights the last checkpoint links
run --stage_after_training-->    the model's files, if no checkpoint can link them
"""

from __future__ import annotations

import logging

from treepack.errors import TreepackError
from treepack.model.head.value_head import whole_value_head, without_value_head
from treepack.model.weights.whole_checkpoint import has_rest
from treepack.model.weights.writing import SavedWeights, saved_weights
from treepack.train.run import TrainingRun
from treepack.train.saving.place import Place
from treepack.train.saving.run_directory import stage_model
from treepack.train.sharding import whole_state

_log = logging.getLogger("treepack")


def stage_before_checkpoint(run: TrainingRun, place: Place) -> bool:
    """Stage the model if a checkpoint can link its weight files; return False if it cannot, or if the disk fails.

    In both cases the model is staged after the checkpoint, and an error of the disk ends the run then.
    """
    weights = _weights_as_files(run)
    if weights is None:
        return False
    try:
        _stage(run, place, weights)
    except TreepackError:
        return False
    return True


def stage_after_training(run: TrainingRun, place: Place) -> None:
    """Write the model; all ranks call this, and only the first one writes.

    Raises:
        TreepackError: the disk fails.
    """
    _stage(run, place, _weights_as_files(run))


def _weights_as_files(run: TrainingRun) -> SavedWeights | None:
    """Return the weights as the files of the model contain them; None for an adapter, or if they are converted."""
    with without_value_head(run.loaded.causal):
        return None if has_rest(run.loaded.causal, run.loaded.source) else saved_weights(run.loaded.model)


def _stage(run: TrainingRun, place: Place, weights: SavedWeights | None) -> None:
    """Write the model; all ranks take part in the gathering of the shards, and only the first rank writes.

    Raises:
        TreepackError: the disk fails.
    """
    _log.info("writing the model")
    loaded, ranks = run.loaded, run.ranks
    head = whole_value_head(loaded.causal)
    if weights is None:
        state = whole_state(loaded) if ranks.grouped else None
        ranks.lead(lambda: stage_model(run, place, state, value_head=head))
        return

    def write() -> None:
        try:
            stage_model(run, place, weights, value_head=head)
        finally:
            weights.gather()  # the other ranks wait in it, even if the disk is full

    if not ranks.leads:
        weights.gather()
    ranks.lead(write)
