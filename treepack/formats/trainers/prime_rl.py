"""Training data of prime-rl as token ids: samples, packed micro batches, and token exports of the trainer.

    {"token_ids": [..], "mask": [..], "logprobs": [..], "temperatures": [..], "env_name": "..", "advantages": [..]}
    {"input_ids": [..], "loss_mask": [..], "inference_logprobs": [..], "advantages": [..], "env_names": [..],
     "position_ids": [0, 1, 0, ..], "sequence_lengths": [..]}
    {"step": 3, "rank": 0, "export_sequence_idx": 0, "token_ids": [..], "loss_mask": [..], "trainer_logprobs": [..], ..}

All fields have one value per token at the position of the token, 0 if the token is not trained; only the trainer shifts
labels. A micro batch is split by its lengths. Padding after its last sequence, where the positions start again, is
removed. The weight of a token in the policy loss is its mask times `rl_weights`. If no token has such a weight,
`ce_weights` are the loss weights.
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
    mask_values,
    read_tokens,
    with_notes,
    without,
)
from treepack.ingest.readers.fields.token_fields import KEPT_FIELDS, number_values
from treepack.ingest.readers.kinds import ARRAY
from treepack.ingest.readers.tokens.kept_fields import read_sets, set_fields
from treepack.ingest.readers.tokens.packed_rows import lengths_of, num_padding, read_packed
from treepack.ingest.readers.tokens.route_fields import kept_routes, rows_of_all

_IDS_OF = ("token_ids", "input_ids")
_MASKS_OF = ("loss_mask", "mask")
# One weight per token for each part of the loss: policy, cross-entropy, KL to a reference.
_STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")
_LENGTHS = ("sequence_lengths", "seq_lens")
# Settings of the sampler, and metrics that the trainer computes from the other fields.
_DROPPED = frozenset(
    """
    routed_experts mm_kwargs mm_token_type_ids position_ids env_names rank micro_step
    micro_sequence_idx schema_version entropy mismatch_kl prob_delta log_importance_ratio importance_ratio
    is_masked is_masked_high is_masked_low
    """.split()
) | frozenset(_LENGTHS)


def _read_prime_rl(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of a sample or an export, or all trajectories of a micro batch, `<record>/sequence-<k>`.

    Raises:
        TreepackError: weights or lengths that do not fit the tokens, or an error of the `tokens` reader.
    """
    value = record.value
    if value.get("mm_kwargs"):
        yield Skipped(record.source, MEDIA_REASON)
        return
    ids = _first(value, _IDS_OF)
    weights, notes = _weights(value, len(ids), record.source)
    kept = without(value, (*_DROPPED, *_STREAMS, *_MASKS_OF, *_IDS_OF))
    kept |= {"token_ids": ids, "loss_mask": weights, **kept_routes(value, options)}
    # The trainer computes log-probabilities before the update, so they are the old ones.
    if "export_sequence_idx" in kept:
        kept["old_log_probs"] = kept.pop("trainer_logprobs", None)
    sizes = next((value[name] for name in _LENGTHS if value.get(name) is not None), None)
    if sizes is not None:  # several sequences: their rows are separated with their tokens
        kept |= {
            name: rows_of_all(routes, source=record.source, name=name, num_tokens=len(ids))
            for name, routes in kept_routes(value, options).items()
        }
        if (sets := read_sets(set_fields(value), record.source)) is not None:
            kept = without(kept, KEPT_FIELDS) | {"kept_ids": [sets[1].list(i) for i in range(len(sets[1]))]}
    one = replace(record, value=kept)
    items = read_tokens(one, options) if sizes is None else _read_batch(one, value, sizes, options)
    yield from with_notes(items, notes)


def _read_batch(record: Record, value: JsonObject, sizes: Any, options: ReadOptions) -> Outcomes:
    num_tokens, source = len(record.value["token_ids"]), record.source
    lengths = lengths_of(sizes, name="sequence_lengths", num_tokens=num_tokens, source=source)
    names = value.get("env_names")
    kept = dict(record.value)
    if isinstance(names, list) and len(names) == num_tokens and lengths:
        # lengths [3, 2] -> starts [0, 3]; every token of a sequence has the name of the sequence's environment.
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        kept["env_name"] = [names[start] for start in starts if start < num_tokens]
    padding = num_padding(value.get("position_ids"), lengths, source=source)
    if padding:
        kept = {name: _cut(field, num_tokens, padding) for name, field in kept.items()}
        # Padding is counted in the last length.
        lengths[-1] -= padding
    yield from read_packed(replace(record, value=kept), lengths, options)


def _cut(field: Any, num_tokens: int, padding: int) -> Any:
    return field[: num_tokens - padding] if ARRAY.test(field) and len(field) == num_tokens else field


def _weights(value: JsonObject, num_tokens: int, source: str) -> tuple[Any, tuple[str, ...]]:
    """Return the loss weight of each token, and notes on the streams of weights that are not in it."""
    name = next(name for name in _MASKS_OF if value.get(name) is not None)
    weights = mask_values(value[name], source=source, name=name).astype(np.float64)
    streams = {name: _stream(value.get(name), num_tokens, name, source) for name in _STREAMS}
    used = "rl_weights"
    if (rl_weights := streams[used]) is not None:
        if len(weights) != num_tokens:
            raise TreepackError(f"{source}: {name} has {len(weights)} values; expected {num_tokens}, one per token")
        weights = weights * rl_weights
    # No token has a weight in the policy loss, so the sample trains by cross-entropy.
    if not weights.any() and streams["ce_weights"] is not None and streams["ce_weights"].any():
        used, weights = "ce_weights", streams["ce_weights"]
    others = (name for name, stream in streams.items() if name != used and stream is not None and stream.any())
    return weights, tuple(f"{name} not used" for name in others)


def _stream(stream: Any, num_tokens: int, name: str, source: str) -> Any:
    """Return a stream of weights as an array; None if it is missing, or null throughout as in an export."""
    if stream is None or not ARRAY.test(stream):
        return None
    numbers = number_values(stream, source=source, name=name)
    if len(numbers) != num_tokens:
        raise TreepackError(f"{source}: {name} has {len(numbers)} values; expected {num_tokens}, one per token")
    return None if np.isnan(numbers).all() else numbers


def _first(value: JsonObject, names: tuple[str, ...]) -> Any:
    return next((value[name] for name in names if ARRAY.test(value.get(name))), None)


FORMAT = Format(
    name="prime-rl",
    rank=390,
    program="prime-rl (TrainingSample, MicroBatch, token exports)",
    recognised_by="`token_ids` or `input_ids` beside `env_name` and a mask, or `inference_logprobs`",
    requires="token_ids|input_ids:array, loss_mask|mask:array, env_name|inference_logprobs",
    used="""
        token_ids mask logprobs temperatures env_name ref_logprobs teacher_logprobs advantages rl_weights ce_weights
        input_ids loss_mask inference_logprobs sequence_lengths position_ids env_names step trainer_logprobs
        export_sequence_idx
    """,
    dropped="""
        routed_experts (kept by --keep-routes);
        ref_kl_weights, and ce_weights beside rl_weights (noted);
        mm_kwargs (samples that have some are skipped);
        what an export computes: entropy, ratios, which tokens were clipped
    """,
    keeps="token ids, masks, log-probabilities",
    read=_read_prime_rl,
)
