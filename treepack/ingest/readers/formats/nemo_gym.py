"""NeMo Gym's rollouts: a request to OpenAI's Responses API and all that came of it, one line per rollout.

    {"responses_create_params": {"input": [..], "instructions", "tools"}, "response": {"output": [..]}, "reward": 1.0,
     "_ng_task_index": 3, "_ng_rollout_index": 0}                        rollout "3/0" of the group "3"

`output` holds the whole rollout, results of tools and what the user said included. The last item of each turn of the
model carries, where they were asked for, `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`: the
call's exact tokens, which are then used instead of the text. Reasoning is kept under `summary`. Where `output` is a
list of lists (Aviary's transitions), each of them holds all items up to the end of a call and of what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from treepack.ingest.readers.calls import ChatCall, TokenCall, read_calls, read_chats
from treepack.ingest.readers.fields import GROUPS, IDS, ReadOptions
from treepack.ingest.readers.format import EVERYTHING, OBJECT, Format
from treepack.ingest.readers.messages import MEDIA_REASON, is_text
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.response_items import Item, messages_of_items
from treepack.ingest.readers.trajectories import with_notes, without
from treepack.trajectory import Skipped, Trajectory

TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"
PROMPT, GENERATION = "prompt_token_ids", "generation_token_ids"
PLACEHOLDER = [0]  # prompt and generation of an empty message that stands for an output without any
USED = frozenset({"responses_create_params", "response", TASK, ROLLOUT, "agent_ref"})
SOME_NOTE = "token ids of some turns only, not used"


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of `record`, one if its calls continue each other; why it has none.

    Raises:
        TreepackError: items that are none, or token ids that contradict each other.
    """
    value, source = record.value, record.source
    response = value.get("response")
    if not isinstance(response, dict) or response.get("output") is None:
        yield Skipped(source, "task without a response")
        return
    if _is_masked(value):
        yield Skipped(source, "masked by its environment (mask_sample)")
        return
    steps = _is_steps(response["output"])
    calls = _calls_of_steps(value, source) if steps else _calls_of_items(value, source)
    if not all(is_text([*chat.prompt, *chat.response]) for chat in calls.chats):
        yield Skipped(source, MEDIA_REASON)
        return
    slim = replace(record, value=_description(value, response))
    if calls.tokens and calls.have_all_ids:
        yield from read_calls(slim, calls.tokens, options)
        return
    notes = (*calls.notes, SOME_NOTE) if calls.tokens else calls.notes
    yield from with_notes(read_chats(slim, calls.chats, options), notes)


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of a rollout by their messages, those that have token ids by these, and whether all do."""

    chats: list[ChatCall]
    tokens: list[TokenCall]
    have_all_ids: bool
    notes: tuple[str, ...]


def _is_steps(output: Any) -> bool:
    return isinstance(output, list) and bool(output) and all(isinstance(items, list) for items in output)


def _calls_of_items(value: dict[str, Any], source: str) -> _Calls:
    """One conversation of all input and output, and a call of token ids for each item that has them."""
    params, response = value["responses_create_params"], value["response"]
    output = messages_of_items(response["output"], source=f"{source}: output", summaries=True)
    instructions = params.get("instructions") or response.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    given = messages_of_items(params.get("input"), source=f"{source}: input", summaries=True)
    pairs = zip(output.messages, output.items, strict=True)
    turns = [items[-1] for message, items in pairs if message["role"] == "assistant"]
    chat = ChatCall([*system, *given.messages], output.messages, params.get("tools") or None)
    items = [] if isinstance(response["output"], str) else response["output"]
    tokens = [_call(item) for item in items if _has_ids(item)]
    notes = tuple(dict.fromkeys((*given.notes, *output.notes)))
    return _Calls([chat], tokens, all(map(_has_ids, turns)), notes)


def _calls_of_steps(value: dict[str, Any], source: str) -> _Calls:
    """A call for each step: its last turn, asked with what is before it."""
    tools = value["responses_create_params"].get("tools") or None
    chats, tokens, notes = [], [], dict[str, None]()
    for items in value["response"]["output"]:
        step = messages_of_items(items, source=f"{source}: output", summaries=True)
        notes |= dict.fromkeys(step.notes)
        turns = [place for place, message in enumerate(step.messages) if message["role"] == "assistant"]
        if turns:
            chats.append(ChatCall(step.messages[: turns[-1]], step.messages[turns[-1] :], tools))
            tokens += [_call(item) for item in step.items[turns[-1]] if _has_ids(item)]
    return _Calls(chats, tokens, len(tokens) == len(chats), tuple(notes))


def _has_ids(item: Item) -> bool:
    return bool(item.get(PROMPT)) and bool(item.get(GENERATION)) and item[GENERATION] != PLACEHOLDER


def _call(item: Item) -> TokenCall:
    return TokenCall(item[PROMPT], item[GENERATION], {"rollout_log_probs": item.get("generation_log_probs")})


def _is_masked(value: dict[str, Any]) -> bool:
    config = value.get("instance_config")
    return value.get("mask_sample") is True or (isinstance(config, dict) and config.get("mask_sample") is True)


def _description(value: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """What the record says besides its calls, under the names that all formats share."""
    rest = without(value, USED)
    agent = value.get("agent_ref")
    found = {"model": response.get("model") or None, "agent": agent.get("name") if isinstance(agent, dict) else None}
    task = response.get("group_id") if value.get(TASK) is None else value[TASK]
    if task is None:
        return found | rest
    found["group_id"] = task
    if value.get(ROLLOUT) is not None:
        found["trajectory_id"] = f"{task}/{value[ROLLOUT]}"
    # The task's own ids are those of its data set, which may repeat; they are kept as metadata.
    own = {name: rest.pop(name) for name in (*IDS, *GROUPS) if isinstance(rest.get(name), str | int)}
    return found | rest | ({"metadata": own} if own and "metadata" not in rest else {})


FORMAT = Format(
    name="nemo-gym",
    program="NeMo Gym",
    recognised_by="`responses_create_params`",
    requires=[{"responses_create_params": OBJECT}],
    used="""
        responses_create_params.input responses_create_params.instructions responses_create_params.tools
        response.output response.model response.output.prompt_token_ids response.output.generation_token_ids
        response.output.generation_log_probs reward _ng_task_index _ng_rollout_index agent_ref.name mask_sample
    """.split(),
    dropped=(
        "routed_experts",
        "the other settings of request and response (sampling, usage)",
        "reasoning.encrypted_content",
        "hosted tools but mcp_call (named in a note)",
    ),
    keeps=EVERYTHING,
    read=read,
)
