"""Trees of text as objects inside objects: one record per tree, one trajectory per path from the root to a leaf.

    {"prompt": "2 + 2?", "children": [{"text": "It is", "children": [{"text": " 4.", "reward": 1},
                                                                     {"text": " 5.", "reward": 0}]}]}
    {"messages": [..], "tools": [..], "children": [{"message": {"role": "assistant", ..}, "children": [..]}]}
    {"prompt": "2 + 2?", "tree": {"children": [{"response": "4", "reward": 1}, ..]}}

A node has one of `message`, `messages`, `text`, `content`, `completion` and `response`, with or without `role`. What
the root has is the prompt, which is not trained. A path is read in one of two ways:

    only text, no role, tool or weight    text: the texts of the nodes follow each other, as they are, after the prompt
    otherwise                             a conversation: a text without a role is the assistant's, and continues the
                                          text before it if that has no role either; a role makes a new message

The reward of a path is that of its last node with a reward, so a reward of an inner node or of the root counts for the
leaves below it that have none. An `advantage` is read at leaves. This layout is not a program's: people write it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treepack.calls.leaf_paths import nodes_of, unused_fields
from treepack.files.input_files.json_text import parsed_json
from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcome,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    TreepackError,
    conversation,
    describe,
    endings,
    is_messages,
    leaf_paths,
    shown,
    skip_reason,
    without,
)
from treepack.ingest.readers.fields.rewards import REWARDS as REWARD_NAMES
from treepack.ingest.readers.fields.rewards import reward_of
from treepack.ingest.readers.fields.values import as_number
from treepack.ingest.readers.messages.conversation_settings import normalise_template_kwargs
from treepack.trajectory import Chat, PromptCompletion

_ROOTS = ("tree", "root")  # fields that may have the root, if it is not the record itself
_ASKED = ("prompt", "messages", "question", "problem", "query", "instruction")  # the prompt, in this order
_SAID = ("message", "messages", "text", "content", "completion", "response")
_ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "ai": "assistant", "model": "assistant"}
# Fields of a node that belong to its message.
_OF_MESSAGE = frozenset(
    """
    name tool_call_id tool_calls function_call reasoning reasoning_content loss loss_scale trainable weight
    """.split()
)
_ENDINGS = (*endings.FIELDS, *endings.FLAGS)
# Numbers and names of the search, and fields that are read elsewhere; the rest of a node is noted.
_OF_TREE = frozenset(["children", "role", "id", "node_id", "parent", "parent_id", "depth", "advantage", *REWARD_NAMES])
_ROOT = (*_SAID, "role", *(_OF_MESSAGE - {"weight"}))  # fields of a record that is the root itself
NO_ANSWER = "tree without a path that has text of the assistant"
NO_ANSWER_PATH = "path of a tree without text of the assistant"
_INNER_NOTE = "reward of a node above another node with a reward not used"

_Message = JsonObject
Node = JsonObject


def read_text_trees(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of a tree, `<record>/leaf-<k>` from 0 in depth-first order, which form one group.

    Raises:
        TreepackError: a node without text, with two texts, or with a field that may be an answer and is not understood;
            or messages that `readers.messages` refuses.
    """
    value, source = record.value, record.source
    root, inside = _root(value, source)
    nodes = list(nodes_of(root))
    prompt, asked = _prompt(value, root, inside, source)
    notes = unused_fields(nodes[1:], {*_SAID, *_OF_MESSAGE, *_ENDINGS, *_OF_TREE}, source=source)
    if inside:
        notes += unused_fields([root], {*_SAID, *_OF_MESSAGE, *_ENDINGS, *_OF_TREE, *_ASKED, "tools"}, source=source)
    taken = {inside, asked, "children", "system", "advantage", *REWARD_NAMES, *(() if inside else _ROOT)}
    rest = without(value, taken)
    built = unanswered = 0
    for leaf, path in enumerate(leaf_paths(root, source=source)):
        named = replace(record, value=rest | {"tools": value.get("tools") or root.get("tools")})
        item = _trajectory(named, prompt, path[1:], options, notes)
        if item is None:
            unanswered += 1
            continue
        built += 1
        if isinstance(item, Trajectory):
            item = _with_values(item, value, path, leaf, options)
            notes = ()  # counted once for each record
        yield item
    if not built:
        yield Skipped(source, "; ".join((NO_ANSWER, *notes)))
    elif unanswered:
        yield Skipped(source, NO_ANSWER_PATH, is_rollout=False)


def _root(value: JsonObject, source: str) -> tuple[JsonObject, str | None]:
    """Return the root, and the field of the record that has it; None if the record is the root."""
    if value.get("children") is not None:
        return value, None
    for name in _ROOTS:
        if isinstance(value.get(name), dict):
            return value[name], name
    raise TreepackError(f"{source}: has no children; expected a tree, whose nodes have children")


def _prompt(
    value: JsonObject, root: JsonObject, inside: str | None, source: str
) -> tuple[str | list[_Message], str | None]:
    """Return the prompt as text or messages, and the field of the record that has it, None if the root's text is it."""
    fields = value if inside is None else root | value
    names = [each for each in _ASKED if fields.get(each) is not None]
    if {"prompt", "messages"} <= set(names):
        raise TreepackError(f"{source}: has prompt and messages; keep the one that is the prompt")
    name = names[0] if names else None
    asked: Any = fields[name] if name is not None else ""
    own = [each for each in _SAID if root.get(each) is not None and each != name]
    # {"prompt": .., "tree": {"text": "the prompt again", ..}}: the same text twice is not a second text.
    if name is not None and any(root[each] != asked for each in own):
        raise TreepackError(f"{source}: has {name}, and its root has {own[0]}; keep the one that is the prompt")
    if name is None and own:
        said = _said(root, f"{source}: the root")
        asked = said[0]["content"] if len(said) == 1 and _is_text(said[0]) else said
    if not isinstance(asked, str) and not is_messages(asked):
        raise TreepackError(f"{source}: {name} is {shown(asked)}; expected text or a list of messages")
    if isinstance(asked, list):
        asked = [_renamed({"role": "user"} | message) for message in asked]
    if system := value.get("system"):
        asked = _as_messages(asked)
        asked = [{"role": "system", "content": system}, *asked]
    return asked, name if name is not None and value.get(name) is not None else None


def _as_messages(prompt: str | list[_Message]) -> list[_Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if prompt else []
    return prompt


def _said(node: JsonObject, where: str) -> list[_Message]:
    """Return the messages of a node; a text without a role is a message without a role."""
    names = [name for name in _SAID if node.get(name) is not None]
    if len(names) > 1 and any(node[name] != node[names[0]] for name in names[1:]):
        raise TreepackError(f"{where} has {names[0]} and {names[1]}; keep the one that is the node's text")
    about = {name: node[name] for name in ("role", *_OF_MESSAGE) if node.get(name) is not None}
    if "role" not in about:
        about.pop("name", None)  # the name of the node, not of who speaks
    end = endings.raw_of(node)
    about |= {"finish_reason": end} if end is not None else {}
    if not names:
        _refuse_text(node, where)
        return [_renamed({"role": "assistant", "content": None} | about)] if about else []
    said = node[names[0]]
    is_list_of_texts = isinstance(said, list) and not is_messages(said)
    if is_list_of_texts or (names[0] in ("message", "messages") and parsed_json(said) is not None):
        raise TreepackError(f"{where} has the {names[0]} {shown(said)}; expected text, or messages as objects")
    # `content` and `text` may be a list of parts; any other list is a list of messages.
    if is_messages(said) and names[0] not in ("content", "text"):
        if about:
            raise TreepackError(f"{where} has {names[0]} and {next(iter(about))}; move it into the messages")
        return [_renamed(message) for message in said]
    if isinstance(said, dict):
        message = {"role": "assistant"} | about | said
        if names[0] in ("text", "content") or message.keys().isdisjoint(("content", "tool_calls", "function_call")):
            raise TreepackError(f"{where} has the {names[0]} {shown(said)}; expected text, or a message with content")
        return [_renamed(message)]
    message = {"content": said} | about
    return [message if isinstance(said, str) and "role" not in about else _renamed({"role": "assistant"} | message)]


def _refuse_text(node: JsonObject, where: str) -> None:
    """Refuse a node without known content that has text, a list or an object."""
    # {"reward": 1} only ends a path; {"state": "x = 4"} has text under a name that is not known.
    known = {*_OF_TREE, *_OF_MESSAGE, *_ENDINGS}
    other = [name for name, field in node.items() if name not in known and isinstance(field, str | list | dict)]
    if other:
        raise TreepackError(
            f"{where} has no {', '.join(_SAID[:-1])} or {_SAID[-1]}, but {', '.join(other)}; "
            "rename the field of its text"
        )


def _renamed(message: _Message) -> _Message:
    role = message.get("role")
    return message | {"role": _ROLES.get(role, role)} if isinstance(role, str) else message


def _is_text(message: _Message) -> bool:
    """Return whether `message` is a text without a role, which continues another such text."""
    return message.keys() <= {"content", "finish_reason"}


def _trajectory(
    record: Record, prompt: str | list[_Message], path: list[Node], options: ReadOptions, notes: tuple[str, ...]
) -> Outcome | None:
    """Return the trajectory of the nodes `path` below the root, or None if they contain no text of the assistant."""
    value = record.value
    said = [message for node in path for message in _said(node, f"{record.source}: a node")]
    used = {"tools", "chat_template_kwargs"}
    if isinstance(prompt, str) and not value.get("tools") and all(map(_is_text, said)):
        text = "".join(message["content"] for message in said)
        if said and said[-1].get("finish_reason") is not None:
            record = replace(record, value=value | {"finish_reason": said[-1]["finish_reason"]})
        return (
            describe(record, PromptCompletion(prompt, text), used=used, options=options, notes=notes) if text else None
        )
    asked = _as_messages(prompt)
    messages = [*asked, *_turns(said)]
    if not any(message.get("role") == "assistant" for message in messages[len(asked) :]):
        return None
    if (reason := skip_reason(messages)) is not None:
        return Skipped(record.source, reason)
    item = conversation(
        record, messages, options, used=used, tools=value.get("tools"), num_prompt=len(asked), notes=notes
    )
    variables = normalise_template_kwargs(value.get("chat_template_kwargs"), source=record.source)
    assert isinstance(item.content, Chat)
    return replace(item, content=replace(item.content, chat_template_kwargs=variables))


def _turns(said: list[_Message]) -> list[_Message]:
    """Return the messages of a path; texts without a role that follow each other are one message of the assistant."""
    # "a" "b" user "c" -> assistant "ab", user, assistant "c"
    turns: list[_Message] = []
    is_open = False  # the last turn consists of texts without a role
    for message in said:
        if is_open and _is_text(message):
            turns[-1] = turns[-1] | message | {"content": turns[-1]["content"] + message["content"]}
        else:
            turns.append({"role": "assistant"} | message)
        is_open = _is_text(message)
    return turns


def _with_values(
    item: Trajectory, value: JsonObject, path: list[JsonObject], leaf: int, options: ReadOptions
) -> Trajectory:
    """Return `item` with the name, group, reward and advantage of its path."""
    nodes = path if path[0] is value else [value, *path]
    rewards = [reward_of(node, item.source, reward_key=options.reward_key)[0] for node in nodes]
    known = [reward for reward in rewards if reward is not None]
    advantages = [node.get("advantage") for node in nodes]
    if any(advantage is not None for advantage in advantages[:-1]):
        raise TreepackError(
            f"{item.source}: a node above a leaf has an advantage; write the advantage of each path at its leaf"
        )
    own = advantages[-1]
    return replace(
        item,
        trajectory_id=f"{item.trajectory_id}/leaf-{leaf}",
        group_id=item.source if item.group_id is None else item.group_id,
        reward=known[-1] if known else None,
        advantage=None if own is None else as_number(own, source=item.source, name="advantage"),
        notes=item.notes + ((_INNER_NOTE,) if len(known) > 1 else ()),
    )


FORMAT = Format(
    name="text-trees",
    rank=530,
    program="trees of text that no program defines",
    recognised_by="`children`, a list of nodes, in the record or in its field `tree` or `root`",
    requires="""
        children:filled;
        tree:object, tree.children:filled;
        root:object, root.children:filled, node_count:!
    """,
    checked="first",
    used="prompt messages system tools chat_template_kwargs tree children id group_id reward",
    dropped="fields of nodes besides their text, role, reward and advantage (named in notes)",
    keeps="masks, rewards, lineage",
    read=read_text_trees,
)
