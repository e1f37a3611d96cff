"""Rollouts of NeMo Gym: a request to OpenAI's Responses API and all output after it, one rollout per line.

    {"responses_create_params": {"input": [..], "instructions", "tools"}, "response": {"output": [..]}, "reward": 1.0,
     "_ng_task_index": 3, "_ng_rollout_index": 0}                        rollout "3/0" of the group "3"

`output` is the whole rollout, with the results of tools and the messages of the user. If the run collected them, the
last item of each turn of the model has `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`. They are
the exact tokens of the call and are read in place of the text. Reasoning is in `summary`. If `output` is a list of
lists (the transitions of Aviary), each list contains all items up to the end of a call and its results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from treepack.files.input_files.json_text import parsed_json
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    as_text,
    endings,
    messages_of_items,
    object_or_empty,
    read_calls,
    read_chats,
    skip_reason,
    temperature_of,
    with_notes,
    without,
)
from treepack.ingest.readers.fields.rollout_facts import GROUPS, IDS
from treepack.ingest.readers.messages.response_items import Item

_TASK, _ROLLOUT = "_ng_task_index", "_ng_rollout_index"
_PROMPT, _GENERATION = "prompt_token_ids", "generation_token_ids"
_PLACEHOLDER = [0]  # prompt and generation of the empty message that NeMo Gym adds to an empty output
# Fields that become calls, or that are read under another name.
_USED = frozenset({"responses_create_params", "response", _TASK, _ROLLOUT, "agent_ref"})
_SOME_NOTE = "token ids of some turns only, not used"


def _read_nemo_gym(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`: one if its calls continue each other.

    Raises:
        TreepackError: items of a different form, or token ids that contradict each other.
    """
    value, source = record.value, record.source
    response = value.get("response")
    if not isinstance(response, dict) or response.get("output") is None:
        yield Skipped(source, "task without a response", is_rollout=False)
        return
    if _is_masked(value):
        yield Skipped(source, "masked by its environment (mask_sample)")
        return
    if (items := parsed_json(response["output"])) is not None:
        value = value | {"response": response | {"output": items}}
        response = value["response"]
    steps = _is_steps(response["output"])
    calls = _calls_of_steps(value, source) if steps else _calls_of_items(value, source)
    # Media cannot be trained, and neither can a turn after them.
    reason = skip_reason([message for chat in calls.chats for message in (*chat.prompt, *chat.response)])
    if reason is not None:
        yield Skipped(source, reason)
        return
    slim = replace(record, value=_description(value, response))
    # The response is that of the last call, with the output of all calls before it.
    if (ending := endings.raw_of_response(response)) is not None and calls.chats:
        calls.chats[-1] = replace(calls.chats[-1], ending=ending)
        calls.tokens[-1:] = [replace(call, ending=ending) for call in calls.tokens[-1:]]
    if calls.tokens and calls.have_all_ids:
        yield from read_calls(slim, calls.tokens, options)
        return
    notes = (*calls.notes, _SOME_NOTE) if calls.tokens else calls.notes
    yield from with_notes(read_chats(slim, calls.chats, options), notes)


@dataclass(frozen=True, slots=True)
class _RolloutCalls:
    """The calls of a rollout by their messages, the calls that have token ids, and whether all calls have them."""

    chats: list[ChatCall]
    tokens: list[TokenCall]
    have_all_ids: bool
    notes: tuple[str, ...]


def _is_steps(output: Any) -> bool:
    return isinstance(output, list) and bool(output) and all(isinstance(items, list) for items in output)


def _calls_of_items(value: JsonObject, source: str) -> _RolloutCalls:
    """Return one conversation of all input and output, and a call by token ids for each item that has them."""
    params, response = value["responses_create_params"], value["response"]
    output = messages_of_items(response["output"], source=f"{source}: output", summaries=True)
    instructions = params.get("instructions") or response.get("instructions")
    # If the request has no instructions, the response may repeat the instructions of the server.
    instructions = as_text(instructions, source=source, name="instructions", default="")
    system = [{"role": "system", "content": instructions}] if instructions else []
    input_messages = messages_of_items(params.get("input"), source=f"{source}: input", summaries=True)
    # Items [reasoning, message, function_call, result] are 2 messages; the turn's ids are on its last item.
    pairs = zip(output.messages, output.items, strict=True)
    turns = [items[-1] for message, items in pairs if message["role"] == "assistant"]
    chat = ChatCall([*system, *input_messages.messages], output.messages, params.get("tools") or None)
    items = [] if isinstance(response["output"], str) else response["output"]
    tokens = [_call(item) for item in items if _has_ids(item)]
    notes = tuple(dict.fromkeys((*input_messages.notes, *output.notes)))
    return _RolloutCalls([chat], tokens, all(map(_has_ids, turns)), notes)


def _calls_of_steps(value: JsonObject, source: str) -> _RolloutCalls:
    """Return one call for each step: its last turn, with everything before it as the prompt."""
    tools = value["responses_create_params"].get("tools") or None
    chats, tokens, notes = [], [], dict[str, None]()
    for items in value["response"]["output"]:
        step = messages_of_items(items, source=f"{source}: output", summaries=True)
        notes |= dict.fromkeys(step.notes)
        turns = [index for index, message in enumerate(step.messages) if message["role"] == "assistant"]
        if turns:
            # messages [user, assistant, tool, assistant] -> prompt of 3, response of 1
            chats.append(ChatCall(step.messages[: turns[-1]], step.messages[turns[-1] :], tools))
            tokens += [_call(item) for item in step.items[turns[-1]] if _has_ids(item)]
    return _RolloutCalls(chats, tokens, len(tokens) == len(chats), tuple(notes))


def _has_ids(item: Item) -> bool:
    return bool(item.get(_PROMPT)) and bool(item.get(_GENERATION)) and item[_GENERATION] != _PLACEHOLDER


def _call(item: Item) -> TokenCall:
    values = {"rollout_log_probs": item.get("generation_log_probs")}
    return TokenCall(item[_PROMPT], item[_GENERATION], values, item.get("routed_experts"))


def _is_masked(value: JsonObject) -> bool:
    config = value.get("instance_config")
    # Some environments mark a failed sample in their configuration only.
    return value.get("mask_sample") is True or (isinstance(config, dict) and config.get("mask_sample") is True)


def _description(value: JsonObject, response: JsonObject) -> JsonObject:
    """Return the fields of the record besides its calls, under the names that all formats share."""
    rest = without(value, _USED)
    names: JsonObject = {
        "model": response.get("model") or None,
        "agent": object_or_empty(value.get("agent_ref")).get("name"),
        "temperature": temperature_of(value["responses_create_params"]),
    }
    task = response.get("group_id") if value.get(_TASK) is None else value[_TASK]
    if task is None:
        return names | rest
    names["group_id"] = task
    if value.get(_ROLLOUT) is not None:
        names["trajectory_id"] = f"{task}/{value[_ROLLOUT]}"
    # The ids of the task come from its data set and may repeat, so they are metadata and do not name the rollout.
    task_ids = {name: rest.pop(name) for name in (*IDS, *GROUPS) if isinstance(rest.get(name), str | int)}
    return names | rest | ({"metadata": task_ids} if task_ids and "metadata" not in rest else {})


FORMAT = Format(
    name="nemo-gym",
    rank=230,
    program="NeMo Gym",
    recognised_by="`responses_create_params`",
    requires="responses_create_params:object",
    used="""
        responses_create_params.input responses_create_params.instructions responses_create_params.tools
        responses_create_params.temperature response.output response.model response.output.prompt_token_ids
        response.output.generation_token_ids response.output.generation_log_probs reward _ng_task_index
        _ng_rollout_index agent_ref.name mask_sample response.output.summary response.output.content
        response.output.type response.output.role response.output.call_id response.output.name
        response.output.output
    """,
    dropped="""
        routed_experts (kept by --keep-routes);
        the other settings of request and response (usage);
        reasoning.encrypted_content;
        hosted tools but mcp_call (named in a note)
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    read=_read_nemo_gym,
)
