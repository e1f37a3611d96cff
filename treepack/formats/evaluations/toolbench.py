"""Answer trees of ToolBench: one file per query, one trajectory per path from the root of its search tree to a leaf.

    Thought "..." > Action "search" > Action Input '{"q": 1}' observation "..."
    =>  assistant {content: "...", tool_calls: [search]}   tool {content: observation}

A turn is up to three nested nodes; a Thought without an Action is a complete turn. The prompts of the search ("try
something else") are not in the tree, so they are not in the trajectories. The reward of a path is 1 if it ends in a
`Finish` call that the environment accepted as an answer, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from treepack.files.input_files.records import folder_and_stem
from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    TreepackError,
    as_objects,
    conversation,
    is_messages,
    leaf_paths,
    quoted,
    shown,
)

_ANSWER_ACCEPTED = 3  # observation_code of a Finish call that gives an answer; 4 is giving up
# Fields that become messages, and options of the search.
_USED = frozenset({"tree", "answer_generation", "forward_args", "compare_candidates"})


def read_toolbench(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`, `<group>/leaf-<k>` in depth-first order; the group is `<folder>/<file stem>`.

    Raises:
        TreepackError: a node of an unknown type, or a field of a different kind.
    """
    answer = record.value["answer_generation"]
    opening = _opening(answer, record.source)
    functions = as_objects(answer.get("function"), source=record.source, name="answer_generation.function")
    tools = [{"type": "function", "function": function} for function in functions]
    group = "/".join(part for part in folder_and_stem(record) if part)
    for leaf, (_, *path) in enumerate(leaf_paths(record.value["tree"]["tree"], source=record.source)):
        messages = opening + _messages(path, record.source)
        item = conversation(record, messages, options, used=_USED, tools=tools)
        yield replace(item, trajectory_id=f"{group}/leaf-{leaf}", group_id=group, reward=_reward(path))


def _opening(answer: JsonObject, source: str) -> list[JsonObject]:
    """Return the system and user messages of the first prompt, or the query if the file contains no prompt."""
    prompts = answer.get("train_messages") or []
    if not isinstance(prompts, list) or not all(map(is_messages, prompts)):
        raise TreepackError(
            f"{source}: answer_generation.train_messages is {shown(prompts)}; expected a list of lists of messages"
        )
    first = prompts[0] if prompts else []
    leading = takewhile(lambda message: message.get("role") in ("system", "user"), first)
    kept = (message for message in leading if message.get("valid") is not False)
    # train_messages [[system, user, assistant, ..], ..] -> [system, user]
    opening = [{"role": message["role"], "content": message.get("content")} for message in kept]
    return opening or [{"role": "user", "content": answer.get("query")}]


@dataclass(slots=True)
class _SearchStep:
    """The nodes of the turn being read."""

    thought: str | None = None
    action: str | None = None
    messages: list[JsonObject] = field(default_factory=list)
    num_calls: int = 0

    def flush(self) -> None:
        """End a turn that has no Action Input."""
        if self.action is not None:
            self.call("{}", None)
        elif self.thought is not None:
            self.messages.append({"role": "assistant", "content": self.thought})
            self.thought = None

    def call(self, arguments: str, observation: Any) -> None:
        """End a turn with its call and, if there is one, the call's result."""
        # Call 7 -> "call00007"
        call_id = f"call{self.num_calls:05}"
        call = {"id": call_id, "type": "function", "function": {"name": self.action, "arguments": arguments}}
        self.messages.append({"role": "assistant", "content": self.thought, "tool_calls": [call]})
        if observation is not None:
            result = {"role": "tool", "tool_call_id": call_id, "name": self.action, "content": observation}
            self.messages.append(result)
        self.thought = self.action = None
        self.num_calls += 1


def _messages(path: list[JsonObject], source: str) -> list[JsonObject]:
    # [Thought "a", Thought "b", Action "f", Action Input "{}"] -> assistant "a", assistant "b" with a call of f
    turn = _SearchStep()
    for node in path:
        kind, text = node.get("node_type"), node.get("description")
        if kind == "Thought":
            turn.flush()
            turn.thought = text
        elif kind == "Action":
            if turn.action is not None:
                turn.flush()
            turn.action = text
        elif kind == "Action Input" and turn.action is not None:
            turn.call(text or "{}", node.get("observation"))
        else:
            raise TreepackError(
                f"{source}: a node has the type {quoted(kind)} in the wrong place; "
                "expected Thought, Action, or Action Input after an Action"
            )
    turn.flush()
    return turn.messages


def _reward(path: list[JsonObject]) -> float:
    if len(path) < 2:
        return 0.0
    # The last nodes are Action "Finish" and its Action Input.
    action, leaf = path[-2], path[-1]
    answered = action.get("description") == "Finish" and leaf.get("observation_code") == _ANSWER_ACCEPTED
    return 1.0 if answered else 0.0


FORMAT = Format(
    name="toolbench",
    rank=60,
    program="ToolBench (DFSDT answer trees)",
    recognised_by="`tree.tree` and `answer_generation`",
    requires="tree.tree:object, answer_generation:object",
    used="""
        answer_generation.query answer_generation.function answer_generation.train_messages
        tree.tree.children.description tree.tree.children.children=tree.tree.children
        tree.tree.children.node_type!
    """,
    dropped="""
        forward_args, compare_candidates (options of the search);
        the other fields of a node;
        answer_generation.chain, answer_generation.final_answer (repeat the winning path)
    """,
    keeps="rewards, lineage",
    read=read_toolbench,
)
