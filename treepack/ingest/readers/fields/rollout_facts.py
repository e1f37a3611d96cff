"""Fields of a record besides the content of its rollout: id, group, step, weight, reward, metadata.

    Record + content --describe--> Trajectory

All formats share these names. A reader passes the names of the fields that it has used for the content. A field that
neither the reader nor `describe` uses becomes metadata if it is small, otherwise a note, so that it is counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.failures import failure_of
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rewards import REWARDS, is_equal, is_names, reward_of
from treepack.ingest.readers.fields.unread import ANSWER, MASK, danger, is_empty, is_prose, not_used
from treepack.ingest.readers.fields.values import BadValueError, JsonObject, as_fact, fault_in_json, shown
from treepack.trajectory import Chat, PromptCompletion, Tokens, Trajectory, check_scalars

# Of several names in one record, the first in these lists counts.
IDS = ("trajectory_id", "rollout_id", "session_id", "trace_id", "id", "index")
GROUPS = ("uid", "group_id", "group_index", "example_id", "task_id", "data_id", "prompt_id")
STEPS = ("step", "global_step")
# Objects with the settings of the sampler, of which the temperature is read.
SAMPLING_DICTS = ("sampling_params", "sampling_args", "generation_params", "generation_config")
METADATA_DICTS = frozenset({"metadata", "info", "extra_info", "extra"})
_NOT_TEXT = frozenset({"role", "from", "type", "name", "id", "speaker"})  # fields of a message that are not text
# Names of reasoning next to an answer. It may be of a judge, so no reader trains it unless the user names it.
_THOUGHTS = frozenset(
    "reasoning reasoning_content thinking thought thoughts chain_of_thought cot rationale reasoning_text".split()
)
ASKED = frozenset(
    "input context passage question query instruction instructions problem prompt system system_prompt".split()
)
UNTRAINED_PREFIX = "untrained_prefix"  # tokens of an augmented query, which its rollouts never train
SEGMENTS = "segments"  # token offsets at which a sampler began its segments: a list of integers of any length
SEGMENT_IDS = "segment_ids"  # one integer per segment, equal in two rollouts of a group if it is the same sample
MAX_METADATA = 2000  # characters of one field: enough for settings and scores, too few for a transcript
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[0-9]{1,4}(\.[0-9]{1,20})?")  # a temperature as text


def describe(
    record: Record,
    content: Tokens | Chat | PromptCompletion,
    *,
    used: Collection[str],
    options: ReadOptions,
    advantage: float | None = None,
    notes: tuple[str, ...] = (),
    has_end: bool = True,
) -> Trajectory:
    """Return the trajectory of `record`; the reader has put the fields `used` into `content`.

    Fields about the end of the rollout (`endings`) belong to its last answer; they also stay metadata. Without
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
    failed, remarks_on_failure = failure_of(value, options.failed)
    # Errors are lists or objects, a status is metadata too.
    errors = {name for name in options.failed if isinstance(value.get(name), list | dict)}
    taken = {group_field, id_field, step_field, reward_field, "weight", temperature_field, *errors}
    rest = {k: v for k, v in value.items() if k not in used and k not in taken}
    # Alpaca's `text` is the instruction and the output in one text.
    repeated = [k for k, v in rest.items() if danger(k, v) == ANSWER and _repeats(v, content)]
    rest = {k: v for k, v in rest.items() if k not in repeated}
    _check_rest({k: v for k, v in rest.items() if k not in options.harmless}, source)
    metadata, dropped = _metadata(rest)
    dropped += _other_rewards(rest, reward, reward_field) + tuple(
        f"field '{name}' not used, because it repeats the messages" for name in repeated
    )
    ending, remarks, stop = endings.ending_of({key: field for key, field in value.items() if key not in used})
    item = check_scalars(
        Trajectory(
            trajectory_id=record.label if name is None else name,
            source=source,
            content=content,
            group_id=group,
            step=step,
            weight=1.0 if weight is None else as_fact(weight, source=source, name="weight"),
            reward=reward,
            advantage=advantage,
            metadata=metadata,
            notes=notes + dropped + remarks + remarks_on_failure,
            temperature=temperature,
            is_truncated=isinstance(content, Chat) and endings.last_is_cut(content),
            failed=failed,
        )
    )
    if ending == endings.ENDED or (ending == endings.STOPPED and not has_end):
        return item
    if ending == endings.STOPPED:
        return endings.stopped(item, stop)
    return endings.cut(item) if has_end else replace(item, is_truncated=True)


def _check_rest(rest: JsonObject, source: str) -> None:
    """Refuse a record whose field can contain an answer or a mask; the reader has understood all fields but `rest`.

    Raises:
        TreepackError: the name of a field is one of `unread.ANSWERS` or `MASKS`, or a mask is in an object of metadata.
    """
    for name, field in rest.items():
        kind = danger(name, field)
        if name in METADATA_DICTS and isinstance(field, dict):
            # {"info": {"loss_mask": [..]}} chooses the trained tokens; {"info": {"text": ".."}} is metadata.
            masks = [f"{name}.{inner}" for inner, each in field.items() if _is_mask(inner, each)]
            kind, name = (MASK, masks[0]) if masks else (None, name)
        if kind is not None:
            raise TreepackError(
                f"{source}: has the field '{name}', which can contain {kind} and is not read here; say what it is with "
                f"--columns, leave it out with --columns ignore={name}, or remove it"
            )


def _is_mask(name: str, value: Any) -> bool:
    return isinstance(value, list | np.ndarray) and danger(name, value) == MASK


def _other_rewards(rest: JsonObject, reward: float | None, used: str | None) -> tuple[str, ...]:
    """Return notes on the rewards in `rest` under other names, of which only the first name counts."""
    # {"reward": 1.0, "score": 7} -> the score is metadata; an equal one adds nothing, nor do names of functions.
    filled = (name for name in REWARDS if used and not is_empty(rest.get(name)) and not is_names(rest[name]))
    others = (name for name in filled if not is_equal(rest[name], reward))
    return tuple(f"field '{name}' not read as the reward, because '{used}' is" for name in others)


def _temperature(value: JsonObject) -> tuple[float | None, str | None]:
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
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf  # refused as other temperatures that are not finite


def marked(value: JsonObject, name: str) -> Any:
    """Return the field `name` of `value` or of a metadata object in it, or None if neither has it."""
    # {"info": {"untrained_prefix": 7}} -> 7. The names are sorted, so that the result does not depend on a set's order.
    nested = [value[key] for key in sorted(METADATA_DICTS) if isinstance(value.get(key), dict)]
    return next((fields[name] for fields in (value, *nested) if fields.get(name) is not None), None)


def group_of(record: Record) -> str | None:
    """Return the group that `record` names, or None if it names none, or something that cannot be a name."""
    try:
        return _group(record.value, record.source)[0]
    except TreepackError:
        return None


def _group(value: JsonObject, source: str) -> tuple[str | None, str | None]:
    group, field = _first_name(value, GROUPS, source)
    if group is None and isinstance(task := value.get("task"), dict):
        group, _ = _first_name(task, ("key", "hash"), source, prefix="task.")
        field = "task"
    return group, field


def _first_name(
    value: JsonObject, names: tuple[str, ...], source: str, *, prefix: str = ""
) -> tuple[str | None, str | None]:
    for name in names:
        if (identifier := value.get(name)) is not None:
            # A column with nulls becomes floats in pandas: 3.0 -> "3".
            if isinstance(identifier, float) and identifier.is_integer():
                identifier = int(identifier)
            if isinstance(identifier, bool) or not isinstance(identifier, str | int):
                raise BadValueError(
                    f"{source}: {prefix}{name} is {shown(identifier)}; expected a string or an integer of 64 bits",
                    f"bad value of {prefix}{name}",
                )
            return str(identifier), name
    return None, None


def _trial(value: JsonObject, group: str | None, source: str) -> tuple[str | None, str | None]:
    # A trial number counts the rollouts of one group: "task-7/0". Without a group it names nothing.
    trial, field = _first_name(value, ("trial",), source)
    return (None, None) if trial is None or group is None else (f"{group}/{trial}", field)


def _step(value: JsonObject, source: str) -> tuple[int | None, str | None]:
    for name in STEPS:
        if (step := value.get(name)) is not None:
            number = _integer(step)
            if number is None or not -(2**63) <= number < 2**63:
                raise BadValueError(
                    f"{source}: {name} is {shown(step)}; expected an integer in [-2**63, 2**63)", f"bad value of {name}"
                )
            return number, name
    return None, None


def _integer(value: Any) -> int | None:
    """Return the integer that `value` means: 12, 12.0 or "12"; None if it means none."""
    if (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and _INTEGER.fullmatch(value)):
        return int(value)
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None


def _metadata(rest: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    metadata: JsonObject = {}
    notes: list[str] = []
    for name, value in rest.items():
        if value is None:
            continue
        if name in (SEGMENTS, SEGMENT_IDS) and (listed := _integers(value)):
            metadata[name] = listed
            continue
        if not isinstance(value, str | int | float) and not (name in METADATA_DICTS and isinstance(value, dict)):
            notes.append(not_used(name))
            continue
        # NaN is refused here, because the metadata column is read by other programs, and strict JSON has no NaN.
        fault = fault_in_json(value, allow_nan=False)
        if fault is None and len(json.dumps(value)) > MAX_METADATA:
            fault = f"more than {MAX_METADATA} characters"
        if fault is None:
            metadata[name] = value
            if isinstance(value, str) and _may_be_asked(name, value.strip()):
                notes.append(f"field '{name}' is metadata, not trained")
        else:
            notes.append(f"field '{name}' dropped, {fault}")
    return metadata, tuple(notes)


def _may_be_asked(name: str, text: str) -> bool:
    """Return whether metadata may be part of a prompt, or reasoning, by its name; "system_x" if its text has words."""
    words = re.split("[^a-z]+", name.lower())
    return bool(text) and (name in _THOUGHTS | ASKED or (" " in text and not ASKED.isdisjoint(words)))


def _integers(value: Any) -> list[int]:
    """Return a list or a numpy array of integers as a list; an empty list for any other value."""
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    is_integers = isinstance(listed, list) and all(type(each) is int for each in listed)
    return listed if is_integers else []


def _repeats(value: Any, content: Tokens | Chat | PromptCompletion) -> bool:
    """Return whether each text in `value` is a message of `content`, or `value` is one text with all messages.

    messages [user "Bolts?", assistant "Seven."]    "Seven."                                   repeats the answer
                                                    "### Q: Bolts?\\n### A: Seven."             contains all messages
                                                    [{"from": "gpt", "value": "Seven."}, ..]    the same in another form
                                                    "Eight."                                   another answer
    """
    said = [text.strip() for text in _messages_of(content) if text.strip()]
    own = [text.strip() for text in _texts_in(value) if text.strip()]
    if not said or not own:
        return False
    # By lines, because a template may print the lines of a message in two places: instruction and input of Alpaca.
    whole = "\n".join(own)
    lines = (line.strip() for text in said for line in text.splitlines())
    # {"text": "Guten Tag!"} next to "Translate: Guten Tag!": prose that a message contains is not another answer.
    parts = all(text in said or (is_prose(text) and any(text in each for each in said)) for text in own)
    return parts or all(line in whole for line in lines)


def _messages_of(content: Tokens | Chat | PromptCompletion) -> list[str]:
    if isinstance(content, Chat):
        return [str(message.get("content") or "") for message in content.messages]
    return [content.prompt, content.completion] if isinstance(content, PromptCompletion) else []


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in _NOT_TEXT:
                yield from _texts_in(each)
