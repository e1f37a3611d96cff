"""The model that a training run writes: in the format of its source, with a value head in a separate file.

run, weights --save_model--> model.safetensors or adapter_model.safetensors, and the files of `run.files`
value_head.safetensors, if the model is a critic
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from treepack.errors import first_line
from treepack.model.accept.vocabulary import CONFIG_FILE
from treepack.model.adapters.adapter import adapter_base, is_adapted, save_adapter
from treepack.model.head.value_head import without_value_head, write_value_head
from treepack.model.load import hide_progress_bars, load_merged
from treepack.model.saved_files import write_files
from treepack.model.weights.files import stored_dtypes
from treepack.model.weights.whole_checkpoint import has_rest, save_whole
from treepack.model.weights.writing import SavedWeights, converted_weights, saved_weights
from treepack.train.run import TrainingRun

_log = logging.getLogger("treepack")


def save_model(
    run: TrainingRun,
    directory: Path,
    weights: dict[str, Any] | SavedWeights | None,
    *,
    value_head: dict[str, Tensor] | None,
) -> None:
    """Write model, value head and the other files into the directory, which is replaced.

    Args:
        run: the trained run.
        directory: the directory to write.
        weights: of a sharded model the full tensors, or the tensors that the other ranks gather with this one; None
            if the model itself contains them.
        value_head: the weights of a critic's head, which get a file beside the model.

    Raises:
        OSError: the disk fails.
    """
    from safetensors import SafetensorError

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model, options = run.loaded.model, run.options
    model.eval()
    merge = options.lora is not None and options.lora.merge
    base = adapter_base(model) if is_adapted(model) else run.loaded.source
    try:
        with hide_progress_bars(), without_value_head(run.loaded.causal):
            if is_adapted(model):
                assert not isinstance(weights, SavedWeights)
                save_adapter(model, directory, weights)
                if merge:  # `weights` has the adapter alone
                    model, weights = _merge(run, directory, base), None
            if not is_adapted(model):
                _save_weights(run, model, base, directory, weights)
    except SafetensorError as error:
        raise OSError(first_line(error)) from error
    if value_head is not None:
        write_value_head(value_head, directory)
    write_files(run.files, directory)  # last: the configuration of an adapter that trains on is not the base's


def _merge(run: TrainingRun, directory: Path, base: str) -> Any:
    """Return the whole model with the adapter in `directory` in it, and remove the directory."""
    _log.info("merging the adapter into the model")
    merged = load_merged(base, directory, seed=run.options.seed)
    for path in directory.iterdir():
        path.unlink()
    return merged


def _save_weights(
    run: TrainingRun, model: Any, source: str, directory: Path, weights: dict[str, Any] | SavedWeights | None
) -> None:
    """Write a model, and the rest of a checkpoint of which it is the text half."""
    is_rounded = run.options.save_dtype == "source"
    if has_rest(model, source):
        assert not isinstance(weights, SavedWeights)
        save_whole(model, source, directory, weights, rounded=is_rounded)
        return
    if weights is None:  # one process
        weights = saved_weights(model)
    if not isinstance(weights, SavedWeights):
        weights = converted_weights(model, weights)
    if is_rounded:
        fields = json.loads(run.files[CONFIG_FILE])
        default = fields.get("dtype") or fields.get("torch_dtype")
        weights = weights.rounded(stored_dtypes(source, weights.layout, default))
    weights.write(directory)
