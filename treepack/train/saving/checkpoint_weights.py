"""The weights of a checkpoint that are in the files of the saved model, so that the last step writes them once.

    out/model.safetensors                              one file with two names (hard links), so that each
    out/checkpoints/step-00000010/model.safetensors    of the two directories is whole without the other

    model --find_boxes--> FileBoxes: for each of its tensors, the boxes of the files' tensors that it consists of
    directory of the model, checkpoint --link_weights--> its weight files in the checkpoint
    checkpoint --linked_files--> files --FileBoxes.check, FileBoxes.read--> the tensors of a model, whole or sharded

An adapter, a value head and weights that only transformers can convert are in the files of DCP.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treepack.errors import TreepackError
from treepack.memory.device_memory import local_part
from treepack.model.head.value_head import without_value_head
from treepack.model.weights.files import DTYPES
from treepack.model.weights.reading import own_part, read_part
from treepack.model.weights.traced import TracedBox, TracedTensor
from treepack.model.weights.writing import saved_weights

_PATTERN = "*.safetensors"


@dataclass(frozen=True)
class FileBoxes:
    """The tensors of a model that its saved files contain bit for bit.

    Attributes:
        tensors: for each of them by its name, the boxes of the files' tensors.
        layout: shape and dtype of the files' tensors by name.
    """

    tensors: Mapping[str, TracedTensor]
    layout: Mapping[str, Tensor]

    def check(self, files: Mapping[str, Path], source: Path) -> None:
        """Refuse the weight files of a checkpoint whose tensors differ from the model's.

        Raises:
            TreepackError: a tensor is missing, or has another shape or dtype.
        """
        from safetensors import safe_open

        for name, expected in self.layout.items():
            if name not in files:
                raise TreepackError(f"{source}: the checkpoint has no {name}; take the model that was trained")
            with safe_open(files[name], "pt") as file:
                part = file.get_slice(name)
                shape, dtype = tuple(part.get_shape()), DTYPES.get(part.get_dtype())
            if (shape, dtype) != (tuple(expected.shape), expected.dtype):
                raise TreepackError(
                    f"{source}: {name} is {dtype} of shape {shape} in the checkpoint and {expected.dtype} of shape "
                    f"{tuple(expected.shape)} in the model; take the model that was trained"
                )

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
        """Fill the `tensors` of a model by name, of which this rank may hold parts, from weight files."""
        for name, traced in self.tensors.items():
            tensor = tensors[name].detach()
            read_part(traced, own_part(tensor), files, local_part(tensor))


def find_boxes(model: Any) -> FileBoxes:
    """Return the boxes of the tensors of `model` in the files of its saved model."""
    with without_value_head(model):
        weights = saved_weights(model)
    if weights is None:
        return FileBoxes({}, {})
    boxes: dict[str, list[TracedBox]] = {name: [] for name in weights.tensors}
    casts = set()
    for target, traced in weights.layout.items():
        for box in traced.boxes or ():
            # The box is turned around. Of a tensor in the file with axes (None, 1, 0): dimension 0 of the model's
            # tensor is dimension 2 there, and dimension 1 is dimension 1.
            axes = tuple(box.axes.index(axis) if axis in box.axes else None for axis in range(len(box.source)))
            start = tuple(first for first, _ in box.source)
            boxes[box.name].append(TracedBox(target, box.target, axes, start))
            if traced.dtype != weights.tensors[box.name].dtype:
                casts.add(box.name)
    known = {
        name: traced
        for name, tensor in weights.tensors.items()
        if name not in casts and (traced := TracedTensor(boxes[name], tensor.shape, tensor.dtype)).is_known
    }
    used = {box.name for traced in known.values() for box in traced.boxes or ()}
    return FileBoxes(known, {name: traced for name, traced in weights.layout.items() if name in used})


def link_weights(saved_model: Path, checkpoint: Path) -> None:
    """Give the weight files in `saved_model` a second name in `checkpoint`, and flush them to disk.

    Raises:
        OSError: the disk fails.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    for file in sorted(saved_model.glob(_PATTERN)):
        path = checkpoint / file.name
        try:
            os.link(file, path)
        except OSError:  # a file system without links, such as exFAT and some network disks
            shutil.copyfile(file, path)
        with path.open("rb") as opened:
            os.fsync(opened.fileno())


def linked_files(checkpoint: Path) -> dict[str, Path]:
    """Return the file of each tensor in the weight files of a checkpoint; empty if DCP's files contain all weights.

    Raises:
        OSError: a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    files: dict[str, Path] = {}
    for path in sorted(checkpoint.glob(_PATTERN)):
        try:
            with safe_open(path, "pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from error
    return files
