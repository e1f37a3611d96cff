"""Calls of one rollout by their token ids: calls that continue each other as one record of `tokens`.

    calls --join_calls--> _JoinedTokens --read_tokens--> trajectories

`treepack.calls` explains when a call continues another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treepack.calls.copied_turns import once
from treepack.calls.rollout_names import with_rollout_names
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.token_fields import LABELS, NAMES, mask_values, number_values
from treepack.ingest.readers.fields.token_fields import MASK as MASK_OF_TOKENS
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import BadValueError, JsonObject, as_number, shown
from treepack.ingest.readers.tokens.kept_fields import read_sets, set_fields
from treepack.ingest.readers.tokens.route_fields import has_routes, read_routes
from treepack.ingest.readers.tokens.token_records import read_valid_tokens
from treepack.ragged import RaggedArray
from treepack.trajectory import Float64, Int32, Int64, Outcomes, Routes, Skipped, Trajectory, as_token_ids, is_recorded

_MASK, _TEMPERATURES, _ROUTES, _KEPT = "loss_mask", "temperatures", "routed_experts", "kept_ids"


@dataclass(frozen=True, slots=True)
class TokenCall:
    """One call by its token ids.

    `values` belong to the response: a `loss_mask` with one value per token (without it, all tokens are trained), and
    numbers under names of the `tokens` reader (`rollout_log_probs, old_log_probs, ref_log_prob, advantages,
    temperatures`): one per token of the response, one per trained token, or one for all. None and empty lists count as
    absent. `routes` are the recorded experts of prompt and response (`route_fields`), and `kept` the kept sets of the
    tokens of the response, or of its trained ones (`kept_fields`). `ending` is the raw value of the
    field with the reason why the response ended (`endings`), or None. `name` is as in `ChatCall`.
    """

    prompt: Any
    response: Any
    values: JsonObject = field(default_factory=dict)
    routes: Any = None
    ending: Any = None
    kept: Any = None
    name: Any = None


@dataclass(frozen=True, slots=True)
class _JoinedTokens:
    """Calls that continue each other: `calls` are their numbers from 0, `fields` the fields of a `tokens` record."""

    calls: tuple[int, ...]
    fields: JsonObject
    notes: tuple[str, ...] = ()


@once
def read_calls(record: Record, calls: Sequence[TokenCall], options: ReadOptions) -> Outcomes:
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
            for item in read_valid_tokens(replace(record, value=record.value | part.fields), options)
        ]
    except BadValueError as error:
        yield Skipped(record.source, error.reason, detail=str(error))
        return
    if calls and endings.is_cut(calls[-1].ending):
        items = [replace(item, is_truncated=True) if isinstance(item, Trajectory) else item for item in items]
    yield from with_rollout_names(record, items, [part.calls for part in joined], num_calls=len(calls))


def join_calls(calls: Sequence[TokenCall], *, source: str) -> list[_JoinedTokens]:
    """Join `calls` that continue each other, in the order of their first call; calls without a response are left out.

    The `fields` of each result are `input_ids`, `loss_mask` and the values that all of its calls have, over the whole
    sequence, and `routed_experts` if a call has routes: of several calls, the first one with routes for a token counts.
    `kept_ids` are empty for a call without sets. Numbers are NaN at untrained tokens. O(tokens of all prompts) if the
    calls continue each other; otherwise this times the number of trajectories.

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
        if (sets := read_sets(set_fields({_KEPT: call.kept}), where)) is not None:
            run.sets.append(_placed(sets[1], np.flatnonzero(values[_MASK]), len(prompt), len(response), where))
        if has_routes(call.routes):
            trained = np.flatnonzero(values[_MASK])
            run.add_routes(
                read_routes(
                    call.routes,
                    source=where,
                    name=_ROUTES,
                    num_tokens=len(ids),
                    start=0,
                    stored=len(ids),
                    first_trained=len(prompt) + int(trained[0]) if len(trained) else 0,
                )
            )
    return [run.join() for run in runs]


class _CallChain:
    """Calls that continue each other, while more calls may join."""

    def __init__(self) -> None:
        self.ids: Int32 = np.zeros(0, np.int32)
        self._calls: list[int] = []
        self._parts: list[tuple[int, dict[str, Float64]]] = []  # start of each response in `ids`, and its values
        self._routes: list[Routes] = []  # of the first tokens of `ids`, by calls
        self.sets: list[dict[int, Any]] = []  # by the places of tokens, by calls

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
                f"{_ROUTES} of one call has {list(self._routes[0].shape[1:])} layers and experts, and of a later one "
                f"{list(routes.shape[1:])}; keep the calls of one model"
            )
        self._routes.append(routes)

    def join(self) -> _JoinedTokens:
        names = dict.fromkeys(name for _, values in self._parts for name in values)
        # Temperatures may be known for some calls only; the others have NaN, as untrained tokens do.
        common = [name for name in names if name == _TEMPERATURES or all(name in values for _, values in self._parts)]
        fields: JsonObject = {"input_ids": self.ids}
        # ids P a T b, responses a at 1 and b at 3 -> loss_mask 0 m 0 m, log-probabilities NaN p NaN p.
        for name in common:
            whole = np.full(len(self.ids), 0.0 if name == _MASK else np.nan)
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
            fields[_ROUTES] = whole
        if self.sets:
            placed = {place: own for sets in self.sets for place, own in sets.items()}
            fields[_KEPT] = [placed.get(place, []) for place in range(len(self.ids))]
        notes = tuple(f"{name} of some calls only, not used" for name in names if name not in common)
        return _JoinedTokens(tuple(self._calls), fields, notes)


def _ids(values: Any, name: str, where: str) -> Int32:
    if not isinstance(values, list | np.ndarray):
        raise TreepackError(f"{where}: {name} is {shown(values)}; expected a list of token ids")
    return as_token_ids(values, source=where, name=name)


def _values(call: TokenCall, num_tokens: int, where: str) -> dict[str, Float64]:
    """Return the values of `call`, each over all tokens of its response, and NaN for untrained tokens without value."""
    present = {name: value for name, value in call.values.items() if not is_empty(value)}
    mask = np.ones(num_tokens)
    if _MASK in present:
        if not isinstance(present[_MASK], list | np.ndarray):
            raise TreepackError(
                f"{where}: {_MASK} is {shown(present[_MASK])}; expected one value per token of the response"
            )
        mask = mask_values(present.pop(_MASK), source=where, name=_MASK).astype(np.float64)
        if len(mask) != num_tokens:
            raise TreepackError(
                f"{where}: {_MASK} has {len(mask)} values; expected {num_tokens}, one per token of the response"
            )
    # A list has one number per token of the response or per trained token; its length decides which.
    trained = np.flatnonzero(mask)
    values = {_MASK: mask}
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


def _placed(sets: RaggedArray, trained: Int64, start: int, num_tokens: int, where: str) -> dict[int, Any]:
    """Return the set of each token of a response by the place of the token, after a prompt of `start` tokens."""
    if len(sets) not in (num_tokens, len(trained)):
        raise TreepackError(
            f"{where}: {_KEPT} has {len(sets)} sets; "
            f"expected {num_tokens} (the response) or {len(trained)} (its trained tokens)"
        )
    places = range(num_tokens) if len(sets) == num_tokens else trained.tolist()
    return {start + place: sets.list(i) for i, place in enumerate(places)}
