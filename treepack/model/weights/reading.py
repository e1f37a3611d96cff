"""Read the weights of a sharded model: each rank reads its part of every tensor, one tensor at a time.

    model on the meta device, files --find_plan--> for each tensor of the model, the boxes of files it consists of
    plan, sharded model             --fill-------> the rank's part in memory

                            rank 0                  rank 1
    experts.gate_up_proj    experts 0 ... 63        experts 64 ... 127        (dimension 0 is cut by FSDP2)
    is read from            experts.0.gate_proj.weight, ..., or a part of one larger tensor

Besides its part of the model, a rank needs memory for one tensor of a file. Each file is opened for one tensor of the
model at a time, because pages of an open file count as memory of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treepack.memory.device_memory import local_part
from treepack.model.adapters.adapter import base_name
from treepack.model.weights.conversion import stored_tensors, trace_loading
from treepack.model.weights.files import DTYPES, translate_read_errors
from treepack.model.weights.traced import Ranges, TracedBox, TracedTensor


def find_plan(model: Any, files: Mapping[str, Path], source: str) -> dict[str, TracedTensor] | None:
    """Return the boxes of each tensor of `model`; None if only transformers can convert the weights.

    Args:
        model: a model on the meta device.
        files: the file of every tensor of the checkpoint.
        source: the checkpoint, for errors.

    Raises:
        TreepackError: a file cannot be read, or a tensor has another shape than in the configuration.
    """
    from safetensors import safe_open

    stored: dict[str, tuple[list[int], torch.dtype]] = {}
    for path, names in _by_file(files).items():
        with translate_read_errors(source), safe_open(path, "pt") as file:
            for name in names:
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    return None
                stored[name] = part.get_shape(), DTYPES[part.get_dtype()]
    return trace_loading(model, stored, source=source)


@torch.no_grad()
def fill(
    model: Any, plan: Mapping[str, TracedTensor], files: Mapping[str, Path], device: torch.device, source: str
) -> None:
    """Allocate the memory of a sharded model on the meta device, and read this rank's part of the frozen weights.

    The parameters of an adapter are in no file of the base, and stay NaN.

    Args:
        model: the sharded model.
        plan: from `find_plan`, before the model was sharded or got an adapter.
        files: the file of every tensor of the checkpoint.
        device: the device of the weights.
        source: the checkpoint, for errors.

    Raises:
        TreepackError: a file cannot be read.
    """
    model.to_empty(device=device)
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        local = local_part(tensor)
        if local.is_floating_point():
            local.fill_(torch.nan)  # a tensor that is forgotten below must not pass the probe
    stored = {base_name(name): tensor for name, tensor in stored_tensors(model).items()}
    stored = {name: tensor for name, tensor in stored.items() if name in plan}
    assert stored.keys() == plan.keys(), "a weight that is not read would be drawn at random below"
    for name, tensor in stored.items():
        with translate_read_errors(source):
            read_part(plan[name], own_part(tensor), files, local_part(tensor))
    # Buffers that no checkpoint contains, such as rotary frequencies, are computed by `initialize_weights`. The flag
    # keeps it from overwriting the weights that were just read.
    for tensor in stored.values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


def read_part(traced: TracedTensor, part: Ranges, files: Mapping[str, Path], tensor: Tensor) -> None:
    """Read the window `part` of a traced tensor into `tensor`, which has its shape."""
    from safetensors import safe_open

    boxes: dict[str, list[TracedBox]] = {}
    for box in traced.boxes or ():
        if (inside := box.within(part)) is not None:
            boxes.setdefault(inside.name, []).append(inside)
    for path, names in _by_file({name: files[name] for name in boxes}).items():
        with safe_open(path, "pt") as file:
            for name in names:
                stored = file.get_slice(name)
                for box in boxes[name]:
                    box.put(stored, tensor)


def _by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    names: dict[Path, list[str]] = {}
    for name, path in files.items():
        names.setdefault(path, []).append(name)
    return names


def own_part(tensor: Tensor) -> Ranges:
    """Return the window of a whole tensor that this rank holds; all of it if the tensor is not sharded."""
    from torch.distributed.tensor import DTensor

    ranges = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        # The last dimension of the mesh has the parts; ranks along one before it have equal parts.
        dim, ranks = tensor.placements[-1].dim, tensor.device_mesh.ndim - 1  # type: ignore[attr-defined]
        # Parts of ceil(rows / ranks) rows, the last ones smaller or empty:
        # 5 rows on 4 ranks -> [0, 2), [2, 4), [4, 5), empty
        length, rows = -(-tensor.shape[dim] // tensor.device_mesh.size(ranks)), tensor.shape[dim]
        first = length * tensor.device_mesh.get_local_rank(ranks)
        ranges[dim] = (min(first, rows), min(first + length, rows))
    return tuple(ranges)
