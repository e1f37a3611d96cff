"""The weights that a run starts with if they are not its model's: a checkpoint or model of a different run.

    init_from --find_weights--> InitialWeights: the folder to load instead of the model, or a checkpoint to read

    RUN that is complete, a model, its address or hub name     loaded in place of the model
    RUN that is not complete                                   its newest whole checkpoint
    RUN/checkpoints/step-00000100                              this checkpoint

Only weights are taken. Configuration and tokenizer come from the model, and a model of other shapes is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from treepack.errors import TreepackError
from treepack.files.directory import RUN
from treepack.files.model_source import local_source
from treepack.files.remote.address import is_address
from treepack.model.accept.vocabulary import find_config
from treepack.model.adapters.adapter import find_adapter
from treepack.model.load import read_config, translate_load_errors
from treepack.model.stored_weights import check_stored
from treepack.model.text_half import model_from_config
from treepack.train.saving.checkpoint import latest
from treepack.train.saving.checkpoint_files import CHECKPOINTS, RECORD, step_of_name
from treepack.train.saving.checkpoint_ranks import all_ranks
from treepack.train.saving.state import SavedCheckpoint, load_weights


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights come from: `source` is loaded, and then `checkpoint` is read if there is one."""

    source: str | Path
    checkpoint: SavedCheckpoint | None
    note: str

    def fill(self, model: Any) -> None:
        """Read the checkpoint, if there is one, into the model; all ranks must call this.

        Raises:
            TreepackError: the checkpoint has other tensors than the model, or cannot be read.
        """
        if (checkpoint := self.checkpoint) is not None:
            all_ranks().together(lambda: load_weights(checkpoint, model))


def find_weights(init_from: str, model: str | Path, *, dequantize: bool = False) -> InitialWeights:
    """Find the weights of `init_from` for `model`; all ranks must call this. With `dequantize` they may be quantised.

    Raises:
        TreepackError: there are none, they are damaged, or their shapes differ from `model`.
    """
    checkpoint = _find_checkpoint(init_from)
    if checkpoint is not None:
        return InitialWeights(model, checkpoint, f"the run starts with the weights of {checkpoint.path}")
    check_stored(init_from, find_config(local_source(init_from)) or {}, trained=True, dequantize=dequantize)
    _check_shapes(init_from, model)
    return InitialWeights(init_from, None, f"the run starts with the weights of {init_from}")


def _find_checkpoint(init_from: str) -> SavedCheckpoint | None:
    """Return the checkpoint that `init_from` names, or None if it names a model.

    Raises:
        TreepackError: it is a run without a checkpoint, or all checkpoints are damaged.
    """
    if is_address(init_from):
        return None
    path = Path(init_from)
    if (path / RECORD).exists():
        return latest(path.parent, step=step_of_name(path.name))[0]
    # The model of a complete run is in its directory.
    if not (path / RUN).exists() or (path / "train.json").exists():
        return None
    checkpoint, _ = latest(path / CHECKPOINTS)
    if checkpoint is None:
        raise TreepackError(f"{path}: is a run without a checkpoint; wait for its first one, or choose another run")
    return checkpoint


def _check_shapes(init_from: str, model: str | Path) -> None:
    """Refuse weights whose names or shapes differ from the model's; only the configurations are read."""
    ours, theirs = (_shapes(source) for source in (model, init_from))
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            one, other = (f"of shape {each[name]}" if name in each else "missing" for each in (ours, theirs))
            raise TreepackError(
                f"{init_from}: its {name} is {other} and that of {model} is {one}; start from a run of the same model"
            )


def _shapes(source: str | Path) -> dict[str, list[int]]:
    if find_adapter(source) is not None:
        raise TreepackError(f"{source}: is an adapter, and --init-from is about whole models; give it as --model alone")
    config, _ = read_config(source)
    with translate_load_errors(source), torch.device("meta"):
        model = model_from_config(config, dtype=torch.float32)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
