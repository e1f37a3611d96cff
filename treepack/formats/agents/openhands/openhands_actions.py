"""Events of OpenHands before version 1 to a view: actions and observations.

    {"action": "system", "args": {"content": .., "tools": [..]}}     system prompt and tools
    {"action": "message", "source": "user", "args": {..}}            message of the user
    {"action": "run", "source": "agent", "tool_call_metadata": ..}   response of the model, with its calls
    {"observation": "run", "content": .., "tool_call_metadata": ..}  result of a call
    {"action": "condensation", "args": {..}}                         summary in place of earlier events

An action of the agent contains the response that it came from. A response that ends the task is in later prompts as
text without its call. Texts about the workspace that the agent adds (`recall`) are not in the file as sent.
"""

from __future__ import annotations

from typing import Any

from treepack.calls.event_views import EventView, Message, command_output, event_parts
from treepack.formats.kit import JsonObject, endings, is_messages, object_or_empty

Event = JsonObject

RECALL_NOTE = "text about the workspace that OpenHands adds is not in the file"
NO_RESPONSE = "action of the agent without the response of the model"
# Actions of the agent that no model chose: they are in no prompt.
_OWN_ACTIONS = frozenset(
    "change_agent_state condensation_request recall null start pause resume stop loop_recovery".split()
)
# Observations that no prompt contains, as a result or as a message.
_HIDDEN = frozenset("agent_state_changed null loop_detection recall".split())
_MARKS = {
    "error": "{}\n[Error occurred in processing last action]",
    "user_rejected": "OBSERVATION:\n{}\n[Last action has been rejected by the user]",
}


def add_action_event(view: EventView, event: Event) -> str | None:
    """Add `event` to `view`; return the reason if the conversation cannot be read."""
    if "observation" in event:
        _add_observation(view, event)
        return None
    name, action, args = event.get("id"), event.get("action"), object_or_empty(event.get("args"))
    is_agent, response = event.get("source") == "agent", _response(event)
    if action == "system":
        view.tools = args.get("tools") or None
        view.add(name, {"role": "system", "content": args.get("content")})
    elif action == "condensation":
        view.forget(_forgotten(args), args.get("summary"), args.get("summary_offset"))
    elif response is not None:
        thought = args.get("thought") or response["content"]
        history = {"role": "assistant", "content": thought} if action == "finish" else None
        view.answer(name, response, name=_response_id(event), history=history)
    elif action in ("message", "finish") and is_agent:
        text = args.get("content") if action == "message" else args.get("thought")
        view.answer(name, {"role": "assistant", "content": text or ""}, name=None)
    elif action == "message":
        view.add(name, {"role": "user", "content": _with_images(args)})
    elif not is_agent:
        command = f"User executed the command:\n{args.get('command')}" if action == "run" else None
        view.add(name, {"role": "user", "content": command} if command else None)
    elif str(action) not in _OWN_ACTIONS:
        return NO_RESPONSE
    return None


def _with_images(args: Event) -> list[Any]:
    images = [{"type": "image_url"} for _ in event_parts(args.get("image_urls"))]
    return [{"type": "text", "text": str(args.get("content") or "")}, *images]


def _add_observation(view: EventView, event: Event) -> None:
    kind, extras, content = event.get("observation"), object_or_empty(event.get("extras")), event.get("content") or ""
    if kind == "recall":
        view.log.note(RECALL_NOTE)
    if str(kind) in _HIDDEN:
        return
    if kind == "run":
        content = command_output(content, extras.get("metadata"))
    elif kind == "delegate":
        content = object_or_empty(extras.get("outputs")).get("content", content)
    content = _MARKS.get(str(kind), "{}").format(content)
    call = object_or_empty(event.get("tool_call_metadata"))
    if call.get("tool_call_id") is not None:
        result = {"tool_call_id": call["tool_call_id"], "name": call.get("function_name"), "content": content}
        view.add(event.get("id"), {"role": "tool"} | result)
        return
    if kind == "run":
        content = f"\nObserved result of command executed by user:\n{content}"
    view.add(event.get("id"), {"role": "user", "content": content})


def _response(event: Event) -> Message | None:
    """Return the message of the model that the action `event` came from, or None if it is not in the file."""
    response = object_or_empty(object_or_empty(event.get("tool_call_metadata")).get("model_response"))
    choices = response.get("choices")
    choice = choices[0] if is_messages(choices) and choices else {}
    message = choice.get("message")
    if not isinstance(message, dict):
        return None
    fields = {name: message[name] for name in ("tool_calls", "reasoning_content") if message.get(name)}
    if (ending := endings.raw_of(choice)) is not None:
        fields["finish_reason"] = ending
    return {"role": "assistant", "content": message.get("content") or ""} | fields


def _response_id(event: Event) -> str | None:
    name = object_or_empty(object_or_empty(event.get("tool_call_metadata")).get("model_response")).get("id")
    return name if isinstance(name, str) else None


def _forgotten(args: Event) -> set[Any] | range:
    """Return the ids of the events that a condensation takes out: a list, or the first and the last of a range."""
    if isinstance(args.get("forgotten_event_ids"), list):
        return {event for event in args["forgotten_event_ids"] if isinstance(event, str | int)}
    first, last = args.get("forgotten_events_start_id"), args.get("forgotten_events_end_id")
    return range(first, last + 1) if isinstance(first, int) and isinstance(last, int) else set()
