"""Search trees of DARS, `<task>.root`: one file per issue, one trajectory per path from the root to a leaf.

    {"root": {"role": "system", "content": "..", "children": [{"role": "user", "content": "..", "children": [
        {"role": "assistant", "content": "..", "action": "ls", "children": [..]},
        {"role": "assistant", "content": "..", "expansion_prompt": "Try another ..", "children": [..]}]}]}}

For an alternative, the search adds a request (`expansion_prompt`) to the last user message, and no later turn sees this
request. The alternative is therefore trained in a separate trajectory with the prompt that produced it, and it is
context only in the paths through it. Demonstrations, and submissions by the program, are not trained.
"""

from __future__ import annotations

from dataclasses import replace

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    as_flag,
    companion_path,
    conversation,
    folder_and_document,
    leaf_paths,
)

# The tree, and the bookkeeping of the search, which repeats it.
_USED = frozenset({"root", "node_count", "iterations", "current_node_id", "node_id_stack"})
_CHECKPOINTS = (".cur", ".prev")  # `x.cur.root` and `x.prev.root` are copies of an unfinished `x.root`
_BY_PROGRAM = "Auto-submitting"  # the thought in a submission by the program, not by the model


def read_dars(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`: `<run>/<task>/leaf-<k>` in depth-first order, and `node-<k>` per alternative.

    Raises:
        TreepackError: a node is not a message.
    """
    folder, stem = folder_and_document(record)
    task = stem
    # "sympy-1.prev" -> "sympy-1"
    for ending in _CHECKPOINTS:
        task = task.removesuffix(ending)
    if stem != task and (whole := _whole_file(record, stem, task)) is not None:
        yield Skipped(record.source, f"checkpoint of {whole}", is_rollout=False)
        return
    name = task if folder in ("", task) else f"{folder}/{task}"
    alternatives: dict[int, list[JsonObject]] = {}
    for leaf, path in enumerate(leaf_paths(record.value["root"], source=record.source)):
        yield _trajectory(record, [_message(node) for node in path], f"{name}/leaf-{leaf}", task, options)
        # Several leaves share an alternative, so its identity is the key: it is trained once.
        for depth, node in enumerate(path):
            if _is_alternative(node) and depth > 0:
                alternatives.setdefault(id(node), path[: depth + 1])
    for number, path in enumerate(alternatives.values()):
        yield _trajectory(record, _asking_messages(path), f"{name}/node-{number}", task, options)


def _whole_file(record: Record, stem: str, task: str) -> str | None:
    """Return the name of the file of which the checkpoint `stem` is a copy, or None if that file does not exist."""
    # "x.prev" -> ["x.root", "x.cur.root"], "x.cur" -> ["x.root"]
    better = [f"{task}.root"] + ([f"{task}.cur.root"] if stem.endswith(".prev") else [])
    whole = next((path for each in better if (path := companion_path(record, each)) is not None), None)
    return None if whole is None else whole.name


def _is_alternative(node: JsonObject) -> bool:
    return node.get("role") == "assistant" and bool(node.get("expansion_prompt"))


def _message(node: JsonObject) -> JsonObject:
    message = {"role": node.get("role"), "content": node.get("content")}
    # Every other assistant message on a path is a real turn of that path.
    is_demo = as_flag(node.get("is_demo") or False) is not False
    trained = not is_demo and node.get("thought") != _BY_PROGRAM and not _is_alternative(node)
    return message if trained else message | {"loss": False}


def _asking_messages(path: list[JsonObject]) -> list[JsonObject]:
    """Return the conversation that the alternative at the end of `path` answered; only that answer is trained."""
    # [system, user, answer with expansion_prompt] -> [system, user + request, answer]
    *before, node = path
    messages = [_message(each) | {"loss": False} for each in before]
    request = str(node["expansion_prompt"])
    # The search appended the request to the message; after another role it is a message itself.
    if messages[-1]["role"] == "user":
        messages[-1] = messages[-1] | {"content": f"{messages[-1]['content']}\n\n{request}"}
    else:
        messages.append({"role": "user", "content": request})
    return [*messages, {"role": "assistant", "content": node.get("content")}]


def _trajectory(record: Record, messages: list[JsonObject], name: str, task: str, options: ReadOptions) -> Trajectory:
    return replace(conversation(record, messages, options, used=_USED), trajectory_id=name, group_id=task)


FORMAT = Format(
    name="dars",
    rank=70,
    program="DARS",
    recognised_by="`root`, a message with `children`, beside `node_count`",
    requires="root.role, root.content, root.children, node_count",
    used="""
        root.role root.content root.children root.is_demo root.thought root.expansion_prompt root.children=root
    """,
    dropped="""
        root.action (part of the content);
        root.expansion_candidates (the one chosen is a node);
        root.critic_prompt;
        root.critic_response (calls of a different model);
        node_count, iterations, current_node_id, node_id_stack (bookkeeping)
    """,
    keeps="masks, lineage",
    needs_folder=True,
    read=read_dars,
)
