"""Likeliest words of a teacher in a tokenised record, as columns of the trained tokens.

    {"teacher_ids": [[5, 7], ..], "teacher_logprobs": [[-.1, -3], ..]} --take_words--> _TeacherWords, and other fields

Programs store them at the token, or at the token before it, whose state predicts it; `_FIELDS` has the choice. Lists of
one word are the sampled token itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.tokens.token_layout import FieldLayout, Mask
from treepack.ragged import RaggedArray
from treepack.trajectory import MAX_LOGPROB, MAX_TOKEN_ID, Tokens, positions


class _Pair(NamedTuple):
    ids: str
    values: str
    is_before: bool = False  # at the token before
    has_logits: bool = False  # logits of the words, in place of log-probabilities


# treepack's own names; verl's DataProto; NeMo RL's distillation batches.
_FIELDS = (
    _Pair("teacher_topk_ids", "teacher_topk_logprobs"),
    _Pair("teacher_ids", "teacher_logprobs", is_before=True),
    _Pair("teacher_topk_indices", "teacher_topk_logits", is_before=True, has_logits=True),
)


class _TeacherWords(NamedTuple):
    """Words of a teacher at the stored tokens of a record: ids and values [n, K] each, under `names`."""

    names: _Pair
    ids: NDArray[Any]
    values: NDArray[np.float64]

    def put(self, content: Tokens, mask: Mask, layout: FieldLayout) -> Tokens:
        """Return the tokens with the words, or with the log-probability of each token if K is 1.

        Raises:
            TreepackError: another number of rows, or an impossible value at a trained token.
        """
        # The first token of a sequence is never predicted.
        places = np.flatnonzero(mask)
        places = places[places > layout.start] - self.names.is_before
        if len(self.ids) != layout.num_tokens:
            begin = layout.response
            if begin is None or len(self.ids) != layout.num_response or self.names.is_before:
                raise TreepackError(
                    f"{layout.source}: {self.names.ids} has {len(self.ids)} rows for {layout.num_tokens} tokens; give "
                    "one per token"
                )
            places = places - begin
        ids, values = self.ids[places], self.values[places]
        is_wrong = not np.isfinite(values).all() or (len(ids) and not (ids.min() >= 0 and ids.max() <= MAX_TOKEN_ID))
        if is_wrong or (not self.names.has_logits and (values > MAX_LOGPROB).any()):
            raise TreepackError(
                f"{layout.source}: {self.names.ids} or {self.names.values} has an impossible value at a trained token; "
                "expected token ids and their log-probabilities"
            )
        ordered = np.sort(ids, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise TreepackError(
                f"{layout.source}: {self.names.ids} repeats an id at a trained token; give each id once"
            )
        if self.names.has_logits:  # the other logits are not recorded, so the words are the whole law
            values = values - np.logaddexp.reduce(values, axis=1, keepdims=True)
        elif (np.exp(values).sum(axis=1) > 1.01).any():
            raise TreepackError(
                f"{layout.source}: {self.names.values} of a trained token are probabilities of more than 1 together; "
                "give log-probabilities over the whole vocabulary"
            )
        if ids.shape[1] == 1:
            if (ids[:, 0] != content.tokens[positions(content.starts, content.ends)]).any():
                raise TreepackError(
                    f"{layout.source}: {self.names.ids} has one id for each token, which is not the sampled one; give "
                    "the sampled token's, or several ids"
                )
            return replace(content, teacher_logprob=values[:, 0].astype(np.float32))
        offsets = np.arange(len(ids) + 1) * ids.shape[1]
        return replace(
            content,
            teacher_topk_ids=RaggedArray(ids.astype(np.int32).ravel(), offsets),
            teacher_topk_logprobs=RaggedArray(values.astype(np.float32).ravel(), offsets),
        )


def take_words(record: Record) -> tuple[_TeacherWords | None, Record]:
    """Return the words of a teacher, or None, and the record without their fields.

    Raises:
        TreepackError: the fields are not two tables of the same shape.
    """
    for names in _FIELDS:
        pair = record.value.get(names.ids), record.value.get(names.values)
        if any(each is None for each in pair):
            continue
        rest = {name: value for name, value in record.value.items() if name not in names[:2]}
        try:
            ids, values = np.asarray(pair[0]), np.asarray(pair[1], np.float64)
        except (TypeError, ValueError):
            ids = values = np.zeros(0)
        if ids.ndim != 2 or ids.shape != values.shape or not ids.shape[1] or ids.dtype.kind not in "iu":
            raise TreepackError(
                f"{record.source}: {names.ids} and {names.values} are not tables of one shape; expected a row of K "
                "token ids and a row of their K numbers for each token"
            )
        return _TeacherWords(names, ids, values), replace(record, value=rest)
    return None, record
