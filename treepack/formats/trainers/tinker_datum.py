"""Datums of Tinker: sequences ready for training, with shifted targets.

    {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
     "loss_fn_inputs": {"target_tokens": {"data": [6, 7]}, "mask": {"data": [0.0, 1.0]}, "logprobs": .., ..}}

Target i is token i + 1 of the sequence 5 6 7. Weights, log-probabilities and advantages are shifted in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from treepack.formats.kit import (
    MEDIA_REASON,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    read_tokens,
    shown,
    without,
)
from treepack.ingest.readers.fields.token_fields import number_values
from treepack.ingest.readers.tokens.model_inputs import model_input_ids
from treepack.trajectory import Float64, as_token_ids

# Loss functions of Tinker name their weights differently.
_WEIGHTS = ("mask", "weights")
# Names of Tinker -> names of the reader of tokens.
_VALUES = {"logprobs": "rollout_log_probs", "advantages": "advantages"}


def _read_tinker_datum(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of `record`.

    Raises:
        TreepackError: targets that are not the input shifted by one, or an error of the `tokens` reader.
    """
    source, inputs = record.source, record.value["loss_fn_inputs"]
    ids = model_input_ids(record.value["model_input"], source)
    if ids is None:
        yield Skipped(source, MEDIA_REASON)
        return
    targets = as_token_ids(_data(inputs.get("target_tokens"), "target_tokens", source), source=source, name="targets")
    # inputs [5, 6, 7] and targets [6, 7, 8] agree: targets[:-1] == inputs[1:]
    if len(targets) != len(ids) or len(ids) == 0 or not np.array_equal(targets[:-1], ids[1:]):
        raise TreepackError(
            f"{source}: target_tokens are not the tokens of model_input one place later; expected them shifted by one"
        )
    mask_name = next((mask_name for mask_name in _WEIGHTS if mask_name in inputs), None)
    if mask_name is None:
        weights = np.ones(len(ids))
    else:
        weights = _numbers(inputs[mask_name], mask_name, len(ids), source)
    # inputs [5, 6] and targets [6, 7] -> ids [5, 6, 7]; weights [0, 1] -> [0, 0, 1], because no target is token 5
    fields: JsonObject = {"input_ids": np.append(ids, targets[-1]), "loss_mask": np.append(0.0, weights)}
    for name, field in _VALUES.items():
        if name in inputs:
            fields[field] = np.append(np.nan, _numbers(inputs[name], name, len(ids), source))
    rest = without(record.value, ("model_input", "loss_fn_inputs"))
    yield from read_tokens(replace(record, value=rest | fields), options)


def _data(tensor: Any, name: str, source: str) -> list[Any]:
    """Return the values of a tensor in Tinker's form, or of a plain list."""
    values = tensor.get("data") if isinstance(tensor, dict) else tensor
    if not isinstance(values, list) or (isinstance(tensor, dict) and tensor.get("sparse_crow_indices") is not None):
        raise TreepackError(f"{source}: {name} is {shown(tensor)}; expected one value per token")
    return values


def _numbers(tensor: Any, name: str, num_tokens: int, source: str) -> Float64:
    numbers = number_values(_data(tensor, name, source), source=source, name=name)
    if len(numbers) != num_tokens:
        raise TreepackError(f"{source}: {name} has {len(numbers)} values; expected {num_tokens}, one per target")
    return numbers


FORMAT = Format(
    name="tinker-datum",
    rank=440,
    program="Tinker (Datum)",
    recognised_by="`model_input` and `loss_fn_inputs`",
    requires="model_input, loss_fn_inputs:object",
    used="""
        model_input.chunks loss_fn_inputs.target_tokens loss_fn_inputs.mask loss_fn_inputs.weights
        loss_fn_inputs.logprobs loss_fn_inputs.advantages
    """,
    dropped="""
        clip thresholds;
        chunks that are not text (datums that have some are skipped)
    """,
    keeps="token ids, masks, log-probabilities",
    read=_read_tinker_datum,
)
