"""Logs of Inspect: samples with their messages, the calls of models as events, and scores.

    {"version": 2, "eval": {"task": "sums", "model": "m"}, "samples": [
        {"id": "s1", "epoch": 1, "messages": [..], "scores": {"match": {"value": "C"}}, "attachments": {"h": "text"},
         "events_data": {"messages": [message 0, message 1, ..]},
         "events": [{"event": "model", "input_refs": [[0, 2]], "tools": [..], "output": {"choices": [..]}}, ..]}]}

A file `.eval` is read as one such log for each of its samples (`eval_files`). A model event is a call with the messages
that the model saw, so an agent that shortens its history gives several trajectories. Long texts are stored once, under
`attachments`; messages are stored once, in a pool, and `input_refs` are ranges of the pool. Calls of scorers, and of
models with a role of their own such as a grader, are left out. A log without events is read from `messages`, with a
note, because messages that an agent changed later differ from the sampled ones. C or true is the reward 1, P is 0.5,
and I, N or false is 0. If there are several scores, `--reward-key` selects one. A sample that ended in an error
failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treepack.formats.kit import (
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    as_objects,
    as_text,
    conversation,
    endings,
    is_messages,
    object_at,
    object_or_empty,
    objects_at,
    skip_reason,
    temperature_of,
)

_ATTACHMENT = "attachment://"
_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_SCORERS = frozenset({"scorer", "scorers"})
MESSAGES_NOTE = "log without model events, read from its messages"
SCORES_NOTE = "several scores, none of them used; choose one with --reward-key"
NO_CALL = "sample without a response of the model"
_EVENTS_ONLY = "sample with events only, none of which has a response of the model"

_Sample = JsonObject


def read_inspect(record: Record, options: ReadOptions) -> Outcomes:
    """Read the samples of a log, named `<task>/<sample>/<epoch>`, in the group `<task>/<sample>`.

    Raises:
        TreepackError: samples, events or messages of a different form.
    """
    samples = objects_at(record.value, "samples", record.source)
    if not samples:
        yield Skipped(record.source, "log without samples", is_rollout=False)
    for number, sample in enumerate(samples):
        # A document has many samples; a file .eval is read with one sample per record.
        source = record.source if len(samples) == 1 else f"{record.source}: samples[{number}]"
        yield from _read_sample(replace(record, source=source), _resolved(sample, source), options)


def _read_sample(record: Record, sample: _Sample, options: ReadOptions) -> Outcomes:
    task = record.value["eval"]["task"]
    group = f"{task}/{sample.get('id')}"
    reward, notes = _reward(sample, options.reward_key)
    value = {
        "trajectory_id": f"{group}/{sample.get('epoch')}",
        "group_id": group,
        "reward": reward,
        "model": record.value["eval"].get("model"),
        "error": object_or_empty(sample.get("error")).get("message"),
    }
    one = replace(record, value=value)
    log = _calls(sample, record.source)
    if log.calls:
        log.note(*notes)
        yield from log.read(one, options, context=())
        return
    messages = [_message(each) for each in objects_at(sample, "messages", record.source)]
    reason = log.fault or skip_reason(messages)
    if reason is not None or not any(message["role"] == "assistant" for message in messages):
        empty = NO_CALL if messages or not sample.get("events") else _EVENTS_ONLY
        yield Skipped(record.source, reason or empty, group_id=group)
        return
    # The output of the sample is its last response.
    choices = object_or_empty(sample.get("output")).get("choices")
    ending = choices[0].get("stop_reason") if is_messages(choices) and choices else None
    yield conversation(one, endings.mark(messages, ending), options, notes=(MESSAGES_NOTE, *notes))


def _resolved(sample: _Sample, source: str) -> _Sample:
    """Return `sample` with the texts of its attachments in their places."""
    attachments = object_at(sample, "attachments", source)

    def resolve(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(_ATTACHMENT):
            return as_text(attachments.get(value.removeprefix(_ATTACHMENT)), source=source, name=value)
        if isinstance(value, dict):
            return {name: resolve(field) for name, field in value.items()}
        return [resolve(each) for each in value] if isinstance(value, list) else value

    # Only these fields have messages; the others, such as stores, may be large.
    return sample | {name: resolve(sample.get(name)) for name in ("messages", "events", "events_data")}


def _calls(sample: _Sample, source: str) -> CallLog:
    """Return the calls of the model that is evaluated."""
    events = objects_at(sample, "events", source)
    stored = object_or_empty(sample.get("events_data")).get("messages")
    pool = as_objects(stored, source=source, name="events_data.messages")
    scoring = _scoring_spans(events)
    messages = [_message(each) for each in pool]
    reasons = [skip_reason([each]) for each in messages]
    log = CallLog()
    for event in events:
        choices = object_at(event, "output", source).get("choices")
        if event.get("event") != "model" or event.get("role") is not None or str(event.get("span_id")) in scoring:
            continue
        # A call that failed has no choice; Inspect repeats it.
        for choice in as_objects(choices, source=source, name="choices"):
            indices = _indices(event.get("input_refs"), len(pool))
            inputs = as_objects(event.get("input"), source=source, name="input of a model event")
            prompt = [_message(each) for each in inputs] or [messages[index] for index in indices]
            response = _message(object_or_empty(choice.get("message")) | {"role": "assistant"})
            reason = skip_reason([*(prompt if inputs else []), response])
            reason = reason or next((reasons[index] for index in indices if reasons[index]), None)
            log.add(
                prompt,
                [response],
                reason=reason,
                tools=event.get("tools") or None,
                temperature=temperature_of(event.get("config")),
                ending=choice.get("stop_reason"),
            )
    return log


def _indices(refs: Any, num_messages: int) -> list[int]:
    """Return the indices in the pool that the ranges `refs` name."""
    # [[0, 2], [5, 6]] -> 0 1 5
    ranges = [pair for pair in refs if isinstance(pair, list) and len(pair) == 2] if isinstance(refs, list) else []
    pairs = [(start, end) for start, end in ranges if isinstance(start, int) and isinstance(end, int)]
    return [index for start, end in pairs for index in range(max(start, 0), min(end, num_messages))]


def _scoring_spans(events: list[JsonObject]) -> set[str]:
    """Return the ids of the spans of scorers and of the spans inside of them."""
    spans: set[str] = set()
    for event in events:
        is_scorer = str(event.get("type")) in _SCORERS or str(event.get("parent_id")) in spans
        if event.get("event") == "span_begin" and is_scorer:
            spans.add(str(event.get("id")))
    return spans


def _message(message: JsonObject) -> JsonObject:
    """Return a message of Inspect in chat form."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    thoughts = [part for part in parts if part.get("type") == "reasoning"]
    others = [part for part in parts if part.get("type") != "reasoning"]
    chat: JsonObject = {"role": message.get("role"), "content": others if isinstance(content, list) else content}
    texts = [
        part["reasoning"] for part in thoughts if isinstance(part.get("reasoning"), str) and not part.get("redacted")
    ]
    if text := "\n\n".join(filter(None, texts)):
        chat["reasoning_content"] = text
    if len(texts) < len(thoughts):
        chat["redacted_thinking"] = True
    if is_messages(message.get("tool_calls")) and message["tool_calls"]:
        chat["tool_calls"] = [
            {"id": call.get("id"), "name": call.get("function"), "arguments": call.get("arguments")}
            for call in message["tool_calls"]
        ]
    if message.get("role") == "tool":
        chat |= {"tool_call_id": message.get("tool_call_id"), "name": message.get("function")}
        # Inspect sends the error in place of the content.
        if error := object_or_empty(message.get("error")).get("message"):
            chat["content"] = f"Error: {error}"
    return chat


def _reward(sample: _Sample, reward_key: str | None) -> tuple[float | None, tuple[str, ...]]:
    """Return the score of `sample` as a number, and a note if there are several and none is selected."""
    scores: JsonObject = {}
    for name, score in object_or_empty(sample.get("scores")).items():
        value = score.get("value") if isinstance(score, dict) else score
        # {"quality": {"value": {"style": 2, "facts": 5}}} -> quality.style 2, quality.facts 5
        scores |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    if reward_key is not None:
        return _number(scores.get(reward_key)), ()
    if len(scores) > 1:
        return None, (SCORES_NOTE,)
    return _number(next(iter(scores.values()), None)), ()


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):  # true is 1
        return float(value)
    return _VALUES.get(value) if isinstance(value, str) else None


FORMAT = Format(
    name="inspect",
    rank=190,
    program="Inspect (inspect_ai)",
    recognised_by="`eval.task` and `samples` or `status`, or a file .eval",
    requires="eval:object, eval.task:text, samples:objects; eval:object, eval.task:text, status:text",
    used="""
        eval.task eval.model samples.id samples.epoch samples.messages samples.scores samples.attachments
        samples.events samples.events_data.messages samples.events.input_refs samples.events.output.choices
        samples.events.tools samples.events.config.temperature samples.events.output.choices.stop_reason
        samples.error samples.events.output.choices.message.*
    """,
    dropped="""
        samples.store, samples.metadata, samples.output but for its stop reason (repeats the last response);
        other events, and samples.events.call (the request of the provider);
        plan, results, stats, reductions
    """,
    keeps="masks, rewards, lineage",
    failed="error",
    read=read_inspect,
)
