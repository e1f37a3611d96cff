"""Names of the fields of a tokenised record, and their values as arrays: the vocabulary of `token_records`.

    {"prompt_ids": [..], "response_ids": [..], "response_mask": [..]}  --sort_fields-->  {kind: {name: values}}

Names of one kind are interchangeable, and if a record has several, their values must agree. Log-probabilities are four
different kinds: of the sampler, of the trainer before the update (old), of the reference model, and of a teacher.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject, shown
from treepack.trajectory import MAX_WEIGHT, MIN_WEIGHT, WEIGHTS, Float64

IDS, PROMPT, RESPONSE = "ids", "prompt", "response"
MASK, LABELS, ATTENTION, PROMPT_MASK = "mask", "labels", "attention", "prompt mask"
POSITIONS, RESPONSE_LENGTH, LENGTHS = "positions", "response length", "lengths"
ADVANTAGE, RETURN = "advantages", "returns"
SAMPLING, OLD, REFERENCE = "sampling log-probabilities", "old log-probabilities", "reference log-probabilities"
TEACHER, TEMPERATURE = "teacher log-probabilities", "temperatures"
IGNORED_LABEL = -100  # of torch's cross_entropy

NAMES: dict[str, tuple[str, ...]] = {
    IDS: ("input_ids", "tokens", "token_ids", "sequences"),
    PROMPT: ("prompt_ids", "prompt_token_ids", "prompts"),
    RESPONSE: ("response_ids", "completion_ids", "completion_token_ids", "responses"),
    MASK: tuple(
        "loss_mask loss_masks response_mask completion_mask assistant_masks assistant_mask mask generation_mask "
        "tool_mask env_mask".split()
    ),
    LABELS: ("labels",),
    ATTENTION: ("attention_mask",),
    PROMPT_MASK: ("prompt_mask",),
    POSITIONS: ("position_ids", "input_pos"),
    RESPONSE_LENGTH: ("response_length",),
    LENGTHS: ("seq_lengths", "seq_lens", "sequence_lengths"),
    ADVANTAGE: ("advantages", "advantage"),
    RETURN: ("returns", "mc_return"),
    SAMPLING: tuple(
        "rollout_log_probs rollout_logprobs response_logprobs completion_logprobs inference_logprobs logprobs "
        "sampling_per_token_logps sampling_logprobs".split()
    ),
    OLD: ("old_log_probs", "old_logprobs", "old_per_token_logps", "action_log_probs"),
    REFERENCE: tuple("ref_log_prob ref_logprobs reference_logprobs ref_per_token_logps base_action_log_probs".split()),
    TEACHER: ("teacher_log_probs", "teacher_logprobs", "teacher_per_token_logps"),
    TEMPERATURE: ("temperatures",),
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names}
TOKEN_IDS = frozenset({IDS, PROMPT, RESPONSE})
# Fields with kept sets (`tokens.kept_fields`), and the field with the sizes or offsets of some.
SIZES_OF_SETS = {
    "rollout_top_p_token_ids": "rollout_top_p_token_offsets",
    "sampling_mask_token_ids": "sampling_mask_sizes",
}
KEPT_SETS = ("kept_ids", "sampling_mask", "kept_tokens", *SIZES_OF_SETS)
KEPT_FIELDS = frozenset({*KEPT_SETS, *SIZES_OF_SETS.values()})
# Names of lists with one number per token, which may be arrays.
NUMBERS = tuple(name for kind, names in NAMES.items() if kind not in (RESPONSE_LENGTH, LENGTHS) for name in names)
_LISTS = frozenset(NAMES) - {RESPONSE_LENGTH, ADVANTAGE, RETURN}  # an advantage may be one number for all tokens

Fields = dict[str, JsonObject]


def sort_fields(record: JsonObject, source: str) -> Fields:
    """Return the fields of `record` with a known name, by kind and name; texts under names of ids are left out.

    Raises:
        TreepackError: a mask or another list with one number per token is text, and no list as JSON.
    """
    fields: Fields = {}
    for name, value in record.items():
        kind = KINDS.get(name)
        if kind is None or value is None:
            continue
        # A mask from CSV or a table is text: "[1, 0, 1]".
        if isinstance(value, str) and kind not in TOKEN_IDS:
            value = _list_of_text(value, f"{source}: {name}")
        if isinstance(value, str | dict):
            continue
        if kind in _LISTS and not isinstance(value, list | np.ndarray):
            continue
        # "prompts": ["Hi"] and "responses": [{"role": ..}] are texts and messages under the same names.
        if kind in TOKEN_IDS and len(value) > 0 and isinstance(value[0], str | dict):
            continue
        fields.setdefault(kind, {})[name] = value
    # Returns replace missing advantages; the union keeps ADVANTAGE of `fields` if there is one.
    returns = fields.pop(RETURN, None)
    return fields if returns is None else {ADVANTAGE: returns} | fields


def _list_of_text(text: str, where: str) -> Any:
    """Return the list or number that `text` is as JSON.

    Raises:
        TreepackError: it is something else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    # "1011" is a number in JSON, but most probably a mask.
    if not isinstance(value, list | float):
        raise TreepackError(f"{where} is the text {shown(text)}; expected a list of numbers")
    return value


def mask_values(values: Any, *, source: str, name: str) -> NDArray[np.uint8] | Float64:
    """Return a mask as uint8 of 0 and 1; a `loss_mask` with other numbers is returned as float64 weights.

    Raises:
        TreepackError: the list is nested, or has any other value.
    """
    if type(values) is list:
        try:
            # bytes() accepts 0..255 and booleans only, and is five times as fast as numpy on a list.
            flags: NDArray[Any] = np.frombuffer(bytes(values), np.uint8)
        except (TypeError, ValueError):
            flags = as_array(values)
    else:
        flags = values
    if flags.ndim != 1 or flags.dtype.kind not in "buif":
        raise TreepackError(f"{source}: {name} is not a flat list of 0 and 1; expected one per token")
    if len(flags) == 0 or flags.dtype.kind == "b":
        return flags.astype(np.uint8)
    low, high = flags.min(), flags.max()
    if flags.dtype.kind == "f" and not np.isin(flags, (0, 1)).all():
        if name != "loss_mask":
            raise TreepackError(f"{source}: {name} has values from {low} to {high}; expected 0 and 1")
        weights = flags.astype(np.float64)
        # Written as a negation, so that NaN is refused: every comparison with NaN is False.
        bad = weights[(weights != 0) & ~((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))]
        if len(bad):
            raise TreepackError(f"{source}: {name} has the value {bad[0]}; expected each value to be {WEIGHTS}")
        return weights
    if low < 0 or high > 1:
        raise TreepackError(f"{source}: {name} has the value {low if low < 0 else high}; expected 0 and 1")
    return flags.astype(np.uint8, copy=False)


def number_values(values: Any, *, source: str, name: str) -> Float64:
    """Return a list of numbers as float64, with NaN for null.

    Raises:
        TreepackError: the list is nested, or has a value that is neither a number nor null.
    """
    numbers = as_array(values)
    if len(values) == 0:
        return np.zeros(0, np.float64)
    # Object arrays: lists with null, and integers beyond 64 bits. Booleans are not numbers, although bool is an int.
    if numbers.dtype.kind == "O" and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    ):
        try:
            numbers = np.asarray([np.nan if value is None else value for value in values], np.float64)
        except OverflowError:
            raise TreepackError(
                f"{source}: {name} has a number that does not fit a float; expected finite numbers"
            ) from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise TreepackError(f"{source}: {name} is not a flat list of numbers; expected one per token")
    return numbers.astype(np.float64, copy=False)


def as_array(values: Any) -> NDArray[Any]:
    """Return `values` as an array of any dtype; ragged lists become an empty array of two dimensions."""
    try:
        return np.asarray(values)
    except (ValueError, OverflowError):
        return np.zeros((0, 0), np.object_)
