"""Runs of LangSmith: the LLM calls of a trace, one run per record or nested in the `child_runs` of their root.

    {"id": "r", "run_type": "chain", "trace_id": "r", "feedback_stats": {"correct": {"n": 1, "avg": 1.0}}, ..}
    {"id": "a", "run_type": "llm", "trace_id": "r", "dotted_order": "..Zr...Za", "inputs": {"messages": ..}, ..}
    {"runs": [run, ..]}                                                              as queries and webhooks give them

A trace is a rollout. Its group is the example that it was run on (`reference_example_id`), and its rewards are the
means of the feedback on its root. Messages have the form of LangChain, as objects or as constructors with `kwargs`, or
the form of a provider. Runs inside an LLM run repeat it and are skipped. Chains, tools and other runs without an LLM
call are skipped too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from treepack.calls.apis.api_forms import prompt_of, responses_of
from treepack.calls.apis.api_paths import requests, responses
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    as_id,
    as_objects,
    mark_prefills,
    object_at,
    object_or_empty,
    objects_at,
    read_chats,
    skip_reason,
    temperature_of,
)
from treepack.ingest.readers.fields.values import as_number, start_time

_DAMAGED_NOTE = "trace with a run that cannot be read"
_NO_CALL_NOTE = "run without an LLM call"


@dataclass(slots=True)
class _TraceFacts:
    """The LLM runs of a trace, the record of its first run, and the facts of its runs.

    The facts of the root count before the facts of other runs.
    """

    record: Record
    runs: list[tuple[str, JsonObject]] = field(default_factory=list)
    example: Any = None
    scores: JsonObject = field(default_factory=dict)
    fault: str = ""


def _read_langsmith(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the traces of one file, in the order of their first runs.

    A trace with a run that cannot be read is skipped: the calls after it would be trained without it.

    Raises:
        TreepackError: nested runs that are not of the forms above.
    """
    traces: dict[str, _TraceFacts] = {}
    for record in records:
        for name, run in _runs(record):
            trace = traces.setdefault(name, _TraceFacts(replace(record, value={})))
            # The example and the feedback of the root describe the whole trace.
            is_root = run.get("parent_run_id") is None
            trace.example = (run.get("reference_example_id") if is_root else None) or trace.example
            # Scores of other runs are kept, unless the root has a score of the same name.
            try:
                scores = _scores(run, record.source)
            except TreepackError as error:
                scores, trace.fault = {}, str(error)
            trace.scores = trace.scores | scores if is_root else scores | trace.scores
            if run.get("run_type") != "llm":
                yield Skipped(record.source, _NO_CALL_NOTE, is_rollout=False)
            elif run.get("error") is not None or not isinstance(run.get("outputs"), dict):
                yield Skipped(record.source, "LLM run that failed")
            else:
                trace.runs.append((record.source, run))
    for name, trace in traces.items():
        try:
            if trace.fault:
                raise TreepackError(trace.fault)
            items = list(_read(name, trace, options))
        except TreepackError as error:
            items = [Skipped(trace.record.source, _DAMAGED_NOTE, detail=str(error))]
        yield from items


def _runs(record: Record) -> Iterator[tuple[str, JsonObject]]:
    """Yield the run of `record` and all runs below it, each with the name of its trace."""
    value = record.value
    runs = value["runs"] if "run_type" not in value else [value]
    # Reversed, so that pop() gives the runs in the order of the record.
    stack = [(run, _trace_of(run, record)) for run in reversed(as_objects(runs, source=record.source, name="runs"))]
    while stack:
        run, trace = stack.pop()
        yield trace, run
        children = objects_at(run, "child_runs", record.source)
        stack += [(child, _trace_of(child, record) if child.get("trace_id") else trace) for child in reversed(children)]


def _trace_of(run: JsonObject, record: Record) -> str:
    """Return the trace of a run; the id of the run if it is a root without a trace.

    Raises:
        TreepackError: the trace is neither text nor a number, or a run with a parent has none.
    """
    name = run.get("trace_id") or (run.get("id") if run.get("parent_run_id") is None else None)
    if name is None and run.get("parent_run_id") is not None:
        raise TreepackError(f"{record.source}: the run has a parent and no trace_id; expected the id of its trace")
    return record.label if name is None else str(as_id(name, source=record.source, name="trace_id"))


def _scores(run: JsonObject, source: str) -> JsonObject:
    """Return the means of the feedback on a run, as a reward of several scores."""
    stats = object_at(run, "feedback_stats", source)
    means = {name: each.get("avg") for name, each in stats.items() if isinstance(each, dict)}
    return {
        name: {"score": as_number(mean, source=source, name=f"feedback_stats.{name}.avg")}
        for name, mean in means.items()
        if mean is not None
    }


def _read(name: str, trace: _TraceFacts, options: ReadOptions) -> Outcomes:
    calls: list[ChatCall] = []
    models: dict[str, None] = {}
    outer = ""
    # Exports are in any order; dotted_order sorts by time, a parent before its children.
    for source, run in sorted(
        trace.runs, key=lambda item: str(start_time(item[1], "dotted_order", "start_time", source=item[0]))
    ):
        order = str(run.get("dotted_order") or "")
        # dotted_order "..Zr...Za.." starts with the order of the parent: "Zr.Za" is inside "Zr".
        if outer and order.startswith(outer + "."):
            yield Skipped(source, "run inside another LLM run", is_rollout=False)
            continue
        outer = order
        run_calls = list(_calls(run, source))
        if not run_calls:
            yield Skipped(source, "LLM run without messages")
            continue
        reason = skip_reason([message for call in run_calls for message in (*call.prompt, *call.response)])
        if reason is not None:
            yield Skipped(source, reason)
            continue
        calls += run_calls
        metadata = object_or_empty(object_or_empty(run.get("extra")).get("metadata"))
        if isinstance(model := metadata.get("ls_model_name"), str):
            models[model] = None
    value: JsonObject = {"rollout_id": name, "model": ", ".join(models) or None, "group_id": trace.example}
    if trace.scores:
        value["rewards"] = trace.scores
    if calls:
        yield from read_chats(replace(trace.record, value=value), calls, options)


def _calls(run: JsonObject, source: str) -> Iterator[ChatCall]:
    """Yield one call for each response. A run may have several prompts, and each prompt may have several responses."""
    inputs, outputs = object_or_empty(run.get("inputs")), object_or_empty(run.get("outputs"))
    extra = object_or_empty(run.get("extra"))
    params, metadata = object_or_empty(extra.get("invocation_params")), object_or_empty(extra.get("metadata"))
    messages: Any = inputs.get("messages")
    entries: Any = outputs.get("generations")
    if not isinstance(messages, list) and "input" not in inputs:
        return
    # [m, m] is one prompt, and [[m, m], [m]] are two, each with its own generations.
    several = isinstance(messages, list) and len(messages) > 1 and all(isinstance(each, list) for each in messages)
    if several and (not isinstance(entries, list) or len(entries) != len(messages)):
        raise TreepackError(f"{source}: has {len(messages)} prompts; expected generations of each of them")
    pairs = [(inputs, outputs)]
    if several:
        pairs = [({"messages": a}, {"generations": b}) for a, b in zip(messages, entries, strict=True)]
    names = (f"{run.get('id')}/{number}" for number in count())
    for asked, said in pairs:
        prompt = prompt_of(asked, source=source)
        settings = (params, {"temperature": metadata.get("ls_temperature")}, {"temperature": prompt.temperature})
        heat = next((each for each in map(temperature_of, settings) if each is not None), None)
        tools = prompt.tools or params.get("tools") or params.get("functions") or None
        before = mark_prefills(prompt.messages, params, model=metadata.get("ls_model_name"))
        for response in responses_of(said, source=source):
            yield ChatCall(before, response, tools, temperature=heat, name=next(names))


_ALSO = (
    *"parent_run_id start_time! error extra.invocation_params.functions".split(),
    *requests("inputs"),
    *responses("outputs"),
)
FORMAT = Format(
    name="langsmith",
    rank=600,
    program="LangSmith (exports of runs)",
    recognised_by="`run_type` beside `inputs` or `dotted_order`, or `runs` of such",
    requires="runs:first(run_type:text, inputs|dotted_order); runs:!filled, run_type:text, inputs|dotted_order",
    used="""
        id run_type trace_id dotted_order inputs.messages outputs.generations.message.kwargs
        outputs.choices.message extra.invocation_params.tools extra.invocation_params.temperature
        extra.metadata.ls_model_name extra.metadata.ls_temperature reference_example_id child_runs inputs.tools
        feedback_stats.*.avg
    """,
    also=("runs=.", "child_runs=.", *_ALSO),
    dropped="""
        chains, tools, retrievers and parsers;
        session_id (a project);
        events, tags, tokens and costs
    """,
    keeps="rewards, lineage",
    read_file=_read_langsmith,
)
