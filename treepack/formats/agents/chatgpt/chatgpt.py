"""Exports of ChatGPT, `conversations.json`: one record per conversation, a tree of messages.

    {"title": "..", "conversation_id": "C", "current_node": "n3", "mapping": {
        "n1": {"parent": null, "children": ["n2"], "message": {"author": {"role": "user"}, "recipient": "all",
               "content": {"content_type": "text", "parts": ["Hello"]}, "metadata": {..}, ..}}, ..}}

A message that was edited, or an answer that was made again, branches the tree. Every path from the root to a leaf is a
trajectory, up to its last answer. Answers that an earlier export has are not trained again. An answer consists of
several messages, which become messages of a chat:

    thoughts, text to "all"          ->  assistant {reasoning_content, content}
    thoughts, code to "python"       ->  assistant {reasoning_content, tool_calls: python}, then the tool's message
    context that the user can edit   ->  system

A call has the recipient as its name. Its arguments are the text of the message if that is a JSON object, and else
{"code": text} or {"input": text}. The file contains neither the system prompt nor the tools. A path ends before the
first image, because text cannot represent it. An answer that was interrupted is trained as far as it goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from treepack.calls.copied_turns import COPIED_NOTE
from treepack.calls.leaf_paths import distinct_paths, unused_fields
from treepack.formats.agents.chatgpt.chatgpt_contents import CONTENT, CONTEXTS, chatgpt_text, content_of, reason_of
from treepack.formats.kit import (
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    TreepackError,
    conversation,
    leaf_paths,
    objects_at,
    shown,
    with_notes,
)
from treepack.ingest.readers.kinds import ANY, ValueKind

_CONTEXT_NOTE = "system prompt and tools are not in exports of ChatGPT"
_FILES_NOTE = "files that the user attached are not in the export"
RECAP_NOTE = "length of the reasoning ('Thought for 5 seconds') not used"
_THOUGHTS_NOTE = "thoughts without an answer not used"
PARENT_NOTE = "node whose parent is not in the conversation"
_CHILD_NOTE = "node with a child that is not in the conversation"
_NAME_NOTE = "node whose id is not its name"
EMPTY_NOTE, EMPTY_CALL_NOTE = "message of the model without text not used", "call without text not used"
NO_ANSWER = "conversation without an answer"
_ALL = "all"  # the recipient of a message that is not a call
_NODE = frozenset({"id", "message", "parent", "children"})
_MESSAGE = frozenset(
    "id author create_time update_time content status end_turn weight metadata recipient channel".split()
)
_CUT = frozenset({"in_progress", "finished_partial_completion"})  # values of `status`

_Message = JsonObject
Node = JsonObject


def _has_children(node: Node) -> bool:
    return "children" in node and isinstance(node["children"], list | None)


_NODES = ValueKind(
    "an object of nodes with parent, children and message",
    lambda value: (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(node, dict) and "message" in node and _has_children(node) for node in value.values())
    ),
)


@dataclass(slots=True)
class _PathTurns:
    """The messages of a path in chat form, the thoughts before the next one, and notes to be counted."""

    messages: list[_Message] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    num_calls: int = 0


def read_chatgpt(record: Record, options: ReadOptions) -> Outcomes:
    """Read the paths of a conversation, `<conversation>/leaf-<k>` in depth-first order, which form one group.

    Raises:
        TreepackError: the nodes are not a tree, or a message has a form that is not known.
    """
    value, source = record.value, record.source
    roots = _roots(value["mapping"], source)
    notes = (*_unused(value["mapping"], source), *_links(value["mapping"]))
    cut = [_readable(path, source) for root in roots for path in leaf_paths(root, source=source)]
    reasons = dict.fromkeys(reason for _, reason in cut if reason is not None)
    paths = distinct_paths(_up_to_answer(path, source) for path, _ in cut)
    name = str(value.get("conversation_id") or value.get("id") or record.label)
    if not paths:
        yield Skipped(source, "; ".join(reasons) or NO_ANSWER, group_id=name)
        return
    notes = (_CONTEXT_NOTE, *(f"turns after it not used: {reason}" for reason in reasons), *notes)
    items: list[Trajectory] = []
    copied = _copied(value, paths, CallLog(options.turns, source), source)
    for leaf, path in enumerate(paths):
        if all(node["name"] in copied for node in path if _is_answer(node, source)):
            continue
        turns = _turns(path, copied, source)
        about = {
            "title": value.get("title"),
            "model": _models(path),
            "is_current": any(node["name"] == value.get("current_node") for node in path) or None,
        }
        item = conversation(replace(record, value=about), turns.messages, options, notes=tuple(turns.notes))
        items.append(replace(item, trajectory_id=f"{name}/leaf-{leaf}", group_id=name))
    if not items:
        yield Skipped(source, COPIED_NOTE, group_id=name)
    yield from with_notes(_once(items), (*notes, COPIED_NOTE) if copied else notes)


def _copied(value: JsonObject, paths: list[list[Node]], log: CallLog, source: str) -> set[str]:
    """Return the names of answers that an earlier export has with the same text; exports of one account overlap."""
    conversation_name = value.get("conversation_id") or value.get("id")
    answers = {node["name"]: node["message"]["content"] for path in paths for node in path if _is_answer(node, source)}
    return {name for name, text in answers.items() if log.is_copy([(f"{conversation_name}/{name}", text)])}


def _once(items: list[Trajectory]) -> Iterator[Trajectory]:
    """Yield `items`; a note that several paths have is counted once."""
    seen: set[str] = set()
    for item in items:
        yield replace(item, notes=tuple(note for note in item.notes if note not in seen))
        seen.update(item.notes)


def _roots(mapping: dict[str, Node], source: str) -> list[Node]:
    """Return the nodes without a parent, as objects with name, message and the list of their children."""
    nodes = {name: {"name": name, "message": node["message"], "children": []} for name, node in mapping.items()}
    roots: list[Node] = []
    for name, node in mapping.items():
        parent = node.get("parent")
        if not isinstance(parent, str | None):
            raise TreepackError(f"{source}: node {name} has the parent {shown(parent)}; expected the name of a node")
        (nodes[parent]["children"] if isinstance(parent, str) and parent in nodes else roots).append(nodes[name])
    for name, node in mapping.items():
        # The order in which the answers were made, if the parent lists its children.
        order = {child: index for index, child in enumerate(node["children"] or []) if isinstance(child, str)}
        nodes[name]["children"].sort(key=lambda child: order.get(child["name"], len(order)))
    reached = {id(node) for root in roots for path in leaf_paths(root, source=source) for node in path}
    if len(reached) < len(nodes):
        raise TreepackError(f"{source}: mapping has nodes that are their own ancestors; expected a tree")
    return roots


def _links(mapping: dict[str, Node]) -> tuple[str, ...]:
    """Return notes on nodes that name others which are not there."""
    notes: dict[str, None] = {}
    for name, node in mapping.items():
        if node.get("parent") is not None and node["parent"] not in mapping:
            notes[PARENT_NOTE] = None
        if any(not isinstance(child, str) or child not in mapping for child in node["children"] or []):
            notes[_CHILD_NOTE] = None
        if node.get("id", name) != name:
            notes[_NAME_NOTE] = None
    return tuple(notes)


def _unused(mapping: dict[str, Node], source: str) -> tuple[str, ...]:
    messages = [node["message"] for node in mapping.values() if isinstance(node["message"], dict)]
    contents = [message["content"] for message in messages if isinstance(message.get("content"), dict)]
    return (
        *unused_fields(mapping.values(), _NODE, source=source),
        *unused_fields(messages, _MESSAGE, source=source),
        *unused_fields(contents, CONTENT, source=source),
    )


def _readable(path: list[Node], source: str) -> tuple[list[Node], str | None]:
    """Return the nodes before the first one that text cannot represent, and the reason or None."""
    for index, node in enumerate(path):
        if (reason := reason_of(node, source)) is not None:
            return path[:index], reason
    return path, None


def _metadata(message: _Message, source: str) -> JsonObject:
    metadata = message.get("metadata") or {}
    details = metadata.get("finish_details") if isinstance(metadata, dict) else metadata
    if not isinstance(details, dict | None):
        raise TreepackError(f"{source}: a message has the metadata {shown(metadata)}; expected an object")
    return dict(metadata)


def _role(node: Node, source: str) -> str:
    author = node["message"].get("author")
    role = author.get("role") if isinstance(author, dict) else None
    if role not in ("system", "user", "assistant", "tool"):
        raise TreepackError(f"{source}: a message has the role {shown(role)}; expected system, user, assistant or tool")
    return str(role)


def _is_answer(node: Node, source: str) -> bool:
    """Return whether a node is a text or a call of the model."""
    if node["message"] is None or _role(node, source) != "assistant":
        return False
    is_context = str(content_of(node, source).get("content_type")) in CONTEXTS
    return not is_context and node["message"].get("channel") != "analysis" and bool(chatgpt_text(node, source))


def _up_to_answer(path: list[Node], source: str) -> list[Node]:
    answers = [index for index, node in enumerate(path) if _is_answer(node, source)]
    return path[: answers[-1] + 1] if answers else []


def _turns(path: list[Node], copied: set[str], source: str) -> _PathTurns:
    turns = _PathTurns()
    for node in path:
        message = node["message"]
        if message is None:
            continue
        role, kind, text = (
            _role(node, source),
            str(content_of(node, source).get("content_type")),
            chatgpt_text(node, source),
        )
        metadata = _metadata(message, source)
        if metadata.get("attachments"):
            turns.notes[_FILES_NOTE] = None
        if kind == "reasoning_recap":
            turns.notes[RECAP_NOTE] = None
        elif kind == "thoughts" or (role == "assistant" and message.get("channel") == "analysis"):
            turns.thoughts += _thoughts(content_of(node, source), source) if kind == "thoughts" else [text]
        elif kind in CONTEXTS or role == "system":
            _add_system(turns, text)
        elif role == "assistant":
            weight = {"weight": 0} if node["name"] in copied else {}
            _add_answer(turns, message | weight, text, metadata)
        else:
            _add_other(turns, message, role, text)
    return turns


def _thoughts(content: JsonObject, source: str) -> Iterator[str]:
    """Yield the texts of thoughts; a thought without text has a summary only."""
    if content.get("content") is not None:
        raise TreepackError(
            f"{source}: a message has thoughts and content {shown(content['content'])}; expected thoughts"
        )
    for thought in objects_at(content, "thoughts", source):
        texts = (thought.get("content"), thought.get("summary"))
        if not all(isinstance(each, str | None) for each in texts):
            raise TreepackError(f"{source}: a message has the thought {shown(thought)}; expected text")
        if text := next(filter(None, texts), None):
            yield text


def _add_system(turns: _PathTurns, text: str) -> None:
    if not text:
        return
    # Templates accept one system message, at the beginning.
    last = turns.messages[-1] if turns.messages else None
    if last is not None and last["role"] == "system":
        last["content"] += f"\n\n{text}"
    else:
        turns.messages.append({"role": "system", "content": text})


def _add_answer(turns: _PathTurns, message: _Message, text: str, metadata: JsonObject) -> None:
    if not text:
        turns.notes[EMPTY_NOTE if message.get("recipient") in (None, _ALL) else EMPTY_CALL_NOTE] = None
        return
    answer: _Message = {"role": "assistant", "content": text}
    details = metadata.get("finish_details")
    reason = details.get("type") if details else None
    if message.get("status") in _CUT:
        reason = "interrupted"
    if message.get("weight") is not None:
        answer["weight"] = message["weight"]
    if turns.thoughts:
        answer["reasoning_content"] = "\n\n".join(turns.thoughts)
        turns.thoughts = []
    recipient = message.get("recipient")
    if recipient not in (None, _ALL):
        turns.num_calls += 1
        kind = message["content"].get("content_type")
        # Ids of nine letters and digits, because the export has none.
        call = {"id": f"call{turns.num_calls:05}", "name": recipient, "arguments": _arguments(text, kind)}
        answer |= {"content": "", "tool_calls": [call]}
        last = turns.messages[-1] if turns.messages else {}
        if last.get("role") == "assistant" and "reasoning_content" not in answer and "finish_reason" not in last:
            # Text and calls before a result are one message.
            last["tool_calls"] = [*last.get("tool_calls", []), call]
            return
    if reason is not None:
        answer["finish_reason"] = reason
    turns.messages.append(answer)


def _arguments(text: str, kind: Any) -> JsonObject:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"code" if kind == "code" else "input": text}


def _add_other(turns: _PathTurns, message: _Message, role: str, text: str) -> None:
    """Add a message of the user or of a tool; an empty one is left out, unless it is the result of a call."""
    if turns.thoughts and role == "user":
        turns.notes[_THOUGHTS_NOTE] = None
        turns.thoughts = []
    other: _Message = {"role": role, "content": text}
    if role == "tool":
        calls = [call for each in turns.messages for call in each.get("tool_calls", [])]
        answered = {each.get("tool_call_id") for each in turns.messages}
        unanswered = [call["id"] for call in calls if call["id"] not in answered]
        if isinstance(message["author"].get("name"), str):
            other["name"] = message["author"]["name"]
        # A tool may write several messages: the first one for each call is its result.
        other |= {"tool_call_id": unanswered[0]} if unanswered else {}
    if text or "tool_call_id" in other:
        turns.messages.append(other)


def _models(path: list[Node]) -> str | None:
    metadata = [node["message"].get("metadata") for node in path if node["message"] is not None]
    names = [each.get("model_slug") for each in metadata if isinstance(each, dict)]
    return ", ".join(dict.fromkeys(name for name in names if isinstance(name, str))) or None


FORMAT = Format(
    name="chatgpt",
    rank=510,
    program="ChatGPT (export of conversations)",
    recognised_by="`mapping`, an object of nodes with `message` and `children`, and `current_node` or `title`",
    requires=[{"mapping": _NODES, ("current_node", "title"): ANY}],
    used="""
        current_node conversation_id id title mapping.*.id mapping.*.parent mapping.*.children mapping.*.message=message
        message.author.role message.author.name message.status message.weight message.recipient message.channel
        message.metadata.model_slug message.metadata.finish_details.type message.metadata.attachments
        message.content.content_type message.content.parts message.content.parts.content_type message.content.parts.text
        message.content.text message.content.thoughts.content message.content.thoughts.summary message.content.result
        message.content.title message.content.url message.content.user_profile message.content.user_instructions
        message.content.model_set_context
    """,
    dropped="""
        mapping.message.metadata except model_slug and finish_details (display, citations, searches);
        images and other content that is not text (a path ends before it);
        reasoning_recap
    """,
    keeps="masks, lineage",
    overlaps=True,
    read=read_chatgpt,
)
