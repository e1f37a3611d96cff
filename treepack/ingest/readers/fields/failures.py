"""Rollouts that failed because the environment or the harness broke, by the fields that a format declares.

    Format.failed    fields of the rollout          failure_of(fields, marks)
    errors, ok       {"ok": false, "errors": [{"type": "SandboxError"}]}         "SandboxError"
    status           {"status": "aborted"}                                       "aborted"
    error            {"error": "ContextLengthExceededError"}                     none: a limit was reached

The name of a field decides how it is read: `ok` fails if it is false, another flag if it is true; a field named after
errors or exceptions fails if it has content; any other field fails if it has one of `_WORDS` or an exception's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from treepack.ingest.readers.fields.field_paths import field_at

_OK = "ok"
_ERRORS = re.compile("error|exception")
_WORDS = re.compile(
    r"fail(ed|ure)?|abort(ed)?|pending|crashed|errored|exit_api|((infrastructure|unexpected|user|has|exit|\w+_environment)_)?error"
)
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception|TimeoutExpired|Interrupt|Interruption)\b")
# A limit of turns or tokens, or a loop of the model, in words: "Context Window Exceeded Error", "maximum iteration".
_UNIT = "(length|context|prompt|turn|step|token|iteration|call|cost)s?"
_LIMIT = re.compile(
    rf"\b(max|maximum|over|exceed\w*)\W+(\w+ )?{_UNIT}\b"
    rf"|\b{_UNIT} ((window|length|size) )?(limit|exceed|reached|overflow)"
    r"|\b(limits exceeded|overlong|too long|stuck in|format error)\b"
)
_TEXTS = ("exception_type", "type", "error", "name", "message", "exception_message")  # of an object about an error


def failure_of(fields: Mapping[str, Any], marks: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return why a rollout with these `fields` failed, "" if it did not, and notes; the first of `marks` counts.

    Errors of a rollout whose `ok` is true, such as errors of repeated attempts, are only noted.
    """
    for name in marks:
        value = field_at(fields, name)
        if cause := _cause(name.rpartition(".")[2], value[-1] if isinstance(value, list) and value else value):
            is_ok = fields.get(_OK) is True
            return ("", (f"{name} of a rollout that is ok, kept",)) if is_ok else (cause, ())
    return "", ()


def _cause(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{name} {value}".lower() if value is not (name == _OK) else ""
    texts = [value] if isinstance(value, str) else []
    if isinstance(value, Mapping):
        texts = [value[key] for key in _TEXTS if isinstance(value.get(key), str)] or [name] * bool(value)
    text = " ".join(texts).strip()[:300]
    # "TerminationReason.ERROR" -> "ERROR", "submitted (exit_error)" -> "exit_error"
    word = re.sub(r".*[.(]|\)$", "", texts[0]) if texts and len(texts[0]) <= 40 else ""
    exception = _EXCEPTION.search(text)
    if not text or not (_ERRORS.search(name) or exception or _WORDS.fullmatch(word.lower())):
        return ""
    # "ContextWindowExceededError" -> "context window exceeded error"
    if _LIMIT.search(re.sub(r"(?<=[a-z])(?=[A-Z])|[_-]", " ", text).lower()):
        return ""
    # An error in words is long and differs between rollouts, so its field is the cause.
    return exception[0][:40] if exception else word if re.fullmatch(r"\w+", word) else name
