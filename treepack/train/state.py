"""All that an update of a training run depends on besides its data, as one flat dict, and back.

    model, optimiser, generators --training_state--> dict --(torch.distributed.checkpoint, DCP)--> load_state

    model.NAME            a parameter or persistent buffer, a DTensor where FSDP2 shards it; tied ones once
    optimiser.NAME.KEY    the optimiser's state of the parameter NAME; absent before its first update
    optimiser             its parameter groups: options and names
    random.RANK           states of Python's, numpy's and torch's generators on that rank

DCP's own get_state_dict is not used: it makes an update with an optimiser that has no state yet, which leaves its count
of updates at 1, and saves tied weights twice. The files belong to `checkpoint`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from treepack.errors import TreepackError


def training_state(model: nn.Module, optimiser: torch.optim.Optimizer, *, rank: int) -> dict[str, Any]:
    """The state as it is: its tensors are the model's and the optimiser's own, not copies."""
    tensors = _model_tensors(model)
    order = _order(tensors, optimiser)
    found = optimiser.state_dict()
    groups = [group | {"params": [order[number] for number in group["params"]]} for group in found["param_groups"]]
    state = {
        f"optimiser.{order[number]}.{key}": value
        for number, values in found["state"].items()
        for key, value in values.items()
    }
    own = {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}
    return own | state | {"optimiser": groups, f"random.{rank}": _random_states()}


def load_state(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, *, rank: int, collective: dict[str, Any]
) -> None:
    """Load the state that DCP's files in `path` hold, whatever the number of ranks that wrote it.

    Args:
        path: directory of DCP's files.
        model: parameters and buffers are filled in place.
        optimiser: gets the state and the options of its groups; none where none was saved.
        rank: this process, whose generators are set if it existed then.
        collective: arguments of DCP's load about the ranks.

    Raises:
        TreepackError: parameters, or their groups, are not those that were saved.
        OSError, CheckpointException: the files cannot be read.
    """
    tensors = _model_tensors(model)
    order = _order(tensors, optimiser)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    _check_tensors(path, tensors, saved)
    objects: dict[str, Any] = dict.fromkeys({"optimiser", f"random.{rank}"} & saved.keys())
    _load(path, objects, collective)
    options = _options_of_groups(path, order, optimiser, objects["optimiser"])

    own = {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}
    number_of = {name: number for number, name in enumerate(order)}
    state = {
        key: _like(tensors[name], entry)
        for key, entry in saved.items()
        if key.startswith("optimiser.") and (name := _state_key(key)[0]) in number_of
    }
    loaded = own | state
    _load(path, loaded, collective)
    by_number: dict[int, dict[str, Any]] = {}
    for key in state:
        name, part = _state_key(key)
        by_number.setdefault(number_of[name], {})[part] = loaded[key]
    optimiser.load_state_dict({"state": by_number, "param_groups": options})
    if f"random.{rank}" in objects:
        _set_random_states(objects[f"random.{rank}"])


def _load(path: Path, state: dict[str, Any], collective: dict[str, Any]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state_dict_loader.load(state, storage_reader=FileSystemReader(path), planner=planner, **collective)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, tied ones under the first of their names."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _order(tensors: dict[str, Tensor], optimiser: torch.optim.Optimizer) -> list[str]:
    """Names of the optimiser's parameters, in the order in which its state_dict numbers them."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    return [names[id(parameter)] for group in optimiser.param_groups for parameter in group["params"]]


def _state_key(key: str) -> tuple[str, str]:
    name, _, part = key.removeprefix("optimiser.").rpartition(".")
    return name, part


def _like(parameter: Tensor, entry: Any) -> Tensor | None:
    """Where a piece of a parameter's state is loaded to: sharded like it, or whole on the CPU if of another shape."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _check_tensors(path: Path, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    there = {key.removeprefix("model."): entry for key, entry in saved.items() if key.startswith("model.")}
    for name in [*tensors, *there]:
        if name not in there or name not in tensors:
            lacking = "the checkpoint" if name not in there else "the model"
            raise TreepackError(f"{path}: {lacking} has no {name}; resume with the model that was trained")
        ours, entry = tensors[name], there[name]
        if (ours.shape, ours.dtype) != (entry.size, entry.properties.dtype):
            raise TreepackError(
                f"{path}: {name} is {entry.properties.dtype} of shape {tuple(entry.size)} in the checkpoint and "
                f"{ours.dtype} of shape {tuple(ours.shape)} in the model; resume with the model that was trained"
            )


def _options_of_groups(
    path: Path, order: list[str], optimiser: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved groups with this optimiser's numbers for their parameters; they must hold the same parameters."""
    if len(optimiser.param_groups) != len(saved):
        raise TreepackError(
            f"{path}: holds {len(saved)} groups of parameters and the optimiser has {len(optimiser.param_groups)}; "
            "resume with the options of the run"
        )
    options, first = [], 0
    for group, theirs in zip(optimiser.param_groups, saved, strict=True):
        numbers = range(first, first + len(group["params"]))
        first = numbers.stop
        differing = sorted({order[number] for number in numbers} ^ set(theirs["params"]))
        if differing:
            raise TreepackError(
                f"{path}: {differing[0]} is in another group of the optimiser; resume with the options of the run"
            )
        options.append(theirs | {"params": list(numbers)})
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
