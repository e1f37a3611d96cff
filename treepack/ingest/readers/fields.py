"""Fields of a record besides the content of its rollout: id, group, step, weight, reward, metadata.

    Record + content --describe--> Trajectory

All formats share these names. A reader passes the names of the fields that it has used for the content. A field that
neither the reader nor `describe` uses becomes metadata if it is small, otherwise a note, so that it is counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.options import MAX_RECORD_SIZE
from treepack.ingest.readers import endings
from treepack.ingest.readers.records import Record
from treepack.trajectory import Chat, Text, Tokens, Trajectory, check_scalars

# Of several names in one record, the first in these lists counts.
IDS = ("trajectory_id", "rollout_id", "session_id", "trace_id", "id", "index")
GROUPS = ("uid", "group_id", "group_index", "example_id", "task_id", "data_id", "prompt_id")
STEPS = ("step", "global_step")
REWARDS = ("reward", "score", "reward_score", "rewards", "rm_scores", "token_level_scores", "token_level_rewards")
# Objects with the settings of the sampler, of which the temperature is read.
SAMPLING_DICTS = ("sampling_params", "sampling_args", "generation_params", "generation_config")
METADATA_DICTS = frozenset({"metadata", "info", "extra_info", "extra"})
UNTRAINED_PREFIX = "untrained_prefix"  # tokens of an augmented query, which its rollouts never train
SEGMENTS = "segments"  # token offsets at which a sampler began its segments: a list of integers of any length
SEGMENT_IDS = "segment_ids"  # one integer per segment, equal in two rollouts of a group if it is the same sample
MAX_METADATA = 2000  # characters of one field: enough for settings and scores, too few for a transcript
MAX_DEPTH = 100  # of nested values: far from 1000, at which Python's json raises RecursionError


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of the caller for all records.

    `reward_key` selects one reward of several in a dict. `vocab_size` is the exclusive bound of the token ids.
    `train_all` trains every token of a record that has neither a mask nor a separate response. `shapes` accepts formats
    with the lengths and shared prefixes of rollouts but without tokens or text; token ids are then placeholders.
    `skip_bad` skips damaged records and files, which are refused otherwise. `max_record_size` limits the bytes of a
    record, and of a file that is read as a whole. `keep_routes` keeps recorded routes, see `route_fields`.
    """

    reward_key: str | None = None
    vocab_size: int | None = None
    train_all: bool = False
    shapes: bool = False
    skip_bad: bool = False
    max_record_size: int = MAX_RECORD_SIZE
    keep_routes: bool = False


def describe(
    record: Record,
    content: Tokens | Chat | Text,
    *,
    used: Collection[str],
    options: ReadOptions,
    advantage: float | None = None,
    notes: tuple[str, ...] = (),
    has_end: bool = True,
) -> Trajectory:
    """Return the trajectory of `record`; the reader has put the fields `used` into `content`.

    Fields about the end of the rollout (`endings`) are those of its last answer; they also stay metadata. Without
    `has_end`, this answer is not in `content`, or its end is known from elsewhere.

    Raises:
        TreepackError: a field has a value of the wrong kind, a reward, weight or advantage is not finite, or text
            continues an augmented query: its untrained tokens are counted, which needs token ids.
    """
    value, source = record.value, record.source
    # An augmented query ends with sampled tokens that its rollouts must not train. Text has no token count.
    if not isinstance(content, Tokens) and marked(value, UNTRAINED_PREFIX) is not None:
        raise TreepackError(
            f"{source}: has {UNTRAINED_PREFIX}, which counts tokens, and text; give token ids instead of text"
        )
    group, group_field = _group(value, source)
    name, id_field = _first_name(value, IDS, source)
    if name is None:
        name, id_field = _trial(value, group, source)
    step, step_field = _step(value, source)
    reward, reward_field = reward_of(value, source, reward_key=options.reward_key)
    weight = value.get("weight")
    temperature, temperature_field = _temperature(value)
    taken = {group_field, id_field, step_field, reward_field, "weight", temperature_field}
    metadata, dropped = _metadata({k: v for k, v in value.items() if k not in used and k not in taken})
    ending, remarks = endings.ending_of({key: field for key, field in value.items() if key not in used})
    item = check_scalars(
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
            notes=notes + dropped + remarks,
            temperature=temperature,
            is_truncated=isinstance(content, Chat) and endings.last_is_cut(content),
        )
    )
    if ending == endings.ENDED:
        return item
    return endings.cut(item) if has_end else replace(item, is_truncated=True)


def _temperature(value: dict[str, Any]) -> tuple[float | None, str | None]:
    """Return the temperature of the sampler and the name of the field that has it: a number, or an object of settings.

    A `temperature` that is not a number stays metadata: it may be about something else.
    """
    if (temperature := temperature_of(value)) is not None:
        return temperature, "temperature"
    settings = ((temperature_of(value.get(name)), name) for name in SAMPLING_DICTS)
    return next(((temperature, name) for temperature, name in settings if temperature is not None), (None, None))


def temperature_of(settings: Any) -> float | None:
    """Return the `temperature` of an object of settings, None if it has none or `settings` is not an object."""
    value = settings.get("temperature") if isinstance(settings, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf  # refused as other temperatures that are not finite


def marked(value: dict[str, Any], name: str) -> Any:
    """Return the field `name` of `value` or of a metadata object in it, or None if there is none."""
    # {"info": {"untrained_prefix": 7}} -> 7. The names are sorted, so that the result does not depend on a set's order.
    nested = [value[key] for key in sorted(METADATA_DICTS) if isinstance(value.get(key), dict)]
    return next((fields[name] for fields in (value, *nested) if fields.get(name) is not None), None)


def as_number(value: Any, *, source: str, name: str) -> float:
    """Return `value` as a float.

    Raises:
        TreepackError: it is not a number (a boolean or a string is not), or too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a number")
    try:
        return float(value)
    except OverflowError:
        raise TreepackError(f"{source}: {name} does not fit a float; expected a finite number") from None


def as_objects(value: Any, *, source: str, name: str) -> list[dict[str, Any]]:
    """Return the list of objects `value`, or an empty list for null.

    Raises:
        TreepackError: it is something else.
    """
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a list of objects")
    return value or []


def shown(value: Any) -> str:
    """Return `value` as JSON of at most 40 characters, to be quoted in a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = " ".join(repr(value).split())  # one line, also for a numpy array
    except RecursionError:
        return "nested too deeply to be shown"
    return text if len(text) <= 40 else text[:37] + "..."


def quoted(value: Any) -> str:
    """Return a name in single quotes, shortened, to be used in a message; a value that is not text becomes JSON."""
    if not isinstance(value, str):
        return shown(value)
    return f"'{value}'" if len(value) <= 40 else f"'{value[:37]}...'"


def fault_in_json(value: Any, *, allow_nan: bool = True) -> str | None:
    """Return the reason why `value` cannot be written as JSON (its depth or its types), or None if it can."""
    if _is_deeper(value, MAX_DEPTH):
        return f"nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(value, allow_nan=allow_nan)
    except (TypeError, ValueError):
        return "not plain JSON"
    return None


def _is_deeper(value: Any, levels: int) -> bool:
    # The recursion stops at `levels`, so the depth of the value cannot overflow Python's stack.
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(children) and (levels == 0 or any(_is_deeper(child, levels - 1) for child in children))


def reward_of(value: dict[str, Any], source: str, *, reward_key: str | None) -> tuple[float | None, str | None]:
    """Return the reward and the name of its field. The value is a number, a list to be summed, or a dict of scores.

    Raises:
        TreepackError: a value is not a number, or a dict has neither scores and weights nor the key `reward_key`.
    """
    for name in REWARDS:
        reward = value.get(name)
        if reward is None or (isinstance(reward, dict | list | np.ndarray) and len(reward) == 0):
            continue  # without a score a rollout has no reward, which is different from a reward of 0
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
        # {"accuracy": {"score": 1, "weight": 0.5}} with the key "accuracy" -> 1, without the weight
        chosen = chosen.get("score") if isinstance(chosen, dict) else chosen
        return as_number(chosen, source=source, name=f"{name}.{reward_key}")
    # {"accuracy": {"score": 1, "weight": 0.5}, "format": {"score": 2}} -> 0.5 * 1 + 1 * 2 = 2.5
    total = 0.0
    for key, part in reward.items():
        if not isinstance(part, dict) or "score" not in part:
            raise TreepackError(
                f"{source}: {name} is a dict with the keys {', '.join(reward)}; choose one with --reward-key"
            )
        weight = as_number(part.get("weight", 1.0), source=source, name=f"{name}.{key}.weight")
        total += weight * as_number(part["score"], source=source, name=f"{name}.{key}.score")
    return total


def group_of(record: Record) -> str | None:
    """Return the group that `record` names, or None if it names none, or something that cannot be a name."""
    try:
        return _group(record.value, record.source)[0]
    except TreepackError:
        return None


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
        if (identifier := value.get(name)) is not None:
            if isinstance(identifier, bool) or not isinstance(identifier, str | int):
                raise TreepackError(
                    f"{source}: {prefix}{name} is {shown(identifier)}; expected a string or an integer of 64 bits"
                )
            return str(identifier), name
    return None, None


def _trial(value: dict[str, Any], group: str | None, source: str) -> tuple[str | None, str | None]:
    # A trial number counts the rollouts of one group: "task-7/0". Without a group it names nothing.
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
    metadata: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in rest.items():
        if value is None:
            continue
        if name in (SEGMENTS, SEGMENT_IDS) and (listed := _integers(value)):
            metadata[name] = listed
            continue
        if not isinstance(value, str | int | float) and not (name in METADATA_DICTS and isinstance(value, dict)):
            notes.append(f"field '{name}' not used")
            continue
        # NaN is refused here, because the metadata column is read by other programs, and strict JSON has no NaN.
        fault = fault_in_json(value, allow_nan=False)
        if fault is None and len(json.dumps(value)) > MAX_METADATA:
            fault = f"more than {MAX_METADATA} characters"
        if fault is None:
            metadata[name] = value
        else:
            notes.append(f"field '{name}' dropped, {fault}")
    return metadata, tuple(notes)


def _integers(value: Any) -> list[int]:
    """Return a list or a numpy array of integers as a list; an empty list for any other value."""
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    is_integers = isinstance(listed, list) and all(type(each) is int for each in listed)
    return listed if is_integers else []
