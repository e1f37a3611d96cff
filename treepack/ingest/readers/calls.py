"""The LLM calls of one rollout to trajectories: calls that continue each other are one, the others one each.

    call 1    prompt P        response a            P a [trained a]
    call 2    prompt P a T    response b      =>    P a T b [trained a and b]      "run-7"
    call 3    prompt Q        response c            Q c [trained c]                "run-7/turn-3"

A call continues a trajectory if its prompt begins with all of it, token by token or message by message; it joins the
longest one that it continues, wherever that began, so that sub-agents may be interleaved. Each response is trained
once, in the trajectory of its own call: of two calls that continue the same one, the second is a trajectory of its
own. A rollout that is one trajectory keeps its name; if it is several, each is named after its first call, and all are
in one group, that of the first prompt where the record names none.

A reader hands over `Record`s whose value holds only what the rollout says besides its calls, under the names that
`fields.describe` knows (`trajectory_id, group_id, reward, ...`); what is not known becomes metadata or is noted there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import ReadOptions, as_number, describe, shown
from treepack.ingest.readers.formats import tokens
from treepack.ingest.readers.messages import Messages, normalise_messages, normalise_template_kwargs, normalise_tools
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.token_fields import mask_values, number_values
from treepack.trajectory import (
    Chat,
    Float64,
    Int32,
    Skipped,
    Text,
    Tokens,
    Trajectory,
    as_token_ids,
    derived_group,
    prompt_messages,
    prompt_tokens,
)

MASK = "loss_mask"
SPLIT_NOTE = "split where the prompt of a call does not continue the calls before it"
EMPTY_NOTE = "call without a response not used"


@dataclass(frozen=True, slots=True)
class TokenCall:
    """One call by its token ids.

    `values` belong to the response: a `loss_mask` with one value per token (without it all are trained), and numbers,
    under names that the `tokens` reader knows (`rollout_log_probs, old_log_probs, ref_log_prob, advantages`), with one
    per token of the response, one per trained token, or one for all. None and empty lists are as if not there.
    """

    prompt: Any
    response: Any
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One call by its messages, as logged. Of the response the assistant messages are trained, of the prompt none."""

    prompt: Sequence[Any]
    response: Sequence[Any]
    tools: Any = None
    chat_template_kwargs: Any = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Calls that continue each other: `calls` counts them from 0, `fields` are those of a record of `tokens`."""

    calls: tuple[int, ...]
    fields: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedChat:
    """Calls that continue each other, as one conversation; `calls` counts them from 0."""

    calls: tuple[int, ...]
    content: Chat
    notes: tuple[str, ...] = ()


def read_calls(record: Record, calls: Sequence[TokenCall], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of a rollout that is made of `calls`; `record` says what else is known of it.

    Raises:
        TreepackError: ids or values that contradict each other, or what the `tokens` reader refuses.
    """
    joined = join_calls(calls, source=record.source)
    found = [
        replace(item, notes=item.notes + part.notes) if isinstance(item, Trajectory) else item
        for part in joined
        for item in tokens.read(replace(record, value=record.value | part.fields), options)
    ]
    yield from _named(record, found, [part.calls for part in joined], num_calls=len(calls))


def read_chats(record: Record, calls: Sequence[ChatCall], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The same for calls that are known by their messages.

    Raises:
        TreepackError: messages or tools that `readers.messages` refuses.
    """
    joined = join_chats(calls, source=record.source)
    found = [describe(record, part.content, used=(), options=options, notes=part.notes) for part in joined]
    yield from _named(record, found, [part.calls for part in joined], num_calls=len(calls))


def join_calls(calls: Sequence[TokenCall], *, source: str) -> list[Joined]:
    """`calls` joined where they continue each other, by their first call; those without a response are left out.

    `fields` of each are `input_ids`, `loss_mask` and the values that all of its calls have, over the whole sequence.
    Numbers are NaN where nothing is trained. O(tokens of all prompts) if calls continue each other, else times the
    number of trajectories.

    Raises:
        TreepackError: ids that are none, or values that are not as many as the tokens they belong to.
    """
    runs: list[_CallChain] = []
    for number, call in enumerate(calls):
        where = f"{source}: call {number + 1}"
        prompt, response = _ids(call.prompt, "prompt", where), _ids(call.response, "response", where)
        if len(response) == 0:
            continue
        run = max((run for run in runs if run.is_continued_by(prompt)), key=lambda run: len(run.ids), default=None)
        if run is None:
            run = _CallChain()
            runs.append(run)
        run.add(number, np.concatenate([prompt, response]), len(prompt), _values(call, len(response), where))
    return [run.joined() for run in runs]


def join_chats(calls: Sequence[ChatCall], *, source: str) -> list[JoinedChat]:
    """`calls` joined where the messages of one begin with all of those of another, under the same tools.

    Raises:
        TreepackError: messages or tools that `readers.messages` refuses.
    """
    runs: list[JoinedChat] = []
    logged: list[list[Any]] = []  # the messages of each as they were logged
    for number, call in enumerate(calls):
        if not call.response:
            continue
        where, num_prompt = f"{source}: call {number + 1}", len(call.prompt)
        whole = [*call.prompt, *call.response]
        # Successive prompts repeat nearly everything, and what is repeated as it was need not be normalised again.
        same = [place for place, held in enumerate(logged) if held == whole[: min(num_prompt, len(held))]]
        place = max(same, key=lambda place: len(logged[place]), default=-1)
        start = len(logged[place]) if same else 0
        done = normalise_messages(whole[start:], source=where, before=_messages(runs[place]) if same else None)
        tools = normalise_tools(call.tools, source=where)
        variables = normalise_template_kwargs(call.chat_template_kwargs, source=where)
        weights = [0.0] * num_prompt + done.weights[num_prompt:]
        continued = [
            place
            for place, run in enumerate(runs)
            if (run.content.tools, run.content.chat_template_kwargs) == (tools, variables)
            and run.content.messages == done.messages[: min(num_prompt, len(run.content.messages))]
        ]
        if not continued:
            runs.append(JoinedChat((number,), Chat(done.messages, weights, tools, variables), done.notes))
            logged.append(whole)
            continue
        place = max(continued, key=lambda place: len(runs[place].content.messages))
        before = runs[place]
        earlier = before.content.message_weights
        content = Chat(done.messages, [*earlier, *weights[len(earlier) :]], tools, variables)
        notes = tuple(dict.fromkeys((*before.notes, *done.notes)))
        runs[place] = JoinedChat((*before.calls, number), content, notes)
        logged[place] = whole
    return runs


def _messages(run: JoinedChat) -> Messages:
    return Messages(run.content.messages, run.content.message_weights, run.notes)


class _CallChain:
    """Calls that continue each other, being collected."""

    def __init__(self) -> None:
        self.ids: Int32 = np.zeros(0, np.int32)
        self._calls: list[int] = []
        self._parts: list[tuple[int, dict[str, Float64]]] = []  # where a response begins, and its values

    def is_continued_by(self, prompt: Int32) -> bool:
        num = len(self.ids)
        return num <= len(prompt) and self.ids[-1] == prompt[num - 1] and bool((self.ids == prompt[:num]).all())

    def add(self, number: int, ids: Int32, start: int, values: dict[str, Float64]) -> None:
        self.ids = ids
        self._calls.append(number)
        self._parts.append((start, values))

    def joined(self) -> Joined:
        names = dict.fromkeys(name for _, values in self._parts for name in values)
        common = [name for name in names if all(name in values for _, values in self._parts)]
        fields: dict[str, Any] = {"input_ids": self.ids}
        for name in common:
            whole = np.full(len(self.ids), 0.0 if name == MASK else np.nan)
            for start, values in self._parts:
                whole[start : start + len(values[name])] = values[name]
            fields[name] = whole
        notes = tuple(f"{name} of some calls only, not used" for name in names if name not in common)
        return Joined(tuple(self._calls), fields, notes)


def _ids(values: Any, name: str, where: str) -> Int32:
    if not isinstance(values, list | np.ndarray):
        raise TreepackError(f"{where}: {name} is {shown(values)}; expected a list of token ids")
    return as_token_ids(values, source=where, name=name)


def _values(call: TokenCall, num_tokens: int, where: str) -> dict[str, Float64]:
    """The values of `call` over all tokens of its response; numbers given for the trained tokens only are placed."""
    given = {name: value for name, value in call.values.items() if value is not None and not _is_empty(value)}
    mask = np.ones(num_tokens)
    if MASK in given:
        if not isinstance(given[MASK], list | np.ndarray):
            raise TreepackError(
                f"{where}: {MASK} is {shown(given[MASK])}; expected one value per token of the response"
            )
        mask = mask_values(given.pop(MASK), source=where, name=MASK).astype(np.float64)
        if len(mask) != num_tokens:
            raise TreepackError(
                f"{where}: {MASK} has {len(mask)} values; expected {num_tokens}, one per token of the response"
            )
    trained = np.flatnonzero(mask)
    values = {MASK: mask}
    for name, value in given.items():
        if not isinstance(value, list | np.ndarray):
            values[name] = np.full(num_tokens, as_number(value, source=where, name=name))
            continue
        numbers = number_values(value, source=where, name=name)
        if len(numbers) not in (num_tokens, len(trained)):
            raise TreepackError(
                f"{where}: {name} has {len(numbers)} values; "
                f"expected {num_tokens} (the response) or {len(trained)} (its trained tokens)"
            )
        if len(numbers) == num_tokens:
            values[name] = numbers
        else:
            values[name] = np.full(num_tokens, np.nan)
            values[name][trained] = numbers
    return values


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | np.ndarray) and len(value) == 0


def _named(
    record: Record, found: Sequence[Trajectory | Skipped], calls: Sequence[tuple[int, ...]], *, num_calls: int
) -> Iterator[Trajectory | Skipped]:
    """`found`, each named after its first call if there are several; what is noted of the rollout is noted once."""
    if not found:
        yield Skipped(record.source, "no call with a response")
        return
    general: tuple[str, ...] = () if len(found) == 1 else (SPLIT_NOTE,)
    if sum(map(len, calls)) < num_calls:
        general += (EMPTY_NOTE,)
    group = _group(found)
    seen: set[str] = set()
    for item, own in zip(found, calls, strict=True):
        if isinstance(item, Skipped):
            yield item
            continue
        name = item.trajectory_id if len(found) == 1 else f"{item.trajectory_id}/turn-{own[0] + 1}"
        notes = tuple(note for note in item.notes + general if note not in seen)
        seen.update(notes)
        yield replace(item, trajectory_id=name, group_id=item.group_id or group, notes=notes)


def _group(found: Sequence[Trajectory | Skipped]) -> str | None:
    """The group of the parts of a rollout whose record names none: the one that its first prompt stands for."""
    first = next((item.content for item in found if isinstance(item, Trajectory)), None)
    if len(found) == 1 or first is None or isinstance(first, Text):
        return None
    return derived_group(prompt_tokens(first) if isinstance(first, Tokens) else prompt_messages(first, first.tools))
