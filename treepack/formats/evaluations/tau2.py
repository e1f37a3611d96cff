"""Results of tau2-bench: one document per run, one rollout per simulation in it.

    {"info": {"agent_info": {"llm": ".."}, "environment_info": {"domain_name": "retail", "policy": ".."}},
     "tasks": [{"id": "3", "initial_state": {"message_history": [..]}}, ..],
     "simulations": [{"task_id": "3", "trial": 0, "reward_info": {"reward": 1.0}, "messages": [..], ..}, ..]}
    results.json without simulations, next to simulations/<id>.json, one of them each       the same in many files

Of the agent's system message, the file contains only the policy, which is used as the system message. Tool schemas are
in the file only if an option of the run kept them. The agent does not see the tool calls of the simulated user or their
results, so they are left out. Text that no model wrote is not trained: the greeting, the messages that a task starts
with, and the stop mark in place of the agent's last call if there is no user.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    as_objects,
    as_text,
    companion_path,
    conversation,
    endings,
    has_fields,
    object_or_empty,
    objects_at,
    read_document,
    temperature_of,
    without,
)

STOP = "###STOP###"
_FOLDER = "simulations"
_TRUNCATED_NOTE = "call with a prompt cut to a budget of tokens read with its whole prompt"
# Fields of a simulation that are read under another name.
_USED = frozenset({"messages", "ticks", "reward_info", "id", "task_id", "trial", "policy"})
# Times and costs of a simulation, and what other models said of it.
_DROPPED = frozenset(
    """
    timestamp start_time end_time duration agent_cost user_cost agent_usage seed info review user_only_review
    auth_classification hallucination_check effect_timeline
    """.split()
)


def read_tau2(record: Record, options: ReadOptions) -> Outcomes:
    """Read one trajectory per simulation, `<domain>/<task_id>/<trial>`, in the group `<domain>/<task_id>`.

    Raises:
        TreepackError: simulations or messages of a different kind.
    """
    value, source = record.value, record.source
    if has_fields(value, _SIMULATION):
        # A folder search finds simulations/<id>.json and results.json; the latter reads all of them.
        if Path(record.path).parent.name == _FOLDER and (run := companion_path(record, "../results.json")) is not None:
            yield Skipped(source, f"read with {run.name}", is_rollout=False)
        else:
            yield from _read_simulation(record, {}, options)
        return
    simulations = objects_at(value, "simulations", source)
    # If a run has many files, its simulations are in other files.
    parts = [replace(record, source=f"{source}: simulations[{k}]", value=each) for k, each in enumerate(simulations)]
    for path in [] if simulations else _simulation_files(record):
        parts.append(replace(record, source=str(path), value=read_document(path)))
    if not parts:
        yield Skipped(source, "run without simulations")
    for part in parts:
        yield from _read_simulation(part, value, options)


def _simulation_files(record: Record) -> list[Path]:
    folder = Path(record.path).parent / _FOLDER
    return sorted(folder.glob("*.json*")) if folder.is_dir() else []


def _read_simulation(record: Record, run: JsonObject, options: ReadOptions) -> Outcomes:
    value, source = record.value, record.source
    if value.get("messages") is None:
        yield Skipped(source, "simulation by voice, without messages" if value.get("ticks") else "no messages")
        return
    objects_at(value, "messages", source)
    info = object_or_empty(run.get("info"))
    agent, environment = object_or_empty(info.get("agent_info")), object_or_empty(info.get("environment_info"))
    policy = as_text(value.get("policy") or environment.get("policy"), source=source, name="policy", default="")
    system = [{"role": "system", "content": policy}] if policy else []
    spoken = _agent_messages(value["messages"], _num_scripted(run, value, source), source)
    domain, task = environment.get("domain_name"), value.get("task_id")
    group = f"{domain}/{task}" if isinstance(domain, str) else str(task)
    # A simulation without a trial is named by its id.
    trial = value.get("id") if value.get("trial") is None else value["trial"]
    rest = without(value, _USED | _DROPPED)
    facts = {
        **rest,
        "trajectory_id": f"{group}/{trial}",
        "group_id": group,
        "reward_info": value.get("reward_info"),
        "model": agent.get("llm"),
        "agent": agent.get("implementation"),
        "temperature": temperature_of(agent.get("llm_args")),
    }
    cut = any(message.get("context_truncation") for message in value["messages"])
    notes = (_TRUNCATED_NOTE,) if cut else ()
    tools = _tools(environment.get("tool_defs"))
    yield conversation(replace(record, value=facts), [*system, *spoken], options, tools=tools, notes=notes)


def _num_scripted(run: JsonObject, simulation: JsonObject, source: str) -> int:
    """Count the messages that the task put before the simulation."""
    tasks = objects_at(run, "tasks", source)
    matches = (task for task in tasks if task.get("id") == simulation.get("task_id"))
    history = object_or_empty(object_or_empty(next(matches, None)).get("initial_state")).get("message_history")
    return len(as_objects(history, source=source, name="message_history"))


def _agent_messages(messages: list[JsonObject], num_scripted: int, source: str) -> list[JsonObject]:
    """Return the messages that the agent saw and wrote, in chat form."""
    seen: list[JsonObject] = []
    names: dict[Any, Any] = {}
    # [greeting, user, user's tool call, its result, reply] -> [greeting, user, reply]
    has_user = False
    for number, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            results = message.get("tool_messages")
            # One tool message may contain several results.
            several = [message] if results is None else as_objects(results, source=source, name="tool_messages")
            seen += [_result(each, names) for each in several if each.get("requestor") != "user"]
        elif role == "user":
            has_user = True
            if not message.get("tool_calls"):
                seen.append({"role": role, "content": message.get("content")})
        else:
            said = _said(message, names, source)
            # The agent's first message is fixed text of the benchmark.
            greeting = not has_user and not message.get("tool_calls")
            if role == "assistant" and (number < num_scripted or greeting or message.get("content") == STOP):
                said["loss"] = False
            seen.append(said)
    return seen


def _said(message: JsonObject, names: dict[Any, Any], source: str) -> JsonObject:
    calls = objects_at(message, "tool_calls", source)
    # Results name their call only by its id.
    names.update((call["id"], call.get("name")) for call in calls if isinstance(call.get("id"), str))
    kept = [without(call, {"requestor"}) for call in calls]
    said = {"role": message.get("role"), "content": message.get("content")}
    # The choice of the response; a limit on steps (`termination_reason`) ends a simulation between two answers.
    if (ending := endings.raw_of(object_or_empty(message.get("raw_data")))) is not None:
        said["finish_reason"] = ending
    return said | {"tool_calls": kept} if kept else said


def _result(message: JsonObject, names: dict[Any, Any]) -> JsonObject:
    call = message.get("id")
    name = names.get(call) if isinstance(call, str) else None
    return {"role": "tool", "tool_call_id": call, "name": name, "content": message.get("content")}


def _tools(definitions: Any) -> list[JsonObject] | None:
    """Return the schemas of the tools whose signatures the run kept, by name."""
    if not isinstance(definitions, dict):
        return None
    signatures = [(name, object_or_empty(signature)) for name, signature in definitions.items()]
    return [
        {
            "type": "function",
            "function": {"name": name, "description": each.get("doc") or "", "parameters": each.get("params") or {}},
        }
        for name, each in signatures
    ]


_SIMULATION = "task_id, termination_reason, start_time, messages|ticks"
FORMAT = Format(
    name="tau2",
    rank=20,
    program="tau2-bench",
    recognised_by="`info.environment_info` beside `tasks`; or `task_id`, `termination_reason` and `messages`",
    requires=f"info.environment_info:object, tasks; {_SIMULATION}",
    used="""
        info.environment_info.policy info.environment_info.domain_name info.environment_info.tool_defs
        info.agent_info.llm info.agent_info.llm_args.temperature tasks.id tasks.initial_state.message_history
        simulations.task_id simulations.trial simulations.reward_info.reward simulations.messages.role
        simulations.messages.tool_calls.requestor simulations.messages.tool_messages
        simulations.messages.requestor simulations.termination_reason simulations.policy
        simulations.messages.content simulations.messages.id simulations.messages.tool_calls.* simulations.mode
        info.agent_info.implementation
    """,
    dropped="""
        what the user did with tools (the agent does not see it);
        simulations.ticks (simulations by voice are skipped);
        simulations.review and other reviews;
        times, costs, usage, raw_data but for its finish_reason;
        user_info;
        tasks (all but the messages that they begin with)
    """,
    keeps="masks, rewards, lineage",
    failed="termination_reason",
    needs_folder=True,
    read=read_tau2,
)
