"""The model of a finished run, as files that get their names when the run is complete.

run --stage_model--> weights, configuration and tokenizer in a hidden folder of the run --finish_run--> out
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError, first_line
from treepack.model.head.value_head import whole_value_head, without_value_head
from treepack.model.weights.whole_checkpoint import has_rest
from treepack.model.weights.writing import SavedWeights, saved_weights
from treepack.train.run import TrainingRun
from treepack.train.saving.long_parts import long_part
from treepack.train.saving.place import Place
from treepack.train.saving.saved_model import save_model
from treepack.train.sharding import whole_state


def staged_model(place: Place) -> Path:
    """Return the folder of a model that is written and not finished yet.

    The library writes several files and may fail between them, so they get their final names in `finish_run`.
    """
    return place.folder / ".weights.partial"


@contextmanager
def model_errors(place: Place) -> Iterator[None]:
    """Remove the staged model if the disk fails, and raise a TreepackError."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(staged_model(place), ignore_errors=True)
        raise TreepackError(
            f"{place.folder}: the model cannot be written ({first_line(error)}); free disk space and continue with "
            "--resume"
        ) from error


def stage_model(run: TrainingRun, place: Place) -> None:
    """Write the model; all ranks take part in the gathering of the shards, and only the first rank writes.

    Raises:
        TreepackError: the disk fails.
    """
    with without_value_head(run.loaded.causal):
        # None for the text half of a model, for an adapter, and if only transformers can convert the weights.
        is_half = has_rest(run.loaded.causal, run.loaded.source)
        weights = None if is_half else saved_weights(run.loaded.model)
    with long_part("writing the model"):
        _write(run, place, weights)


def _write(run: TrainingRun, place: Place, weights: SavedWeights | None) -> None:
    loaded, ranks = run.loaded, run.ranks
    head = whole_value_head(loaded.causal)

    def save(weights: dict[str, Any] | SavedWeights | None) -> None:
        with model_errors(place):
            save_model(run, staged_model(place), weights, value_head=head)

    if weights is None:
        state = whole_state(loaded) if ranks.grouped else None
        ranks.lead(lambda: save(state))
        return

    def write() -> None:
        try:
            save(weights)
        finally:
            weights.gather()  # the other ranks wait in it, even if the disk is full

    if not ranks.leads:
        weights.gather()
    ranks.lead(write)
