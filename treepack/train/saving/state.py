"""The state of a training run, without its data: everything on which the next update depends.

    model, optimiser, generators --training_state--> SavedState, copied and written by `train.saving.checkpoint`
    SavedCheckpoint --load_state--> the same, in place; --load_weights--> the model alone

    model.NAME            a parameter or persistent buffer, a DTensor if FSDP2 shards it; tied ones once; of a model
                          with an adapter only the adapter
    optimiser.NAME.KEY    the state of the parameter NAME, with AdamW `step`, `exp_avg` and `exp_avg_sq`; absent before
                          its first update
    random.RANK.KEY       states of Python's, numpy's and torch's generators on that rank
    groups                the optimiser's groups as JSON: options and names of parameters

torch's own get_state_dict is not used. It makes an update with an optimiser that has no state yet, which leaves its
count of updates at 1, and it saves tied weights twice. `train.saving.checkpoint_tensors` reads and writes the tensors.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treepack.errors import TreepackError
from treepack.model.adapters.adapter import is_adapted
from treepack.model.weights.traced import TracedTensor
from treepack.train.optimiser import parameter_places, prepare_state
from treepack.train.saving.checkpoint_tensors import TensorPart, fill_tensors, own_parts, read_layout


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint on disk, written by `world_size` ranks: `step` and `position` are the arguments of `save`.

    `groups` are the groups of the optimiser, `files` the names of the files with tensors, and `is_copy` is true for a
    copy from a store, which is removed after it is read.
    """

    path: Path
    step: int
    world_size: int
    position: dict[str, Any]
    groups: list[Any]
    files: tuple[str, ...]
    is_copy: bool

    def layout(self) -> dict[str, TracedTensor]:
        """Return the tensors, as `read_layout`."""
        return read_layout([self.path / name for name in self.files])


def training_state(
    model: nn.Module, optimiser: torch.optim.Optimizer, *, rank: int
) -> tuple[dict[str, TensorPart], list[dict[str, Any]]]:
    """Return the parts of tensors that this rank writes, which share memory with the run's, and the groups as JSON."""
    tensors = _model_tensors(model)
    order = _parameter_order(tensors, optimiser)
    saved = optimiser.state_dict()["param_groups"]
    # An optimiser numbers its parameters over all groups. A checkpoint has their names, so that an error can name the
    # parameter: {"lr": 0.1, "params": [0, 1]} -> {"lr": 0.1, "params": ["embed.weight", "head.weight"]}
    groups = [group | {"params": [order[number] for number in group["params"]]} for group in saved]
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    # Not from state_dict, in which bitsandbytes has another form of it.
    for name, (_, _, parameter) in zip(order, parameter_places(optimiser), strict=True):
        values = optimiser.state.get(parameter, {})
        state |= {f"optimiser.{name}.{key}": _as_tensor(value) for key, value in values.items()}
    own = {f"random.{rank}.{key}": value for key, value in _random_states().items()}
    return own_parts(state, leads=rank == 0) | own_parts(own, leads=True), json.loads(json.dumps(groups))


def load_state(checkpoint: SavedCheckpoint, model: nn.Module, optimiser: torch.optim.Optimizer, *, rank: int) -> None:
    """Load the state from a checkpoint, which any number of ranks may have written.

    Args:
        checkpoint: from `checkpoint.latest`.
        model: its parameters and buffers are filled in place.
        optimiser: gets the saved state, or none if none was saved, and the saved options of its groups.
        rank: this process; its random generators are set if the checkpoint has their states.

    Raises:
        TreepackError: tensors or groups differ from the saved ones, or the files are not a checkpoint's. Nothing is
            changed then.
        OSError: a file cannot be read.
    """
    path, layout, tensors = checkpoint.path, checkpoint.layout(), _model_tensors(model)
    order = _parameter_order(tensors, optimiser)
    expected = {f"model.{name}": tensor for name, tensor in tensors.items()}
    _check_names(path, expected, layout)
    groups = _options_of_groups(path, order, optimiser, checkpoint.groups)
    states = _empty_states(path, order, layout, optimiser)
    for name, values in states.items():
        for key, value in values.items():
            values[key] = expected[f"optimiser.{name}.{key}"] = _as_tensor(value)
    own = {f"random.{rank}.{key}": value for key, value in _random_states().items()}
    own = {name: tensor for name, tensor in own.items() if name in layout}
    if foreign := sorted(name for name in layout.keys() - expected.keys() if not name.startswith("random.")):
        raise TreepackError(f"{path}: the run has no {foreign[0]}; take another checkpoint")
    _check_tensors(path, expected | own, layout)
    fill_tensors(layout, own)
    generators = {name.rpartition(".")[2]: tensor for name, tensor in own.items()}
    _check_random_states(path, generators)
    fill_tensors(layout, expected)
    if hasattr(optimiser, "init_state"):  # bitsandbytes counts steps in a number
        states = {name: {**values, "step": int(values["step"])} for name, values in states.items()}
    by_number = {number: states[name] for number, name in enumerate(order) if name in states}
    optimiser.load_state_dict({"state": by_number, "param_groups": groups})
    _set_random_states(generators)


def load_weights(checkpoint: SavedCheckpoint, model: nn.Module) -> None:
    """Load the parameters and persistent buffers alone from a checkpoint.

    A value head that only one of model and checkpoint has is left as it is: a critic may start from a policy.

    Raises:
        TreepackError: the tensors differ from the saved ones, or cannot be read.
    """
    path, expected = checkpoint.path, {f"model.{name}": tensor for name, tensor in _model_tensors(model).items()}
    try:
        layout = checkpoint.layout()
        heads = [{name for name in names if ".value_head." in name} for names in (layout, expected)]
        alone = set() if all(heads) else heads[0] ^ heads[1]
        expected = {name: tensor for name, tensor in expected.items() if name not in alone}
        layout = {name: tensor for name, tensor in layout.items() if name not in alone}
        _check_names(path, expected, layout)
        _check_tensors(path, expected, layout)
        fill_tensors(layout, expected)
    except OSError as error:
        raise TreepackError(
            f"{path}: cannot be read ({error.strerror or error}); check that its disk is mounted"
        ) from error


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


def _parameter_order(tensors: Mapping[str, Tensor], optimiser: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimiser's parameters, in the order in which its state_dict numbers them."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    return [names[id(parameter)] for group in optimiser.param_groups for parameter in group["params"]]


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


def _empty_states(
    path: Path, order: Sequence[str], layout: Mapping[str, Tensor], optimiser: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return states to load the optimiser's into, for each parameter that has one in the checkpoint, by names.

    Moments are sharded like their parameter, and on the CPU if the optimiser keeps them there.
    """
    saved: dict[str, set[str]] = {}
    for each in layout:
        kind, _, name = each.partition(".")
        if kind == "optimiser":
            name, _, key = name.rpartition(".")
            saved.setdefault(name, set()).add(key)
    states = {}
    for name, (place, group, parameter) in zip(order, parameter_places(optimiser), strict=True):
        if name in saved:
            prepare_state(optimiser, place, group, parameter)
            values = dict(optimiser.state.pop(parameter))
            # Parameters share the tables of bitsandbytes, which the bytes of a file must not change.
            values |= {key: value.clone() for key, value in values.items() if key.startswith("qmap")}
            if values.keys() != saved[name]:
                raise TreepackError(f"{path}: the optimiser's state of {name} is not complete; take another checkpoint")
            states[name] = values
    return states


def _check_names(path: Path, expected: Mapping[str, Tensor], layout: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint with more or fewer tensors than the model has, which are `expected`."""
    saved = [name for name in layout if name.startswith("model.")]
    for name in [*expected, *saved]:
        if name not in layout or name not in expected:
            lacking = "the checkpoint" if name not in layout else "the model"
            raise TreepackError(
                f"{path}: {lacking} has no {name.removeprefix('model.')}; take the model that was trained"
            )


def _check_tensors(path: Path, expected: Mapping[str, Tensor], layout: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint in which a tensor has another shape or dtype than the `expected` one."""
    for name, tensor in expected.items():
        saved = layout[name]
        if (tensor.shape, tensor.dtype) != (saved.shape, saved.dtype):
            remedy = "take the model that was trained" if name.startswith("model.") else "take another checkpoint"
            raise TreepackError(
                f"{path}: {name.removeprefix('model.')} is {saved.dtype} of shape {tuple(saved.shape)} in the "
                f"checkpoint and {tensor.dtype} of shape {tuple(tensor.shape)} in the run; {remedy}"
            )


def _options_of_groups(
    path: Path, order: Sequence[str], optimiser: torch.optim.Optimizer, saved: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the saved groups, with the names of their parameters replaced by the numbers of this optimiser.

    Raises:
        TreepackError: a group of this optimiser has other parameters or options than the saved group.
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
        if not isinstance(saved_group, dict) or not _same_kinds({**group, "params": []}, saved_group):
            raise TreepackError(f"{path}: its groups of parameters are another optimiser's; take another checkpoint")
        names = {order[number] for number in numbers}
        if differing := sorted(names ^ set(map(str, saved_group["params"]))):
            raise TreepackError(
                f"{path}: {differing[0]} is in another group of this optimiser; resume with the options of the run"
            )
        # JSON has lists only: betas [0.9, 0.95] -> (0.9, 0.95)
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in saved_group.items()}
        options.append(values | {"params": list(numbers)})
    return options


def _same_kinds(group: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return True if both have the same names, with numbers in the same places."""

    def kind(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [kind(each) for each in value]
        return float if type(value) in (int, float) else bool if value is None else type(value)

    own = {key: kind(value) for key, value in group.items() if key != "params"}
    theirs = {key: kind(value) for key, value in saved.items() if key != "params"}
    return own == theirs and isinstance(saved.get("params"), list)


def _random_states() -> dict[str, Tensor]:
    """Return the states of this process's generators as tensors, which always have the same shapes and dtypes."""
    # Both of Python's and numpy's generators have 624 numbers and a place among them, and may keep a normal number.
    _, numbers, normal = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    _, keys, place, keeps_normal, other_normal = state
    kept = [torch.nan if normal is None else normal, other_normal if keeps_normal else torch.nan]
    states = {
        "python": torch.tensor(numbers),
        "numpy": torch.tensor([*keys.tolist(), place]),
        "normal": torch.tensor(kept, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _check_random_states(path: Path, states: Mapping[str, Tensor]) -> None:
    """Refuse states that no generator has: numpy would read beyond its numbers, and torch would fail half restored."""
    try:
        for name in ("python", "numpy") if states else ():
            *numbers, place = states[name].tolist()
            if not 0 <= place <= len(numbers) or not all(0 <= number < 1 << 32 for number in numbers):
                raise ValueError(name)
        if states:
            torch.Generator().set_state(states["torch"])
            states["normal"]
    except (ValueError, KeyError, RuntimeError) as error:
        raise TreepackError(f"{path}: its random states fit no generator; take another checkpoint") from error


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    if states:
        normal, other_normal = (None if np.isnan(each) else each for each in states["normal"].tolist())
        random.setstate((3, tuple(states["python"].tolist()), normal))
        *keys, place = states["numpy"].tolist()
        np.random.set_state(
            ("MT19937", np.array(keys, np.uint32), place, other_normal is not None, other_normal or 0.0)
        )
        torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
