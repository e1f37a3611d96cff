"""The end of a sampled answer as logs record it: complete, cut by a limit, stopped by a filter or by a stop string.

    finish_reason "stop", stop_reason "end_turn", status "completed", is_truncated false       ENDED
    finish_reason "length", stop_reason "max_tokens", status "incomplete", is_truncated true   CUT
    finish_reason "content_filter", stop_reason "refusal", "SAFETY"                            FILTERED
    stop_sequence "</answer>", finish_reason "stop" with stop_reason or matched "Observation:" STOPPED
    finish_reason "stop" with stop_reason or matched_stop 151645 or null                       ENDED

An answer that did not end by its end token trains its text and no end token, because the model wrote none. (A stop
string may be the end token itself, which follows only from the chat template.) The fields may be in a message
(`normalise_messages` reads them), next to the message in a call (`calls.ChatCall.ending`), or in the record of a
rollout (`rollout_facts.describe`); in a message and a record also inside of an object such as `metadata`. A limit on
turns, steps or time between two answers cuts no answer: readers pass on only the limits that end an answer itself. A
value that is not known counts as complete, and a note names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from treepack.trajectory import AnswerBounds, Chat, PromptCompletion, Trajectory

ENDED, CUT, FILTERED, STOPPED = "complete", "cut by a limit", "stopped by a filter", "ended by a stop string"
# Fields that readers add to a message: the characters of its content that the request contained, and a mark that the
# next message continues the same answer.
PREFILL, OPEN = "num_prefilled_characters", "continues_in_next_message"
# Fields of a message, a choice, a response or a record; of several, a cut counts first, then a filter.
FIELDS = tuple(
    """
    finish_reason stop_reason finishReason stopReason done_reason finish_details incomplete_details is_truncated
    truncated
    """.split()
)
# Names in snake case: reasons, which may have a prefix as in `completion_finish_reason`, and flags.
_REASONS = ("finish_reason", "stop_reason", "done_reason", "finish_details", "incomplete_details")
_STOPS = frozenset("stop_sequence stop_string stop_str stop_word matched_stop".split())
FLAGS = frozenset(
    """
    is_truncated truncated was_truncated response_truncated completion_truncated output_truncated answer_truncated
    generation_truncated incomplete is_incomplete hit_max_tokens max_tokens_reached reached_max_tokens
    """.split()
)
# Fields that record many other things too, and the values which mean that an answer was cut.
_STATES = frozenset("status state termination_reason exit_reason exit_status end_reason reason".split())
_CUT_STATES = frozenset(
    "incomplete truncated length max_tokens max_output_tokens max_new_tokens max_completion_tokens".split()
)
# Objects in which loggers keep the fields of a response.
_HOLDERS = frozenset(
    "metadata info extra extra_info response_metadata generation_info provider_specific_fields usage meta_info".split()
)
REASON, FLAG, STATE, STOP = "reason", "flag", "state", "stop"
_FINISH = "finish"  # the field of treepack's own rollouts, which has other reasons too, such as repetition
EMPTY_NOTE = "answer without text, cut by a limit or stopped by a filter, not trained"

_ENDED = frozenset(
    """
    stop stopped stop_token end end_turn end_of_turn eos eos_token eot done
    complete completed finish finished success succeeded tool_call tool_calls tool_use tooluse function_call
    function_calls stop_criteria_met matched normal ok true_stop compaction
    """.split()
)
# Reasons that no stop string explains, although a field beside them names one that the request had.
_OWN_ENDS = frozenset("end_turn end_of_turn eos eos_token eot stop_token".split())
# A reason in words, such as "agent_done" or "out of turns"; a stop string has other characters: "Observation:", "\n\n".
_WORDS = re.compile(r"[A-Za-z][\w.\- ]*|.{41,}", re.DOTALL)
_CUT = frozenset(
    """
    length max_length max_len max_tokens max_token max_output_tokens max_output_reached max_new_tokens
    max_completion_tokens model_length token_limit token_limit_exceeded length_limit length_exceeded
    model_context_window_exceeded context_length context_length_exceeded context_window_exceeded max_context_length
    context_overflow context_limit max_response_length max_response_length_exceeded response_length_exceeded
    outputlengthexceedederror output_length_exceeded truncated truncation incomplete
    pause_turn timeout timed_out time_limit abort aborted cancel cancelled canceled user_cancel interrupted error failed
    network_error insufficient_system_resource depth
    """.split()
)
_FILTERED = frozenset(
    """
    content_filter content_filtered content_filtering filter filtered safety image_safety refusal refused recitation
    blocklist prohibited_content spii language guardrail guardrail_intervened guardrails error_toxic sensitive
    moderation flagged blocked model_armor
    """.split()
)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str | None:
    """Return REASON, FLAG, STATE or STOP for the name of a field about the end of an answer, None for another name."""
    # "finishReason" -> "finish_reason", "stop_reasons" -> "stop_reason"
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()  # YAML has names that are numbers
    if snake in FLAGS:
        return FLAG
    if snake in _STATES or snake in _STOPS:
        return STATE if snake in _STATES else STOP
    # A reason of one side of a pair is not a reason of the other side.
    is_reason = snake.removesuffix("s").endswith(_REASONS) or snake in _REASONS
    return REASON if is_reason and not snake.startswith(("chosen_", "rejected_", "prompt_")) else None


def classify(value: Any) -> str | None:
    """Return ENDED, CUT, FILTERED or STOPPED for the raw `value` of a field; None for null and for unknown values."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping):
        if isinstance(value.get("matched"), str):
            return STOPPED
        # SGLang {"type": "length", "length": 100}; Responses {"reason": "max_output_tokens"}
        return classify(next((value[name] for name in ("type", "reason") if value.get(name) is not None), None))
    if not isinstance(value, str):
        return None
    # "FinishReason.MAX_TOKENS", "content-filter" -> "max_tokens", "content_filter"
    name = value.strip().rpartition(".")[2].casefold().replace("-", "_").replace(" ", "_")
    for names, outcome in ((_CUT, CUT), (_FILTERED, FILTERED), (_ENDED, ENDED), (_STOPS, STOPPED)):
        if name in names or name.removeprefix("finish_reason_") in names:
            return outcome
    return None


def ending_of(fields: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Return the ending that the fields of an object record, notes on values that are not known, and the stop string.

    The stop string is "" if it is not known.
    """
    outcomes: list[str] = []
    notes: list[str] = []
    stops: list[str] = []
    about = list(_about_end(fields))
    finished = [value for name, value, _ in about if kind_of(name) == REASON and "stop" not in name.lower()]
    for name, value, is_own in about:
        kind = kind_of(name)
        if kind == STOP or _is_stop_string(name, value, finished):
            stops += [value] if isinstance(value, str) else []
        elif kind == FLAG:
            outcomes += [CUT] if is_set(value) else []
        elif kind == STATE:
            outcomes += [CUT] if is_cut_state(value) else []
        elif value is not None and value != "":
            outcome = classify(value)
            outcomes += [outcome] if outcome else []
            stops += [value["matched"]] if isinstance(value, Mapping) and outcome == STOPPED else []
            is_noted = is_own and not outcome and not isinstance(value, int)  # an id of a token, or a flag
            notes += [_unknown_note(name, value)] if is_noted else []
    if classify(fields.get(_FINISH)) == CUT:
        outcomes.append(CUT)
    if stops and not any(value in _OWN_ENDS for _, value, _ in about if isinstance(value, str)):
        outcomes.append(STOPPED)
    ending = next((each for each in (CUT, FILTERED, STOPPED) if each in outcomes), ENDED)
    return ending, tuple(notes), next(iter(stops), "")


def _is_stop_string(name: str, value: Any, finished: Sequence[Any]) -> bool:
    """Return True if `value`, the reason in the field `name`, is a stop string; `finished` are reasons beside it."""
    if kind_of(name) != REASON or not isinstance(value, str) or not value or "stop" not in name.lower():
        return False
    if any(isinstance(each, str | Mapping) for each in finished):
        # vLLM writes the string, an id or null into stop_reason, beside the reason of the API.
        return value not in finished and (value != value.lower() or classify(value) is None)
    return classify(value) is None and _WORDS.fullmatch(value) is None


def _about_end(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and value of the fields about the end, of `fields` itself first and then of the objects in it."""
    for name, value in fields.items():
        if kind_of(name) is not None:
            yield name, value, True
    for holder in _HOLDERS.intersection(fields):
        inner = fields[holder]
        for name, value in inner.items() if isinstance(inner, Mapping) else ():
            if kind_of(str(name)) is not None:
                yield str(name), value, False


def is_cut_state(value: Any) -> bool:
    """Return True if the `value` of one of `_STATES` means that a limit on tokens cut the answer."""
    return isinstance(value, str) and value.strip().casefold().replace("-", "_") in _CUT_STATES


def is_set(value: Any) -> bool:
    """Return True for true, and for 1 and "true", which other programs write in its place."""
    return value is True or (isinstance(value, int | float) and value == 1) or str(value).strip().lower() == "true"


def is_cut(value: Any) -> bool:
    """Return True if the raw `value` of a field means that no end token was sampled."""
    return classify(value) in (CUT, FILTERED)


def _unknown_note(name: str, value: Any) -> str:
    """Return the note on a `value` of the field `name` that is not known."""
    text = str(value)
    return f"{name} {text if len(text) <= 40 else text[:37] + '...'!r} not known, answer read as complete"


def without_fields(message: Any) -> Any:
    """Return a message without `FIELDS` and the bounds of an answer; a prompt repeats an answer without them."""
    if not isinstance(message, dict) or not any(kind_of(name) or name in (PREFILL, OPEN) for name in message):
        return message
    rest = {name: value for name, value in message.items() if kind_of(name) in (None, STATE)}
    return {name: value for name, value in rest.items() if name not in (PREFILL, OPEN)}


def mark(messages: Sequence[Any], ending: Any) -> list[Any]:
    """Return `messages` with the raw `ending` in the last message of the assistant, unless it is null."""
    done = list(messages)
    if ending is not None:
        for index in range(len(done) - 1, -1, -1):
            if isinstance(done[index], dict) and done[index].get("role") == "assistant":
                done[index] = done[index] | {"finish_reason": ending}
                break
    return done


def last_is_cut(chat: Chat) -> bool:
    """Return True if the last message of the assistant is cut."""
    if chat.message_cuts is None:
        return False
    indices = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return bool(indices) and chat.message_cuts[indices[-1]]


def stopped(item: Trajectory, stop: str) -> Trajectory:
    """Return `item` with its last answer ended by the stop string `stop`; token ids stay as they are."""
    content: Any = item.content
    if isinstance(content, PromptCompletion):
        content = replace(content, stop=stop)
    elif isinstance(content, Chat):
        bounds = list(content.message_bounds or [None] * len(content.messages))
        for index in [i for i, message in enumerate(content.messages) if message["role"] == "assistant"][-1:]:
            bounds[index] = replace(bounds[index] or AnswerBounds(), stop=stop)
        content = replace(content, message_bounds=bounds)
    return replace(item, content=content)


def cut(item: Trajectory) -> Trajectory:
    """Return `item` with its last answer marked as cut; token ids stay as they are, because they are exact."""
    content: Any = item.content
    if isinstance(content, PromptCompletion):
        content = replace(content, is_cut=True)
    elif isinstance(content, Chat):
        cuts = list(content.message_cuts or [False] * len(content.messages))
        indices = [index for index, message in enumerate(content.messages) if message["role"] == "assistant"]
        weights = list(content.message_weights)
        for index in indices[-1:]:
            cuts[index] = True
            weights[index] *= has_text(content.messages[index])
        content = replace(content, message_cuts=cuts, message_weights=weights)
    return replace(item, content=content, is_truncated=True)


def has_text(message: Mapping[str, Any]) -> bool:
    """Return True if a message in normal form has text, reasoning or calls, so that something of it can be trained."""
    texts = (message.get("content"), message.get("reasoning_content"))
    return bool(message.get("tool_calls")) or any(isinstance(text, str) and text.strip() for text in texts)


def raw_of(fields: Mapping[str, Any]) -> Any:
    """Return the raw value of the field of a choice, node or step with the reason of its end, or None.

    An answer that a stop string ended has the form of SGLang: {"type": "stop", "matched": "Observation:"}.
    """
    if any(is_set(fields.get(name)) for name in FLAGS):
        return "truncated"
    ending, _, stop = ending_of(fields)
    if ending == STOPPED:
        return {"type": "stop", "matched": stop}
    return next((fields[name] for name in FIELDS if name not in FLAGS and fields.get(name) is not None), None)


def raw_of_response(response: Mapping[str, Any]) -> Any:
    """Return why a response of the Responses API ended: its `incomplete_details`, else its `status`."""
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, Mapping) else details
    return response.get("status") if reason is None else reason


def raw_of_step(step: Mapping[str, Any]) -> Any:
    """Return why the response of a step of verifiers ended: a field of the step, or of its response."""
    if (raw := raw_of(step)) is not None or not isinstance(response := step.get("response"), Mapping):
        return raw
    choices = response.get("choices")
    holders = [*(choices[:1] if isinstance(choices, list) else []), response.get("message"), response]
    return next(
        (each for holder in holders if isinstance(holder, Mapping) and (each := raw_of(holder)) is not None), None
    )
