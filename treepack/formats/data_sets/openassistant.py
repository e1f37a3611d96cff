"""Message trees of Open Assistant: one record per tree, or a table with one message per record.

    {"message_tree_id": "T", "tree_state": "ready_for_export", "prompt": {"message_id": "T", "text": "..",
        "role": "prompter", "replies": [{"message_id": "A", "text": "..", "role": "assistant", "rank": 0,
                                         "labels": {"quality": {"value": 0.75, "count": 3}}, "replies": [..]}, ..]}}
    {"message_id": "A", "parent_id": "T", "message_tree_id": "T", "text": "..", "role": "assistant", ..}
    {"thread_id": "A", "thread": [{"text": "..", "role": "prompter"}, {"text": "..", "role": "assistant"}]}

Every path from the prompt to a leaf is a trajectory, up to its last trained answer; a path that is the beginning
of a longer one is left out. Answers that reviewers rejected (`review_result` false) are context. A deleted message is
left out with its replies. Ranks order the replies to a message and are not rewards. With --reward-key, the reward of a
path is this label of its last answer, such as quality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

from treepack.calls.leaf_paths import distinct_paths, nodes_of, unused_fields
from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    TreepackError,
    as_objects,
    as_text,
    conversation,
    is_empty,
    leaf_paths,
    quoted,
    shown,
    with_notes,
)

_ROLES = {"prompter": "user", "assistant": "assistant", "system": "system"}
# Fields of a message that are read, or that are about its author and its export.
_KNOWN = frozenset(
    """
    message_id parent_id text role rank labels deleted review_result replies lang tree_state message_tree_id model_name
    synthetic user_id created_date created_at review_count
    """.split()
)
_DELETED_NOTE = "deleted message not used, with its replies"
_REJECTED_NOTE = "answer that reviewers rejected not trained"
QUESTION_NOTE = "question that reviewers rejected is context"
LABELS_NOTE = "field 'labels' not used; --reward-key NAME reads one of them as the reward"
OTHER_LABELS_NOTE = "field 'labels' not used, except for the label of --reward-key"
NO_ANSWER = "tree without an answer"
ORPHAN = "message whose parents are not in the file"
REPEATED = "message that the file repeats"

Node = JsonObject


def _read_openassistant(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trees of a file, each as the trajectories `<tree>/leaf-<k>` of one group.

    Raises:
        TreepackError: a message without text, or of an unknown role, or with a field that may be an answer.
    """
    rows: list[Record] = []
    for record in records:
        value = record.value
        if isinstance(value.get("prompt"), dict):
            yield from _read_tree(record, value["prompt"], value, options)
        elif value.get("thread") is not None:
            yield from _read_tree(record, _chain(value["thread"], record.source), value, options)
        else:
            rows.append(record)
    yield from _read_table(rows, options)


def _chain(thread: Any, source: str) -> Node:
    """Return the messages of a thread as a tree with one path."""
    root: Node = {"replies": []}
    last = root
    for message in as_objects(thread, source=source, name="thread"):
        last["replies"] = [message | {"replies": []}]
        last = last["replies"][0]
    if not root["replies"]:
        raise TreepackError(f"{source}: thread is empty; expected a list of messages")
    return dict(root["replies"][0])


def _read_table(rows: list[Record], options: ReadOptions) -> Outcomes:
    """Read messages that name their parent; a message may have its replies inside, too."""
    nodes: dict[str, tuple[Record, Node]] = {}
    for row in rows:
        for node in nodes_of(row.value, name="replies"):
            name = as_text(node.get("message_id"), source=row.source, name="message_id")
            if name in nodes:
                yield Skipped(row.source, REPEATED, is_rollout=False)
                continue
            nodes[name] = (row, node | {"replies": []})
    roots: list[str] = []
    for name, (_, node) in nodes.items():
        parent = node.get("parent_id")
        if parent is None:
            roots.append(name)
        elif isinstance(parent, str) and parent in nodes:
            nodes[parent][1]["replies"].append(node)
    reached = {id(node) for name in roots for node in nodes_of(nodes[name][1], name="replies")}
    for row, node in nodes.values():
        if id(node) not in reached:
            yield Skipped(row.source, ORPHAN)
    for name in roots:
        row, root = nodes[name]
        yield from _read_tree(row, root, root, options)


def _read_tree(record: Record, root: Node, tree: Node, options: ReadOptions) -> Outcomes:
    """Read the paths of the tree below `root`; `tree` has the fields of the whole tree."""
    source = record.source
    # Trajectories have the notes on the fields of the file.
    unknown = unused_fields(nodes_of(root, name="replies"), _KNOWN, source=source)
    if tree is not root:
        unknown += unused_fields([tree], {*_KNOWN, "prompt", "thread", "thread_id", "origin"}, source=source)
    nodes = list(nodes_of(root, name="replies"))
    for node, name in ((node, name) for node in nodes for name in ("deleted", "review_result")):
        if not isinstance(node.get(name), bool | None):
            raise TreepackError(f"{source}: a message has the {name} {shown(node[name])}; expected true or false")
    labelled = [labels for node in nodes if not is_empty(labels := node.get("labels"))]
    notes = tuple(
        note
        for note, is_true in (
            (_DELETED_NOTE, any(node.get("deleted") for node in nodes)),
            (_REJECTED_NOTE, any(map(_is_rejected, nodes))),
            (QUESTION_NOTE, any(node.get("review_result") is False and not _is_rejected(node) for node in nodes)),
            (LABELS_NOTE, bool(labelled) and options.reward_key is None),
            (OTHER_LABELS_NOTE, options.reward_key is not None and any(map(_has_others, labelled))),
        )
        if is_true
    )
    paths = distinct_paths(map(_up_to_answer, leaf_paths(root, source=source, name="replies")))
    if not paths:
        yield Skipped(source, "; ".join((NO_ANSWER, *unknown, *notes)))
    # Threads of one tree are files of their own, and one group.
    group = str(root.get("message_id") or record.label)
    name = str(tree.get("message_tree_id") or tree.get("thread_id") or group)
    items = (_trajectory(record, path, tree, options) for path in paths)
    named = (replace(item, trajectory_id=f"{name}/leaf-{leaf}", group_id=group) for leaf, item in enumerate(items))
    yield from with_notes(named, notes)


def _is_rejected(node: Node) -> bool:
    return node.get("role") == "assistant" and node.get("review_result") is False


def _up_to_answer(path: list[Node]) -> list[Node]:
    """Return `path` up to its last answer that is trained and not below a deleted message."""
    kept = list(takewhile(lambda node: not node.get("deleted"), path))
    trained = [index for index, node in enumerate(kept) if node.get("role") == "assistant" and not _is_rejected(node)]
    return kept[: trained[-1] + 1] if trained else []


def _trajectory(record: Record, path: list[Node], tree: Node, options: ReadOptions) -> Trajectory:
    source, last = record.source, path[-1]
    messages: list[JsonObject] = []
    for node in path:
        role = node.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise TreepackError(f"{source}: a message has the role {quoted(role)}; expected prompter or assistant")
        text = as_text(node.get("text"), source=source, name="text of a message")
        messages.append({"role": _ROLES[role], "content": text} | ({"loss": False} if _is_rejected(node) else {}))
    value = {
        "reward": _label(last.get("labels"), options.reward_key, source),
        "rank": last.get("rank"),
        "lang": last.get("lang"),
        "model": last.get("model_name"),
        "tree_state": tree.get("tree_state"),
    }
    return conversation(replace(record, value=value), messages, options)


def _has_others(labels: Any) -> bool:
    """Return whether `labels` has more than one label."""
    names = labels.get("name", labels) if isinstance(labels, dict) else labels
    return not isinstance(names, dict | list) or len(names) > 1


def _label(labels: Any, key: str | None, source: str) -> Any:
    """Return the value of the label `key`: of an object of objects, or of lists of names and values."""
    if key is None or labels is None:
        return None
    if not isinstance(labels, dict):
        raise TreepackError(f"{source}: labels is {shown(labels)}; expected an object")
    # {"name": ["spam", "quality"], "value": [0.0, 0.75]} with the key quality -> 0.75
    if isinstance(labels.get("name"), list) and isinstance(labels.get("value"), list):
        return dict(zip(labels["name"], labels["value"], strict=False)).get(key)
    label = labels.get(key)
    if label is not None and not isinstance(label, dict):
        raise TreepackError(f"{source}: the label {key} is {shown(label)}; expected an object with value")
    return None if label is None else label.get("value")


FORMAT = Format(
    name="openassistant",
    rank=520,
    program="Open Assistant",
    recognised_by="`message_id`, `text` and `role`, in `prompt` or in the record; or `thread_id` and `thread`",
    requires="""
        prompt.message_id, prompt.text:text, prompt.role:=prompter|assistant|system;
        thread_id, thread:objects;
        message_id:text, parent_id, text:text, role:=prompter|assistant|system;
        message_id:text, replies:objects, text:text, role:=prompter|assistant|system
    """,
    checked="first",
    used="""
        message_tree_id tree_state thread_id message_id parent_id text role rank labels deleted review_result lang
        model_name prompt=. thread=. replies=.
    """,
    dropped="""
        emojis, events, detoxify (named in notes);
        rank (kept as metadata)
    """,
    keeps="masks, lineage",
    read_file=_read_openassistant,
)
