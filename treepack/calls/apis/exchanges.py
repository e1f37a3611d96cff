"""Requests to an LLM's API and their responses, as clients, proxies and batch jobs log them, one pair per record.

    {"request": {..}, "response": {..}, ...}                     a pair; either may be wrapped in "body"
    {"messages" or "input": .., "choices" or "output": .., ...}  the same, in one object
    {"custom_id", "response": {"status_code", "body"}, "error"}  a line of a batch's output; its request is a line
    {"custom_id", "method", "url", "body"}                       of the same custom_id in a file of the same folder

Other fields of a pair are kept under the names that all formats share. Pairs with the same session are one rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import STDIN
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.values import JsonObject, as_id, quoted
from treepack.trajectory import Skipped

_SESSIONS = ("rollout_id", "trajectory_id", "session_id", "conversation_id", "trace_id")
_REQUESTS_NOTE = "batch request, read with its response"
_FAILED_NOTE = "request that failed"
# Fields of requests and responses. If one object contains both, every other field describes the rollout.
API_FIELDS = frozenset(
    (
        "messages input instructions prompt tools tool_choice parallel_tool_calls max_tool_calls temperature top_p n "
        "seed stop stream stream_options response_format text include max_tokens max_completion_tokens "
        "max_output_tokens logprobs top_logprobs truncation reasoning reasoning_effort store user service_tier "
        "background prompt_cache_key safety_identifier previous_response_id conversation object created created_at "
        "completed_at choices output usage system_fingerprint status error billing incomplete_details prompt_token_ids"
    ).split()
)
_NOT_KEPT = frozenset("id custom_id request response error method url body".split())


@dataclass(frozen=True, slots=True)
class ApiExchange:
    """A request, its response, and the other fields of the record (`rest`)."""

    record: Record
    request: JsonObject
    response: JsonObject
    rest: JsonObject

    @property
    def session(self) -> str | None:
        """Session of the exchange, from the record, its `metadata` or the metadata of the request, or None."""
        for fields in (self.rest, self.rest.get("metadata"), self.request.get("metadata")):
            if isinstance(fields, dict):
                for name in _SESSIONS:
                    if (session := fields.get(name)) not in (None, ""):
                        return str(as_id(session, source=self.record.source, name=name))
        return None

    @property
    def name(self) -> str:
        """Name of the exchange if it is a rollout by itself."""
        name = self.record.value.get("custom_id") or self.response.get("id")
        return name if isinstance(name, str) else self.record.label


def body(value: Any) -> JsonObject:
    """Return the request or response in `value`, wrapped in "body" or not; {} if `value` is no object."""
    # {"status_code": 200, "body": {"id": ..}} -> {"id": ..}, and {"id": ..} -> {"id": ..}
    inner = value.get("body") if isinstance(value, dict) else None
    unwrapped = inner if isinstance(inner, dict) else value
    return unwrapped if isinstance(unwrapped, dict) else {}


def request_and_response(value: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Return request and response of a record; a missing one is empty. One object with the fields of both is both."""
    if isinstance(value.get("request"), dict) or isinstance(value.get("response"), dict):
        return body(value.get("request")), body(value.get("response"))
    if "custom_id" in value:
        return body(value), {}
    return value, value


def read_exchanges(records: Iterator[Record], *, asks: str, answers: str) -> Iterator[ApiExchange | Skipped]:
    """Yield the exchanges of a file; requests have the field `asks` and responses the field `answers`.

    Raises:
        TreepackError: a record is not an exchange.
    """
    requests: dict[str, JsonObject] | None = None
    for record in records:
        value, source = record.value, record.source
        request, response = request_and_response(value)
        # The input file of a batch in the same folder: its lines are read when their responses come.
        if "custom_id" in value and not response and asks in request:
            yield Skipped(source, _REQUESTS_NOTE, is_rollout=False)
            continue
        if value.get("error") is not None or response.get("error") is not None:
            yield Skipped(source, _FAILED_NOTE)
            continue
        if "custom_id" in value and not request:
            if requests is None:  # read once, and only if the file is the output of a batch
                requests = _batch_requests(record)
            request = requests.get(str(value["custom_id"]), {})
            if not request:
                yield Skipped(source, "response of a batch without its request in a file of the folder")
                continue
        if request is value and asks not in value and isinstance(value.get(answers), list):
            yield Skipped(source, f"response without its {asks}")
            continue
        if request.get(asks) is None or not isinstance(response.get(answers), list):
            raise TreepackError(
                f"{source}: is not a pair of a request with {asks} and a response with {answers}; "
                "expected one pair per record"
            )
        fields = API_FIELDS | _NOT_KEPT if request is value else _NOT_KEPT
        rest = {name: other for name, other in value.items() if name not in fields and other is not None}
        model = response.get("model") or request.get("model")
        yield ApiExchange(record, request, response, ({"model": model} if isinstance(model, str) else {}) | rest)


def description(exchanges: Sequence[ApiExchange], name: str) -> Record:
    """Return the fields of one rollout besides its calls; the last of `exchanges` with a field counts."""
    # The last one, because a reward is usually known only at the end.
    value = {key: other for exchange in exchanges for key, other in exchange.rest.items() if key not in _SESSIONS}
    return replace(exchanges[0].record, value=value | {"rollout_id": name})


def _batch_requests(record: Record) -> dict[str, JsonObject]:
    """Return the requests in the other files of the folder of `record`, by their `custom_id`."""
    requests: dict[str, JsonObject] = {}
    if record.path == STDIN:
        return requests
    for path in sorted(Path(record.path).parent.glob("*.jsonl*")):
        if str(path) == record.path or not path.is_file():
            continue
        others = read_records(str(path))
        try:
            first = next(others, None)
        except TreepackError:  # no file of requests; without its request a response is skipped and counted
            continue
        for other in chain([] if first is None else [first], others):
            if not isinstance(other.value.get("body"), dict) or not isinstance(other.value.get("custom_id"), str):
                break  # not a file of requests
            name = other.value["custom_id"]
            if requests.setdefault(name, other.value["body"]) != other.value["body"]:
                raise TreepackError(
                    f"{other.source}: repeats the custom_id {quoted(name)} with another request; keep one of them"
                )
    return requests
