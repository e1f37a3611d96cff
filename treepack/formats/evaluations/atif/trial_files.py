"""Files of one trial of Harbor: the rollout of a trajectory file, its number in the order of sampling, and its result.

    agent/trajectory.json                               order 0
    agent/trajectory.summarization-1-summary.json       order 1, then -questions 2 and -answers 3
    agent/trajectory.cont-1.json                        order 4: it continues after the first summary
    agent/trajectory.summarization-2-summary.json       order 5, ...

All of them are one rollout, whose source is the folder of the trial. Without a `result.json`, the sessions name the
rollout: the sessions of a trial are `s`, `s-cont-1` and `s-summarization-1-summary`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treepack.files.input_files.records import NoObjectError
from treepack.formats.kit import (
    STDIN,
    JsonObject,
    ReadOptions,
    Record,
    companion_path,
    has_fields,
    object_or_empty,
    objects_at,
    read_document,
)
from treepack.ingest.readers.fields.rewards import reward_of

RESULT = "task_name, trial_name, agent_info"  # fields of the `result.json` of a trial
# It is seen from agent/, from steps/<name>/agent/ and from a folder without subfolders.
_ABOVE = ("../result.json", "../../../result.json", "result.json")
MAX_AGENTS = 1000  # agents of a file that have a part of their own; all further ones have the last part
_KINDS = ("summary", "questions", "answers")
_SUFFIX = re.compile(rf"(?:^|[._-])(?:cont-(\d{{1,3}})|summarization-(\d{{1,3}})-({'|'.join(_KINDS)}))$")
_UNKNOWN = 4000  # the order of files with other names, after the files of 999 continuations
_FILES = "trajectory*.json*"


@dataclass(frozen=True, slots=True)
class FileOfRollout:
    """A file of a rollout of several: name and source of the rollout, its group if known, and the file's `order`."""

    rollout: str
    source: str
    group: str | None
    order: int


def file_of_trial(record: Record, folder: Path, name: str) -> FileOfRollout | None:
    """Return the file of `record` in the trial, or the step of a trial, `name` of a `folder`; None if it is alone."""
    path = Path(record.path)
    names = sorted({each.name for each in path.parent.glob(_FILES)} | {path.name})
    if len(names) == 1 and not _has_links(record.value):
        return None
    inner = path.name.partition(".json")[0]
    order = 0 if inner == "trajectory" else _order(inner, names.index(path.name))
    # "runs/t1/agent/.." -> "runs/t1"
    return FileOfRollout(name, os.path.normpath(folder), None, order)


def file_of_trial_session(record: Record) -> FileOfRollout | None:
    """Return the file of `record` in its session; None if it is neither continued nor a part of a longer session."""
    session = record.value.get("session_id")
    if not isinstance(session, str) or not session:
        return None
    match = _SUFFIX.search(session)
    if match is None and not _has_links(record.value):
        return None
    name = session[: match.start()] if match is not None else session
    source = record.path if record.path == STDIN else str(Path(record.path).parent)
    return FileOfRollout(name, source, name, 0 if match is None else _order(session, 0))


def _order(name: str, index: int) -> int:
    """Return the order of a file by its name or session, or by its `index` in the folder if the name is not known."""
    match = _SUFFIX.search(name)
    if match is None:
        return _UNKNOWN + min(index, 999)
    continuation, summary, kind = match.groups()
    return 4 * int(continuation) if continuation else 4 * int(summary) - 3 + _KINDS.index(kind)


def _has_links(value: JsonObject) -> bool:
    """Return True if a document names another file of its rollout: a continuation, or a sub-agent."""
    if value.get("continued_trajectory_ref"):
        return True
    links = [
        link
        for step in _objects(value.get("steps"))
        for result in _objects(_results(step))
        for link in _objects(result.get("subagent_trajectory_ref"))
    ]
    return any(link.get("trajectory_path") for link in links)


def _results(step: JsonObject) -> Any:
    observation = step.get("observation")
    return observation.get("results") if isinstance(observation, dict) else None


def _objects(value: Any) -> list[JsonObject]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def result_above(record: Record) -> tuple[Path | None, JsonObject]:
    """Return the path and the content of the result of the trial that wrote `record`, or None and {}."""
    for path in filter(None, (companion_path(record, name) for name in _ABOVE)):
        try:
            result = read_document(path)
        except NoObjectError:
            continue
        if has_fields(result, RESULT):
            return path, result
    return None, {}


def facts_of_trial(
    result: JsonObject, part: JsonObject, names: tuple[str, str], source: str, options: ReadOptions
) -> JsonObject:
    """Return the names and the reward that the result of a trial gives to one of its conversations.

    `names` are the names of the step of the trial and of the file; each may be "".
    """
    task = "/".join(filter(None, (str(result["task_name"]), names[0])))
    error = object_or_empty(part.get("exception_info") or result.get("exception_info")).get("exception_type")
    return {
        "trajectory_id": name_of_trial(result, *names),
        "group_id": task,
        "reward": _reward(part, source, options),
        "exception": error,
    }


def name_of_trial(result: JsonObject, *names: str) -> str:
    """Return the name of a conversation of a trial: hello__aaa, hello__aaa/first or hello__aaa/cont-1."""
    return "/".join(filter(None, (str(result["trial_name"]), *names)))


def step_result(result: JsonObject, name: str, source: str) -> JsonObject:
    """Return the result of the step `name` of a trial, empty if the trial has no such step."""
    steps = objects_at(result, "step_results", source)
    return next((step for step in steps if step.get("step_name") == name), {})


def _reward(result: JsonObject, source: str, options: ReadOptions) -> float | None:
    """Return the reward of the verifier: the one of `reward_key`, the one called `reward`, or the only one."""
    rewards = object_or_empty(result.get("verifier_result")).get("rewards")
    if not rewards:
        return None
    # {"reward": 1.0, "tests": 3} -> 1.0, {"tests": 3} -> 3, {"a": 1, "b": 2} -> refused by reward_of
    if isinstance(rewards, dict) and options.reward_key is None:
        rewards = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else rewards)
    return reward_of({"reward": rewards}, source, reward_key=options.reward_key)[0]
