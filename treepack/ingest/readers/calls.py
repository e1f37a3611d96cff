"""LLM calls of one rollout to trajectories: calls that continue each other become one, other calls one each.

    call 1    prompt P        response a            P a [trained a]
    call 2    prompt P a T    response b      =>    P a T b [trained a and b]      "run-7"
    call 3    prompt Q        response c            Q c [trained c]                "run-7/turn-3"

A call continues a trajectory if its prompt begins with the whole trajectory, token by token or message by message. If
it continues several, it joins the longest one, so the calls of sub-agents may be interleaved. Each response is trained
once, in the trajectory of its call: if two calls continue the same trajectory, the second becomes a trajectory of its
own. A rollout of one trajectory keeps its name. If there are several, each is named after its first call, and all are
in one group: the group of the record, or else a group derived from the first prompt.

A reader passes a `Record` whose value has only the fields of the rollout besides its calls, under the names that
`fields.describe` reads (`trajectory_id, group_id, reward, ...`). Any other field becomes metadata or a note there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers import endings
from treepack.ingest.readers.content_blocks import split_blocks
from treepack.ingest.readers.fields import BadValueError, ReadOptions, as_number, describe, shown
from treepack.ingest.readers.formats import tokens
from treepack.ingest.readers.messages import Messages, normalise_messages, normalise_template_kwargs, normalise_tools
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.route_fields import has_routes, read_routes
from treepack.ingest.readers.token_fields import LABELS, NAMES, mask_values, number_values
from treepack.ingest.readers.token_fields import MASK as MASK_OF_TOKENS
from treepack.trajectory import (
    MAX_INSIDE,
    Chat,
    Float64,
    Int32,
    PromptCompletion,
    Routes,
    Skipped,
    Tokens,
    Trajectory,
    as_token_ids,
    check_temperatures,
    derived_group,
    is_recorded,
    prompt_messages,
    prompt_tokens,
)

MASK, TEMPERATURES, ROUTES = "loss_mask", "temperatures", "routed_experts"
SPLIT_NOTE = "split where the prompt of a call does not continue the calls before it"
EMPTY_NOTE = "call without a response not used"


@dataclass(frozen=True, slots=True)
class TokenCall:
    """One call by its token ids.

    `values` belong to the response: a `loss_mask` with one value per token (without it, all tokens are trained), and
    numbers under names of the `tokens` reader (`rollout_log_probs, old_log_probs, ref_log_prob, advantages,
    temperatures`): one per token of the response, one per trained token, or one for all. None and empty lists count as
    absent. `routes` are the recorded experts of prompt and response (`route_fields`). `ending` is the raw value of the
    field that says why the response ended (`endings`), None if there is none.
    """

    prompt: Any
    response: Any
    values: dict[str, Any] = field(default_factory=dict)
    routes: Any = None
    ending: Any = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One call by its messages, as logged. The assistant messages of the response are trained, the prompt is not.

    `temperature` is that of the sampler for the response, None if it is not known. `ending` is the raw value of the
    field that says why the response ended (`endings`), None if there is none or if the messages have it.
    """

    prompt: Sequence[Any]
    response: Sequence[Any]
    tools: Any = None
    chat_template_kwargs: Any = None
    temperature: float | None = None
    ending: Any = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Calls that continue each other: `calls` are their numbers from 0, `fields` the fields of a `tokens` record."""

    calls: tuple[int, ...]
    fields: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedChat:
    """Calls that continue each other, as one conversation; `calls` are their numbers from 0."""

    calls: tuple[int, ...]
    content: Chat
    notes: tuple[str, ...] = ()


def read_calls(record: Record, calls: Sequence[TokenCall], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Yield the trajectories of a rollout with these `calls`; `record` has its other fields.

    A bad value, such as that of the reward, skips the rollout.

    Raises:
        TreepackError: ids or values contradict each other, or the `tokens` reader refuses them.
    """
    if outside := sorted({*NAMES[MASK_OF_TOKENS], *NAMES[LABELS]} & record.value.keys()):
        raise TreepackError(f"{record.source}: {outside[0]} is beside the calls; expected it in each of them")
    if not options.keep_routes:
        calls = [replace(call, routes=None) for call in calls]
    joined = join_calls(calls, source=record.source)
    try:
        items = [
            replace(item, notes=item.notes + part.notes) if isinstance(item, Trajectory) else item
            for part in joined
            for item in tokens.read(replace(record, value=record.value | part.fields), options)
        ]
    except BadValueError as error:
        yield Skipped(record.source, error.reason, detail=str(error))
        return
    if calls and endings.is_cut(calls[-1].ending):
        items = [replace(item, is_truncated=True) if isinstance(item, Trajectory) else item for item in items]
    yield from _with_names(record, items, [part.calls for part in joined], num_calls=len(calls))


def read_chats(record: Record, calls: Sequence[ChatCall], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Yield the trajectories of a rollout whose `calls` are messages; `record` has its other fields.

    A bad value, such as that of the reward, or a message without content, skips the rollout.

    Raises:
        TreepackError: `readers.messages` refuses messages or tools.
    """
    # Fields of the rollout about its end are those of its last call, unless the calls have fields of their own.
    last = len(calls) - 1 if all(call.ending is None for call in calls) else len(calls)
    try:
        joined = join_chats(calls, source=record.source)
        items = [
            describe(record, part.content, used=(), options=options, notes=part.notes, has_end=last in part.calls)
            for part in joined
        ]
    except BadValueError as error:
        yield Skipped(record.source, error.reason, detail=str(error))
        return
    # The whole rollout is truncated if its last call is; another one may be a call of a sub-agent.
    ends = [item.is_truncated for item, part in zip(items, joined, strict=True) if len(calls) - 1 in part.calls]
    items = [replace(item, is_truncated=any(ends)) for item in items] if ends else items
    yield from _with_names(record, items, [part.calls for part in joined], num_calls=len(calls))


def join_calls(calls: Sequence[TokenCall], *, source: str) -> list[Joined]:
    """Join `calls` that continue each other, in the order of their first call; calls without a response are left out.

    The `fields` of each result are `input_ids`, `loss_mask` and the values that all of its calls have, over the whole
    sequence, and `routed_experts` if a call has routes: of several calls, the first one with routes for a token counts.
    Numbers are NaN at untrained tokens. O(tokens of all prompts) if the calls continue each other; otherwise
    this times the number of trajectories.

    Raises:
        TreepackError: ids are not token ids, or the number of values differs from the number of tokens.
    """
    runs: list[_CallChain] = []
    for number, call in enumerate(calls):
        where = f"{source}: call {number + 1}"
        prompt, response = _ids(call.prompt, "prompt", where), _ids(call.response, "response", where)
        if len(response) == 0:
            continue
        # prompt 5 6 7 continues the runs 5 and 5 6 -> it joins 5 6.
        run = max((run for run in runs if run.is_continued_by(prompt)), key=lambda run: len(run.ids), default=None)
        if run is None:
            run = _CallChain()
            runs.append(run)
        ids = np.concatenate([prompt, response])
        values = _values(call, len(response), where)
        run.add(number, ids, len(prompt), values)
        if has_routes(call.routes):
            trained = np.flatnonzero(values[MASK])
            run.add_routes(
                read_routes(
                    call.routes,
                    source=where,
                    name=ROUTES,
                    num_tokens=len(ids),
                    start=0,
                    stored=len(ids),
                    first_trained=len(prompt) + int(trained[0]) if len(trained) else 0,
                )
            )
    return [run.join() for run in runs]


def join_chats(calls: Sequence[ChatCall], *, source: str) -> list[JoinedChat]:
    """Join `calls` if the prompt of one begins with all messages of another, and both have the same tools.

    Raises:
        TreepackError: `readers.messages` refuses messages or tools.
    """
    runs: list[JoinedChat] = []
    logged: list[list[Any]] = []  # the messages of each run as they were logged, before they were normalised
    parts: dict[int, list[Any]] = {}  # each logged message with its blocks split, by its identity
    for number, call in enumerate(calls):
        if not call.response:
            continue
        prompt = [part for message in call.prompt for part in _split(message, parts)]
        where, num_prompt = f"{source}: call {number + 1}", len(prompt)
        response = endings.mark(split_blocks(call.response), call.ending)
        # A later prompt repeats an answer without the reason why it ended.
        whole = [endings.without_fields(message) for message in (*prompt, *response)]
        # Successive prompts repeat nearly all messages. A repeated message need not be normalised again, so only the
        # messages after the longest equal run are: normalising all would be quadratic in the number of turns.
        equal_runs = [i for i, messages in enumerate(logged) if messages == whole[: min(num_prompt, len(messages))]]
        longest = max(equal_runs, key=lambda i: len(logged[i]), default=-1)
        start = len(logged[longest]) if equal_runs else 0
        new = [*prompt, *response][start:]
        done = normalise_messages(new, source=where, before=_messages(runs[longest]) if equal_runs else None)
        tools = normalise_tools(call.tools, source=where)
        if call.temperature is not None:
            check_temperatures(np.array([call.temperature]), source=where, name="temperature")
        variables = normalise_template_kwargs(call.chat_template_kwargs, source=where)
        weights = [0.0] * num_prompt + done.weights[num_prompt:]
        temperatures = [None] * num_prompt + [call.temperature] * (len(done.messages) - num_prompt)
        cuts = [False] * num_prompt + done.cuts[num_prompt:]
        # Equal as logged is not enough (the tools may differ), and not needed (null and "" are the same content).
        continued = [
            i
            for i, run in enumerate(runs)
            if (run.content.tools, run.content.chat_template_kwargs) == (tools, variables)
            and run.content.messages == done.messages[: min(num_prompt, len(run.content.messages))]
        ]
        if not continued:
            content = _chat(done.messages, weights, (tools, variables), temperatures, cuts)
            runs.append(JoinedChat((number,), content, done.notes))
            logged.append(whole)
            continue
        longest = max(continued, key=lambda i: len(runs[i].content.messages))
        before = runs[longest]
        # Weights 0 1 of the run, 0 0 0 1 of the call -> 0 1 0 1: a prompt must not untrain an earlier response.
        earlier = before.content.message_weights
        weights = [*earlier, *weights[len(earlier) :]]
        temperatures = [*(before.content.message_temperatures or [None] * len(earlier)), *temperatures[len(earlier) :]]
        cuts = [*(before.content.message_cuts or [False] * len(earlier)), *cuts[len(earlier) :]]
        content = _chat(done.messages, weights, (tools, variables), temperatures, cuts)
        notes = tuple(dict.fromkeys((*before.notes, *done.notes)))  # each note once, in order
        runs[longest] = JoinedChat((*before.calls, number), content, notes)
        logged[longest] = whole
    return runs


def _chat(
    messages: list[Any], weights: list[float], more: tuple[Any, Any], temperatures: list[Any], cuts: list[bool]
) -> Chat:
    known = any(temperature is not None for temperature in temperatures)
    return Chat(messages, weights, *more, temperatures if known else None, cuts if any(cuts) else None)


def _split(message: Any, parts: dict[int, list[Any]]) -> list[Any]:
    # Readers put the same message into the prompts of all later calls. `calls` keeps it, so its identity stays unique.
    split = parts.get(id(message))
    return parts.setdefault(id(message), split_blocks([message])) if split is None else split


def _messages(run: JoinedChat) -> Messages:
    cuts = run.content.message_cuts or [False] * len(run.content.messages)
    return Messages(run.content.messages, run.content.message_weights, run.notes, cuts)


class _CallChain:
    """Calls that continue each other, while more calls may join."""

    def __init__(self) -> None:
        self.ids: Int32 = np.zeros(0, np.int32)
        self._calls: list[int] = []
        self._parts: list[tuple[int, dict[str, Float64]]] = []  # start of each response in `ids`, and its values
        self._routes: list[Routes] = []  # of the first tokens of `ids`, by calls

    def is_continued_by(self, prompt: Int32) -> bool:
        # The last token is compared first: nearly every prompt that does not continue this chain differs there.
        num = len(self.ids)
        return num <= len(prompt) and self.ids[-1] == prompt[num - 1] and bool((self.ids == prompt[:num]).all())

    def add(self, number: int, ids: Int32, start: int, values: dict[str, Float64]) -> None:
        self.ids = ids
        self._calls.append(number)
        self._parts.append((start, values))

    def add_routes(self, routes: Routes) -> None:
        if self._routes and routes.shape[1:] != self._routes[0].shape[1:]:
            raise TreepackError(
                f"{ROUTES} of one call has {list(self._routes[0].shape[1:])} layers and experts, and of a later one "
                f"{list(routes.shape[1:])}; keep the calls of one model"
            )
        self._routes.append(routes)

    def join(self) -> Joined:
        names = dict.fromkeys(name for _, values in self._parts for name in values)
        # Temperatures may be known for some calls only; the others have NaN, as untrained tokens do.
        common = [name for name in names if name == TEMPERATURES or all(name in values for _, values in self._parts)]
        fields: dict[str, Any] = {"input_ids": self.ids}
        # ids P a T b, responses a at 1 and b at 3 -> loss_mask 0 m 0 m, log-probabilities NaN p NaN p.
        for name in common:
            whole = np.full(len(self.ids), 0.0 if name == MASK else np.nan)
            for start, values in self._parts:
                if name in values:
                    whole[start : start + len(values[name])] = values[name]
            fields[name] = whole
        if self._routes:
            # Calls with routes 1 1 . and 2 2 2 2 . of 3 and 5 tokens -> 1 1 2 2 -1.
            whole = np.full((len(self.ids), *self._routes[0].shape[1:]), -1, np.int32)
            for routes in self._routes:
                own = whole[: len(routes)]
                own[...] = np.where((own < 0) & is_recorded(routes)[..., None], routes, own)
            fields[ROUTES] = whole
        notes = tuple(f"{name} of some calls only, not used" for name in names if name not in common)
        return Joined(tuple(self._calls), fields, notes)


def _ids(values: Any, name: str, where: str) -> Int32:
    if not isinstance(values, list | np.ndarray):
        raise TreepackError(f"{where}: {name} is {shown(values)}; expected a list of token ids")
    return as_token_ids(values, source=where, name=name)


def _values(call: TokenCall, num_tokens: int, where: str) -> dict[str, Float64]:
    """Return the values of `call`, each over all tokens of its response, and NaN for untrained tokens without value."""
    present = {name: value for name, value in call.values.items() if value is not None and not _is_empty(value)}
    mask = np.ones(num_tokens)
    if MASK in present:
        if not isinstance(present[MASK], list | np.ndarray):
            raise TreepackError(
                f"{where}: {MASK} is {shown(present[MASK])}; expected one value per token of the response"
            )
        mask = mask_values(present.pop(MASK), source=where, name=MASK).astype(np.float64)
        if len(mask) != num_tokens:
            raise TreepackError(
                f"{where}: {MASK} has {len(mask)} values; expected {num_tokens}, one per token of the response"
            )
    # A list has one number per token of the response or per trained token; its length decides which.
    trained = np.flatnonzero(mask)
    values = {MASK: mask}
    for name, value in present.items():
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
        else:  # mask 1 0 1, numbers -.5 -.2 -> -.5 NaN -.2
            values[name] = np.full(num_tokens, np.nan)
            values[name][trained] = numbers
    return values


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | np.ndarray) and len(value) == 0


def _with_names(
    record: Record, items: Sequence[Trajectory | Skipped], calls: Sequence[tuple[int, ...]], *, num_calls: int
) -> Iterator[Trajectory | Skipped]:
    """Yield `items`, each named after its first call if there are several; each note of the rollout occurs once."""
    if not items:
        yield Skipped(record.source, "no call with a response")
        return
    general: tuple[str, ...] = () if len(items) == 1 else (SPLIT_NOTE,)
    if sum(map(len, calls)) < num_calls:
        general += (EMPTY_NOTE,)
    group = _group(items)
    seen: set[str] = set()
    for item, numbers in zip(items, calls, strict=True):
        if isinstance(item, Skipped):
            yield item
            continue
        if len(items) > 1:
            item = in_rollout(item, numbers[0])
        notes = tuple(note for note in item.notes + general if note not in seen)
        seen.update(notes)
        yield replace(item, group_id=item.group_id or group, notes=notes)


def within(item: Trajectory | Skipped, rollout: str, number: int) -> Trajectory | Skipped:
    """Return `item` as a part of conversation `number`, from 0, of several of a `rollout`."""
    if isinstance(item, Skipped):
        return item
    return replace(item, rollout_id=rollout, rollout_part=number * MAX_INSIDE + (item.rollout_part or 0))


def in_rollout(item: Trajectory, first_call: int) -> Trajectory:
    """Return `item`, named after its rollout, as the trajectory of this rollout that begins with call `first_call`."""
    name = item.trajectory_id
    return replace(item, trajectory_id=f"{name}/turn-{first_call + 1}", rollout_id=name, rollout_part=first_call)


def _group(items: Sequence[Trajectory | Skipped]) -> str | None:
    """Return the group for the trajectories of a rollout without a group: it is derived from the first prompt."""
    # One trajectory gets its group later, from the tokenised prompt; several must share one, although prompts differ.
    first = next((item for item in items if isinstance(item, Trajectory)), None)
    return None if len(items) == 1 or first is None else group_of_first(first)


def group_of_first(item: Trajectory) -> str | None:
    """Return the group for a rollout of several trajectories without one, by the prompt of its first, `item`."""
    content = item.content
    if isinstance(content, PromptCompletion):
        return None
    return derived_group(
        prompt_tokens(content) if isinstance(content, Tokens) else prompt_messages(content, content.tools)
    )
