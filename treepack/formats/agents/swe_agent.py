"""Files `.traj` of SWE-agent: one document per run of a task, named after the task, in a folder named after the run.

    {"environment": "..", "history": [messages], "trajectory": [{"action", "response", "query": [messages], ..}, ..],
     "info": {"exit_status": "submitted", ..}}
    {"attempts": [{the same}, ..], ..}                        several tries of one task; the rest repeats the best

A step of version 1.1 or later contains the exact prompt of its call, as `query`. The history does not: history
processors shorten old turns, and a refused reply is answered and then dropped. So the prompts are read if there are
any, and otherwise the `history`. In version 1.0, the `messages` of a step include its reply, so its prompt
is the `messages` of the step before; if the reply was refused, the `messages` do not include it.

Demonstrations are not trained, nor is the text of the program in the model's name when it gives up.
"""

from __future__ import annotations

import json
from dataclasses import replace

from treepack.calls.rollout_names import within
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    as_flag,
    as_objects,
    conversation,
    folder_and_document,
    is_messages,
    objects_at,
    read_chats,
    temperature_of,
    with_notes,
    without,
)

# Parts of the content, or bookkeeping of the agent that no model saw.
_REDUNDANT = frozenset({"agent", "thought", "action", "message_type", "is_demo", "tags", "cache_control"})
# Fields of `info` that repeat the edits, or belong to another model.
_REPEATED = frozenset({"submission", "edited_files30", "edited_files50", "edited_files70", "review", "chooser"})
# The first words of a message that the program wrote in the model's name.
_GAVE_UP = ("Exit due to", "Exiting due to")
_UNKNOWN_PROMPT = "call without its prompt in the file not used"
_UNKNOWN_REPLY = "refused reply without its tool calls in the file not used"


def read_swe_agent(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`, named `<folder>/<task>`, in the group of the task.

    Raises:
        TreepackError: steps or messages of a different kind.
    """
    folder, task = folder_and_document(record)
    name = f"{folder}/{task}" if folder else task
    attempts = objects_at(record.value, "attempts", record.source)
    # [run, run] -> {"folder/task/attempt-0": run, "folder/task/attempt-1": run}
    runs = {f"{name}/attempt-{k}": run for k, run in enumerate(attempts)} if attempts else {name: record.value}
    for own_name, run in runs.items():
        source = record.source if run is record.value else f"{record.source}: {own_name.rpartition('/')[2]}"
        yield from _read_run(replace(record, source=source, value=run), own_name, task, options)


def _read_run(record: Record, name: str, task: str, options: ReadOptions) -> Outcomes:
    run = record.value
    info = without(run["info"], _REPEATED)
    rest = without(run, ("history", "trajectory", "replay_config", "info"))
    facts = {"info": info, "trajectory_id": name, "group_id": task, "temperature": _temperature(run)}
    slim = replace(record, value=rest | facts)
    steps = objects_at(run, "trajectory", record.source)
    if any(step.get("query") or step.get("messages") for step in steps):
        calls, notes = _calls(steps, run["history"], record.source)
        yield from with_notes(read_chats(slim, calls, options), notes)
        return
    # A history of several agents mixes their conversations; items without an agent belong to all.
    agents = dict.fromkeys(each["agent"] for each in run["history"] if isinstance(each.get("agent"), str))
    for number, agent in enumerate(agents if len(agents) > 1 else [None]):
        seen = [each for each in run["history"] if agent is None or each.get("agent") in (None, agent)]
        item = conversation(slim, [_message(each) for each in seen], options)
        yield item if agent is None else within(replace(item, trajectory_id=f"{name}/{agent}"), str(name), number)


def _temperature(run: JsonObject) -> float | None:
    """Return the temperature in the configuration of a run, which is an object or JSON text."""
    settings = run.get("replay_config")
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except (ValueError, RecursionError):
            return None
    for name in ("agent", "model"):
        settings = settings.get(name) if isinstance(settings, dict) else None
    return temperature_of(settings)


def _message(item: JsonObject) -> JsonObject:
    """Return an item of the history in chat form."""
    kept = without(item, _REDUNDANT)
    if ids := kept.pop("tool_call_ids", None):
        kept["tool_call_id"] = ids[0] if isinstance(ids, list) else ids
    if blocks := kept.pop("thinking_blocks", None):
        texts = [block.get("thinking") for block in blocks] if is_messages(blocks) else []
        kept["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    return kept | {"loss": False} if _is_demo(item) or _gave_up(item) else kept


def _is_demo(item: JsonObject) -> bool:
    return as_flag(item.get("is_demo") or False) is not False


def _gave_up(item: JsonObject) -> bool:
    """Return whether the program wrote `item` in the model's name, because a limit or an error ended the run."""
    content, action = item.get("content"), item.get("action")
    said = isinstance(content, str) and content.startswith(_GAVE_UP)
    return said and item.get("role") == "assistant" and (not action or str(action).startswith("exit_"))


def _calls(steps: list[JsonObject], history: list[JsonObject], source: str) -> tuple[list[ChatCall], tuple[str, ...]]:
    """Return the calls of the steps, and notes on the calls that cannot be reconstructed.

    A step contains only the text of its reply. The tool calls are in the history, which lacks the refused replies. The
    steps and the replies of the history are therefore compared one by one.
    """
    replies = [item for item in history if item.get("role") == "assistant" and not _is_demo(item)]
    calls_tools = any(reply.get("tool_calls") for reply in replies)
    calls: list[ChatCall] = []
    notes: dict[str, None] = {}
    # steps [a, refused b, c] and replies [a, c]: c is compared after b did not match, so `index` skips no reply.
    index = 0
    for number, step in enumerate(steps):
        reply: JsonObject | None = {"role": "assistant", "content": step.get("response")}
        if index < len(replies) and _is_reply(replies[index], step):
            reply = replies[index]
            index += 1
        elif calls_tools:
            reply = None
        prompt = _prompt(steps, number, source)
        if prompt is None:
            notes[_UNKNOWN_PROMPT] = None
        elif reply is None:
            notes[_UNKNOWN_REPLY] = None
        elif prompt and not _gave_up(reply):
            calls.append(ChatCall([_message(item) for item in prompt], [_message(reply)]))
    return calls, tuple(notes)


def _is_reply(item: JsonObject, step: JsonObject) -> bool:
    return item.get("content") == step.get("response") and item.get("action", step.get("action")) == step.get("action")


def _prompt(steps: list[JsonObject], number: int, source: str) -> list[JsonObject] | None:
    """Return the prompt of the call of a step: [] if the program made the step, None if the file lacks the prompt."""
    step = steps[number]
    # A step that the program made has the query [{}].
    if "query" in step:
        query = objects_at(step, "query", source)
        return [] if query == [{}] else query
    messages = objects_at(step, "messages", source)
    # Version 1.0: messages [.., reply, observation] -> the prompt is before the last two.
    accepted = _ends_with_step(messages, step)
    if number == 0:
        return messages[:-2] if accepted else messages
    before = as_objects(steps[number - 1].get("messages"), source=source, name="messages") if accepted else messages
    return before if _ends_with_step(before, steps[number - 1]) else None


def _ends_with_step(messages: list[JsonObject], step: JsonObject) -> bool:
    """Return whether `messages` end with the reply of `step` and the observation after it."""
    return len(messages) > 1 and messages[-2].get("role") == "assistant" and _is_reply(messages[-2], step)


FORMAT = Format(
    name="swe-agent",
    rank=30,
    program="SWE-agent",
    recognised_by="`history`, a list of messages, beside `trajectory` and `info`; or `attempts` of these",
    requires="""
        attempts:filled(history:objects, trajectory, info:object);
        attempts:!filled, history:objects, trajectory, info:object
    """,
    used="""
        history history.is_demo history.tool_calls history.tool_call_ids trajectory.query trajectory.messages
        trajectory.response trajectory.action environment replay_config history.role history.content
        history.agent attempts.trajectory=trajectory attempts.history=history attempts.environment
        attempts.info
    """,
    dropped="""
        trajectory.observation, trajectory.state, trajectory.execution_time;
        trajectory.extra_info;
        info.submission and info.edited_files (repeat the edits);
        info.review, info.chooser (of a different model);
        replay_config but for the temperature of its model
    """,
    keeps="masks, lineage",
    failed="info.exit_status",
    read=read_swe_agent,
)
