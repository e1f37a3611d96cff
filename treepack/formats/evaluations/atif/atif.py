"""ATIF, the trajectories of Harbor and other programs: `agent/trajectory.json` of a trial, versions 1.0 to 1.8.

    {"schema_version": "ATIF-v1.6", "session_id": "..", "agent": {"name", "version", "model_name", "tool_definitions"},
     "steps": [{"step_id": 1, "source": "user", "message": ".."},
               {"step_id": 2, "source": "agent", "message": "..", "reasoning_content": "..",
                "tool_calls": [{"tool_call_id", "function_name", "arguments": {..}}],
                "observation": {"results": [{"source_call_id", "content"}]},
                "metrics": {"prompt_token_ids": [..], "completion_token_ids": [..], "logprobs": [..]}}],
     "continued_trajectory_ref": "trajectory.cont-1.json", "subagent_trajectories": [{the same}, ..]}

If every call has token ids, these ids are read, and calls that continue each other are joined. If not, the steps are
one conversation. A step is not trained if it was copied from another file (`is_copied_context`) or if no model made it
(`llm_call_count` 0). A system step with an observation is an event of the harness, not a message. If its
`extra.context_management.boundary` is "replace", its results are the whole prompt of the next steps, a conversation of
their own; at another event between two steps of the agent the conversation ends.

The files of a trial are one rollout, and so are a trajectory and its embedded agents: continuations, summaries and
sub-agents count once in the group of their task (`trial_files`). A continuation contains the steps that it continues as
copied steps. The `result.json` of a trial contains the task, the name of the trial and the reward of all files in its
folder. It may contain token ids as `agent_result.rollout_details`, which are read if `trajectory.json` has none. Each
step of a trial of several steps has a separate instruction and reward, so it is a rollout of the group
`<task>/<step>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from treepack.calls.rollout_names import group_of_first, with_rollout_names, within
from treepack.formats.evaluations.atif.trial_files import (
    MAX_AGENTS,
    RESULT,
    FileOfRollout,
    facts_of_trial,
    file_of_trial,
    file_of_trial_session,
    name_of_trial,
    result_above,
    step_result,
)
from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcome,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    Trajectory,
    TreepackError,
    as_flag,
    as_objects,
    companion_path,
    describe,
    endings,
    folder_and_document,
    has_fields,
    object_at,
    object_or_empty,
    objects_at,
    read_calls,
    read_document,
    shown,
    temperature_of,
    without,
)
from treepack.ingest.readers.messages.conversation_settings import normalise_tools
from treepack.ingest.readers.messages.normal_form import normalise_messages

# The sources of ATIF -> the roles of chat.
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
# Fields of a document that are read, or that repeat the steps.
_TOP = frozenset({"schema_version", "trajectory_id", "agent", "steps", "final_metrics"})
_LINKS = frozenset({"continued_trajectory_ref", "subagent_trajectories"})
_MAIN = "trajectory.json"
_SOME_NOTE = "token ids of some steps only, not used"
_MEDIA_NOTE = "steps from the first image or sound to the end not used"
CONTEXT_NOTE = "steps after an event of the harness, such as a summary, not used: their prompt is not known"


def read_atif(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`, named after the trial or the session, and of its embedded agents.

    Raises:
        TreepackError: steps of a different kind, token ids that contradict each other, or several rewards.
    """
    if has_fields(record.value, RESULT):
        yield from _read_result(record, options)
        return
    path, result = result_above(record)
    if path is None:
        yield from _read_document(record, {}, file_of_trial_session(record), options)
        return
    # steps/<name>/agent/trajectory.json -> the step <name>; agent/trajectory.json -> the whole trial
    step = Path(record.path).parent.parent
    is_step = step.parent.name == "steps"
    part = step_result(result, step.name, record.source) if is_step else result
    # "trajectory.json" -> "", "trajectory.cont-1.json" -> "cont-1"
    inner = folder_and_document(record)[1].removeprefix("trajectory").lstrip(".-_")
    step_name = step.name if is_step else ""
    facts = facts_of_trial(result, part, (step_name, inner), str(path), options)
    main = companion_path(record, _MAIN)
    if not _is_in_details(part, main, str(path)):
        file = file_of_trial(record, step if is_step else path.parent, name_of_trial(result, step_name))
        yield from _read_document(record, facts, file, options)
    # The result has the ids of the whole trial: only its main file yields them, and other files are skipped.
    elif main is not None and main.name == Path(record.path).name:
        yield from _read_details(Record(str(path), str(path), facts), part, options)
    else:
        yield Skipped(record.source, f"its token ids are read with {_MAIN if main else path.name}", is_rollout=False)


def _read_result(record: Record, options: ReadOptions) -> Outcomes:
    """Read the token ids of a trial that has no trajectory file."""
    result, source = record.value, record.source
    steps = objects_at(result, "step_results", source)
    # A trial of one step keeps agent/trajectory.json, a trial of several steps one file per step.
    parts = [("", result, f"agent/{_MAIN}")]
    parts += [(str(step.get("step_name")), step, f"steps/{step.get('step_name')}/agent/{_MAIN}") for step in steps]
    nothing = True
    for name, part, main in parts:
        if companion_path(record, main) is None and _is_in_details(part, None, source):
            facts = facts_of_trial(result, part, (name, ""), source, options)
            yield from _read_details(replace(record, value=facts), part, options)
            nothing = False
    if nothing:
        yield Skipped(source, "result of a trial, read with its trajectories", is_rollout=False)


def _read_details(record: Record, part: JsonObject, options: ReadOptions) -> Outcomes:
    """Read the conversations whose token ids are in the result of a trial, or of a step of it."""
    name = record.value["trajectory_id"]
    details = _details(part, record.source)
    for number, detail in enumerate(details):
        value = record.value | {"trajectory_id": f"{name}/segment-{number}" if number else name}
        for item in read_calls(replace(record, value=value), _detail_calls(detail, record.source), options):
            yield within(item, str(name), number) if len(details) > 1 else item


def _details(part: JsonObject, source: str) -> list[JsonObject]:
    """Return the token ids of all calls of a trial, or of a step of it: one object per conversation."""
    details = object_or_empty(part.get("agent_result")).get("rollout_details")
    return as_objects(details, source=source, name="agent_result.rollout_details")


def _is_in_details(part: JsonObject, log: Path | None, source: str) -> bool:
    """Return whether the token ids are read from the result, because the main trajectory at `log` lacks them."""
    if not any(detail.get("completion_token_ids") for detail in _details(part, source)):
        return False
    trained = [step for step in _steps(log) if _is_trained(step)]
    return not trained or not all(map(_has_ids, trained))


def _steps(log: Path | None) -> list[JsonObject]:
    steps = None if log is None else read_document(log).get("steps")
    return as_objects(steps, source=str(log), name="steps")


def _detail_calls(detail: JsonObject, source: str) -> list[TokenCall]:
    prompts, completions = detail.get("prompt_token_ids"), detail.get("completion_token_ids")
    logprobs = detail.get("logprobs")
    if not isinstance(prompts, list) or not isinstance(completions, list) or len(prompts) != len(completions):
        raise TreepackError(
            f"{source}: rollout_details has different numbers of prompts and completions; expected one of each per call"
        )
    # Log-probabilities are optional, but they cannot be assigned to calls if their number differs.
    if not isinstance(logprobs, list) or len(logprobs) != len(prompts):
        logprobs = [None] * len(prompts)
    calls = zip(prompts, completions, logprobs, strict=True)
    return [TokenCall(prompt, said, {"rollout_log_probs": values}) for prompt, said, values in calls]


def _read_document(record: Record, trial: JsonObject, file: FileOfRollout | None, options: ReadOptions) -> Outcomes:
    """Read the agents of a document, as parts of one rollout if `file` is one of several, or has several agents."""
    agents = [list(items) for items in _read_agents(record, trial, options)]
    firsts = [next((item for item in items if isinstance(item, Trajectory)), None) for items in agents]
    main = next((item for item in firsts if item is not None), None)
    if main is None or (file is None and sum(item is not None for item in firsts) == 1):
        yield from chain.from_iterable(agents)
        return
    rollout = file or FileOfRollout(main.rollout_id or main.trajectory_id, record.source, None, 0)
    group = rollout.group or main.group_id or group_of_first(main)
    for number, items in enumerate(agents):
        for item in items:
            part = within(item, rollout.rollout, rollout.order * MAX_AGENTS + min(number, MAX_AGENTS - 1))
            if isinstance(part, Trajectory):
                part = replace(part, source=rollout.source, group_id=part.group_id if trial else group)
            yield part


def _read_agents(record: Record, trial: JsonObject, options: ReadOptions) -> Iterator[Outcomes]:
    """Yield the trajectories of the agent of a document, and then the steps of each agent that is embedded in it."""
    value, source = record.value, record.source
    agent = object_or_empty(value.get("agent"))
    facts = {
        **without(value, _TOP | _LINKS),
        **trial,
        "agent": agent.get("name"),
        "model": agent.get("model_name"),
        "temperature": temperature_of(agent.get("extra")),
    }
    if "trajectory_id" not in facts:
        facts["trajectory_id"] = value.get("trajectory_id") or value.get("session_id")
    yield _read_agent(replace(record, value=facts), value, agent, options)
    embedded = objects_at(value, "subagent_trajectories", source)
    for number, each in enumerate(embedded):
        where = f"{source}: subagent_trajectories[{number}]"
        if not has_fields(each, _TRAJECTORY):
            raise TreepackError(f"{where} is {shown(each)}; expected a trajectory with schema_version ATIF and steps")
        name = f"{facts['trajectory_id']}/{each.get('trajectory_id') or number}"
        yield from _read_agents(Record(where, record.path, each), trial | {"trajectory_id": name}, options)


def _read_agent(record: Record, value: JsonObject, agent: JsonObject, options: ReadOptions) -> Outcomes:
    """Read the steps of one agent, whose document is `value`; `record` has its facts."""
    steps = objects_at(value, "steps", record.source)
    for step in steps:
        object_at(step, "metrics", record.source)
        if not isinstance(number := step.get("llm_call_count"), int | None):
            raise TreepackError(f"{record.source}: llm_call_count is {shown(number)}; expected a number of calls")
    trained = [step for step in steps if _is_trained(step)]
    with_ids = [step for step in trained if _has_ids(step)]
    # Ids of some steps only would mix two tokenisations in one trajectory, so then all are read as text.
    if trained and len(with_ids) == len(trained):
        yield from read_calls(record, [_token_call(step) for step in trained], options)
    else:
        yield from _read_steps(record, steps, agent.get("tool_definitions"), bool(with_ids), options)


def _is_trained(step: JsonObject) -> bool:
    is_own = as_flag(step.get("is_copied_context") or False) is False
    return step.get("source") == "agent" and is_own and step.get("llm_call_count") != 0


def _metrics(step: JsonObject) -> JsonObject:
    return object_or_empty(step.get("metrics"))


def _has_ids(step: JsonObject) -> bool:
    """Return whether `step` has the token ids of its one call. Ids of several calls in one step cannot be separated."""
    return step.get("llm_call_count") in (None, 1) and all(
        _metrics(step).get(name) for name in ("prompt_token_ids", "completion_token_ids")
    )


def _token_call(step: JsonObject) -> TokenCall:
    metrics = _metrics(step)
    values = {"rollout_log_probs": metrics.get("logprobs")}
    return TokenCall(metrics["prompt_token_ids"], metrics["completion_token_ids"], values, ending=_ending(step))


def _ending(step: JsonObject) -> Any:
    """Return why the answer of a step ended, which agents log in `extra` fields; None if it is not in the file."""
    metrics = _metrics(step)
    holders = [step, step.get("extra"), metrics, metrics.get("extra")]
    reasons = (endings.raw_of(holder) for holder in holders if isinstance(holder, dict))
    return next((reason for reason in reasons if reason is not None), None)


def _read_steps(record: Record, steps: list[JsonObject], tools: Any, some_ids: bool, options: ReadOptions) -> Outcomes:
    """Read the steps up to the first one with media, as a conversation for each context that replaces the one before.

    A change of the context whose new text is not known ends the steps too.
    """
    contexts: list[list[JsonObject]] = [[]]
    notes: tuple[str, ...] = (_SOME_NOTE,) if some_ids else ()
    for number, step in enumerate(steps):
        is_event = step.get("source") == "system" and bool(step.get("observation"))
        said = (_new_context if is_event else _messages)(step, f"{record.source}: step {number + 1}")
        if any(map(_has_media, said)):
            notes += (_MEDIA_NOTE,)
            break
        if not is_event:
            contexts[-1] += said
        elif said:
            contexts.append(said)
        # An event before the first call or after the last one changes no prompt.
        elif any(map(_is_trained, steps[:number])) and any(map(_is_trained, steps[number:])):
            notes += (CONTEXT_NOTE,)
            break
    schemas = normalise_tools(tools, source=record.source)
    items: list[Outcome] = []
    first_calls: list[tuple[int, ...]] = []
    num_calls = 0
    for messages in contexts:
        done = normalise_messages(messages, source=record.source)
        if any(done.weights):
            items.append(describe(record, done.chat(tools=schemas), used=(), options=options, notes=done.notes + notes))
            first_calls.append((num_calls,))
        num_calls += sum(map(bool, done.weights))
    if items:
        yield from with_rollout_names(record, items, first_calls, num_calls=0)
    else:
        yield Skipped(record.source, "no step of a model that can be trained")


def _messages(step: JsonObject, source: str) -> list[JsonObject]:
    """Return the messages that a step adds to the conversation."""
    # A step of the agent with two tool calls -> an assistant message and two tool messages.
    origin = step.get("source")
    if not isinstance(origin, str) or origin not in _ROLES:
        raise TreepackError(f"{source}: source is {shown(origin)}; expected system, user or agent")
    message: JsonObject = {"role": _ROLES[origin], "content": step.get("message")}
    if origin != "agent":
        return [message] if message["content"] else []
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    calls = objects_at(step, "tool_calls", source)
    if calls:
        names = {"id": "tool_call_id", "name": "function_name", "arguments": "arguments"}
        message["tool_calls"] = [{name: call.get(field) for name, field in names.items()} for call in calls]
    if not _is_trained(step):
        message["loss"] = False
    if (ending := _ending(step)) is not None:
        message["finish_reason"] = ending
    return [message, *_results(step, source, calls)]


def _new_context(event: JsonObject, source: str) -> list[JsonObject]:
    """Return the messages of the user that replace the conversation before an event; none if it replaces nothing."""
    management = object_or_empty(object_or_empty(event.get("extra")).get("context_management"))
    results = _results(event, source, []) if management.get("boundary") == "replace" else []
    return [{"role": "user", "content": each["content"]} for each in results if each["content"]]


def _results(step: JsonObject, source: str, calls: list[JsonObject]) -> list[JsonObject]:
    """Return a message for each result in the observation of a step with `calls`."""
    results = object_or_empty(step.get("observation")).get("results")
    return [_result(result, calls) for result in as_objects(results, source=source, name="observation.results")]


def _result(result: JsonObject, calls: list[JsonObject]) -> JsonObject:
    """Return the message with the result of a call, or with the result of an action that was not a tool call."""
    call = result.get("source_call_id")
    content = result.get("content")
    # An action that was not a tool call: its result becomes the next message of the user.
    if call is None:
        return {"role": "user", "content": content}
    name = next((each.get("function_name") for each in calls if each.get("tool_call_id") == call), None)
    return {"role": "tool", "tool_call_id": call, "name": name, "content": content}


def _has_media(message: JsonObject) -> bool:
    parts = message["content"] if isinstance(message.get("content"), list) else []
    return any(isinstance(part, dict) and part.get("type") in ("image", "audio") for part in parts)


_TRAJECTORY = "schema_version:=ATIF*, steps:list"
FORMAT = Format(
    name="atif",
    rank=200,
    program="Harbor; NeMo and others that write ATIF",
    recognised_by="`schema_version` that begins with ATIF, and `steps`; or a trial's `task_name` and `trial_name`",
    requires=f"{_TRAJECTORY}; {RESULT}",
    used="""
        steps.source steps.message steps.reasoning_content steps.tool_calls steps.observation.results
        steps.metrics.prompt_token_ids steps.metrics.completion_token_ids steps.metrics.logprobs
        steps.is_copied_context steps.llm_call_count steps.extra.context_management.boundary agent.tool_definitions
        agent.name agent.model_name
        agent.extra.temperature session_id task_name trial_name verifier_result.rewards
        step_results.verifier_result.rewards agent_result.rollout_details subagent_trajectories=.
        continued_trajectory_ref
    """,
    dropped="""
        system steps with an observation that replaces no context (events of the harness);
        steps.timestamp, the rest of steps.extra, other metrics;
        final_metrics;
        observation.results.subagent_trajectory_ref (a file of its own, or embedded);
        of result.json: config, times, costs, messages of exceptions
    """,
    also="exception_info.exception_type step_results.exception_info.exception_type",
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    failed="exception",
    needs_folder=True,
    read=read_atif,
)
