"""Files `results.jsonl` of verifiers before version 1: one rollout per line, next to a `metadata.json` with the model.

    {example_id, prompt, completion, reward, metrics, info, tool_defs, ..., trajectory: [
      {prompt, completion, tokens: {prompt_ids, completion_ids, completion_mask, completion_logprobs}, ...}, ...]}

If every step of the trajectory has tokens, these are read, and steps that continue each other are joined. If not, the
messages of the steps are read, and without steps the prompt and the completion. Tool calls may be JSON text.
"""

from __future__ import annotations

import json
from dataclasses import replace

from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    TreepackError,
    companion_path,
    endings,
    has_fields,
    is_messages,
    object_at,
    objects_at,
    read_calls,
    read_chats,
    read_document,
    shown,
    temperature_of,
    without,
)

_SUMMARY = "metadata.json"
# Fields that become messages, and measurements of the run.
_DROPPED = frozenset(
    """
    prompt completion trajectory tool_defs oai_tools timing token_usage metrics error_chain long_error_chain
    """.split()
)


def _read_verifiers_results(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of one rollout, named `<example>/<line>` or after its steps, in the group of its example.

    Raises:
        TreepackError: steps of a different form, or an error of the readers of tokens and messages.
    """
    if has_fields(record.value, _RUN):
        yield Skipped(record.source, "summary of a run, read with its results", is_rollout=False)
        return
    # Model and settings of the sampler are the same for all lines of the file.
    summary = companion_path(record, _SUMMARY)
    yield from _read_rollout(record, {} if summary is None else read_document(summary), options)


def _read_rollout(record: Record, run: JsonObject, options: ReadOptions) -> Outcomes:
    value, source = record.value, record.source
    steps = objects_at(value, "trajectory", source)
    metrics = object_at(value, "metrics", source)
    repeated = _DROPPED | (metrics.keys() - {"reward"})  # the record repeats each metric as a field
    rest = without(value, repeated)
    rest |= {"trajectory_id": _name(value, steps, record), "extra": metrics or None}
    rest["model"] = rest.get("model") or run.get("model")
    if (temperature := temperature_of(run.get("sampling_args"))) is not None:
        rest = {"temperature": temperature} | rest
    one = replace(record, value=rest)
    tokens = [object_at(step, "tokens", source) for step in steps]
    if steps and all(tokens):
        yield from read_calls(one, [_token_call(step, source) for step in steps], options)
        return
    tools = value.get("tool_defs") or value.get("oai_tools")
    calls = []
    # A record without steps is one call itself.
    for talk in steps or [value]:
        prompt, completion = (_messages(talk, name, source) for name in ("prompt", "completion"))
        ending = endings.raw_of_step(talk) if steps else None
        calls.append(ChatCall(prompt, completion, tools, ending=ending))
    yield from read_chats(one, calls, options)


def _token_call(step: JsonObject, source: str) -> TokenCall:
    tokens = step["tokens"]
    values = {
        "loss_mask": tokens.get("completion_mask"),
        "rollout_log_probs": tokens.get("completion_logprobs"),
        "advantages": step.get("advantage"),
    }
    routes, ending = tokens.get("routed_experts"), endings.raw_of_step(step)
    kept = tokens.get("sampling_mask", tokens.get("kept_tokens"))
    return TokenCall(tokens.get("prompt_ids"), tokens.get("completion_ids"), values, routes, ending, kept)


def _name(value: JsonObject, steps: list[JsonObject], record: Record) -> str:
    """Return the name that the steps share, or the position in the file if they share none."""
    name = steps[0].get("trajectory_id") if steps else None
    # ["t1", "t1"] -> "t1", ["t1", "t2"] -> "<example>/results.jsonl:3"
    shared = isinstance(name, str) and name and all(step.get("trajectory_id") == name for step in steps)
    return str(name) if shared else f"{value['example_id']}/{record.label}"


def _messages(talk: JsonObject, name: str, source: str) -> list[JsonObject]:
    """Return the messages of a prompt or a completion. Text is a message of the user or of the assistant."""
    messages = talk.get(name)
    if messages is None:
        return []
    if isinstance(messages, str):
        return [{"role": "user" if name == "prompt" else "assistant", "content": messages}]
    if not is_messages(messages):
        raise TreepackError(f"{source}: {name} is {shown(messages)}; expected messages or text")
    return [_parse_calls(message, source) for message in messages]


def _parse_calls(message: JsonObject, source: str) -> JsonObject:
    """Return `message` with tool calls that are JSON text parsed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(isinstance(call, str) for call in calls):
        return message
    try:
        return message | {"tool_calls": [json.loads(call) if isinstance(call, str) else call for call in calls]}
    except ValueError as error:
        raise TreepackError(f"{source}: a tool call is not JSON ({error}); expected name and arguments") from None


# The summary of a run, `metadata.json`, is in the folder of its results.
_RUN = "env_id, num_examples, rollouts_per_example"
FORMAT = Format(
    name="verifiers-results",
    rank=250,
    program="verifiers before version 1 (results.jsonl)",
    recognised_by="`example_id`, `prompt` and `completion` beside `reward`, `metrics` or `trajectory`",
    requires=f"""
        example_id, prompt:?talk_or_null, completion:talk_or_null, reward|metrics|trajectory;
        example_id:!, {_RUN}
    """,
    used="""
        example_id prompt completion reward metrics info answer is_truncated tool_defs trajectory.tokens.prompt_ids
        trajectory.tokens.completion_ids trajectory.tokens.completion_mask trajectory.tokens.completion_logprobs
        trajectory.tokens.sampling_mask=trajectory.tokens.prompt_ids
        trajectory.advantage trajectory.is_truncated trajectory.trajectory_id model sampling_args.temperature error
        stop_condition
    """,
    dropped="""
        timing, token_usage, error_chain;
        trajectory.reward (the rollout has its own) and response;
        trajectory.tokens.prompt_mask;
        trajectory.tokens.routed_experts (kept by --keep-routes)
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    failed="error stop_condition",
    needs_folder=True,
    read=_read_verifiers_results,
)
