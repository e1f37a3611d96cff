"""Tokenised rollouts: token ids, the trained ones among them, log-probabilities, advantages; names in `token_fields`.

              left padding |  prompt  |      response      | right padding
    whole     . . . . . .  x  x  x  x  x  x  x  x  x  x  x  . . .            one value per token
    response                           x  x  x  x  x  x  x                   one per token of the response
    trained                            x  x        x  x  x                   one per trained token, in order

The tokens of a field follow from the number of its values. A number that fits no row of the picture is refused, and so
is one that fits two rows with different places. Padding that an attention mask marks is removed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import token_fields as tf
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import UNTRAINED_PREFIX, describe, marked
from treepack.ingest.readers.fields.unread import ANSWER, danger
from treepack.ingest.readers.fields.values import BadValueError, as_number, shown
from treepack.ingest.readers.tokens.kept_fields import cut_note, read_sets, set_fields
from treepack.ingest.readers.tokens.route_fields import kept_routes, read_routes
from treepack.ingest.readers.tokens.teacher_fields import take_words
from treepack.ingest.readers.tokens.token_layout import (
    FieldLayout,
    Mask,
    at_trained,
    find_layout,
    on_all_tokens,
    padding_notes,
)
from treepack.kept_sets import as_kept_sets, known_sets
from treepack.ragged import RaggedArray
from treepack.trajectory import (
    FIRST_TOKEN_NOTE,
    Float64,
    Int32,
    Outcomes,
    Routes,
    Skipped,
    Tokens,
    as_token_ids,
    check_logprobs,
    spans_of_mask,
    with_temperatures,
)

LOGPROBS = {
    **{"sampling_logprob": tf.SAMPLING, "old_logprob": tf.OLD},
    **{"ref_logprob": tf.REFERENCE, "teacher_logprob": tf.TEACHER},
}


class _NullLogprobError(BadValueError):
    """A log-probability of a trained token is null."""


def read_tokens(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of `record`, or skip it, also because of a null log-probability.

    Raises:
        TreepackError: as `read_valid_tokens`.
    """
    try:
        yield from read_valid_tokens(record, options)
    except _NullLogprobError as error:
        yield Skipped(record.source, error.reason, detail=str(error))


def read_valid_tokens(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of `record`, or skip it.

    Raises:
        _NullLogprobError: a log-probability of a trained token is null.
        TreepackError: ids, masks or values that contradict each other, have a wrong length or an impossible value.
    """
    words, record = take_words(record)
    fields = tf.sort_fields(record.value, record.source)
    ids, num_prompt = _ids(fields, record)
    if not _has_mask(fields):
        _check_unknown_masks(record, fields, num_tokens=len(ids), num_prompt=num_prompt or 0)
    if num_prompt is None:
        # Without the length of the prompt, its mask cannot be placed.
        fields.pop(tf.PROMPT_MASK, None)
    layout = find_layout(fields, record, num_tokens=len(ids), num_prompt=num_prompt)
    if layout.start == layout.end:
        yield Skipped(record.source, "empty trajectory")
        return
    _check_ids(ids, fields, layout, vocab_size=options.vocab_size)
    mask = _trained_mask(ids, fields, layout, train_all=options.train_all)
    mask, cleared = _without_reused(mask, record, layout)
    notes = padding_notes(layout) + cleared
    if mask[layout.start] and not (options.train_all and not _has_mask(fields) and layout.response is None):
        notes += (FIRST_TOKEN_NOTE,)
    starts, ends, weights = _spans(mask[layout.start : layout.end])
    if len(starts) == 0:
        yield Skipped(record.source, "no trained token")
        return
    advantage, advantages = _advantages(fields, mask, layout)
    logprobs = {name: _per_token(fields, kind, mask, layout) for name, kind in LOGPROBS.items()}
    routes, sets = kept_routes(record.value, options), set_fields(record.value)
    rounded: dict[str, Any] = {
        name: None if values is None else values.astype(np.float32) for name, values in logprobs.items()
    }
    content = Tokens(
        tokens=ids[layout.start : layout.end],
        starts=starts,
        ends=ends,
        span_weights=weights,
        advantage=advantages,
        **rounded,
        kept_ids=_kept_sets(sets, ids, mask, layout, vocab_size=options.vocab_size),
        routes=_routes(routes, layout, int(starts[0])),
    )
    content = content if words is None else words.put(content, mask, layout)
    notes += cut_note(record.value) if content.kept_ids is None else ()
    # The text of the ids, under the names of answers, is not used, which is noted as for every field.
    texts = [name for name, value in record.value.items() if danger(name, value) == ANSWER]
    used = [*(name for names in fields.values() for name in names), *routes, *sets, *texts]
    item = describe(record, content, used=used, options=options, advantage=advantage, notes=notes)
    temperatures = _per_token(fields, tf.TEMPERATURE, mask, layout)
    yield item if temperatures is None else with_temperatures(item, temperatures)


def _kept_sets(
    fields: dict[str, Any], ids: Int32, mask: Mask, layout: FieldLayout, *, vocab_size: int | None
) -> RaggedArray | None:
    """Return the kept sets of the trained tokens, or None if the record has none."""
    found = read_sets(fields, layout.source)
    if found is None:
        return None
    name, sets = found
    chosen = at_trained(np.arange(len(sets), dtype=np.float64), name, mask, layout).astype(np.int64)
    sampled = at_trained(np.arange(layout.num_tokens, dtype=np.float64), name, mask, layout).astype(np.int64)
    kept = as_kept_sets(sets[chosen], ids[sampled], source=layout.source, name=name)
    if vocab_size is not None and len(kept.flat) and (high := int(kept.flat.max())) >= vocab_size:
        raise TreepackError(
            f"{layout.source}: {name} has the token id {high}; expected ids below the vocabulary size {vocab_size}"
        )
    return known_sets(kept)


def _routes(fields: dict[str, Any], layout: FieldLayout, first_trained: int) -> Routes | None:
    """Return the recorded experts of the tokens that are not padding; of several fields, the first one counts."""
    if not fields:
        return None
    name, value = next(iter(fields.items()))
    where = {"num_tokens": layout.end - layout.start, "start": layout.start, "stored": layout.num_tokens}
    return read_routes(value, source=layout.source, name=name, **where, first_trained=first_trained)


def _ids(fields: tf.Fields, record: Record) -> tuple[Int32, int | None]:
    """Return the token ids, and the length of the prompt if the record separates it from the response."""
    source = record.source
    prompt, prompt_name = _agreed(fields, tf.PROMPT, source)
    response, response_name = _agreed(fields, tf.RESPONSE, source)
    whole, whole_name = _agreed(fields, tf.IDS, source)
    if whole is None:
        if prompt is None or response is None:
            expected = "input_ids, or prompt_ids and response_ids"
            raise TreepackError(f"{source}: has the fields {', '.join(record.value)}; expected {expected}")
        # prompt [5, 6] and response [7] -> ids [5, 6, 7], 2
        return np.concatenate([prompt, response]), len(prompt)
    num_prompt = len(prompt) if prompt is not None else None
    if response is not None and num_prompt is None:
        # whole [5, 6, 7] and response [7] -> a prompt of 2, which is checked below
        num_prompt = max(0, len(whole) - len(response))
    if prompt is not None and not np.array_equal(whole[:num_prompt], prompt):
        raise TreepackError(f"{source}: {whole_name} does not begin with {prompt_name}; drop the wrong one")
    if response is not None and not np.array_equal(whole[num_prompt:], response):
        raise TreepackError(f"{source}: {whole_name} does not end with {response_name}; drop the wrong one")
    return whole, num_prompt


def _agreed(fields: tf.Fields, kind: str, source: str) -> tuple[Int32 | None, str]:
    agreed: Int32 | None = None
    first = ""
    for name, values in fields.get(kind, {}).items():
        ids = as_token_ids(values, source=source, name=name)
        if agreed is not None and not np.array_equal(agreed, ids):
            raise TreepackError(f"{source}: {first} and {name} differ; drop the wrong one")
        agreed, first = (ids, name) if agreed is None else (agreed, first)
    return agreed, first


def _check_ids(ids: Int32, fields: tf.Fields, layout: FieldLayout, *, vocab_size: int | None) -> None:
    source = layout.source
    # Padding may have an id outside the vocabulary, so only the rollout is checked.
    if vocab_size is not None and (high := int(ids[layout.start : layout.end].max())) >= vocab_size:
        raise TreepackError(f"{source}: has the token id {high}; expected ids below the vocabulary size {vocab_size}")
    for name, values in fields.get(tf.LENGTHS, {}).items():
        if len(values) > 1:
            raise TreepackError(f"{source}: {name} has {len(values)} lengths; give one sequence per record")
    for name, values in fields.get(tf.POSITIONS, {}).items():
        # Positions that start again mark packed sequences, which `read_packed` splits.
        positions = tf.as_array(values[layout.start : layout.end])
        if len(values) != layout.num_tokens or not np.array_equal(positions, np.arange(layout.end - layout.start)):
            raise TreepackError(
                f"{source}: {name} is not 0, 1, 2, ...; give one sequence per record, with plain positions"
            )


def _check_unknown_masks(record: Record, fields: tf.Fields, *, num_tokens: int, num_prompt: int) -> None:
    """Refuse a record without a mask that has a list of 0 and 1 with one value per token, under a name not known.

    Raises:
        TreepackError: such a list may be a mask under an unknown name; without it, all tokens would be trained.
    """
    known = {name for names in fields.values() for name in names}
    for name, value in record.value.items():
        if (
            name in known
            or not isinstance(value, list | np.ndarray)
            or len(value) not in (num_tokens, num_tokens - num_prompt)
        ):
            continue
        flags = tf.as_array(value)
        is_flags = flags.ndim == 1 and flags.dtype.kind in "bui" and len(flags) > 1
        if is_flags and flags.min() == 0 and flags.max() == 1:
            raise TreepackError(
                f"{record.source}: {name} has 0 or 1 for each token and may be a mask; rename it loss_mask or remove it"
            )


def _has_mask(fields: tf.Fields) -> bool:
    return tf.MASK in fields or tf.LABELS in fields


def _trained_mask(ids: Int32, fields: tf.Fields, layout: FieldLayout, *, train_all: bool) -> Mask:
    """Return the weight of each stored token: the product of all masks, 0 on padding. [layout.num_tokens]"""
    mask: Mask | None = None
    for name, values in fields.get(tf.MASK, {}).items():
        factor = on_all_tokens(tf.mask_values(values, source=layout.source, name=name), name, layout)
        mask = factor if mask is None else mask * factor
    for name, values in fields.get(tf.LABELS, {}).items():
        factor = _mask_of_labels(ids, values, name, layout)
        mask = factor if mask is None else mask * factor
    if mask is None:
        mask = np.zeros(layout.num_tokens, np.uint8)
        if layout.response is not None:
            mask[layout.response : layout.response_end] = 1
        elif train_all:
            mask[:] = 1
        else:
            raise TreepackError(
                f"{layout.source}: marks neither the trained tokens nor the start of the response; "
                "give loss_mask or response_length, or train all tokens with --train-all"
            )
    # `mask` may be the array of the record, so it is copied before it is changed.
    if layout.start > 0 or layout.end < layout.num_tokens:
        mask = mask.copy()
        mask[: layout.start] = 0
        mask[layout.end :] = 0
    return mask


def _without_reused(mask: Mask, record: Record, layout: FieldLayout) -> tuple[Mask, tuple[str, ...]]:
    """Return `mask` without the tokens that the rollout reused from an augmented query, and a note if it changed."""
    prefix = marked(record.value, UNTRAINED_PREFIX)
    if prefix is None:
        return mask, ()
    if type(prefix) is not int or not 0 <= prefix <= layout.end - layout.start:
        raise TreepackError(
            f"{record.source}: {UNTRAINED_PREFIX} is {shown(prefix)}; expected 0 to {layout.end - layout.start}, "
            "the number of tokens"
        )
    end = layout.start + prefix
    if not mask[:end].any():
        return mask, ()
    mask = mask.copy()
    mask[:end] = 0
    return mask, ("reused tokens not trained",)


def _mask_of_labels(ids: Int32, values: Any, name: str, layout: FieldLayout) -> NDArray[np.uint8]:
    labels = tf.as_array(values) if len(values) else np.zeros(0, np.int64)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise TreepackError(
            f"{layout.source}: {name} is not a flat list of integers; expected token ids or {tf.IGNORED_LABEL}"
        )
    flags = on_all_tokens((labels != tf.IGNORED_LABEL).astype(np.uint8), name, layout)
    labels = on_all_tokens(labels, name, layout)
    # ids [5, 6, 7] and labels [-100, 6, 7] agree; [6, 7, -100] are shifted and are refused
    wrong = np.flatnonzero((labels != ids) & (flags != 0))
    if len(wrong):
        raise TreepackError(
            f"{layout.source}: {name} differ from the token ids at token {wrong[0]}; "
            f"expected unshifted labels, each the id at its own position or {tf.IGNORED_LABEL}"
        )
    return flags


def _spans(mask: Mask) -> tuple[Int32, Int32, Float64]:
    """Return the starts, ends and weights of the spans of a mask, whose first token is not trained."""
    # Weights need a span for each value; flags need only the edges, which are faster to find.
    if mask.dtype == np.float64:
        return spans_of_mask(np.concatenate([[0.0], mask[1:]]))
    framed = np.zeros(len(mask) + 2, np.uint8)
    framed[2:-1] = mask[1:]
    # mask [0, 1, 1, 0, 1] -> framed [0, 0, 1, 1, 0, 1, 0] -> edges [1, 3, 4, 5] -> starts [1, 4], ends [3, 5]
    edges = np.flatnonzero(framed[1:] != framed[:-1]).astype(np.int32)
    return edges[0::2].copy(), edges[1::2].copy(), np.ones(len(edges) // 2)


def _per_token(fields: tf.Fields, kind: str, mask: Mask, layout: FieldLayout) -> Float64 | None:
    """Return the values of `kind` at the trained tokens, on which all fields must agree.

    Log-probabilities are rounded to float32.
    """
    agreed: Float64 | None = None
    first = ""
    for name, values in fields.get(kind, {}).items():
        if not isinstance(values, list | np.ndarray):
            continue
        numbers = tf.number_values(values, source=layout.source, name=name)
        picked = at_trained(numbers, name, mask, layout)
        if kind not in (tf.ADVANTAGE, tf.TEMPERATURE):
            # The trie stores float32. Two fields that differ by less agree, and an overflow is refused below as inf.
            with np.errstate(over="ignore"):
                picked = picked.astype(np.float32).astype(np.float64)
        # A temperature may be unknown.
        bad = np.flatnonzero(np.isinf(picked) if kind == tf.TEMPERATURE else ~np.isfinite(picked))
        if len(bad):
            fault = f"{name} is {picked[bad[0]]} at trained token {bad[0]}; expected finite numbers there"
            if kind in LOGPROBS.values() and np.isnan(picked[bad[0]]):
                raise _NullLogprobError(f"{layout.source}: {fault}", f"bad value of {name}")
            raise TreepackError(f"{layout.source}: {fault}")
        if kind in LOGPROBS.values():
            check_logprobs(picked, source=layout.source, name=name)
        if agreed is not None and not np.array_equal(agreed, picked):
            raise TreepackError(f"{layout.source}: {first} and {name} differ; drop the wrong one")
        agreed, first = (picked, name) if agreed is None else (agreed, first)
    return agreed


def _advantages(fields: tf.Fields, mask: Mask, layout: FieldLayout) -> tuple[float | None, Float64 | None]:
    """Return the advantage of the trajectory, or the advantages of its trained tokens; at most one of the two."""
    advantages = fields.get(tf.ADVANTAGE)
    if advantages is None:
        return None, None
    per_token = _per_token(fields, tf.ADVANTAGE, mask, layout)
    names = [name for name, value in advantages.items() if not isinstance(value, list | np.ndarray)]
    scalars = [as_number(advantages[name], source=layout.source, name=name) for name in names]
    if not scalars:
        return None, per_token
    for name, value in zip(names, scalars, strict=True):
        if not math.isfinite(value):
            raise TreepackError(f"{layout.source}: {name} is {value}; expected a finite number")
    # At most two names, `advantage` and `advantages`, so comparing the first and the last is enough.
    if scalars[0] != scalars[-1] or (per_token is not None and (per_token != scalars[0]).any()):
        raise TreepackError(f"{layout.source}: advantage and advantages differ; drop the wrong one")
    return scalars[0], None
