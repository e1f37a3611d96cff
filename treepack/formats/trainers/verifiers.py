"""Files `traces.jsonl` of verifiers: one episode per line, with each agent's conversation as a graph of messages.

    {id, env: {id}, task: {type, data, key, hash}, group: {id}, run: {work: {step}}, traces: [
      {id, task, agent: {name, trainable, config: {model}}, tools, rewards: {name: {score, weight}}, nodes: [
        {parent, message, sampled, token_ids, mask, logprobs, trainer_logprobs, advantages, ...}, ...]}, ...]}

A node contains the tokens that it adds to the tokens of its parent. Its mask separates the sampled tokens from the
tokens of the template, and its log-probabilities and advantages have one value per sampled token. If the nodes of a
trace have tokens, these are read, joined along each path from the root. If not, the messages are read. Agents that are
not trainable are skipped. Traces of an episode with the same agent and the same reward, such as the rollouts of
sub-agents, are one rollout, which counts once in its group. With different rewards, each is a separate rollout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from treepack.calls import node_graphs as graphs
from treepack.calls.rollout_names import within
from treepack.formats.kit import (
    MEDIA_REASON,
    ChatCall,
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
    endings,
    object_at,
    objects_at,
    read_calls,
    read_chats,
    shown,
    skip_reason,
    temperature_of,
    with_notes,
    without,
)

_AGENT = "agent"  # the name that verifiers gives to the only agent of an environment
PARTIAL_NOTE = "token ids of some messages only, all messages read as text"
REJECTED = "compaction that the harness rejected"
WEIGHTS_NOTE = "loss weights of nodes not used"
# Fields that are read under another name, or that `FORMAT.dropped` lists.
_KNOWN = frozenset(
    """
    version id verifiers task agent tools nodes calls request_rewrites rewards response_rewrites metrics info
    extra_usage is_completed ok stop_condition errors timing root_reply mm_token_type_id_map num_input_tokens
    num_output_tokens num_total_tokens
    """.split()
)
# Fields of a node with values of its sampled tokens, and their names in the reader of tokens.
_VALUES = {
    "logprobs": "rollout_log_probs",
    "trainer_logprobs": "old_log_probs",
    "reference_logprobs": "ref_log_prob",
    "advantages": "advantages",
}


def _read_verifiers(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of all traces of an episode, named after their traces.

    The group is the group of the episode, or its task, with the name of the agent if the environment has named agents.

    Raises:
        TreepackError: nodes of a different form, or an error of the readers of tokens and messages.
    """
    value = record.value
    # An export may contain single traces, without their episode.
    if "traces" not in value:
        yield from _read_trace(record, {}, value, options)
        return
    if not value["traces"]:
        yield Skipped(record.source, "episode without a trace")
    traces: list[list[Outcome]] = []
    for number, trace in enumerate(value["traces"], 1):
        # Errors name the trace, but trajectories name the record.
        index = replace(record, source=f"{record.source}: trace {number}")
        items = _read_trace(index, value, trace, options)
        traces.append([replace(item, source=record.source) for item in items])
    yield from _as_rollouts(traces, str(value.get("id") or record.label))


def _as_rollouts(traces: list[list[Outcome]], episode: str) -> Outcomes:
    """Yield the trajectories of the traces of an episode; traces of one group with one reward are one rollout."""
    rewards: dict[str, list[float | None]] = {}
    for items in traces:
        first = next((item for item in items if isinstance(item, Trajectory)), None)
        if first is not None and first.group_id is not None:
            rewards.setdefault(first.group_id, []).append(first.reward)
    joined = {group: f"{episode}/{group}" for group, each in rewards.items() if len(each) > 1 and len(set(each)) == 1}
    for number, items in enumerate(traces):
        for item in items:
            yield within(item, joined[item.group_id], number) if item.group_id in joined else item


def _read_trace(record: Record, episode: JsonObject, trace: JsonObject, options: ReadOptions) -> Outcomes:
    agent = object_at(trace, "agent", record.source)
    if agent.get("trainable") is False:
        yield Skipped(record.source, "agent that is not trained", is_rollout=False)
        return
    nodes = trace.get("nodes") or []
    paths = graphs.before(nodes, source=record.source)
    rejected = _rejected(nodes, record.source)
    sampled = [k for k, node in enumerate(nodes) if node.get("sampled") is True and k not in rejected]
    for _ in rejected:
        yield Skipped(record.source, REJECTED, is_rollout=False)
    if not sampled:
        yield Skipped(record.source, "no call with a response")
        return
    one = replace(record, value=_facts(episode, trace, agent, record.source))
    temperatures, reasons = _temperatures(trace, agent, record.source), _endings(trace, record.source)
    ids = graphs.ids_of(nodes, source=record.source)
    if (reason := _skip_reason(trace, ids, record.source)) is not None:
        yield Skipped(record.source, reason)
        return
    # Nodes after the last sampled node of their path are in no prompt, so they need no ids.
    needed = {each for number in sampled for each in (*paths[number], number)}
    has_tokens = all(len(ids[number]) > 0 for number in needed)
    notes: tuple[str, ...] = (WEIGHTS_NOTE,) if any(node.get("loss_weights") for node in nodes) else ()
    if has_tokens:
        calls = [_token_call(nodes, ids, paths[number], number, record.source) for number in sampled]
        for call, number in zip(calls, sampled, strict=True):
            call.values["temperatures"] = temperatures.get(number)
        calls[-1] = replace(calls[-1], ending=reasons.get(sampled[-1]))
        items = read_calls(one, calls, options)
    else:
        notes += (PARTIAL_NOTE,) if any(len(ids[number]) > 0 for number in needed) else ()
        chats = [
            replace(
                _chat_call(trace, paths[number], number, record.source),
                temperature=temperatures.get(number),
                ending=reasons.get(number),
            )
            for number in sampled
        ]
        items = read_chats(one, chats, options)
    yield from with_notes(items, notes)


def _rejected(nodes: list[JsonObject], source: str) -> set[int]:
    """Return the sampled leaves that are attempts of a compaction from which no node continues."""
    edges = [
        (number, edge.get("type"), edge.get("node"))
        for number, node in enumerate(nodes)
        for edge in objects_at(node, "semantic_parents", source)
    ]
    attempts = {number for number, kind, _ in edges if kind == "compaction_attempt" and nodes[number].get("sampled")}
    parents = {node.get("parent") for node in nodes}
    return (
        attempts - parents - {origin for _, kind, origin in edges if kind == "compaction" and isinstance(origin, int)}
    )


def _temperatures(trace: JsonObject, agent: JsonObject, source: str) -> dict[int, float]:
    """Return the temperature of each node of which one is known: that of its call, or else that of the agent."""
    usual = temperature_of(object_at(agent, "config", source).get("sampling"))
    known = dict.fromkeys(range(len(trace.get("nodes") or [])), usual)
    for call in objects_at(trace, "calls", source):
        if isinstance(node := call.get("node"), int) and (own := temperature_of(call.get("sampling"))) is not None:
            known[node] = own
    return {number: temperature for number, temperature in known.items() if temperature is not None}


def _endings(trace: JsonObject, source: str) -> dict[int, Any]:
    """Return why the response of each node ended: a field of its call, or of the node itself."""
    known = {number: endings.raw_of(node) for number, node in enumerate(trace.get("nodes") or [])}
    for call in objects_at(trace, "calls", source):
        if isinstance(node := call.get("node"), int) and call.get("finish_reason") is not None:
            known[node] = call["finish_reason"]
    return known


def _token_call(nodes: list[JsonObject], ids: list[Any], path: list[int], number: int, source: str) -> TokenCall:
    node, where = nodes[number], f"{source}: node {number}"
    mask = node.get("mask")
    if not isinstance(mask, list | np.ndarray) or len(mask) != len(ids[number]):
        raise TreepackError(f"{where} has the mask {shown(mask)}; expected one value per token")
    values = {name: node.get(field) for field, name in _VALUES.items()}
    kept = node.get("sampling_mask", node.get("kept_tokens"))
    return replace(graphs.node_call(ids, path, number, {"loss_mask": mask} | values), kept=kept)


def _chat_call(trace: JsonObject, path: list[int], number: int, source: str) -> ChatCall:
    """Return the call of node `number`. The tools of its root come first: the trace lists the tools of all paths."""
    nodes = [trace["nodes"][each] for each in (*path, number)]
    messages = [object_at(node, "message", source) for node in nodes]
    return ChatCall(messages[:-1], messages[-1:], nodes[0].get("tools") or trace.get("tools"))


def _skip_reason(trace: JsonObject, ids: list[Any], source: str) -> str | None:
    """Return a reason if a message contains more than text, or the tokens contain a placeholder for media."""
    # The map's keys are the ids of placeholders: {"151655": 1} -> [151655]
    indices = [int(name) for name in object_at(trace, "mm_token_type_id_map", source) if name.isdecimal()]
    messages = [object_at(node, "message", source) for node in trace["nodes"]]
    return MEDIA_REASON if any(np.isin(each, indices).any() for each in ids) else skip_reason(messages)


def _facts(episode: JsonObject, trace: JsonObject, agent: JsonObject, source: str) -> JsonObject:
    """Return the facts of a trace besides its nodes, under the names that every reader uses."""
    task = object_at(trace, "task", source) or object_at(episode, "task", source)
    group = object_at(episode, "group", source).get("id") or task.get("key") or task.get("hash")
    name = agent.get("name")
    # The model of an agent is in its config, or in its calls.
    models = [call.get("model") for call in objects_at(trace, "calls", source)]
    # A reward that was not computed is null.
    rewards = {key: part for key, part in object_at(trace, "rewards", source).items() if part is not None}
    work = object_at(object_at(episode, "run", source), "work", source)
    config = object_at(agent, "config", source)
    return {
        **without(trace, _KNOWN),
        "trajectory_id": trace.get("id"),
        "group_id": f"{group}/{name}" if group is not None and name not in (None, _AGENT) else group,
        "step": work.get("step"),
        "reward": rewards or None,
        "env": object_at(episode, "env", source).get("id"),
        "agent": name,
        "model": config.get("model") or next((model for model in models if model), None),
        "ok": next((ok for ok in (False, True) if ok in (trace.get("ok"), episode.get("ok"))), None),
        "errors": trace.get("errors") or episode.get("errors") or None,
        "stop_condition": trace.get("stop_condition"),
        "info": trace.get("info") or None,
        "extra": object_at(trace, "metrics", source) or None,
    }


FORMAT = Format(
    name="verifiers",
    rank=240,
    program="verifiers (traces.jsonl)",
    recognised_by="`traces` beside `task`, or `nodes` that have a `message` and `sampled`",
    requires="""
        traces:each(nodes:?objects), task;
        traces:!list, nodes:first(message:object, sampled);
        task:!, nodes:first(message:object, sampled)
    """,
    used="""
        env.id group.id run.work.step traces.id traces.task.key traces.agent.name traces.agent.trainable
        traces.tools traces.nodes.tools traces.rewards traces.metrics traces.info traces.stop_condition traces.ok
        traces.errors ok errors
        traces.calls.model traces.calls.finish_reason traces.nodes.parent traces.nodes.message traces.nodes.sampled
        traces.nodes.token_ids traces.nodes.sampling_mask=traces.nodes.token_ids
        traces.nodes.mask traces.nodes.logprobs traces.nodes.advantages traces.nodes.reference_logprobs
        traces.nodes.trainer_logprobs traces.mm_token_type_id_map
    """,
    dropped="""
        traces with images, audio or video (they are skipped);
        traces.nodes.loss_weights (noted);
        traces.nodes.is_content, entropies and timestamp;
        traces.root_reply and numbers of tokens;
        traces.calls but for model, temperature and finish_reason (usage, times);
        timing, rewrites, versions and extra_usage;
        task.data
    """,
    also="traces.nodes.semantic_parents.type traces.nodes.semantic_parents.node",
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    failed="errors ok",
    read=_read_verifiers,
)
