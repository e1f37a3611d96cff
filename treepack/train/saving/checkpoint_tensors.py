"""The tensors of a checkpoint in safetensors files: each rank writes its parts, and any number of ranks reads them.

    "w" [5, 8] on 2 ranks    rank 0: rows 0 ... 2    rank-00000-000.safetensors    "w" [3, 8] starts at [0, 0] of [5, 8]
                             rank 1: rows 3 and 4    rank-00001-000.safetensors    "w" [2, 8] starts at [3, 0] of [5, 8]

    tensors, sharded or not --own_parts--> the parts that this rank writes --write_parts--> files of this rank
    files of all ranks --read_layout--> for each tensor, the boxes of files it consists of
    layout, tensors of any sharding --fill_tensors--> the tensors, filled in place

A part has the name of its tensor. The metadata of its file contain its start and the shape of the whole tensor.
`read_layout` checks that the parts are the whole of each tensor. Only the values in them are not checked.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from treepack.errors import TreepackError, first_line
from treepack.memory.device_memory import local_part
from treepack.model.weights.files import DTYPES
from treepack.model.weights.reading import own_part
from treepack.model.weights.traced import TracedBox, TracedTensor
from treepack.model.weights.writing import plan_file, write_tensor

FILE_NAME = re.compile(r"rank-\d{5,}-\d{3,}\.safetensors")
_FILE_BYTES = 2 << 30  # of several files, threads write and hash several at a time
_METADATA = "parts"


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor, which begins at `start` of a whole of this `shape`."""

    tensor: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]


def own_parts(tensors: Mapping[str, Tensor], *, leads: bool) -> dict[str, TensorPart]:
    """Return the parts of `tensors` that this rank writes; every element is in the part of exactly one rank.

    Tensors that are not sharded are written by the first rank, which `leads`.
    """
    parts = {}
    for name, tensor in tensors.items():
        ranges, is_writer = own_part(tensor), leads
        if isinstance(tensor, DTensor):
            place = tensor.device_mesh.get_coordinate()
            assert place is not None
            # Ranks along a dimension of the mesh before the last one have equal parts. An empty part has no rows, but
            # an empty tensor is written too.
            is_writer = not any(place[:-1]) and (not place[-1] or local_part(tensor).numel() > 0)
        if is_writer:
            start = tuple(first for first, _ in ranges)
            parts[name] = TensorPart(local_part(tensor).detach(), start, tuple(tensor.shape))
    return parts


def write_parts(parts: Mapping[str, TensorPart], folder: Path, *, rank: int) -> list[Path]:
    """Write parts on the CPU into files of `rank` in `folder`, flush them to disk, and return their paths.

    Raises:
        OSError: the disk fails.
    """
    groups: list[dict[str, TensorPart]] = [{}]
    size = 0
    for name, part in parts.items():
        size += part.tensor.nbytes
        if groups[-1] and size > _FILE_BYTES:
            groups.append({})
            size = part.tensor.nbytes
        groups[-1][name] = part
    paths = [folder / f"rank-{rank:05d}-{number:03d}.safetensors" for number in range(len(groups))]
    with ThreadPoolExecutor() as pool:  # writing leaves the interpreter to other threads
        list(pool.map(_write_file, paths, groups))
    return paths


def _write_file(path: Path, parts: Mapping[str, TensorPart]) -> None:
    places = json.dumps({name: [part.start, part.shape] for name, part in parts.items()})
    tensors = {name: part.tensor for name, part in parts.items()}
    plan = plan_file(tensors, tensors, {_METADATA: places})
    with path.open("wb") as file:
        file.write(plan.header)
        for name, start in plan.starts.items():
            write_tensor(file, start, tensors[name])
        file.flush()
        os.fsync(file.fileno())


def read_layout(files: Sequence[Path]) -> dict[str, TracedTensor]:
    """Return the tensors in `files` by name, each as boxes that have the path of a file as their name.

    Raises:
        TreepackError: a file is not one of `write_parts`, or the parts of a tensor are not the whole tensor.
        OSError: a file cannot be read.
    """
    boxes: dict[str, list[TracedBox]] = {}
    kinds: dict[str, tuple[Any, torch.dtype]] = {}
    for path in files:
        with _opened(path) as file:
            places = _places(path, file)
            for name in file.keys():  # noqa: SIM118  # not a dict
                part, (start, shape) = file.get_slice(name), places[name]
                sizes, dtype = part.get_shape(), DTYPES.get(part.get_dtype())
                fits = len(start) == len(sizes) == len(shape) and all(
                    0 <= first <= first + size <= whole for first, size, whole in zip(start, sizes, shape, strict=True)
                )
                if dtype is None or not fits or kinds.setdefault(name, (shape, dtype)) != (shape, dtype):
                    raise _incomplete(path, name)
                source, axes = tuple((0, size) for size in sizes), tuple(range(len(sizes)))
                boxes.setdefault(name, []).append(TracedBox(str(path), source, axes, tuple(start)))
    for name, (shape, _) in kinds.items():
        if not _is_whole(shape, [box.target for box in boxes[name]]):
            raise _incomplete(files[0].parent, name)
    return {name: TracedTensor(boxes[name], *kind) for name, kind in kinds.items()}


@torch.no_grad()
def fill_tensors(layout: Mapping[str, TracedTensor], tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` by name, of which this rank may hold parts, with the saved ones of equal shape and dtype.

    Raises:
        OSError: a file cannot be read.
    """
    found: dict[str, list[tuple[str, TracedBox]]] = {}
    for name, tensor in tensors.items():
        for box in layout[name].boxes or ():
            if (inside := box.within(own_part(tensor))) is not None:
                found.setdefault(inside.name, []).append((name, inside))
    for path, boxes in found.items():
        with _opened(Path(path)) as file:
            for name, box in boxes:
                box.put(file.get_slice(name), local_part(tensors[name]))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose header the library checks: lengths, types, and places inside of the file."""
    from safetensors import SafetensorError, safe_open

    path.stat()  # an OSError with the reason of the disk
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise _foreign(path, first_line(error)) from error


def _places(path: Path, file: Any) -> dict[str, tuple[list[int], list[int]]]:
    """Return start and shape of the whole for the parts in a file, which are integers for every part."""
    try:
        places: dict[str, tuple[list[int], list[int]]] = json.loads((file.metadata() or {})[_METADATA])
        are_places = places.keys() == set(file.keys()) and all(
            len(place) == 2
            and all(type(number) is int for numbers in place for number in numbers)
            and math.prod(max(1, size) for size in place[1]) < 1 << 60  # torch counts elements in 64 bits
            for place in places.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        are_places = False
    if not are_places:
        raise _foreign(path, "it does not have the places of its tensors")
    return places


def _is_whole(shape: Sequence[int], parts: Sequence[Any]) -> bool:
    """Return True if parts, which are inside of the shape, are the whole tensor, cut along at most one dimension."""
    cuts = [dim for dim, size in enumerate(shape) if any(part[dim] != (0, size) for part in parts)]
    if len(cuts) != 1:
        return not cuts and len(parts) == 1
    # [0, 2), [2, 4), [4, 5) of 5 rows: each begins at the end of the one before
    edges = sorted(part[cuts[0]] for part in parts)
    return [first for first, _ in edges] == [0, *(stop for _, stop in edges[:-1])] and edges[-1][1] == shape[cuts[0]]


def _incomplete(path: Path, name: str) -> TreepackError:
    return TreepackError(f"{path}: the parts of {name} are not the whole tensor; take another checkpoint")


def _foreign(path: Path, problem: str) -> TreepackError:
    return TreepackError(f"{path}: is not a file of a checkpoint ({problem}); take another checkpoint")
