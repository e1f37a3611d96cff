"""Requests to an LLM's API and their responses, as clients, proxies and batch jobs log them, one pair per record.

    {"request": {..}, "response": {..}, ...}                     a pair; either may be wrapped in "body"
    {"messages" or "input": .., "choices" or "output": .., ...}  the same, in one object
    {"custom_id", "response": {"status_code", "body"}, "error"}  a line of a batch's output; its request is a line
    {"custom_id", "method", "url", "body"}                       of the same custom_id in a file of the same folder

What the pair says besides is kept under the names that all formats share. Pairs with the same session are one rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import quoted
from treepack.ingest.readers.inputs import STDIN
from treepack.ingest.readers.records import Record, read_records
from treepack.trajectory import Skipped

SESSIONS = ("rollout_id", "trajectory_id", "session_id", "conversation_id", "trace_id")
REQUESTS_NOTE = "batch request, read with its response"
FAILED_NOTE = "request that failed"
# What request and response are made of, where both are one object with what is said besides.
API_FIELDS = frozenset(
    {
        *(
            "messages",
            "input",
            "instructions",
            "prompt",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "max_tool_calls",
        ),
        *(
            "temperature",
            "top_p",
            "n",
            "seed",
            "stop",
            "stream",
            "stream_options",
            "response_format",
            "text",
            "include",
        ),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "top_logprobs", "truncation"),
        *("reasoning", "reasoning_effort", "store", "user", "service_tier", "background", "prompt_cache_key"),
        *("safety_identifier", "previous_response_id", "conversation", "object", "created", "created_at"),
        *("completed_at", "choices", "output", "usage", "system_fingerprint", "status", "error", "billing"),
        *("incomplete_details", "prompt_token_ids"),
    }
)
NOT_KEPT = frozenset({"id", "custom_id", "request", "response", "error", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, its response, and what the record says besides."""

    record: Record
    request: dict[str, Any]
    response: dict[str, Any]
    rest: dict[str, Any]

    @property
    def session(self) -> str | None:
        """The session that the exchange is a part of, where the record names one, itself or in a `metadata`."""
        for held in (self.rest, self.rest.get("metadata"), self.request.get("metadata")):
            if isinstance(held, dict):
                for name in SESSIONS:
                    if isinstance(found := held.get(name), str | int) and not isinstance(found, bool):
                        return str(found)
        return None

    @property
    def name(self) -> str:
        """What the exchange is called where it is a rollout of its own."""
        given = self.record.value.get("custom_id") or self.response.get("id")
        return given if isinstance(given, str) else self.record.label


def body(held: Any) -> dict[str, Any]:
    """The request or response in `held`, wrapped or not; empty if there is none."""
    inner = held.get("body") if isinstance(held, dict) else None
    found = inner if isinstance(inner, dict) else held
    return found if isinstance(found, dict) else {}


def request_and_response(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two halves of a record; either is empty if it has none."""
    if isinstance(value.get("request"), dict) or isinstance(value.get("response"), dict):
        return body(value.get("request")), body(value.get("response"))
    if "custom_id" in value:
        return body(value), {}
    return value, value


def read_exchanges(records: Iterator[Record], *, asks: str, answers: str) -> Iterator[Exchange | Skipped]:
    """The exchanges of a file, whose requests have the field `asks` and whose responses have `answers`.

    Raises:
        TreepackError: a record is no exchange.
    """
    requests: dict[str, dict[str, Any]] | None = None
    for record in records:
        value, source = record.value, record.source
        request, response = request_and_response(value)
        if "custom_id" in value and not response and asks in request:
            yield Skipped(source, REQUESTS_NOTE)
            continue
        if value.get("error") is not None or response.get("error") is not None:
            yield Skipped(source, FAILED_NOTE)
            continue
        if "custom_id" in value and not request:
            if requests is None:
                requests = _batch_requests(record)
            request = requests.get(str(value["custom_id"]), {})
            if not request:
                yield Skipped(source, "response of a batch whose request is in no file of its folder")
                continue
        if request is value and asks not in value and isinstance(value.get(answers), list):
            yield Skipped(source, f"response without its {asks}")
            continue
        if request.get(asks) is None or not isinstance(response.get(answers), list):
            raise TreepackError(
                f"{source}: is no pair of a request with {asks} and a response with {answers}; expected one per record"
            )
        fields = API_FIELDS | NOT_KEPT if request is value else NOT_KEPT
        rest = {name: held for name, held in value.items() if name not in fields and held is not None}
        model = response.get("model") or request.get("model")
        yield Exchange(record, request, response, ({"model": model} if isinstance(model, str) else {}) | rest)


def description(exchanges: Sequence[Exchange], name: str) -> Record:
    """What `exchanges` of one rollout say besides their calls: of fields that several have, the last one counts."""
    value = {key: held for exchange in exchanges for key, held in exchange.rest.items() if key not in SESSIONS}
    return replace(exchanges[0].record, value=value | {"rollout_id": name})


def _batch_requests(record: Record) -> dict[str, dict[str, Any]]:
    """The requests in files beside that of `record`, by their `custom_id`."""
    found: dict[str, dict[str, Any]] = {}
    if record.path == STDIN:
        return found
    for path in sorted(Path(record.path).parent.glob("*.jsonl*")):
        if str(path) == record.path or not path.is_file():
            continue
        others = read_records(str(path))
        for other in others:
            if not isinstance(other.value.get("body"), dict) or not isinstance(other.value.get("custom_id"), str):
                break
            name = other.value["custom_id"]
            if found.setdefault(name, other.value["body"]) != other.value["body"]:
                raise TreepackError(f"{other.source}: repeats the custom_id {quoted(name)}; keep one request of it")
    return found
