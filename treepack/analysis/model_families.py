"""Verdicts on models and the costs of a row, for `treepack models`, without rows, weights or torch.

families.json --families--> ModelFamily, ...       written by `make docs` from the table that the tests prove
name, type, example or config.json --describe_model--> its families, operations and memory
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from treepack.costs.model_cost import language_model, read_model_fields, shape_of
from treepack.costs.presets import PRESETS
from treepack.errors import TreepackError
from treepack.memory.model_memory import count_weights, memory_of

FILE = Path(__file__).with_name("families.json")


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of models that the tests train, or that is refused.

    Attributes:
        name: its usual name.
        example: a checkpoint on the hub; "" for refused families.
        type: its model_type in transformers.
        heads: head dimensions of the example, such as "192/128" for keys and values.
        attention: variants of attention in its layers.
        kernels: kernels of attention on an H100 in bf16.
        beside: its other layers, or a condition.
        refused: the reason if it is refused, else "".
    """

    name: str
    example: str
    type: str
    heads: str = ""
    attention: str = ""
    kernels: str = ""
    beside: str = ""
    refused: str = ""


@cache
def families() -> tuple[ModelFamily, ...]:
    """Return all families by name, refused ones last."""
    return tuple(ModelFamily(**each) for each in json.loads(FILE.read_text(encoding="utf-8")))


def describe_model(
    model: str, tokens: int, device: str, find_config: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any]:
    """Return a report about a model for JSON: its families, verdict, and costs of a row of `tokens` tokens.

    Args:
        model: a preset, a name, type or example of a family, a config.json or its folder, or a name of the hub.
        tokens: the length of the row.
        device: a name of `forecast.read_device`, or a rate.
        find_config: reads the config.json of a name of the hub.

    Raises:
        TreepackError: the model or the device is not known.
    """
    named = [
        each for each in families() if model.casefold() in (each.name.casefold(), each.type, each.example.casefold())
    ]
    fields = _fields(model, bool(named), find_config)
    if fields is not None:
        kind = language_model(fields).get("model_type")
        named = [each for each in families() if each.type == kind]
    else:
        kind = named[0].type
    report: dict[str, Any] = {"model": model, "type": kind, "families": [each.name for each in named]}
    report["exact"] = not named[0].refused if named else None
    report["reason"] = named[0].refused if named else f"no test of treepack has models of type {kind}"
    for name in ("heads", "attention", "kernels", "beside"):
        report[name] = "; ".join(dict.fromkeys(getattr(each, name) for each in named))
    return report | ({} if fields is None else _costs(model, fields, tokens, device))


def _fields(model: str, is_family: bool, find_config: Callable[[str], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the fields of the config.json of a model; None for a family without one on this machine."""
    try:
        return read_model_fields(model)[0]
    except TreepackError as error:
        if is_family:
            return None
        if "/" in model and not Path(model).exists():
            return find_config(model)
        words = [word for each in families() for word in (each.name, each.type)] + list(PRESETS)
        near = get_close_matches(model, words, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "; treepack models lists the families"
        raise TreepackError(f"{model}: is not a family, preset or config.json{meant}") from error


def _costs(model: str, fields: dict[str, Any], tokens: int, device: str) -> dict[str, Any]:
    """Return weights, operations, seconds and memory, or why they are not forecast."""
    # Imported here, because a verdict alone needs no packing, whose import takes seconds.
    from treepack.analysis.forecast import MFU, read_device
    from treepack.analysis.trie_forecast import ForecastTarget, row_forecast

    one = read_device(device)
    try:
        target = ForecastTarget(shape_of(fields, name=model), memory_of(fields, name=model), one)
        forecast, weights = row_forecast(target, tokens), count_weights(fields, name=model).total
    except TreepackError as error:
        return {"costs": str(error)}
    (row,) = forecast["capacities"]
    seconds = row["flops"] / (MFU * target.device.rate)
    sizes = {"weights": weights, "tokens": tokens, "flops": row["flops"], "seconds": seconds}
    return {**sizes, "memory": forecast["memory"], "num_gpus": forecast["num_gpus"]}
