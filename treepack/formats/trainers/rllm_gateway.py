"""Traces of rLLM's model gateway: one LLM call per line; the calls of one session are a rollout.

    {"trace_id": "b", "session_id": "s", "model": "..", "messages": [..], "response_message": {..},
     "prompt_token_ids": [..], "completion_token_ids": [..], "logprobs": [..], "metadata": {..}, ..}
    {.., "prompt_delta_token_ids": [..], "parent_trace_id": "a"}    prompt = that of a, its completion, and the delta

A trace with `prompt_delta_token_ids` has a delta, any other trace the whole prompt. Sessions may be interleaved, so the
whole file is kept in memory. A session contains the calls of an agent and of its sub-agents. Their `lineage_id` is not
needed, because calls are joined by their prompts, and all trajectories of a session are one rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.formats.kit import (
    ChatCall,
    Format,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    TreepackError,
    object_or_empty,
    objects_at,
    read_calls,
    read_chats,
    shown,
    temperature_of,
    without,
)
from treepack.trajectory import Int32, as_token_ids

# Fields that are read under another name, or that `FORMAT.dropped` lists.
_KNOWN = frozenset(
    """
    trace_id session_id model messages prompt_token_ids response_message logprobs completion_token_ids
    routing_matrices finish_reason weight_version latency_ms token_counts timestamp metadata raw_request
    raw_response prompt_delta_token_ids parent_trace_id lineage_id
    """.split()
)
ORPHAN = "trace whose parent is not in the file"


def _read_rllm_gateway(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of all sessions, named after them, in the order in which the sessions started.

    The fields of a session's first `metadata`, such as `reward` or `task_id`, count as fields of the rollout.

    Raises:
        TreepackError: an error of the readers of tokens and messages.
    """
    sessions: dict[str, list[Record]] = {}
    for record in records:
        sessions.setdefault(record.value["session_id"], []).append(record)
    for session, traces in sessions.items():
        yield from _read_session(session, traces, options)


def _read_session(session: str, traces: list[Record], options: ReadOptions) -> Outcomes:
    first, last = traces[0].value, traces[-1].value
    names = {"rollout_id": session, "model": first.get("model") or None, "weight_version": last.get("weight_version")}
    more = without(first, _KNOWN)
    one = replace(traces[0], value=more | object_or_empty(first.get("metadata")) | names)
    # Ids of some calls only would mix two tokenisations in one trajectory, so then all are read as text.
    if not all(trace.value.get("completion_token_ids") for trace in traces):
        chats = [_chat_call(trace) for trace in traces]
        yield from read_chats(one, chats, options)
        return
    prompts = _prompts(traces)
    calls = []
    for trace in traces:
        prompt = prompts[trace.value["trace_id"]]
        if prompt is None:
            yield Skipped(trace.source, ORPHAN)
            continue
        values = {"rollout_log_probs": trace.value.get("logprobs")}
        values["temperatures"] = temperature_of(trace.value.get("raw_request"))
        ending = trace.value.get("finish_reason")
        calls.append(TokenCall(prompt, _ids(trace, "completion_token_ids"), values, ending=ending))
    if calls:
        yield from read_calls(one, calls, options)


def _prompts(traces: list[Record]) -> dict[str, Int32 | None]:
    """Return the whole prompt of each trace; None if an ancestor is missing. O(sum of their lengths)."""
    by_id = {trace.value["trace_id"]: trace for trace in traces}
    whole: dict[str, Int32 | None] = {}
    for start in by_id:
        chain: list[str] = []
        name: Any = start
        # A cycle of parents ends at the first name that repeats; its prompts stay None.
        while isinstance(name, str) and name not in whole and name in by_id and name not in chain:
            chain.append(name)
            if by_id[name].value.get("prompt_delta_token_ids") is None:
                break
            name = by_id[name].value.get("parent_trace_id")
        # a <- b <- c: the chain [c, b, a] ends at a whole prompt; from a on, each prompt extends the one before it.
        for link in reversed(chain):
            trace = by_id[link]
            if trace.value.get("prompt_delta_token_ids") is None:
                whole[link] = _ids(trace, "prompt_token_ids")
                continue
            parent = trace.value.get("parent_trace_id")
            before = whole.get(parent) if isinstance(parent, str) else None
            # The prompt stays unknown if the parent is missing.
            whole[link] = None
            if isinstance(parent, str) and before is not None:
                parts = (before, _ids(by_id[parent], "completion_token_ids"), _ids(trace, "prompt_delta_token_ids"))
                whole[link] = np.concatenate(parts)
    return whole


def _ids(trace: Record, name: str) -> Int32:
    values = trace.value.get(name)
    if not isinstance(values, list | np.ndarray):
        raise TreepackError(f"{trace.source}: {name} is {shown(values)}; expected a list of token ids")
    return as_token_ids(values, source=trace.source, name=name)


def _chat_call(trace: Record) -> ChatCall:
    messages = objects_at(trace.value, "messages", trace.source)
    response = trace.value.get("response_message")
    if response is not None and not isinstance(response, dict):
        raise TreepackError(f"{trace.source}: response_message is {shown(response)}; expected a message")
    request = trace.value.get("raw_request")
    tools, ending = object_or_empty(request).get("tools"), trace.value.get("finish_reason")
    return ChatCall(messages, [response] if response else [], tools, None, temperature_of(request), ending)


FORMAT = Format(
    name="rllm-gateway",
    rank=480,
    program="rLLM (model gateway)",
    recognised_by="`trace_id` and `session_id` beside `response_message` or `completion_token_ids`",
    requires="trace_id:text, session_id:text, response_message|completion_token_ids",
    used="""
        trace_id session_id model messages response_message prompt_token_ids metadata completion_token_ids
        logprobs prompt_delta_token_ids parent_trace_id weight_version finish_reason
    """,
    dropped="""
        routing_matrices;
        lineage_id (calls are joined by their prompts);
        latency_ms, token_counts and timestamp;
        raw_request but for its tools and temperature, and raw_response
    """,
    keeps="token ids, masks, log-probabilities",
    read_file=_read_rllm_gateway,
)
