"""Samples of lm-evaluation-harness (`--log_samples`): the requests for a document, the responses, and the metrics.

    {"doc_id": 3, "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": [..]}}}, "resps": [[response, ..]],
     "filter": "strict-match", "filtered_resps": ["18"], "metrics": ["exact_match"], "exact_match": 1.0, ..}

    generate_until   prompt, then the whole response (`resps`), which the filters have not shortened
    loglikelihood    arg_1 is the text of a choice; the model has written nothing, so the sample is not a rollout

The prompt is text, or chat messages as JSON text in a list. The harness writes one record for each filter of a task,
with the same responses: they are one rollout, and the metrics are its rewards, named "exact_match,strict-match" if
there are several filters. Metrics of a document with several responses or requests describe all of them together, so
they are not used. Written from the source of the harness; files of other tasks were not available to check it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treepack.files.input_files.json_text import parsed_json
from treepack.files.input_files.records import DAMAGED_RECORD
from treepack.formats.kit import (
    MEDIA_REASON,
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    as_text,
    describe,
    is_messages,
    read_chats,
    shown,
    skip_reason,
    temperature_of,
    with_notes,
    without,
)
from treepack.ingest.readers.fields.rewards import reward_of
from treepack.trajectory import PromptCompletion

_LIKELIHOOD_NOTE = "loglikelihood sample, in which the model has written nothing"
_FILTER_NOTE = "sample under another filter, read with the first one"
_NO_RESPONSE_NOTE = "sample without a response"
_CONTINUED_NOTE = "response that continues a message of the prompt"
_SEVERAL_NOTE = "metrics of several responses together not used"
_NO_NUMBER_NOTE = "metrics that are no numbers not used"
# The prompt hash and the row of the data set describe the prompt; the filtered responses are parts of the responses.
_NOT_KEPT = frozenset("doc arguments resps filtered_resps metrics doc_hash prompt_hash target_hash".split())
_PERPLEXITIES = frozenset({"word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity"})
_FIELDS = _NOT_KEPT | {"doc_id", "target", "filter"}


@dataclass(frozen=True, slots=True)
class _SampleRequest:
    prompt: Any
    settings: JsonObject
    responses: Sequence[Any]


@dataclass(slots=True)
class _DocumentSample:
    """The first record of a document, and its metrics under each filter."""

    record: Record
    metrics: dict[str, JsonObject] = field(default_factory=dict)


def _read_lm_eval(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the documents of one file, in the order of their first records.

    Raises:
        TreepackError: several metrics, and none is chosen.
    """
    samples: dict[str, _DocumentSample] = {}
    for record in records:
        value = record.value
        # Tasks may be in one file, so the document alone is not a key; the responses distinguish two runs in one file.
        names = ("doc_id", "doc_hash", "prompt_hash", "arguments", "resps")
        text = json.dumps([value.get(name) for name in names], default=str)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        name = str(value.get("filter") or "none")
        if (sample := samples.get(key)) is not None and name not in sample.metrics:
            sample.metrics[name] = _metrics(value)
            yield Skipped(record.source, _FILTER_NOTE, is_rollout=False)
            continue
        samples[key if sample is None else record.source] = _DocumentSample(record, {name: _metrics(value)})
    for sample in samples.values():
        # Several metrics without a choice refuse the file; anything else is a fault of one sample.
        reward_of({"reward": _numbers(sample)}, sample.record.source, reward_key=options.reward_key)
        try:
            items = list(_read(sample, options))
        except TreepackError as error:
            items = [Skipped(sample.record.source, DAMAGED_RECORD, detail=str(error))]
        yield from items


def _metrics(value: JsonObject) -> JsonObject:
    names = value.get("metrics")
    names = names if isinstance(names, list) else [name for name in value if name not in _FIELDS]
    return {name: value[name] for name in names if isinstance(name, str) and value.get(name) is not None}


def _read(sample: _DocumentSample, options: ReadOptions) -> Outcomes:
    source = sample.record.source
    metrics = next(iter(sample.metrics.values()))
    requests = _requests(sample.record)
    settings = [request.settings for request in requests]
    if any(isinstance(each, str) for each in settings) or (_PERPLEXITIES & metrics.keys() and not any(settings)):
        yield Skipped(source, _LIKELIHOOD_NOTE, is_rollout=False)
        return
    rollouts = [(request, text) for request in requests for text in request.responses]
    if not rollouts:
        yield Skipped(source, _NO_RESPONSE_NOTE)
    for number, (request, text) in enumerate(rollouts):
        value, notes = _description(sample, request, options, is_only=len(rollouts) == 1)
        if len(rollouts) > 1:
            value["rollout_id"] = f"{sample.record.label}/response-{number + 1}"
        yield from _rollout(replace(sample.record, value=value), request, text, notes, options)


def _rollout(
    record: Record, request: _SampleRequest, text: Any, notes: tuple[str, ...], options: ReadOptions
) -> Outcomes:
    if not as_text(text, source=record.source, name="a response"):  # an API may return no content
        yield Skipped(record.source, _NO_RESPONSE_NOTE)
        return
    messages = _messages(request.prompt)
    if messages is None:
        if not isinstance(request.prompt, str):
            raise TreepackError(f"{record.source}: has the prompt {shown(request.prompt)}; expected text or messages")
        yield describe(record, PromptCompletion(request.prompt, text), used=(), options=options, notes=notes)
    elif messages and messages[-1].get("role") == "assistant":
        yield Skipped(record.source, _CONTINUED_NOTE)
    elif (reason := skip_reason(messages)) is not None:
        yield Skipped(record.source, reason)
    else:
        call = ChatCall(messages, [{"role": "assistant", "content": text}])
        yield from with_notes(read_chats(record, [call], options), notes)


def _requests(record: Record) -> list[_SampleRequest]:
    """Return the requests of a sample, each with its responses."""
    arguments, resps = record.value["arguments"], record.value["resps"]
    # {"gen_args_0": {"arg_0": a, "arg_1": b}} and [[a, b]] are the same.
    listed = list(arguments.values()) if isinstance(arguments, dict) else arguments
    tuples = [[each[name] for name in sorted(each)] if isinstance(each, dict) else each for each in listed]
    if not all(isinstance(each, list) and each for each in tuples) or len(tuples) != len(resps):
        raise TreepackError(
            f"{record.source}: arguments is {shown(arguments)} and resps is {shown(resps)}; expected the arguments of "
            "each request, and its responses"
        )
    requests = []
    for values, responses in zip(tuples, resps, strict=True):
        settings = values[1] if len(values) > 1 else {}
        if len(values) > 2 and any(values[2:]):
            raise TreepackError(f"{record.source}: has a request with more than text ({MEDIA_REASON}); remove it")
        requests.append(_SampleRequest(values[0], settings, responses if isinstance(responses, list) else [responses]))
    return requests


def _messages(prompt: Any) -> list[JsonObject] | None:
    """Return the messages of a chat prompt, which is JSON text in a list; None if it is plain text."""
    # ['[{"role": "user", "content": "2 + 2?"}]'], or JSON text of it -> [{"role": "user", ..}]
    listed = parsed_json(prompt) or prompt
    if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], str):
        listed = parsed_json(listed[0])
    return listed if is_messages(listed) and all("role" in each for each in listed) else None


def _description(
    sample: _DocumentSample, request: _SampleRequest, options: ReadOptions, *, is_only: bool
) -> tuple[JsonObject, tuple[str, ...]]:
    """Return the facts of a rollout under the names that all formats share, and notes on the others."""
    every = {name for metrics in sample.metrics.values() for name in metrics}
    value = without(sample.record.value, _NOT_KEPT | every) | {"temperature": temperature_of(request.settings)}
    if not any(sample.metrics.values()):
        return value, ()
    if not is_only:
        return value, (_SEVERAL_NOTE,)
    numbers = _numbers(sample)
    has_others = any(len(_metric_numbers(metrics)) < len(metrics) for metrics in sample.metrics.values())
    # One of several metrics is the reward.
    others = [name for name in numbers if name != options.reward_key] if isinstance(numbers, dict) else []
    notes = (*([_NO_NUMBER_NOTE] if has_others else []), *(f"metric '{name}' not used" for name in others))
    return value | {"reward": numbers}, notes


def _numbers(sample: _DocumentSample) -> float | dict[str, float] | None:
    """Return the metrics of a sample that are numbers: one, several by their names, or None."""
    # exact_match under two filters -> "exact_match,strict-match" and "exact_match,flexible-extract"
    numbers = {
        name if len(sample.metrics) == 1 else f"{name},{key}": number
        for key, metrics in sample.metrics.items()
        for name, number in _metric_numbers(metrics).items()
    }
    return next(iter(numbers.values())) if len(numbers) == 1 else numbers or None


def _metric_numbers(metrics: JsonObject) -> dict[str, float]:
    return {name: float(metric) for name, metric in metrics.items() if isinstance(metric, int | float | np.number)}


def _view(value: JsonObject) -> JsonObject:
    """Return the fields that describe no rollout: the names of metrics are data, and all others become metadata."""
    return {name: each for name, each in value.items() if name in _NOT_KEPT and name != "metrics"}


FORMAT = Format(
    name="lm-eval",
    rank=220,
    program="lm-evaluation-harness (samples_TASK.jsonl; after its source)",
    recognised_by="`doc_id`, `arguments`, `resps` and `filtered_resps`",
    requires="doc_id, arguments:object_or_list, resps:list, filtered_resps",
    used="doc_id target arguments resps filter metrics",
    also=("arguments.*.arg_0", "arguments.*.arg_1.temperature", "arguments.temperature"),
    view=_view,
    dropped="""
        doc (the row of the task's data set);
        filtered_resps (a part of resps);
        loglikelihood samples (the model has written nothing);
        stop sequences in arg_1 (the harness removes them, and does not record whether a response was cut)
    """,
    keeps="rewards",
    read_file=_read_lm_eval,
)
