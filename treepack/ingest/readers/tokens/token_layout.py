"""The places of a tokenised rollout in the fields of its record: its padding, prompt, response and trained tokens.

    record --find_layout--> FieldLayout
    values of a field, FieldLayout --on_all_tokens--> one value per stored token
                                   --at_trained-----> one value per trained token

The header of `formats.tokens` has a picture of the places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import token_fields as tf
from treepack.ingest.readers.fields.values import shown
from treepack.trajectory import Float64, Int64

Mask = NDArray[np.uint8] | Float64


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Positions in the stored ids: `[start, end)` is not padding, and `[response, response_end)` is the response."""

    source: str
    num_tokens: int
    start: int
    end: int
    response: int | None = None
    response_end: int = 0

    @property
    def num_response(self) -> int | None:
        """The number of tokens of the response; None if the record does not separate it."""
        return None if self.response is None else self.response_end - self.response


def find_layout(fields: tf.Fields, record: Record, *, num_tokens: int, num_prompt: int | None) -> FieldLayout:
    """Return the places of a record with `num_tokens` stored tokens, of which `num_prompt` are the prompt if known.

    Raises:
        TreepackError: masks and lengths contradict each other.
    """
    source = record.source
    # Without masks, nothing is padding.
    start, end = 0, num_tokens
    if tf.ATTENTION in fields:
        ((name, values),) = fields[tf.ATTENTION].items()
        start, end = _run_of_ones(tf.mask_values(values, source=source, name=name), num_tokens, source, name)
    if tf.PROMPT_MASK in fields and num_prompt is not None:
        ((name, values),) = fields[tf.PROMPT_MASK].items()
        flags = tf.mask_values(values, source=source, name=name)
        ones, last = _run_of_ones(flags, num_prompt, source, name)
        # A batch pads prompts on the left: [0, 0, 1, 1], so the run of ones must end with the prompt.
        if last not in (0, num_prompt) or (tf.ATTENTION in fields and 0 < ones != start):
            raise TreepackError(f"{source}: {name} is not zeros then ones; expected the padding left of the prompt")
        start = ones or start
    length = fields.get(tf.RESPONSE_LENGTH, {}).get("response_length")
    if isinstance(length, bool) or not isinstance(length, int | None):
        raise TreepackError(f"{source}: response_length is {shown(length)}; expected the number of tokens")
    if num_prompt is not None:
        if length is not None and length not in (num_tokens - num_prompt, end - num_prompt):
            num_response = num_tokens - num_prompt
            raise TreepackError(
                f"{source}: response_length is {shown(length)}, but the response has {num_response} tokens; drop one"
            )
        return FieldLayout(source, num_tokens, start, end, num_prompt, num_tokens)
    if length is None:
        return FieldLayout(source, num_tokens, start, end)
    if not 0 <= length <= end - start:
        raise TreepackError(
            f"{source}: response_length is {shown(length)}; expected 0 to {end - start}, the number of tokens"
        )
    return FieldLayout(source, num_tokens, start, end, end - length, end)


def _run_of_ones(flags: Mask, expected: int, source: str, name: str) -> tuple[int, int]:
    """Return the start and the end of the only run of ones; (0, 0) if all are zeros."""
    if len(flags) != expected:
        raise TreepackError(f"{source}: {name} has {len(flags)} values; expected {expected}, one per token")
    # [0, 1, 1, 0] -> (1, 3)
    ones = np.flatnonzero(flags)
    if len(ones) == 0:
        return 0, 0
    start, end = int(ones[0]), int(ones[-1]) + 1
    if end - start != len(ones):
        raise TreepackError(f"{source}: {name} has holes; expected one run of ones with padding left and right of it")
    return start, end


def padding_notes(layout: FieldLayout) -> tuple[str, ...]:
    """Return a note for each side on which padding was removed."""
    left = ("left padding removed",) if layout.start > 0 else ()
    right = ("right padding removed",) if layout.end < layout.num_tokens else ()
    return left + right


def on_all_tokens(values: NDArray[Any], name: str, layout: FieldLayout) -> NDArray[Any]:
    """Return `values` over all tokens; they have one value per token, or one per token of the response.

    Raises:
        TreepackError: another number of values.
    """
    if len(values) == layout.num_tokens:
        return values
    if layout.response is not None and len(values) == layout.num_response:
        # 3 tokens of prompt and the response [1, 0, 1] -> [0, 0, 0, 1, 0, 1]
        whole = np.zeros(layout.num_tokens, values.dtype)
        whole[layout.response : layout.response_end] = values
        return whole
    if layout.response is None:
        raise TreepackError(
            f"{layout.source}: {name} has {len(values)} values for {layout.num_tokens} tokens; "
            "give response_length if it covers the response only"
        )
    raise TreepackError(
        f"{layout.source}: {name} has {len(values)} values; "
        f"expected {layout.num_tokens} (the whole sequence) or {layout.num_response} (the response)"
    )


def at_trained(values: Float64, name: str, mask: Mask, layout: FieldLayout) -> Float64:
    """Return `values` at the trained tokens, without the first token of the sequence.

    `values` has one value per token, one per token of the response, or one per trained token.

    Raises:
        TreepackError: another number of values, or a number that fits two of these and places the values differently.
    """
    # The first token of a sequence is never predicted, so it has no term even if the mask marks it.
    trained: Int64 = np.flatnonzero(mask)
    # A list of trained values has one for the first token too, which is dropped.
    skip = int(len(trained) > 0 and trained[0] == layout.start)
    if len(values) == layout.num_tokens:
        return values[trained[skip:]]
    offset = layout.response
    if offset is not None and len(values) == layout.num_response:
        # One value per token of the response has no value for a trained token of the prompt.
        inside = len(trained) == 0 or (trained[0] >= offset and trained[-1] < layout.response_end)
        if len(values) == len(trained) and not inside:
            raise TreepackError(
                f"{layout.source}: {name} has {len(values)} values, as many as the response and as the trained tokens, "
                "which differ; give one per token of the whole sequence"
            )
        if not inside:
            raise TreepackError(f"{layout.source}: {name} covers the response only, but tokens outside it are trained")
        return values[trained[skip:] - offset]
    if len(values) == len(trained):
        return values[skip:]
    response = "" if offset is None else f"{layout.num_response} (the response), "
    raise TreepackError(
        f"{layout.source}: {name} has {len(values)} values; "
        f"expected {layout.num_tokens} (the whole sequence), {response}or {len(trained)} (the trained tokens)"
    )
