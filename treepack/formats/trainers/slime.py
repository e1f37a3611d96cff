"""Samples of slime: the `.pt` files of `--save-debug-rollout-data`, or the same dicts as JSON, or one sample a record.

    {"rollout_id": 5, "samples": [sample, ..]}          a whole file; rollout_id counts the steps
    {"group_index": 0, "index": 3, "rollout_id": null, "tokens": [..], "response_length": 7, "loss_mask": [..],
     "rollout_log_probs": [..], "reward": 1.0, "status": "completed", "remove_sample": false, ..}

`tokens` are prompt and response; the mask and the log-probabilities belong to the response. The samples of one rollout,
such as an agent and its sub-agents, have the same `rollout_id`. They count once in their group if they have one reward.
A sample without tokens is read as text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.formats.kit import (
    MEDIA_REASON,
    Format,
    JsonObject,
    Outcome,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    TreepackError,
    as_text,
    endings,
    is_messages,
    read_chat,
    read_tokens,
    without,
)
from treepack.ingest.readers.fields.token_fields import KEPT_FIELDS, KINDS, NUMBERS
from treepack.ingest.readers.tokens.route_fields import kept_routes

# Fields of a tokenised sample; the reader of chats would count them as not used.
_OF_TOKENS = KEPT_FIELDS | {"tokens", "response_length", "loss_mask", "rollout_log_probs", "teacher_log_probs"}
_LINE = re.compile(r"[:\[](\d+)\]?$")  # of a record in its file
_TEXT = frozenset({"prompt", "response", "apply_chat_template_kwargs"})
# Bookkeeping of the sampler, and fields that are read under another name.
_DROPPED = frozenset(
    """
    rollout_routed_experts weight_versions spec_info prefix_cache_info non_generation_time
    remove_sample multimodal_inputs multimodal_train_inputs multimodal_train_input_id generate_function_path
    custom_rm_path train_metadata rollout_id index
    """.split()
)


def _read_slime(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of a file, or the one of a sample, `<index>`, or `<rollout>/<index>` for one of several.

    Raises:
        TreepackError: a response that is not text, or an error of the `tokens` reader.
    """
    value = record.value
    # The field `label` is the expected answer, and no label of the rollout.
    options = replace(options, harmless=options.harmless | {"label"})
    if not isinstance(value.get("samples"), list):
        for item in _read_sample(record, options):
            yield _in_rollout_of_file(item, record)
        return
    if outside := sorted(KINDS.keys() & value.keys()):
        raise TreepackError(f"{record.source}: {outside[0]} is beside the samples; expected it in each of them")
    step = value.get("rollout_id")
    whole = _rollouts_of_several(value["samples"])
    for number, sample in enumerate(value["samples"]):
        fields = {} if step is None else {"step": step}
        for item in _read_sample(replace(record, source=f"{record.source}[{number}]", value=sample | fields), options):
            rollout = sample.get("rollout_id")
            if isinstance(item, Trajectory) and str(rollout) in whole:
                item = replace(item, source=record.source, rollout_id=str(rollout), rollout_part=number)
            yield item


def _in_rollout_of_file(item: Outcome, record: Record) -> Outcome:
    """Return `item` as a part of its rollout, whose other samples may be anywhere in the file of `record`."""
    rollout = record.value.get("rollout_id")
    if rollout is None or not isinstance(item, Trajectory):
        return item
    # A record has no reference to the others, so the name has all facts that samples of one rollout have in common, and
    # samples with other rewards stay apart: group 2, rollout 8, reward 1 -> "2/8/1.0".
    facts = (item.step, item.group_id, rollout, item.reward)
    name = "/".join(str(fact) for fact in facts if fact is not None)
    line = _LINE.search(record.source, len(record.path))
    return replace(item, source=record.path, rollout_id=name, rollout_part=0 if line is None else int(line[1]))


def _rollouts_of_several(samples: list[JsonObject]) -> set[str]:
    """Return the rollouts that have several samples with equal rewards. Samples with other rewards stay apart."""
    rewards: dict[str, list[Any]] = {}
    for sample in samples:
        if sample.get("rollout_id") is not None:
            rewards.setdefault(str(sample["rollout_id"]), []).append(sample.get("reward"))
    # A reward may be a number, an object or an array.
    return {
        name
        for name, values in rewards.items()
        if len(values) > 1 and all(np.array_equal(each, values[0]) for each in values)
    }


def _read_sample(record: Record, options: ReadOptions) -> Outcomes:
    value = record.value
    # slime sets this mark on samples that its filters removed from the loss.
    if value.get("remove_sample"):
        yield Skipped(record.source, "removed by the sampler")
        return
    if value.get("multimodal_inputs"):
        yield Skipped(record.source, MEDIA_REASON)
        return
    kept = without(value, _DROPPED)
    kept["trajectory_id"] = _name(value, record)
    # The weights may change during a rollout; the last version is the one that wrote its end.
    if isinstance(versions := value.get("weight_versions"), list) and versions:
        kept["weight_version"] = versions[-1]
    if len(value["tokens"]) == 0:
        items = _read_text(replace(record, value=kept), options)
    else:
        kept = without(kept, _TEXT) | kept_routes(value, options)
        items = read_tokens(replace(record, value=kept), options)
    is_cut = endings.is_cut(value["status"])
    for item in items:
        yield endings.cut(item) if is_cut and isinstance(item, Trajectory) else item


def _read_text(record: Record, options: ReadOptions) -> Outcomes:
    """Read a sample without tokens: its prompt, as text or messages, and its response."""
    value = record.value
    prompt, response = value.get("prompt"), value.get("response")
    if not response:
        yield Skipped(record.source, "empty response")
        return
    as_text(response, source=record.source, name="response")
    # A prompt of messages needs a message as its completion, and a text needs a text.
    completion: Any = [{"role": "assistant", "content": response}] if is_messages(prompt) else response
    rest = without(value, _TEXT | _OF_TOKENS)
    variables = value.get("apply_chat_template_kwargs") or None
    text = {"prompt": prompt, "completion": completion, "chat_template_kwargs": variables}
    yield from read_chat(replace(record, value=rest | text), options)


def _name(value: JsonObject, record: Record) -> str | int:
    # rollout 7 of several samples -> "7/file.pt[3]"; a rollout of one sample has rollout_id == index
    rollout, index = value.get("rollout_id"), value.get("index")
    if rollout is None or rollout == index:
        return record.label if index is None else index
    return f"{rollout}/{record.label}"


FORMAT = Format(
    name="slime",
    rank=380,
    program="slime (debug rollout data)",
    recognised_by="`tokens`, `response_length` and `status`, or `samples` that have them",
    requires="""
        samples:filled(tokens:array, response_length, status);
        samples:!list, tokens:array, response_length, status
    """,
    used="""
        rollout_id tokens=samples.tokens samples samples.group_index samples.index samples.rollout_id samples.tokens
        samples.response_length samples.loss_mask samples.rollout_log_probs samples.teacher_log_probs samples.reward
        samples.status
        samples.remove_sample samples.metadata samples.label samples.weight_versions
        samples.rollout_top_p_token_ids samples.rollout_top_p_token_offsets
    """,
    dropped="""
        prompt and response (text of the tokens);
        rollout_routed_experts (kept by --keep-routes);
        images, audio and video (samples that have some are skipped);
        spec_info, prefix_cache_info and non_generation_time;
        train_metadata, generate_function_path and custom_rm_path
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    arrays=NUMBERS,
    failed="status",
    read=_read_slime,
)
