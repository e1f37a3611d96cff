"""A training run as the table of a config file, with which `treepack train` repeats it.

    run.json --run_config--> {"packed": ["data/packed"], "model": "Qwen/Qwen3-8B", "lr": 1e-5, "loss": "grpo", ...}

The table also has the values that the run has chosen, so that a repeated run has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.registry import find_loss
from treepack.option_fields import option_texts
from treepack.train.options import TrainOptions
from treepack.train.saving.run_record import lora_options, read_run_record

_PATHS = ("packed", "eval", "model", "init_from", "teacher")


def run_config(path: AnyPath) -> dict[str, Any]:
    """Return the data, model and options of the run.json at `path`, by the keys of a config file.

    Raises:
        TreepackError: the file is damaged, or of a development version that did not record its inputs.
    """
    record = read_run_record(path)
    try:
        options = {"blocks": 1, **record["options"], **record["free_options"], **record["chosen"]}
        plain = {each.name: options.get(each.name) for each in fields(TrainOptions)}
        plain |= {"carry": plain["carry"] or "off", "lora": None, "objective": None}
        values = {**record["inputs"], **plain, **lora_options(options["lora"]), **_loss(options["objective"])}
        values |= {name: _found(values.get(name), Path(record["folder"])) for name in _PATHS}
    except (KeyError, TypeError, AttributeError) as error:
        raise TreepackError(f"{path}: does not have {error}, so it cannot be repeated; give the options") from error
    return {name: value for name, value in values.items() if value is not None}


def _loss(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset that is nearest to a loss, and the options that differ from it."""
    names = {each.name for each, _ in option_texts(Objective)}
    best: tuple[bool, int] | None = None
    for preset in find_loss(record["loss"]).presets:
        usual = choose_objective(preset).as_record()
        changed = {name: value for name, value in record.items() if name in names and value != usual.get(name)}
        changed.pop("loss", None)
        # `rewarded` is not an option, so only a preset can give it.
        cost = (usual.get("rewarded") != record.get("rewarded"), len(changed))
        if best is None or cost < best:
            best, values = cost, {"loss": preset, **changed}
    return {**values, "loss_constants": None, "loss_constant": values.get("loss_constants")}


def _found(value: Any, folder: Path) -> Any:
    """Return a path, or a list of paths, as it is found from here: from `folder`, where the run started, if it exists.

    "data/packed", /home/me -> "/home/me/data/packed"; an address and a hub name stay as they are
    """
    if isinstance(value, list):
        return [_found(each, folder) for each in value]
    is_here = folder == Path.cwd() or not isinstance(value, str)
    return value if is_here or not (folder / value).exists() else str(folder / value)
