"""Result files of InterCode: one document per run, one rollout per task in it.

    {"0": {"environment": "ic_bash", "dataset": "data/nl2bash_fs_1.json", "task_id": 0, "query": "..",
           "turn_history": {"actions": [..], "observations": [..], "rewards": [..], "thoughts": [..]},
           "summary": {"max_reward": 1.0}}, ..}
    {"meta": {..}, "logs": {the same}}

The query is the first message of the user, every action is a message of the assistant, and every observation is the
next message of the user. The file contains neither the prompt nor demonstrations. Of the model's text it contains the
parsed parts only: the thought, if the policy asked for one, and the action. Actions of the program are left out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    conversation,
    folder_and_document,
    object_or_empty,
    shown,
    without,
)
from treepack.ingest.readers.fields.values import as_texts

_BLOCKED = "blocked"  # the action if the model gave no reply; it has no observation
_OUT_OF_TURNS = "EXCEEDED MAX TURNS: submit"  # the thought in a submission by the program, not by the model
# Fields of an episode that are read under another name, and `info`, which repeats the reward.
_USED = frozenset({"query", "turn_history", "summary", "task_id", "dataset", "info"})


def _has_episodes(record: JsonObject) -> bool:
    """Return whether `record` contains episodes with a query and the history of their turns."""
    episodes = _episodes(record)
    first = next(iter(episodes.values()), None)
    return isinstance(first, dict) and "query" in first and isinstance(first.get("turn_history"), dict)


def _episodes(record: JsonObject) -> JsonObject:
    logs = record.get("logs")
    return logs if isinstance(logs, dict) else record


def read_intercode(record: Record, options: ReadOptions) -> Outcomes:
    """Read one trajectory per task, `<file>/<number>`, in the group `<dataset>/<task_id>`.

    Raises:
        TreepackError: an episode without a query or a history, or turns that are not lists of text.
    """
    _, stem = folder_and_document(record)
    for number, episode in _episodes(record.value).items():
        part = replace(record, source=f"{record.source}[{number}]")
        if not isinstance(episode, dict) or not isinstance(episode.get("turn_history"), dict):
            raise TreepackError(f"{part.source}: is {shown(episode)}; expected an object with query and turn_history")
        messages = _messages(episode, part.source)
        if len(messages) == 1:
            yield Skipped(part.source, "no turn of the model")
            continue
        value = {
            **without(episode, _USED),
            "trajectory_id": f"{stem}/{number}",
            "group_id": _group(episode, number),
            "reward": object_or_empty(episode.get("summary")).get("max_reward"),
        }
        yield conversation(replace(part, value=value), messages, options)


def _messages(episode: JsonObject, source: str) -> list[JsonObject]:
    """Return the messages of an episode: the query, and then the action and the observation of each turn."""
    history = episode["turn_history"]
    actions, observations = (_texts(history, name, source) for name in ("actions", "observations"))
    thoughts = _texts(history, "thoughts", source)
    messages: list[JsonObject] = [{"role": "user", "content": episode.get("query")}]
    # actions [ls, submit], observations [a.txt] -> query, ls, a.txt, submit
    for turn, action in enumerate(actions):
        thought = thoughts[turn] if turn < len(thoughts) else None
        # After these turns the program acts alone.
        if thought == _OUT_OF_TURNS or (action == _BLOCKED and turn >= len(observations)):
            break
        content = action if thought is None else f"Thought {turn + 1}: {thought}\nAction {turn + 1}: {action}"
        messages.append({"role": "assistant", "content": content})
        if turn < len(observations):
            messages.append({"role": "user", "content": observations[turn]})
    return messages


def _texts(history: JsonObject, name: str, source: str) -> list[str]:
    texts = history.get(name)
    return [] if texts is None else as_texts(texts, source=source, name=f"turn_history.{name}")


def _group(episode: JsonObject, number: str) -> str:
    # "data/nl2bash_fs_1.json" and 0 -> "nl2bash_fs_1/0"
    dataset, task = episode.get("dataset"), episode.get("task_id")
    name = PurePath(dataset).stem if isinstance(dataset, str) else episode.get("environment") or "intercode"
    return f"{name}/{number if task is None else task}"


FORMAT = Format(
    name="intercode",
    rank=90,
    program="InterCode",
    recognised_by="objects with `query` and `turn_history`, by number or under `logs`",
    requires=_has_episodes,
    used="""
        *.query *.turn_history.actions *.turn_history.observations *.turn_history.thoughts *.summary.max_reward
        *.dataset *.task_id *.environment *.hardness logs.*.query logs.*.turn_history.actions
        logs.*.turn_history.observations logs.*.turn_history.thoughts logs.*.summary.max_reward logs.*.dataset
        logs.*.task_id logs.*.environment logs.*.hardness
    """,
    dropped="""
        meta (options of the run);
        info (how the reward came about);
        turn_history.rewards, turn_history.valid_action (of single turns);
        turn_history.steps (plan of a different call);
        summary.max_reward_idx, summary.turns_taken, summary.turns_max
    """,
    keeps="rewards, lineage",
    read=read_intercode,
)
