"""Rollouts of verl as token ids: outputs of agent loops, and rows of a `DataProto`.

    {"prompt_ids": [..], "response_ids": [..], "response_mask": [..], "response_logprobs": [..], "reward_score": 1.0,
     "num_turns": 4, "extra_fields": {..}}
    {"prompts": [0, 0, ..], "responses": [.., 0], "attention_mask": [0, 0, 1, ..], "response_mask": [..],
     "input_ids": [..], "rollout_log_probs": [..], "token_level_scores": [..], "advantages": [..], "uid": ".."}
    {"batch": {"prompts": [[..], ..], ..}, "non_tensor_batch": {"uid": [..], ..}}      a whole batch as columns

The output of an agent loop has no padding. In a batch, prompts are padded on the left and responses on the right, as
the attention mask shows. Masks, log-probabilities, scores and advantages belong to the response. The output of tools is
a part of the response, with mask 0.
"""

from __future__ import annotations

from dataclasses import replace

from treepack.formats.kit import (
    MEDIA_REASON,
    Format,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    has_fields,
    is_empty,
    object_or_empty,
    read_tokens,
    temperature_of,
    without,
)
from treepack.ingest.readers.fields.token_fields import KINDS, NUMBERS
from treepack.ingest.readers.tokens.route_fields import kept_routes
from treepack.ingest.readers.tokens.trainer_batches import rows_of

# Fields that are objects with content if the row has media.
_MEDIA = ("multi_modal_data", "multi_modal_inputs")
_DROPPED = frozenset(
    """
    raw_prompt raw_prompt_ids routed_experts metrics turn_scores tool_rewards reward_extra_info
    """.split()
) | frozenset(_MEDIA)
# In order of precedence.
_SCORES = ("reward_score", "rm_scores", "token_level_scores", "token_level_rewards")


def _read_verl(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of `record`, or one for each row of a batch, named after the row.

    Raises:
        TreepackError: columns of different lengths, or an error of the `tokens` reader.
    """
    value, temperature = record.value, None
    if has_fields(value, _BATCH):
        # Tensors are in `batch`, texts and objects in `non_tensor_batch`; both have one value per row.
        temperature = temperature_of(value.get("meta_info"))
        if outside := sorted(KINDS.keys() & value.keys()):
            raise TreepackError(f"{record.source}: {outside[0]} is beside the batch; expected all tensors in the batch")
        value = value["batch"] | object_or_empty(value.get("non_tensor_batch"))
    elif not has_fields(value, _COLUMNS):
        yield from _read_row(record, options)
        return
    else:
        value = record.with_lists().value  # a row of a column is a plain number
    for number, row in enumerate(rows_of(value, first="prompts", source=record.source)):
        row = {"temperature": temperature} | row if temperature is not None else row
        yield from _read_row(replace(record, source=f"{record.source}[{number}]", value=row), options)


def _read_row(record: Record, options: ReadOptions) -> Outcomes:
    value = record.value
    if any(isinstance(value.get(name), dict) and value[name] for name in _MEDIA):
        yield Skipped(record.source, MEDIA_REASON)
        return
    kept = without(value, _DROPPED) | kept_routes(value, options)
    if isinstance(extra := kept.pop("extra_fields", None), dict):
        kept = {name: field for name, field in without(extra, _DROPPED).items() if not is_empty(field)} | kept
    # `__num_turns__` is the column of a batch, `num_turns` the field of an agent loop.
    if (num_turns := kept.pop("__num_turns__", None)) is not None:
        kept["num_turns"] = num_turns
    if isinstance(model := kept.get("reward_model"), dict):
        kept = without(kept, {"reward_model"})
        kept["ground_truth"] = model.get("ground_truth")
    if kept.get("advantages") is not None:
        kept.pop("returns", None)
    # Rewards are scores minus the KL penalty, so only the first of these fields is the reward.
    scores = [name for name in _SCORES if kept.get(name) is not None]
    kept = without(kept, scores[1:])
    yield from read_tokens(replace(record, value=kept), options)


_BATCH = "batch.prompts:column, batch.responses:column"
_COLUMNS = "prompts:column, responses:column"
FORMAT = Format(
    name="verl",
    rank=260,
    program="verl (AgentLoopOutput, DataProto)",
    recognised_by="`prompt_ids` and `response_ids`, or `prompts` and `responses`, as ids, beside `response_mask`, "
    "`response_logprobs`, `rollout_log_probs` or a score of verl; or columns of these",
    # A prompt and a response with a field of verl are a row; other programs use the same names for the ids.
    requires=f"""
        {_BATCH};
        {_COLUMNS};
        prompt_ids|prompts:ids, response_ids|responses:ids,
        response_mask|response_logprobs|reward_score|num_turns|__num_turns__|rollout_log_probs|
            token_level_scores|token_level_rewards|rm_scores
    """,
    used="""
        prompt_ids response_ids response_mask response_logprobs reward_score extra_fields prompts responses
        input_ids attention_mask position_ids rollout_log_probs old_log_probs ref_log_prob teacher_ids
        teacher_logprobs token_level_scores
        advantages uid __num_turns__ data_source extra_info reward_model.ground_truth non_tensor_batch.*
        batch.input_ids batch.attention_mask batch.position_ids batch.prompts batch.responses
        batch.response_mask batch.rollout_log_probs batch.old_log_probs batch.ref_log_prob batch.advantages
        batch.token_level_scores batch.teacher_ids batch.teacher_logprobs
    """,
    dropped="""
        token_level_rewards if there are scores (they are the scores minus the KL penalty);
        returns if there are advantages;
        raw_prompt (text of the prompt ids);
        routed_experts (kept by --keep-routes);
        metrics;
        extra_fields.turn_scores, tool_rewards and reward_extra_info (parts of the score)
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    arrays=NUMBERS,
    read=_read_verl,
)
