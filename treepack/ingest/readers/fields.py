"""What a record says about its rollout besides the content: id, group, step, weight, reward, metadata.

    Record + content --describe--> Trajectory

Every format shares these names; a reader tells which fields it has used up itself. What nobody uses is kept as
metadata where it is small, and else noted, so that it can be counted.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.records import Record
from treepack.trajectory import Chat, Text, Tokens, Trajectory, check_scalars

IDS = ("rollout_id", "trajectory_id", "session_id", "trace_id", "id", "index")
GROUPS = ("uid", "group_id", "group_index", "example_id", "task_id", "data_id", "prompt_id")
STEPS = ("step", "global_step")
REWARDS = ("reward", "score", "reward_score", "rewards", "rm_scores", "token_level_scores", "token_level_rewards")
METADATA_DICTS = frozenset({"metadata", "info", "extra_info", "extra"})
UNTRAINED_PREFIX = "untrained_prefix"  # tokens of an augmented query, which its rollouts never train
SEGMENTS = "segments"  # token offsets where a sampler began its segments: a list of integers, kept however long
MAX_METADATA = 2000
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the caller says about the records.

    `reward_key` picks the reward out of a dict of several; `vocab_size` bounds the token ids; `train_all` trains every
    token of records that say neither which tokens are trained nor where the response begins. `shapes` takes formats
    that hold the lengths of rollouts and what they share, but neither tokens nor text, with stand-ins for token ids.
    """

    reward_key: str | None = None
    vocab_size: int | None = None
    train_all: bool = False
    shapes: bool = False


def describe(
    record: Record,
    content: Tokens | Chat | Text,
    *,
    used: Collection[str],
    options: ReadOptions,
    advantage: float | None = None,
    notes: tuple[str, ...] = (),
) -> Trajectory:
    """The trajectory of `record`, whose fields `used` have gone into `content`.

    Raises:
        TreepackError: a field of another kind than its name says, a reward, weight or advantage that is not finite, or
            text that continues an augmented query, of which only token ids tell what is not to be trained.
    """
    value, source = record.value, record.source
    if not isinstance(content, Tokens) and marked(value, UNTRAINED_PREFIX) is not None:
        raise TreepackError(f"{source}: has {UNTRAINED_PREFIX}, which counts tokens, and text; give it as token ids")
    group, group_field = _group(value, source)
    name, id_field = _first_name(value, IDS, source)
    if name is None:
        name, id_field = _trial(value, group, source)
    step, step_field = _step(value, source)
    reward, reward_field = reward_of(value, source, reward_key=options.reward_key)
    weight = value.get("weight")
    taken = {group_field, id_field, step_field, reward_field, "weight"}
    metadata, dropped = _metadata({k: v for k, v in value.items() if k not in used and k not in taken})
    return check_scalars(
        Trajectory(
            trajectory_id=record.label if name is None else name,
            source=source,
            content=content,
            group_id=group,
            step=step,
            weight=1.0 if weight is None else as_number(weight, source=source, name="weight"),
            reward=reward,
            advantage=advantage,
            metadata=metadata,
            notes=notes + dropped,
        )
    )


def marked(value: dict[str, Any], name: str) -> Any:
    """The field `name` of `value` or of a metadata object in it; None if there is none."""
    nested = [value[key] for key in sorted(METADATA_DICTS) if isinstance(value.get(key), dict)]
    return next((held[name] for held in (value, *nested) if held.get(name) is not None), None)


def as_number(value: Any, *, source: str, name: str) -> float:
    """`value` as a float; a boolean or a string is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a number")
    try:
        return float(value)
    except OverflowError:
        raise TreepackError(f"{source}: {name} does not fit a float; expected a finite number") from None


def as_objects(value: Any, *, source: str, name: str) -> list[dict[str, Any]]:
    """`value`, a list of objects or null."""
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a list of objects")
    return value or []


def shown(value: Any) -> str:
    """`value` as JSON, shortened, for a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = " ".join(repr(value).split())
    except RecursionError:
        return "nested too deeply to be shown"
    return text if len(text) <= 40 else text[:37] + "..."


def quoted(value: Any) -> str:
    """A name in quotes, shortened, for a message; what is no name as JSON."""
    if not isinstance(value, str):
        return shown(value)
    return f"'{value}'" if len(value) <= 40 else f"'{value[:37]}...'"


def fault_in_json(value: Any, *, allow_nan: bool = True) -> str | None:
    """Why `value` cannot be written as JSON, or None if it can: nested too deeply, or of types that JSON lacks."""
    if _is_deeper(value, MAX_DEPTH):
        return f"nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(value, allow_nan=allow_nan)
    except (TypeError, ValueError):
        return "not plain JSON"
    return None


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(children) and (levels == 0 or any(_is_deeper(child, levels - 1) for child in children))


def reward_of(value: dict[str, Any], source: str, *, reward_key: str | None) -> tuple[float | None, str | None]:
    """The reward and the field it was read from: a number, a list summed over tokens, or a dict of scores.

    Raises:
        TreepackError: a dict without scores and weights and no `reward_key` that it holds, or no number.
    """
    for name in REWARDS:
        reward = value.get(name)
        if reward is None or (isinstance(reward, dict | list | np.ndarray) and len(reward) == 0):
            continue  # a rollout that nobody scored has no reward, which is not 0
        return _reward(reward, source=source, name=name, reward_key=reward_key), name
    info = value.get("reward_info")
    if isinstance(info, dict) and info.get("reward") is not None:
        return _reward(info["reward"], source=source, name="reward_info.reward", reward_key=reward_key), "reward_info"
    return None, None


def _reward(reward: Any, *, source: str, name: str, reward_key: str | None) -> float:
    if isinstance(reward, dict):
        return _reward_of_dict(reward, source=source, name=name, reward_key=reward_key)
    if isinstance(reward, np.ndarray):
        reward = reward.tolist()
    if isinstance(reward, list):
        return sum(as_number(part, source=source, name=f"a value of {name}") for part in reward)
    return as_number(reward, source=source, name=name)


def _reward_of_dict(reward: dict[str, Any], *, source: str, name: str, reward_key: str | None) -> float:
    if reward_key is not None:
        if reward_key not in reward:
            raise TreepackError(f"{source}: {name} has no key '{reward_key}'; expected one of {', '.join(reward)}")
        chosen = reward[reward_key]
        chosen = chosen.get("score") if isinstance(chosen, dict) else chosen
        return as_number(chosen, source=source, name=f"{name}.{reward_key}")
    total = 0.0
    for key, part in reward.items():
        if not isinstance(part, dict) or "score" not in part:
            raise TreepackError(
                f"{source}: {name} is a dict with the keys {', '.join(reward)}; name one as the reward key"
            )
        weight = as_number(part.get("weight", 1.0), source=source, name=f"{name}.{key}.weight")
        total += weight * as_number(part["score"], source=source, name=f"{name}.{key}.score")
    return total


def _group(value: dict[str, Any], source: str) -> tuple[str | None, str | None]:
    group, field = _first_name(value, GROUPS, source)
    if group is None and isinstance(task := value.get("task"), dict):
        group, _ = _first_name(task, ("key", "hash"), source, prefix="task.")
        field = "task"
    return group, field


def _first_name(
    value: dict[str, Any], names: tuple[str, ...], source: str, *, prefix: str = ""
) -> tuple[str | None, str | None]:
    for name in names:
        if (found := value.get(name)) is not None:
            if isinstance(found, bool) or not isinstance(found, str | int):
                raise TreepackError(
                    f"{source}: {prefix}{name} is {shown(found)}; expected a string or an integer of 64 bits"
                )
            return str(found), name
    return None, None


def _trial(value: dict[str, Any], group: str | None, source: str) -> tuple[str | None, str | None]:
    trial, field = _first_name(value, ("trial",), source)
    return (None, None) if trial is None or group is None else (f"{group}/{trial}", field)


def _step(value: dict[str, Any], source: str) -> tuple[int | None, str | None]:
    for name in STEPS:
        if (step := value.get(name)) is not None:
            if isinstance(step, bool) or not isinstance(step, int) or not -(2**63) <= step < 2**63:
                raise TreepackError(f"{source}: {name} is {shown(step)}; expected an integer in [-2**63, 2**63)")
            return step, name
    return None, None


def _metadata(rest: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    kept: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in rest.items():
        if value is None:
            continue
        if name == SEGMENTS and (offsets := _integers(value)):
            kept[name] = offsets
            continue
        if not isinstance(value, str | int | float) and not (name in METADATA_DICTS and isinstance(value, dict)):
            notes.append(f"field '{name}' not used")
            continue
        fault = fault_in_json(value, allow_nan=False)
        if fault is None and len(json.dumps(value)) > MAX_METADATA:
            fault = f"more than {MAX_METADATA} characters"
        if fault is None:
            kept[name] = value
        else:
            notes.append(f"field '{name}' dropped, {fault}")
    return kept, tuple(notes)


def _integers(value: Any) -> list[int]:
    """A list of integers as it is, of Python's or of numpy's; nothing for anything else."""
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    whole = isinstance(listed, list) and all(type(each) is int for each in listed)
    return listed if whole else []
