"""Flags of turns: values beside the text of the model that may choose the trained turns, in records of any format.

    {"steps": [{"said": "Seven.", "learnable": true}, {"said": "Nine.", "learnable": false}]}
    TurnFlags      no reader uses 'learnable', true beside a trained text and false beside another one: refused
    TurnWeights    with --columns mask=learnable the turn "Nine." gets the weight 0

A turn is the innermost object of a list, or a record of a file, that has a text of the model or its token ids. What
stands beside a conversation, such as whether it was solved, is of no turn, and neither is what stands in a call. The
longest line of a text identifies it, because readers cut texts into thought, content and call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.unread import Declared
from treepack.ingest.readers.fields.unread_notes import View
from treepack.ingest.readers.fields.values import JsonObject, shown
from treepack.ingest.readers.messages.turn_weights import WEIGHT_FIELDS, as_flag
from treepack.trajectory import Chat, Outcome, Outcomes, PromptCompletion, Skipped, Tokens, Trajectory

# Flags that known programs write beside turns for their own use, and settings of a call.
_KNOWN = frozenset(
    """
    is_error isError isMeta isSidechain isApiErrorMessage isCompactSummary isVisibleInTranscriptOnly isSynthetic
    userModified cached cache_hit cacheHit is_cached from_cache done episode_done terminated finished is_terminal
    is_last pending pruned end_turn is_complete is_redacted is_visually_hidden_from_conversation
    is_thinking_preamble_message
    overlong_prompt in_dataset prefix partial stream streaming logprobs echo store background parallel_tool_calls
    enable_thinking add_generation_prompt continue_final_message ignore_eos skip_special_tokens do_sample
    """.split()
)
# Objects with settings or arguments of a call, and with the results of a rollout.
_BESIDE = frozenset(
    """
    request params parameters sampling_params model_parameters config settings options usage arguments args
    reward_info scores report test_result evaluation
    """.split()
)
# Lists of the calls of a turn, which have no weights of their own.
_CALLS = frozenset(("tool_calls", "toolCalls", "function_calls"))
# Numbers of turns, which may be 0 and 1.
_NUMBERED = frozenset(
    "turn step index idx id number num n round reward score count position order seq level depth time timestamp "
    "advantage value return tokens cost duration code kind flags version priority".split()
)
_OTHERS = frozenset("user system tool human function developer observation environment tool_result".split())
_SPEAKERS = ("role", "from", "type", "source", "speaker")
_LONGEST = 5  # characters of a flag as text
_Turn = JsonObject
_Key = str | tuple[int, ...]


class TurnFlags:
    """The flags of the turns of one record, or of all records of a file, that the format does not declare."""

    def __init__(self, known: AbstractSet[str]) -> None:
        """Take the names of fields that are not flags of turns."""
        self._known = known
        self._values: dict[str, list[tuple[bool | None, _Turn, str]]] = {}
        self._keys: set[_Key] = set()  # of trained turns
        self._arguments: set[str] = set()  # names of arguments of trained calls

    def of_records(self, records: Iterable[Record], view: View | None = None) -> Iterator[Record]:
        """Yield `records` after adding their turns, as their `view` shows them."""
        for record in records:
            for turn in _turns(record.value if view is None else view(record.value)):
                for path, flag in _flags(turn, self._known):
                    self._values.setdefault(path, []).append((flag, turn, record.source))
            yield record

    def on_items(self, items: Outcomes) -> Outcomes:
        """Yield the `items` of the records.

        Raises:
            TreepackError: in the end, if a flag is true beside a trained text, and false beside another one.
        """
        for item in items:
            # Without flags, nothing is compared.
            for _, said in said_turns(item) if self._values and isinstance(item, Trajectory) else ():
                self._keys.update(keys_of_turn(said))
                self._arguments.update(_arguments(said))
            yield item
        for path, turns in self._values.items():
            if {flag for flag, *_ in turns} != {True, False}:
                continue
            said = ((flag, source) for flag, turn, source in turns if not self._keys.isdisjoint(_own_lines(turn)))
            sources = dict(said)
            if sources.keys() == {True, False} and path.rpartition(".")[2] not in self._arguments:
                raise TreepackError(
                    f"{sources[False]}: the field '{path}' is true for some turns of the model and false for others, "
                    f"so it may be a mask; add --columns mask={path} if it chooses the trained turns, or leave it out "
                    f"with --columns ignore={path}"
                )


@dataclass(frozen=True, slots=True)
class _WeightedTurn:
    weight: float
    size: int  # lines of all its texts; a later call has more, because its prompt contains this one
    is_marked: bool  # its message has the weight, too, which readers of messages use


class TurnWeights:
    """The loss weights that a column gives to turns, for readers that do not use weights of messages.

    If it `is_required`, each record has the column and is read alone; else at least one record of a file has it.
    """

    def __init__(self, *, is_required: bool = False) -> None:
        self.is_required = is_required
        self.is_used = False
        self._turns: dict[_Key, list[_WeightedTurn]] = {}

    def of_record(self) -> TurnWeights:
        """Return it for the next record of the file."""
        if self.is_required:
            self._turns.clear()
        return self

    def add(self, turn: _Turn, weight: float, *, is_marked: bool) -> None:
        """Add a turn of a record."""
        self.is_used = True
        lines = lines_of_texts(turn)
        for line in lines:
            self._turns.setdefault(line, []).append(_WeightedTurn(weight, len(lines), is_marked))

    def applied(self, item: Outcome) -> Outcome:
        """Return `item` with the weights of its turns.

        Raises:
            TreepackError: turns of different weights have the same text.
        """
        if not self._turns or isinstance(item, Skipped):
            return item
        keys = {place: self._key(said) for place, said in said_turns(item)}
        counts = Counter(keys.values())
        weights = {at: 1.0 if key is None else self._weight(key, counts[key], item.source) for at, key in keys.items()}
        content = item.content
        if isinstance(content, Chat):
            # A reader of messages has used the weight, unless it is still 1.
            new = [
                weights.get(place, 1.0) if old == 1 or weights.get(place) == 0 else old
                for place, old in enumerate(content.message_weights)
            ]
            return replace(item, content=replace(content, message_weights=new))
        if not any(weights.values()):
            return Skipped(item.source, "no trained token", item.group_id)
        if isinstance(content, Tokens):
            return replace(item, content=_weighted(content, np.array(list(weights.values()))))
        return replace(item, weight=item.weight * weights[0])

    def _key(self, said: Any) -> _Key | None:
        """Return the rarest line of a trained turn, None if no turn has one of its lines."""
        found = [line for part in _parts(said) for line in lines_of_texts(part) if line in self._turns]
        return min(found, key=lambda line: (len(self._turns[line]), -len(line), line), default=None)

    def _weight(self, key: _Key, num_said: int, source: str) -> float:
        """Return the weight of a turn with the line `key`, which `num_said` trained turns of its trajectory have."""
        turns = self._turns[key]
        if len({turn.weight for turn in turns}) == 1 or all(turn.size > turns[0].size for turn in turns[1:]):
            return turns[0].weight
        weights = {turn.weight for turn in turns if turn.weight}
        # Readers that use the weights of messages left only messages with a weight.
        if all(turn.is_marked for turn in turns) and num_said <= sum(turn.weight > 0 for turn in turns):
            return weights.pop() if len(weights) == 1 else 1.0
        raise TreepackError(
            f"{source}: the column mask trains one of several turns with the text {shown(key)}, which cannot be told "
            "apart in this format; leave the field out with --columns ignore=FIELD, or remove the turns"
        )


def _weighted(content: Tokens, weights: NDArray[Any]) -> Tokens:
    """Return `content` with its spans times `weights` [spans], without spans of weight 0."""
    kept = weights != 0
    rows = np.flatnonzero(np.repeat(kept, content.ends - content.starts))
    # All columns but the routes have one entry for each trained token.
    values = {each.name: getattr(content, each.name) for each in fields(Tokens)[4:] if each.name != "routes"}
    return replace(
        content,
        starts=content.starts[kept],
        ends=content.ends[kept],
        span_weights=(content.span_weights * weights)[kept],
        **{name: value[rows] for name, value in values.items() if value is not None},
    )


def known_names(declared: Declared) -> frozenset[str]:
    """Return the names in the `declared` fields of a format, and the names that every reader uses."""
    inner = (name for below in declared.values() if isinstance(below, dict) for name in known_names(below))
    return frozenset((*declared, *inner, *_KNOWN, *WEIGHT_FIELDS))


def _turns(value: Any) -> Iterator[_Turn]:
    """Yield `value` and each object of the lists in it that no other speaker than the model wrote, without calls."""
    if isinstance(value, list):
        for each in value:
            yield from _turns(each)
    elif isinstance(value, dict):
        if not is_other(value):
            yield value
        yield from _lists(value)


def _lists(value: Any) -> Iterator[_Turn]:
    """Yield the turns in the lists of `value`."""
    if isinstance(value, dict):
        for name, field in value.items():
            if name not in _CALLS:
                yield from _lists(field)
    elif isinstance(value, list):
        yield from _turns(value)


def _own_lines(turn: _Turn) -> set[Any]:
    """Return the lines of the texts of `turn` that are not in a conversation."""
    lines: set[Any] = set()
    for name, field in turn.items():
        if isinstance(field, dict):
            lines |= _own_lines(field) if name not in _BESIDE else set()
        elif name in _CALLS or not _is_conversation(field):
            lines |= lines_of_texts(field)
    return lines


def _is_conversation(value: Any) -> bool:
    """Return whether others than the model speak in `value`, too."""
    return isinstance(value, list) and any(is_other(each) for each in value if isinstance(each, dict))


def is_other(turn: _Turn) -> bool:
    """Return whether a user, a tool or the program is the speaker of `turn`."""
    return any(str(turn.get(name)).lower() in _OTHERS for name in _SPEAKERS if name in turn)


def _flags(turn: _Turn, known: AbstractSet[str], before: str = "", depth: int = 3) -> Iterator[tuple[str, bool | None]]:
    """Yield path and value of each flag of a turn that is not `known`, also in an object; None for another value."""
    for name, field in turn.items():
        if isinstance(field, dict):
            if depth > 1 and name not in _BESIDE:
                yield from _flags(field, known, f"{before}{name}.", depth - 1)
        elif name in known or not isinstance(field, bool | int | float | str) or endings.kind_of(name) is not None:
            continue
        elif not isinstance(field, str) or len(field) <= _LONGEST:
            is_flag = isinstance(field, bool) or str(field).lower() in ("true", "false")
            # Numbers and rewards of turns may be 0 and 1 too.
            is_number = not is_flag and bool(_NUMBERED & set(re.split(r"[._]", f"{before}{name}")))
            yield f"{before}{name}", None if is_number else as_flag(field)


def said_turns(item: Trajectory) -> Iterator[tuple[int, Any]]:
    """Yield each trained turn of `item` with its place: text and calls, or token ids."""
    content = item.content
    if isinstance(content, Tokens):
        for place, (start, end) in enumerate(zip(content.starts, content.ends, strict=True)):
            yield place, tuple(content.tokens[start:end].tolist())
    elif isinstance(content, PromptCompletion):
        yield 0, {"content": content.completion}
    else:
        yield from ((i, content.messages[i]) for i, weight in enumerate(content.message_weights) if weight)


def keys_of_turn(said: Any) -> Iterator[_Key]:
    """Yield the longest line of each part of a trained turn, or its ids."""
    for part in _parts(said):
        if lines := lines_of_texts(part):
            yield max(lines, key=lambda line: (len(line), line))


def _parts(said: Any) -> list[Any]:
    """Return the text, the thought and the arguments of a trained turn; the names of its calls if there is nothing."""
    if not isinstance(said, dict):
        return [list(said)]
    calls = [call["function"] for call in said.get("tool_calls") or ()]
    parts = [said["content"], said.get("reasoning_content"), [call["arguments"] for call in calls]]
    return parts if any(map(lines_of_texts, parts)) else [[call["name"] for call in calls]]


def _arguments(said: Any) -> Iterator[str]:
    """Yield the names in the arguments of the calls of a trained turn."""
    for call in said.get("tool_calls") or () if isinstance(said, dict) else ():
        given = call["function"]["arguments"]
        yield from _object_names(parsed_json(given) if isinstance(given, str) else given)


def _object_names(value: Any) -> Iterator[str]:
    for name, field in value.items() if isinstance(value, dict) else ():
        yield from (name, *_object_names(field))
    for each in value if isinstance(value, list) else ():
        yield from _object_names(each)


def lines_of_texts(value: Any) -> set[Any]:
    """Return the lines of all texts in `value`, also inside of JSON text, and its lists of ids."""
    if isinstance(value, str):
        lines = {line for each in value.splitlines() if (line := each.strip())}
        opened = parsed_json(value)
        return lines | lines_of_texts(opened) if isinstance(opened, dict | list) else lines
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and value and isinstance(value[0], int):
        return {tuple(value)}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(lines_of_texts, inner))
