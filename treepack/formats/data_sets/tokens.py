"""Tokenised rollouts of any trainer, under the names of `token_fields`; `readers.tokens.token_records` reads them."""

from __future__ import annotations

from treepack.formats.kit import Format, read_tokens
from treepack.ingest.readers.fields import token_fields as tf
from treepack.ingest.readers.kinds import IDS

FORMAT = Format(
    name="tokens",
    rank=620,
    program="anything with token ids: trainers' dumps, your own",
    recognised_by="ids, whole or as prompt and response, under one of the names of [inputs](inputs.md#tokens)",
    requires=[{tf.NAMES[tf.IDS]: IDS}, {tf.NAMES[tf.PROMPT]: IDS, tf.NAMES[tf.RESPONSE]: IDS}],
    checked="none",
    used="input_ids loss_mask logprobs reward group_id temperature temperatures",
    dropped="fields without a name in [inputs](inputs.md#tokens) that are not short metadata",
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    arrays=tf.NUMBERS,
    read=read_tokens,
)
