"""Write the weights of a model in the names and shapes of its checkpoint, one tensor in memory at a time.

    model of one process or sharded --saved_weights--> SavedWeights, on every rank
    SavedWeights.write, on rank 0   ------------------> model-00001-of-00003.safetensors, ..., index
    SavedWeights.gather, on others                      the same tensors, gathered and dropped

    order of gathering      experts.gate_up_proj of layer 0     ...down_proj of layer 0     ... of layer 1
    written at its place    experts.0.gate_proj.weight ...      experts.0.down_proj ...

The header of a safetensors file gives the place of every tensor, so they can be written in any order. transformers' own
`save_pretrained` needs the whole model on the CPU, and a second copy of fused experts on the device of the weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from treepack.model.adapters.adapter import is_adapted
from treepack.model.foreign_errors import translate_errors
from treepack.model.weights.conversion import stored_tensors, trace_saving
from treepack.model.weights.files import DTYPES, INDEX_FILE, SINGLE_FILE
from treepack.model.weights.traced import TracedBox, TracedTensor

_MAX_FILE_BYTES = 50_000_000_000  # the default of transformers

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class SavedWeights:
    """The weight files to write, and the tensors in memory in the order in which all ranks gather them.

    Attributes:
        layout: for each tensor of the checkpoint, the boxes of `tensors` that it consists of.
        tensors: the tensors of the model by name, sharded or not.
    """

    layout: Mapping[str, TracedTensor]
    tensors: Mapping[str, Tensor]
    _rest: Iterator[tuple[str, Tensor]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rest", _whole(self.tensors))

    def rounded(self, dtypes: Mapping[str, torch.dtype]) -> SavedWeights:
        """Return the same weights, of which the files have floating-point tensors in `dtypes`, by name."""
        layout = {
            name: TracedTensor(traced.boxes, traced.shape, dtypes[name] if traced.is_floating_point() else traced.dtype)
            for name, traced in self.layout.items()
        }
        weights = SavedWeights(layout, self.tensors)
        object.__setattr__(weights, "_rest", self._rest)  # `gather` of either one ends the gathering
        return weights

    def gather(self) -> None:
        """Gather the remaining tensors together with the other ranks, and drop them."""
        for _ in self._rest:
            pass

    def write(self, directory: Path, *, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        """Write the weight files, and their index if there are several; files of the same name are replaced.

        Raises:
            OSError: the disk fails. Other ranks then wait for the rest: call `gather`.
        """
        places = _plan_files(self.layout, self._names_in_order(), max_file_bytes)
        boxes: dict[str, list[tuple[str, TracedBox]]] = {}
        for target, traced in self.layout.items():
            for box in traced.boxes or ():
                boxes.setdefault(box.name, []).append((target, box))
        waiting: dict[str, _AssembledTensor] = {}
        with ExitStack() as stack:
            files = {name: stack.enter_context((directory / name).open("wb")) for name in places}
            at = {
                target: (files[name], start) for name, file in places.items() for target, start in file.starts.items()
            }
            for name, file in places.items():
                files[name].write(file.header)
            for name, tensor in self._rest:
                for target, box in boxes.get(name, ()):
                    traced = self.layout[target]
                    if box.num_elements == traced.numel():
                        write_tensor(*at[target], box.take(tensor).to(traced.dtype))
                        continue
                    part = waiting.setdefault(target, _AssembledTensor(torch.empty(traced.shape, dtype=traced.dtype)))
                    if part.add(box, tensor):
                        write_tensor(*at[target], waiting.pop(target).tensor)
        if len(places) > 1:
            self._write_index(directory, places)

    def _names_in_order(self) -> list[str]:
        """Return the names of the checkpoint, in the order in which the tensors that they need are gathered."""
        order = {name: number for number, name in enumerate(self.tensors)}

        def first(name: str) -> int:
            return min((order[box.name] for box in self.layout[name].boxes or ()), default=0)

        return sorted(self.layout, key=first)

    def _write_index(self, directory: Path, places: Mapping[str, _TensorFile]) -> None:
        tensors = self.layout.values()
        sizes = {"total_parameters": sum(t.numel() for t in tensors), "total_size": sum(map(_num_bytes, tensors))}
        weight_map = {target: name for name, file in places.items() for target in file.starts}
        text = json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        (directory / INDEX_FILE).write_text(text, encoding="utf-8")


@dataclass
class _AssembledTensor:
    """A tensor of the checkpoint that is complete once `num_elements` of it are in place."""

    tensor: Tensor
    num_elements: int = 0

    def add(self, box: TracedBox, source: Tensor) -> bool:
        """Put a box of `source` in its place; return True if the tensor is complete."""
        box.put(source, self.tensor)
        self.num_elements += box.num_elements
        return self.num_elements == self.tensor.numel()


@dataclass(frozen=True)
class _TensorFile:
    """The header of a safetensors file, and the offset of each of its tensors in bytes."""

    header: bytes
    starts: dict[str, int]


def saved_weights(model: Any) -> SavedWeights | None:
    """Return the weights of a model for its checkpoint; None for an adapter, or if the conversion has no trace.

    All ranks must call it, and then either `write` or `gather`.
    """
    if is_adapted(model):
        return None
    tensors = stored_tensors(model)
    layout = trace_saving(model, tensors)
    if layout is None or not all(traced.dtype in _DTYPE_NAMES for traced in layout.values()):
        return None
    return SavedWeights(layout, {name: tensor.detach() for name, tensor in tensors.items()})


def converted_weights(model: Any, state: Mapping[str, Tensor] | None = None) -> SavedWeights:
    """Return the weights of a model whose conversion has no trace: a second copy of them, made by transformers.

    `state` are the whole tensors of a sharded model.

    Raises:
        Exception: of transformers, which cannot convert them, or a KeyError for a dtype that no file can have.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = stored_tensors(model)
    state = names if state is None else state
    tensors: dict[str, Tensor] = revert_weight_conversion(model, {name: state[name].detach() for name in names})
    return SavedWeights(_whole_layout(tensors), tensors)


def check_weights(model: Any, source: str | Path) -> None:
    """Refuse a model whose weights could not be saved; call it before training, on every rank.

    Raises:
        TreepackError: transformers cannot convert them to those of a checkpoint.
    """
    if saved_weights(model) is None:
        with translate_errors(f"{source}: transformers could not save its weights", "choose another model"):
            empty = {name: tensor.new_empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
            converted_weights(model, empty)


def _whole_layout(tensors: Mapping[str, Tensor]) -> dict[str, TracedTensor]:
    layout = {name: TracedTensor.whole(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    for traced in layout.values():
        _DTYPE_NAMES[traced.dtype]  # a KeyError
    return layout


def _whole(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return each tensor whole on the CPU; all ranks of a sharded model take them together."""
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            # A trainer's FSDP may keep shards on the CPU; ranks gather on the device of their mesh.
            whole: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
            yield name, whole.cpu()
        else:
            yield name, tensor.cpu()


def _plan_files(layout: Mapping[str, TracedTensor], names: list[str], max_bytes: int) -> dict[str, _TensorFile]:
    """Distribute the tensors over files in the order of `names`; a file has at most `max_bytes`, or one tensor."""
    groups: list[list[str]] = [[]]
    total = 0
    for name in names:
        size = _num_bytes(layout[name])
        if groups[-1] and total + size > max_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    if len(groups) == 1:
        return {SINGLE_FILE: plan_file(layout, groups[0])}
    stem, suffix = SINGLE_FILE.split(".")  # "model", "safetensors"
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}": plan_file(layout, group)
        for number, group in enumerate(groups, 1)
    }


def plan_file(
    layout: Mapping[str, Tensor], names: Iterable[str], metadata: Mapping[str, str] = MappingProxyType({})
) -> _TensorFile:
    """Return the header of a safetensors file with the tensors `names` of `layout`, and the place of each."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    starts: dict[str, int] = {}
    first = 0
    # Larger elements first, so that each tensor starts at a multiple of the size of its elements.
    for name in sorted(names, key=lambda name: -layout[name].itemsize):
        traced = layout[name]
        stop = first + _num_bytes(traced)
        shape = list(traced.shape)
        entries[name] = {"dtype": _DTYPE_NAMES[traced.dtype], "shape": shape, "data_offsets": [first, stop]}
        starts[name] = first
        first = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return _TensorFile(header, {name: len(header) + start for name, start in starts.items()})


def _num_bytes(traced: Tensor) -> int:
    return traced.numel() * traced.itemsize


def write_tensor(file: BinaryIO, start: int, tensor: Tensor) -> None:
    """Write the elements of a tensor on the CPU to `file`, from the byte `start` on; contiguous ones are not copied."""
    file.seek(start)
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
