"""The state of a training run, without its data, as one flat dict: everything on which the next update depends.

    model, optimiser, generators --training_state--> dict --(torch.distributed.checkpoint, DCP)--> load_state

    model.NAME            a parameter or persistent buffer, a DTensor if FSDP2 shards it; tied ones once; of a model
                          with an adapter only the adapter; absent if weight files contain it (`checkpoint_weights`)
    optimiser.NAME.KEY    the optimiser's state of the parameter NAME; absent before its first update
    optimiser             its parameter groups: options and names
    random.RANK           states of Python's, numpy's and torch's generators on that rank

DCP's own get_state_dict is not used. It makes an update with an optimiser that has no state yet, which leaves its count
of updates at 1, and it saves tied weights twice. `train.saving.checkpoint` decides when to save, and checks the files.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from treepack.errors import TreepackError
from treepack.memory.offloaded_adamw import OffloadedAdamW
from treepack.model.adapters.adapter import is_adapted
from treepack.train.saving.checkpoint_files import describe_error
from treepack.train.saving.checkpoint_pickles import CheckpointReader, PlainPlanner
from treepack.train.saving.checkpoint_weights import FileBoxes, find_boxes, linked_files


def training_state(
    model: nn.Module, optimiser: torch.optim.Optimizer, *, rank: int, without_weights: bool = False
) -> dict[str, Any]:
    """Return the state; its tensors share memory with the tensors of the model and the optimiser.

    With `without_weights`, the tensors of the model that the files of its saved model contain are left out.
    """
    tensors = _model_tensors(model)
    order = _parameter_order(tensors, optimiser)
    saved = optimiser.state_dict()
    # An optimiser numbers its parameters over all groups. A checkpoint has their names, so that an error can name the
    # parameter: {"lr": 0.1, "params": [0, 1]} -> {"lr": 0.1, "params": ["embed.weight", "head.weight"]}
    groups = [group | {"params": [order[number] for number in group["params"]]} for group in saved["param_groups"]]
    state = {
        f"optimiser.{order[number]}.{key}": value
        for number, values in saved["state"].items()
        for key, value in values.items()
    }
    saved_elsewhere = _boxes_by_name(model, tensors).tensors if without_weights else {}
    model_state = {f"model.{name}": tensor.detach() for name, tensor in tensors.items() if name not in saved_elsewhere}
    return model_state | state | {"optimiser": groups, f"random.{rank}": _random_states()}


def load_state(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, *, rank: int, collective: dict[str, Any]
) -> None:
    """Load the state from DCP's files in `path`, which any number of ranks may have written.

    Args:
        path: directory of DCP's files.
        model: its parameters and buffers are filled in place.
        optimiser: gets the saved state, or none if none was saved, and the saved options of its groups.
        rank: this process; its random generators are set if the files contain their states.
        collective: arguments of DCP's load about the ranks.

    Raises:
        TreepackError: the parameters or their groups differ from the saved ones, or a file names foreign code.
        OSError, CheckpointException: the files cannot be read.
    """
    tensors = _model_tensors(model)
    order = _parameter_order(tensors, optimiser)
    saved = _checked_metadata(path)
    files = linked_files(path)
    boxes = _boxes_by_name(model, tensors) if files else FileBoxes({}, {})
    inside = {name: tensor for name, tensor in tensors.items() if name not in boxes.tensors}
    boxes.check(files, path)
    _check_tensors(path, inside, saved)
    # Two loads: groups and generators first, so that a model or optimiser that does not fit is refused before any
    # tensor is overwritten.
    objects: dict[str, Any] = dict.fromkeys({"optimiser", f"random.{rank}"} & saved.keys())
    _load(path, objects, collective)
    options = _options_of_groups(path, order, optimiser, objects["optimiser"])

    model_state = {f"model.{name}": tensor.detach() for name, tensor in inside.items()}
    number_of = {name: number for number, name in enumerate(order)}
    # Buffers of the right shape and sharding, which DCP fills.
    states = {
        key: (tensors[name], entry)
        for key, entry in saved.items()
        if key.startswith("optimiser.") and (name := _state_key(key)[0]) in number_of
    }
    _check_state_types(path, states)
    in_host = isinstance(optimiser, OffloadedAdamW)
    state = {key: _state_buffer(parameter, entry, in_host=in_host) for key, (parameter, entry) in states.items()}
    loaded = model_state | state
    _load(path, loaded, collective)
    boxes.read(tensors, files)
    by_number: dict[int, dict[str, Any]] = {}
    for key in state:
        name, part = _state_key(key)
        by_number.setdefault(number_of[name], {})[part] = loaded[key]
    optimiser.load_state_dict({"state": by_number, "param_groups": options})
    if f"random.{rank}" in objects:
        _set_random_states(objects[f"random.{rank}"])


def load_weights(path: Path, model: nn.Module, *, collective: dict[str, Any]) -> None:
    """Load the parameters and persistent buffers alone from DCP's files in `path`; arguments as in `load_state`.

    A value head that only one of model and checkpoint has is left as it is: a critic may start from a policy.

    Raises:
        TreepackError: the tensors differ from the saved ones, or cannot be read.
    """
    tensors = _model_tensors(model)
    try:
        saved = _checked_metadata(path)
        heads = [{key for key in keys if ".value_head." in key} for keys in (saved, map("model.{}".format, tensors))]
        alone = set() if all(heads) else heads[0] ^ heads[1]
        files = linked_files(path)
        boxes = _boxes_by_name(model, tensors) if files else FileBoxes({}, {})
        inside = {
            name: tensor
            for name, tensor in tensors.items()
            if f"model.{name}" not in alone and name not in boxes.tensors
        }
        boxes.check(files, path)
        _check_tensors(path, inside, {key: entry for key, entry in saved.items() if key not in alone})
        _load(path, {f"model.{name}": tensor.detach() for name, tensor in inside.items()}, collective)
        boxes.read(tensors, files)
    except (OSError, CheckpointException) as error:
        raise TreepackError(
            f"{path}: cannot be read ({describe_error(error)}); check that its disk is mounted"
        ) from error


def _checked_metadata(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint by name.

    Raises:
        TreepackError: a tensor has no size or type, or its chunks are not all of it; DCP would leave the rest as it is.
    """
    saved: dict[str, Any] = CheckpointReader(path).read_metadata().state_dict_metadata
    for name, entry in saved.items():
        if isinstance(entry, TensorStorageMetadata) and not _is_whole(entry):
            raise TreepackError(f"{path}: the chunks of {name} are not the whole tensor; take another checkpoint")
    return saved


def _is_whole(entry: Any) -> bool:
    """Return True if the chunks of a tensor are inside of it and have as many numbers."""
    if entry.size is None or entry.properties is None or entry.chunks is None:
        return False
    for chunk in entry.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            return False
        places = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if not all(start >= 0 and num >= 0 and start + num <= size for start, num, size in places):
            return False
    # Shape [4, 3] in chunks of [2, 3] and [2, 3] -> 6 + 6 = 12
    num_stored: int = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    num_numbers: int = math.prod(entry.size)
    return num_stored == num_numbers


def _check_state_types(path: Path, states: dict[str, tuple[Tensor, Any]]) -> None:
    """Refuse moments whose dtype differs from that of their parameter, and numbers of steps that are not float32."""
    for key, (parameter, entry) in states.items():
        if isinstance(entry, TensorStorageMetadata):
            expected = parameter.dtype if entry.size == parameter.shape else torch.float32
            if entry.properties.dtype != expected:
                raise TreepackError(
                    f"{path}: {key} is {entry.properties.dtype} in the checkpoint; expected {expected}; take another "
                    "checkpoint"
                )


def _load(path: Path, state: dict[str, Any], collective: dict[str, Any]) -> None:
    try:
        state_dict_loader.load(state, storage_reader=CheckpointReader(path), planner=PlainPlanner(path), **collective)
    except CheckpointException as error:  # collects the exceptions of all ranks
        for failure, _ in error.failures.values():
            if isinstance(failure, TreepackError):
                raise failure from error
        raise


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers (not copies), tied ones under the first of their names.

    Of a model with an adapter, only the trained weights: the others are in the files of the base model.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    # Without keep_vars, state_dict makes new tensors, and tied weights would have two identities.
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen and (value.requires_grad or not is_adapted(model)):
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _boxes_by_name(model: nn.Module, tensors: dict[str, Tensor]) -> FileBoxes:
    """Return the boxes in the files of the saved model by the names of `tensors`, which may differ for tied ones."""
    names, state = {id(each): name for name, each in tensors.items()}, model.state_dict(keep_vars=True)
    boxes = find_boxes(model)
    return replace(boxes, tensors={names[id(state[name])]: traced for name, traced in boxes.tensors.items()})


def _parameter_order(tensors: dict[str, Tensor], optimiser: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimiser's parameters, in the order in which its state_dict numbers them."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    return [names[id(parameter)] for group in optimiser.param_groups for parameter in group["params"]]


def _state_key(key: str) -> tuple[str, str]:
    # "optimiser.model.norm.weight.exp_avg" -> "model.norm.weight", "exp_avg"
    name, _, part = key.removeprefix("optimiser.").rpartition(".")
    return name, part


def _state_buffer(parameter: Tensor, entry: Any, *, in_host: bool) -> Tensor | None:
    """Return a tensor to load a part of a parameter's optimiser state into; None if the part is not a tensor.

    A part with the shape of the parameter, such as exp_avg, is sharded like it, and on the CPU if `in_host`. Others,
    such as step, are whole and on the CPU.
    """
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if entry.size == parameter.shape:
        device = torch.device("cpu") if in_host else None
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, device=device, requires_grad=False)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _check_tensors(path: Path, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Refuse a model whose tensors differ from the saved ones."""
    entries = {key.removeprefix("model."): entry for key, entry in saved.items() if key.startswith("model.")}
    for name in [*tensors, *entries]:
        if name not in entries or name not in tensors:
            lacking = "the checkpoint" if name not in entries else "the model"
            raise TreepackError(f"{path}: {lacking} has no {name}; take the model that was trained")
        tensor, entry = tensors[name], entries[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise TreepackError(f"{path}: {name} is not a tensor in the checkpoint; take another checkpoint")
        if (tensor.shape, tensor.dtype) != (entry.size, entry.properties.dtype):
            raise TreepackError(
                f"{path}: {name} is {entry.properties.dtype} of shape {tuple(entry.size)} in the checkpoint and "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} in the model; take the model that was trained"
            )


def _options_of_groups(
    path: Path, order: list[str], optimiser: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the saved groups, with the names of their parameters replaced by the numbers of this optimiser.

    Raises:
        TreepackError: a group of this optimiser contains other parameters than the saved group.
    """
    if len(optimiser.param_groups) != len(saved):
        raise TreepackError(
            f"{path}: contains {len(saved)} groups of parameters and the optimiser has {len(optimiser.param_groups)}; "
            "resume with the options of the run"
        )
    options, first = [], 0
    for group, saved_group in zip(optimiser.param_groups, saved, strict=True):
        numbers = range(first, first + len(group["params"]))  # groups of 3 and 2 parameters: 0 1 2, then 3 4
        first = numbers.stop
        differing = sorted({order[number] for number in numbers} ^ set(saved_group["params"]))
        if differing:
            raise TreepackError(
                f"{path}: {differing[0]} is in another group of this optimiser; resume with the options of the run"
            )
        options.append(saved_group | {"params": list(numbers)})
    return options


def _random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
