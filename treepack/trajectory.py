"""The value that every reader yields and every later stage consumes: one trajectory.

    reader --Trajectory(content=Chat | PromptCompletion | Tokens)--> tokenization --Trajectory(content=Tokens)--> trie

A reader fills in the fields of the file and nothing else. Readers check values once with the functions of this file, so
that later stages can trust them. Unusable input becomes a `Skipped` value, not an exception, so that it is counted.
"""

from __future__ import annotations

import array
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.ragged import RaggedArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Routes = NDArray[np.uint8] | NDArray[np.uint16]

MAX_TOKEN_ID = 2**31 - 1
# Chosen so that sums and quotients of weights stay far from the limits of float32 (1e-38 to 3e38): the quotient of two
# weights is at most 1e24, and a sum of 1e9 of them at most 1e21.
MIN_WEIGHT, MAX_WEIGHT = 1e-12, 1e12
# A log-probability is at most 0. A log-softmax of float32 is above it by rounding, by 1e-5 for large vocabularies.
MAX_LOGPROB = 1e-3
WEIGHTS = f"0 or a number in [{MIN_WEIGHT:g}, {MAX_WEIGHT:g}]"
ON_SEVERAL_PATHS = -1  # a `rollout_part`
FAILED = "failed"  # field of the metadata: the cause, of a rollout that --failed keep kept
MAX_INSIDE = 1_000_000  # trajectories of one part of a rollout; part 3 then has the parts 3,000,000, 3,000,001, ...
FIRST_TOKEN_NOTE = "the first token is not trained, because no token predicts it"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a trajectory. Trained tokens are spans `[starts[i], ends[i])`, ascending and disjoint.

    Position 0 is never trained, because no token predicts it. Advantages, log-probabilities and temperatures have one
    entry per trained token, in order, or are None. A temperature is that of the sampler, NaN if it is not known. No
    reader gives returns, old values of a critic, or factors of edges; `treepack advantages` writes them. `routes`
    [num_tokens, layers, k] are the experts that the sampler's routers chose for each token, or `missing_route`.
    `kept_ids` are the token ids that top-p, top-k or min-p left for each trained token, int32 and ascending, with the
    token itself; an empty list is the whole vocabulary.

        tokens  5 6 7 8 9      starts 1 4      ends 3 5      trained 6 7 and 9
    """

    tokens: Int32
    starts: Int32
    ends: Int32
    span_weights: Float64
    advantage: Float64 | None = None
    sampling_logprob: Float32 | None = None
    old_logprob: Float32 | None = None
    ref_logprob: Float32 | None = None
    temperature: Float32 | None = None
    returns: Float64 | None = None
    old_values: Float64 | None = None
    edge_factor: Float64 | None = None
    teacher_logprob: Float32 | None = None
    teacher_topk_ids: RaggedArray | None = None
    teacher_topk_logprobs: RaggedArray | None = None
    kept_ids: RaggedArray | None = None
    routes: Routes | None = None

    @property
    def num_trained(self) -> int:
        return int((self.ends - self.starts).sum())


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """The part of an answer that its model wrote, if this is not the whole turn with its end token.

    The first `prefill` characters of the content were in the request. `stop` is the text that made the sampler stop
    ("" if it is not known), so that the end token was not sampled unless the text is this token. A turn `is_open` if
    the next message continues the same answer.
    """

    prefill: int = 0
    stop: str | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in OpenAI's message form, normalised by the reader.

    `content` is a string, `tool_calls` have the nested `function` form, and `reasoning_content` contains reasoning.
    `message_weights[i]` is the loss weight of message i: 0 if it is not trained, and 0 for every role but assistant.
    `message_temperatures[i]` is the temperature at which message i was sampled, None if it is not known.
    `message_cuts[i]` is True if a limit or a filter cut message i, so that its end token was not sampled.
    `message_bounds[i]` are other bounds of the text that the model wrote in message i, or None.
    `chat_template_kwargs` are variables of the chat template, for example `{"enable_thinking": false}`.
    """

    messages: list[dict[str, Any]]
    message_weights: list[float]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    message_temperatures: list[float | None] | None = None
    message_cuts: list[bool] | None = None
    message_bounds: list[AnswerBounds | None] | None = None


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A plain prompt and its completion; the completion and an end-of-sequence token after it are trained.

    No end token is added if `is_cut`, because a limit or a filter cut the completion, after a `stop` (`AnswerBounds`)
    that is not this token, or if `has_special`: then the completion was decoded with its special tokens, and was cut if
    none of them is at its end.
    """

    prompt: str
    completion: str
    is_cut: bool = False
    has_special: bool = False
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One trajectory: its content and the facts that the file gives about it.

    `source` is the place in the input, `file:line` or `file`. If `group_id` is None, the file names no group, and the
    group is derived from the prompt. `temperature` is the sampler's temperature for all trained tokens; temperatures in
    the content take precedence. `notes` are remarks to be counted and shown (`left padding removed`), and `totals` are
    sums for the log of reading; of several samples of a conversation, only the first one has them.

    If a rollout became several samples, `rollout_id` is the rollout, and `rollout_part` ascends in the order in which
    they were sampled. Samples with the same `rollout_id` and `source` belong to one rollout, which counts once in its
    group. The part is `ON_SEVERAL_PATHS` for a turn that several paths of a search tree have.

    `is_truncated` is True if a limit or a filter cut the last answer of the rollout. `failed` is the cause if the
    rollout failed because its environment or harness broke, else "".
    """

    trajectory_id: str
    source: str
    content: Tokens | Chat | PromptCompletion
    group_id: str | None = None
    step: int | None = None
    weight: float = 1.0
    reward: float | None = None
    advantage: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    temperature: float | None = None
    rollout_id: str | None = None
    rollout_part: int | None = None
    is_truncated: bool = False
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Input that cannot be used for training, and the reason; it is counted and reported, never silent.

    `reason` is short and the same for the same cause, so that it can be counted. `detail` is the sentence about this
    rollout, in the words of an error. `group_id` is its group if it is known. `is_rollout` is False for a file or
    record that is not a rollout alone, such as a file that is read together with another one.
    """

    source: str
    reason: str
    group_id: str | None = None
    detail: str = ""
    is_rollout: bool = True

    @property
    def sentence(self) -> str:
        """The detail, or else source and reason."""
        return self.detail or f"{self.source}: {self.reason}"


Outcome = Trajectory | Skipped  # of a rollout that was read
Outcomes = Iterator[Outcome]


def is_recorded(routes: Routes) -> NDArray[np.bool_]:
    """Return True where `routes` [..., k] has experts, and not k times `missing_route`; bool [...]."""
    # uint8 [3 255] -> True, as the experts of a token differ; [255 255] -> False. With k = 1, 255 is never an expert.
    recorded: NDArray[np.bool_] = (routes != missing_route(routes)).any(axis=-1)
    return recorded


def missing_route(routes: Routes) -> int:
    """Return the entry of `routes` for experts that were not recorded: the largest value of its type."""
    return int(np.iinfo(routes.dtype).max)


def as_routes(rows: NDArray[Any], num_tokens: int, *, source: str, name: str) -> Routes:
    """Return recorded experts as uint8 or uint16 [num_tokens, layers, k]; `missing_route` if a token has none.

    Args:
        rows: integers [n, layers, k] of the first n <= `num_tokens` tokens. A sampler never computes the last one.
            Experts below 0 are not recorded, and neither are k experts of which two are equal, such as zeros. With
            k = 1, zeros in all layers of the last tokens are not recorded either: samplers fill up with them.
        num_tokens: tokens of the trajectory.
        source: the trajectory, in errors.
        name: the field, in errors.

    Raises:
        TreepackError: another shape or type, more rows than tokens, or an expert above 32,767.
    """
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or 0 in rows.shape[1:]:
        raise TreepackError(
            f"{source}: {name} has the shape {list(rows.shape)} of {rows.dtype}; expected integers [tokens, layers, k]"
        )
    if len(rows) > num_tokens:
        raise TreepackError(
            f"{source}: {name} has {len(rows)} rows for {num_tokens} tokens; expected at most one per token"
        )
    last = check_experts(rows, source=source, name=name)
    # Rows [3, 3] of equal experts record nothing: sorted neighbours are equal.
    ordered = np.sort(rows, axis=-1)
    unknown = (ordered[..., 0] < 0) | (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if rows.shape[2] == 1:
        # Rows [2] [0] [0] -> the last two are unknown. A router that did choose expert 0 there chooses it again.
        used = np.flatnonzero((rows != 0).any(axis=(1, 2)))
        unknown[used[-1] + 1 if len(used) else 0 :] = True
    kind = np.uint8 if last <= np.iinfo(np.uint8).max - (rows.shape[2] == 1) else np.uint16
    routes = np.full((num_tokens, *rows.shape[1:]), np.iinfo(kind).max, kind)
    routes[: len(rows)] = np.where(unknown[..., None], np.iinfo(kind).max, rows)
    return routes


def check_experts(rows: NDArray[Any], *, source: str, name: str) -> int:
    """Return the largest of recorded experts, integers of any shape; 0 if `rows` is empty.

    Raises:
        TreepackError: it is above 32,767.
    """
    last = int(rows.max()) if rows.size else 0
    if last > np.iinfo(np.int16).max:  # torch has no full support of uint16
        raise TreepackError(f"{source}: {name} has the expert {last}; expected at most {np.iinfo(np.int16).max}")
    return last


def spans_of_mask(weights: Float64) -> tuple[Int32, Int32, Float64]:
    """Return starts, ends and weights of the maximal runs of equal non-zero weight in `weights` [num_tokens]."""
    if len(weights) == 0:
        empty = np.zeros(0, np.int32)
        return empty, empty, np.zeros(0, np.float64)
    # 0 1 1 2 0 0 -> starts 0 1 3 4, ends 1 3 4 6; runs of weight 0 go -> starts 1 3, ends 3 4, weights 1 2.
    # A difference with NaN is NaN, which is not 0, so a run always starts at position 0.
    starts = np.flatnonzero(np.diff(weights, prepend=np.nan) != 0)
    ends = np.append(starts[1:], len(weights))
    is_trained = weights[starts] != 0
    return (
        starts[is_trained].astype(np.int32),
        ends[is_trained].astype(np.int32),
        np.ascontiguousarray(weights[starts[is_trained]], np.float64),
    )


def positions(starts: Int32 | Int64, ends: Int32 | Int64) -> Int64:
    """Return the positions in the spans `[starts[i], ends[i])`, in order, int64 [sum of their sizes]."""
    if len(starts) == 1:  # the usual case: a prompt and its response
        return np.arange(starts[0], ends[0], dtype=np.int64)
    # Starts 1 5, ends 3 8: sizes 2 3; starts - [0 2] = 1 3 -> repeated 1 1 3 3 3, + 0 1 2 3 4 -> 1 2 5 6 7.
    sizes = ends - starts
    return np.repeat(starts - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())


def check_scalars(trajectory: Trajectory) -> Trajectory:
    """Return `trajectory` if its reward, advantage, weight and temperature are possible values.

    Raises:
        TreepackError: a value is not; the message names the source and the value.
    """
    for name in ("reward", "advantage", "weight"):
        value = getattr(trajectory, name)
        if value is not None and not math.isfinite(value):
            raise TreepackError(f"{trajectory.source}: {name} is {value}; expected a finite number")
    if not is_weight(trajectory.weight):
        raise TreepackError(f"{trajectory.source}: weight is {trajectory.weight}; expected {WEIGHTS}")
    if trajectory.temperature is not None:
        check_temperatures(np.array([trajectory.temperature]), source=trajectory.source, name="temperature")
    return trajectory


def check_temperatures(values: Float64 | Float32, *, source: str, name: str) -> None:
    """Check that `values` can be temperatures of a sampler: finite in float32, and not negative; 0 is greedy.

    Raises:
        TreepackError: one cannot; the message names `source`, `name` and the value.
    """
    # Written as a negation, so that NaN is refused: every comparison with NaN is False.
    bad = values[~((values >= 0) & (values <= np.finfo(np.float32).max))]
    if len(bad):
        raise TreepackError(f"{source}: {name} is {bad[0]}; expected a finite number that is not negative")


def check_logprobs(values: NDArray[Any], *, source: str, name: str) -> None:
    """Check that `values` can be log-probabilities: none is above `MAX_LOGPROB`.

    Raises:
        TreepackError: one is; the message names `source`, `name`, and the place and value of the first.
    """
    high = np.flatnonzero(values > MAX_LOGPROB)
    if len(high):
        raise TreepackError(
            f"{source}: {name} is {values[high[0]]:.6g} at trained token {high[0]}, and no log-probability is above 0; "
            "write the natural logarithms of the probabilities"
        )


def with_temperatures(trajectory: Trajectory, values: Float64) -> Trajectory:
    """Return a tokenised `trajectory` with `values` as the temperatures of its trained tokens.

    They are float64 [num_trained], NaN if unknown; then the temperature of the whole trajectory counts. Equal values
    become one for the whole trajectory.

    Raises:
        TreepackError: a value is not a temperature.
    """
    assert isinstance(trajectory.content, Tokens)
    check_temperatures(values[~np.isnan(values)], source=trajectory.source, name="a temperature")
    if trajectory.temperature is not None:
        values = np.where(np.isnan(values), trajectory.temperature, values)
    if np.isnan(values).all():
        return trajectory
    if (values == values[0]).all():
        return replace(trajectory, temperature=float(values[0]))
    content = replace(trajectory.content, temperature=values.astype(np.float32))
    return replace(trajectory, content=content, temperature=None)


def is_weight(value: float) -> bool:
    """Return True if `value` can weight a loss: it is 0, or between `MIN_WEIGHT` and `MAX_WEIGHT`."""
    return value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT


def as_token_ids(values: Sequence[int] | NDArray[Any], *, source: str, name: str) -> Int32:
    """Return `values` as int32 [num_tokens].

    Raises:
        TreepackError: a value is not an integer in [0, 2**31); the message names `source` and `name`.
    """
    if len(values) == 0:
        return np.zeros(0, np.int32)
    try:
        # On a list, array is a third faster than numpy. It refuses floats, which numpy would truncate, but it accepts
        # booleans, as numpy does.
        ids = np.frombuffer(array.array("i", values), np.int32) if type(values) is list else np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        ids = _as_array(values)
    if type(values) is list and ids.shape == (len(values),) and ids.dtype.kind == "i":
        # A boolean has become 0 or 1, so it is enough to check these ids, which are few.
        maybe = np.flatnonzero(ids < 2).tolist()
        if any(type(values[i]) is bool for i in maybe):
            ids = np.zeros(0, np.object_)  # fails the check of the kind below
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TreepackError(f"{source}: {name} is not a flat list of integers; expected token ids")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > MAX_TOKEN_ID:
        bad = low if low < 0 else high
        raise TreepackError(f"{source}: {name} holds the id {bad}; expected token ids in [0, {MAX_TOKEN_ID}]")
    return ids.astype(np.int32, copy=False)


def _as_array(values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, OverflowError):
        return np.zeros(0, np.object_)


def derived_group(prompt: bytes) -> str:
    """Return the group of a trajectory whose file names no group; trajectories with equal `prompt` bytes share it."""
    # 12 hex digits are 48 bits: with a million different prompts, two share a name with a probability of 0.2 %.
    return "prompt-" + hashlib.sha256(prompt).hexdigest()[:12]


def prompt_tokens(content: Tokens) -> bytes:
    """Return the token ids before the first trained one as little-endian int32, for `derived_group`."""
    return content.tokens[: content.starts[0] if len(content.starts) else None].astype("<i4", copy=False).tobytes()


def prompt_messages(content: Chat, tools: list[dict[str, Any]] | None) -> bytes:
    """Return the messages before the first assistant message, `tools` and template variables, for `derived_group`."""
    roles = [message["role"] for message in content.messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    # Left out if there are none, so that the group does not depend on whether a log has the empty field.
    variables = [content.chat_template_kwargs] if content.chat_template_kwargs else []
    return json.dumps([content.messages[:first], tools, *variables], sort_keys=True).encode()
