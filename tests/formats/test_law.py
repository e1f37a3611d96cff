"""Nothing of a record vanishes: every value is used or named, and no change of a field trains other turns in silence.

`support.law` defines the changes, and when a value counts as seen. The samples of all formats are tried, one field of
each path; the slow tests try all records, all places, and two changes at once.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import law
from support.paths import ROLLOUTS, SAMPLE_DATA
from treepack.calls.copied_turns import COPIED_NOTE
from treepack.cluster.build import build_trie_on
from treepack.cluster.scheduler import LocalScheduler
from treepack.files.input_files.inputs import list_inputs
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.ingest.options import BuildOptions
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON
from treepack.ingest.readers.messages.normal_form import EMPTY_NOTE
from treepack.ingest.readers.messages.prefills import NEW_TURN_NOTE
from treepack.ingest.readers.registry import formats_by_name
from treepack.sequences import num_trained
from treepack.trajectory import AnswerBounds, Chat, PromptCompletion, Skipped, Trajectory
from treepack.trie.directory import build_trie_directory, read_to_trie

# Values that no reader needs although their field is declared, because other records of the format need it.
NOT_NEEDED = {
    "swe-agent": {
        "history.is_demo": "the calls are in the steps, which name their prompts",
        "trajectory.query.is_demo": "a demonstration is in the prompt",
    },
    "dars": {"is_demo": "the demonstrations of the sample are messages of the user"},
    "intercode": {
        "logs.1.task_id": "the rollout is skipped",
        "logs.1.summary.max_reward": "the rollout is skipped",
        "1.turn_history.observations": "the program acts alone after its last turn",
        "1.turn_history.thoughts": "one of them is the mark of the last turn",
    },
    "verifiers": {"traces.mm_token_type_id_map.900": "the ids of placeholders are its keys"},
    "verifiers-results": {"completion.tool_calls": "the steps of the trajectory have the same calls"},
    "verl": {
        "extra_fields.tool_rewards": "parts of the score",
        # Of a table with a row for each token, the law changes the first two rows and the last one.
        "teacher_ids": "these rows are about tokens that are not trained",
        "teacher_logprobs": "these rows are about tokens that are not trained",
    },
    "tinker": {"trajectories_G.transitions.metrics.stop/completed": "the metrics of the last transition count"},
    "tinker-datum": {"shape": "the data have the same length"},
    "cline": {"finish_reason": "a field of a message, and the sample has a whole session in one record"},
    "lm-eval": {"acc": "the sample is not a rollout"},
    "openinference": {
        "start_time": "calls that continue each other are joined in any order",
        "attributes.annotations.0.annotation.name": "a name to choose one of several scores",
    },
    "otel-genai": {
        "start_time": "calls that continue each other are joined in any order",
        "parentSpanId": "no call is inside another one",
    },
    "langfuse": dict.fromkeys(("start_time", "startTime"), "calls that continue each other are joined in any order"),
    "litellm": {"startTime": "calls that continue each other are joined in any order"},
    "opencode": {"messages.parts.synthetic": "the texts of a message of the user are sent, whoever wrote them"},
    "langsmith": {
        "start_time": "dotted_order comes first",
        "outputs.generations.text": "the message comes first",
        "extra.metadata.ls_temperature": "the parameters of the call come first",
    },
}
# Changes that train something else, each with its reason.
LEGAL = {
    "alpaca": {"renamed: kto_tag": "without a label all answers are trained"},
    "sharegpt": {"renamed: kto_tag": "without a label all answers are trained"},
    "ms-swift": {
        "renamed: label": "without a label all answers are trained",
        **dict.fromkeys(
            ("renamed: rejected_response", "null: rejected_response"), "without a second answer all turns are trained"
        ),
    },
    "trl-packed": {"true: seq_lengths": "token ids beside a flag of this name"},
    "text-trees": {"true: children": "a conversation beside a flag of this name"},
    "pi": {"null: parentId": "an entry without a parent begins a branch"},
    "claude-code": {"null: parentUuid": "a line of the user without a parent begins a conversation"},
    "swe-agent": {
        "empty: history.agent": "a history of one agent fewer",
        "empty: trajectory.query.content": "the prompt does not continue the calls before it",
    },
    "auto-code-rover": dict.fromkeys(
        ("empty: content", "list of texts: content"), "an earlier round that is not the beginning of the last one"
    ),
    "openai-responses": {"null: conversation.id": "a call of no conversation is a rollout of its own"},
    "codex": {
        "empty: metadata.compaction_output": "an answer without this flag is not a summary",
        "null: metadata.compaction_output": "an answer without this flag is not a summary",
    },
    "openinference": dict.fromkeys(("null: start_time", "empty: start_time"), "a call without a time comes first"),
    "harbor-traces": {"list of texts: trace_source": "a trace of a different origin"},
    "opencode": {
        "command": "an argument of a call",
        "null: info.summary": "an answer without this flag is not a summary",
        "null: parts.synthetic": "a text without this flag is the model's",
    },
    "cline": {
        f"{kind}: {name}Parent": "a message without this name is not replaced"
        for kind in ("null", "empty")
        for name in ("condense", "truncation")
    },
    "intercode": {"up: logs.0": "a rollout beside the logs"},
}


def files_of(name: str) -> Iterator[list[Record]]:
    (sample,) = (each for each in ROLLOUTS.iterdir() if each.name.partition(".")[0] == name)
    for path in list_inputs([sample])[0]:
        yield list(read_records(path))


def excused(name: str, path: str, reasons: dict[str, dict[str, str]]) -> bool:
    """Return whether `path`, or its last name, has a reason."""
    return bool({path, path.rpartition(".")[2]} & reasons.get(name, {}).keys())


@pytest.mark.parametrize("name", formats_by_name())
def test_every_value_of_a_sample_is_used_or_named(name: str) -> None:
    fates = law.Fates()
    for records in files_of(name):
        law.follow(records, fates)
    assert [path for path in fates.lost if not excused(name, path, NOT_NEEDED)] == []


@pytest.mark.parametrize("name", formats_by_name())
def test_no_note_calls_a_value_unused_that_is_used(name: str) -> None:
    wrong = [path for records in files_of(name) for path in law.misnamed(records)]
    assert [path for path in wrong if not excused(name, path, NOT_NEEDED)] == []


@pytest.mark.parametrize("name", ["openai-chat/calls", "openai-responses"])
def test_no_note_calls_a_value_unused_that_is_used_in_the_other_form_of_a_call(name: str) -> None:
    (records,) = (each for each in files_of(name.partition("/")[0]) if f"/{name}." in each[0].path)
    others = [replace(record, value=law.other_form(record.value)) for record in records]
    assert law.read(others).trained == law.read(records).trained != []
    assert law.misnamed(others) == []
    declared = {path.rpartition(".")[2] for path in formats_by_name()[name.partition("/")[0]].used}
    named = {note.split("'")[1].rpartition(".")[2] for note in law.read(others).notes if note.startswith("field")}
    assert declared & named <= {"content"}  # the text of a second choice


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("name", formats_by_name())
def test_a_changed_field_never_trains_other_turns_in_silence(name: str, every: int) -> None:
    found = [change for records in files_of(name) for change in law.silent(records, every=every)]
    assert [change for change in found if not excused(name, change, LEGAL)] == []


@pytest.mark.parametrize("name", formats_by_name())
def test_no_answer_mask_or_cut_beside_the_known_fields_is_ignored(name: str) -> None:
    found = [field for records in files_of(name) for field in law.unnoticed(records)]
    assert [field for field in found if not excused(name, field, NOT_NEEDED)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", formats_by_name())
def test_two_changed_fields_never_train_other_turns_in_silence(name: str, seed: int) -> None:
    rng = random.Random(f"{name}{seed}")
    for records in files_of(name):
        base = law.read(records)
        for _ in range(9):
            place = rng.randrange(len(records))
            one = law.changed_by_chance(records, place, rng, base)
            # After a harmless change; the second may undo the first, so it is compared with the records before both.
            is_harmless = one is not None and one.trains_same
            two = law.changed_by_chance(one.records, place, rng, base) if one and is_harmless else None
            for change in (one, two):
                if change is not None and change.is_silent:
                    assert excused(name, change.name, LEGAL), change.name


# Changes that gave the model another prompt in silence, by the file of the sample that has the field.
PROMPTS = {
    "claude-code/session": [
        "list of texts: subtype",
        "true: message.content",
        "renamed: compactMetadata.preservedSegment.tailUuid",
        "true: compactMetadata.preservedSegment",
    ],
    "codex/rollout": ["renamed: payload.replacement_history.content"],
    "gemini-cli/session-2026-01-02T03-09": ["list of texts: $rewindTo", "true: id"],
    "inspect/": ["renamed: samples.attachments", "list of texts: samples.attachments.h1"],
    "nemo-gym": ["true: responses_create_params.instructions"],
    "openai-responses": ["renamed: input.content", "renamed: input.output", "list of texts: instructions"],
    "opencode/messages": ["list of texts: info.id"],
    "openhands/events": ["JSON text: system_prompt", "renamed: system_prompt.text", "true: forgotten_event_ids"],
    "openhands/points": ["list of texts: instruction"],
    "tau2/one-file/results": ["true: info.environment_info.policy"],
}


@pytest.mark.parametrize(("file", "change"), [(file, change) for file, names in PROMPTS.items() for change in names])
def test_a_changed_field_never_gives_another_prompt_in_silence(file: str, change: str) -> None:
    beginning = f"{ROLLOUTS}/{file}"
    (records,) = (each for each in files_of(file.partition("/")[0]) if each[0].path.startswith(beginning))
    assert law.silently_read(records, change) == 0


ASKED = [{"role": "user", "content": "How many bolts?"}]
SAID = [*ASKED, {"role": "assistant", "content": "Seven bolts."}]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an answer beside the messages of a request": (
        {
            "messages": [
                {"role": "user", "content": "How many bolts?"},
                {"role": "assistant", "content": "Of an earlier call."},
                {"role": "user", "content": "And nuts?"},
            ],
            "response": "Four nuts.",
        },
        ["Four nuts."],
    ),
    "prompt, completion and all messages": (
        {
            "prompt": [{"role": "user", "content": "Bolts?"}],
            "completion": [{"role": "assistant", "content": "Seven bolts."}],
            "messages": [{"role": "user", "content": "Bolts?"}, {"role": "assistant", "content": "Seven bolts."}],
        },
        ["Seven bolts."],
    ),
    "an answer that the messages end with": (
        {
            "messages": [
                {"role": "user", "content": "Bolts?"},
                {"role": "assistant", "content": "Seven bolts."},
            ],
            "output": "Seven bolts.",
        },
        ["Seven bolts."],
    ),
    "messages beside a pair": (
        {
            "prompt": "Name a bolt.",
            "chosen": [{"role": "user", "content": "Name a bolt."}, {"role": "assistant", "content": "An M6 bolt."}],
            "rejected": [{"role": "user", "content": "Name a bolt."}, {"role": "assistant", "content": "A nut."}],
            "messages": [{"role": "user", "content": "Name a bolt."}, {"role": "assistant", "content": "An M6 bolt."}],
        },
        ["An M6 bolt.", "A nut."],
    ),
}


RESPONSES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a text": lambda thought: {"text": "Seven bolts."} | thought,
    "a completion": lambda thought: {"completion": "Seven bolts."} | thought,
    "a choice": lambda thought: {"choices": [{"text": "Seven bolts."} | thought]},
    "a message": lambda thought: {"choices": [{"message": {"content": "Seven bolts."} | thought}]},
}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking", "reasoningText"])
@pytest.mark.parametrize("form", RESPONSES)
def test_a_thought_beside_the_text_of_a_response_is_trained(form: str, name: str) -> None:
    value = {"messages": ASKED, "response": RESPONSES[form]({name: "Zq7: I count."})}
    (((_, said),),) = law.read([Record("r:1", "r", value)]).trained
    assert said[:2] == ("Seven bolts.", "Zq7: I count.")


@pytest.mark.parametrize("form", ["a choice", "a message"])
def test_a_response_as_json_text_in_a_column_is_the_response(form: str) -> None:
    value = {"asked": ASKED, "logged": json.dumps(RESPONSES[form]({"id": "zq7"}))}
    records = [Record("r:1", "r", value)]
    reading = law.read_edited(records, formats_by_name()["columns"], "prompt=asked,answer=logged")
    assert [said[0] for turns in reading.trained for _, said in turns] == ["Seven bolts."]


@pytest.mark.parametrize(("value", "expected"), CASES.values(), ids=CASES)
def test_an_answer_beside_messages_is_trained_alone(value: dict[str, Any], expected: list[str]) -> None:
    reading = law.read([Record("r:1", "r", value)])
    assert not reading.refusal
    assert [said[0] for turns in reading.trained for _, said in turns] == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two answers": (
        {"messages": SAID, "completion": "Eight."},
        "messages end with an answer, and completion is another",
    ),
    "different answers": ({"messages": ASKED, "completion": "A", "response": "B"}, "are different answers"),
    "an answer that is an object": ({"messages": ASKED, "output": {"score": 1}}, "expected the answer to the messages"),
    "another prompt": ({"messages": SAID, "prompt": "Nuts?"}, "messages do not contain the prompt"),
    "one side of a pair": (
        {"messages": SAID, "rejected": "Eight."},
        "the field 'rejected', which can contain an answer",
    ),
    "a mask": ({"messages": SAID, "assistant_mask": [0, 1]}, "the field 'assistant_mask', which can contain a mask"),
    "a mask inside metadata": ({"messages": SAID, "info": {"loss_mask": [0, 1]}}, "the field 'info.loss_mask'"),
    "text beside the messages": ({"messages": SAID, "text": "Something else."}, "the field 'text', which can contain"),
    "a completion beside a pair": (
        {"prompt": "Bolts?", "chosen": "Seven.", "rejected": "Eight.", "completion": "Nine."},
        "has a completion beside chosen and rejected",
    ),
    "a mask under a different name": (
        {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "is_model_token": [1, 0, 1]},
        "is_model_token has 0 or 1 for each token and may be a mask",
    ),
    "a result that messages wait for": ({"messages": [*SAID, *ASKED], "result": "Eight bolts."}, "may be the answer"),
    "a mask as text": (
        {"prompt_ids": [5, 6], "response_ids": [7, 8], "response_mask": "11"},
        "response_mask is the text",
    ),
}


@pytest.mark.parametrize(("value", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_field_that_decides_and_is_not_understood_refuses_the_record(value: dict[str, Any], sentence: str) -> None:
    assert sentence in law.read([Record("r:1", "r", value)]).refusal


def test_a_text_that_a_template_made_of_the_messages_is_no_second_answer() -> None:
    reading = law.read([Record("r:1", "r", {"messages": SAID, "text": "<u>How many bolts?</u><a>Seven bolts.</a>"})])
    assert list(reading.notes) == ["field 'text' not used, because it repeats the messages"]


@pytest.mark.parametrize(
    "value",
    [
        {
            "instruction": "How many bolts?",
            "input": "In all.",
            "output": "Seven bolts.",
            "text": "Q: How many bolts? (In all.) A: Seven bolts.",
        },
        {
            "conversations": [{"from": "human", "value": "Bolts?"}, {"from": "gpt", "value": "Seven."}],
            "response": "Seven.",
        },
    ],
)
def test_a_copy_of_the_answer_is_noted_and_no_second_answer(value: dict[str, Any]) -> None:
    reading = law.read([Record("r:1", "r", value)])
    assert not reading.refusal
    assert [note for note in reading.notes if note.endswith("not used, because it repeats the messages")]
    other = law.read([Record("r:1", "r", {**value, "response": "Another answer."})])
    assert "the field 'response', which can contain an answer" in other.refusal


def test_a_mask_that_is_json_text_is_read_as_a_list() -> None:
    ids: dict[str, Any] = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}
    text, plain = ({**ids, "response_mask": mask} for mask in ("[1, 0, 1]", [1, 0, 1]))
    assert law.read([Record("r:1", "r", text)]).trained == law.read([Record("r:1", "r", plain)]).trained


def test_unused_fields_of_records_that_are_read_together_are_named_once(tmp_path: Path) -> None:
    call = {"messages": ASKED, "choices": [{"message": {"role": "assistant", "content": "Seven."}}]}
    records = [Record(f"r:{n}", "r", call | {"session_id": "s", "cost": {"usd": n}}) for n in (1, 2)]
    reading = law.read(records)
    assert reading.notes["field 'cost.usd' not used"] == 1


@pytest.mark.parametrize("name", formats_by_name())
def test_blocks_of_an_answer_keep_their_order(name: str) -> None:
    for records in files_of(name):
        for changed in law.with_answer(records, law.MIXED):
            reading = law.read(changed, law.read(records).form)
            for said in law.said_in_order(reading):
                assert law.order_of_marks(said) in ([], ["first", "second", "third", "fourth", "fifth"])


@pytest.mark.parametrize("name", formats_by_name())
def test_a_result_inside_an_answer_is_the_result_of_its_call(name: str) -> None:
    for records in files_of(name):
        for changed in law.with_answer(records, law.WITH_RESULT):
            reading = law.read(changed, law.read(records).form)
            for said in law.said_in_order(reading):
                assert law.order_of_marks(said) in ([], ["first", "second", "third", "fourth"])
                assert [trained for text, trained in said if text == "Zq7 third."] in ([], [False])


# `law.MIXED` in the parts of libraries and programs, by the kind of each part.
PARTS: dict[str, dict[str, Callable[[Any], dict[str, Any]]]] = {
    "AI SDK": {
        "text": lambda said: {"type": "text", "text": said},
        "thinking": lambda said: {"type": "reasoning", "text": said},
        "tool_use": lambda call: {"type": "tool-call", "toolCallId": "c", "toolName": "f", "input": call},
        "tool_result": lambda said: {"type": "tool-result", "toolCallId": "c", "output": {"value": said}},
    },
    "OpenTelemetry": {
        "text": lambda said: {"type": "text", "content": said},
        "thinking": lambda said: {"type": "reasoning", "content": said},
        "tool_use": lambda call: {"type": "tool_call", "id": "c", "name": "f", "arguments": call},
        "tool_result": lambda said: {"type": "tool_call_response", "id": "c", "response": said},
    },
    "Gemini": {
        "text": lambda said: {"text": said},
        "thinking": lambda said: {"text": said, "thought": True},
        "tool_use": lambda call: {"functionCall": {"id": "c", "name": "f", "args": call}},
        "tool_result": lambda said: {"functionResponse": {"id": "c", "name": "f", "response": {"output": said}}},
    },
    "OpenInference": {
        "text": lambda said: {"message_content": {"type": "text", "text": said}},
        "thinking": lambda said: {"message_content": {"type": "reasoning", "text": said}},
        "tool_use": lambda call: {
            "tool_call": {"id": "c", "function": {"name": "f", "arguments": json.dumps(call)}},
        },
    },
    "pi": {
        "text": lambda said: {"type": "text", "text": said},
        "thinking": lambda said: {"type": "thinking", "thinking": said},
        "tool_use": lambda call: {"type": "toolCall", "id": "c", "name": "f", "arguments": call},
    },
    "opencode": {
        "text": lambda said: {"type": "text", "text": said},
        "thinking": lambda said: {"type": "reasoning", "text": said},
        "tool_use": lambda call: {"type": "tool", "callID": "c", "tool": "f", "state": {"input": call}},
    },
}


def _in_parts(name: str, blocks: list[dict[str, Any]]) -> list[Any]:
    """The values of a file whose answer, and in some formats whose prompt, has the parts of `blocks`."""
    values = [block.get(block["type"]) or block.get("input") or block.get("content") for block in blocks]
    parts = [PARTS[name][block["type"]](value) for block, value in zip(blocks, values, strict=True)]
    later = {"role": "user", "content": "Nuts?"}
    if name == "AI SDK":
        said = {"role": "assistant", "content": parts}
        return [GENERATION | CLAUDE | {"input": {"messages": [ASK_JSON, said, later]}, "output": said}]
    if name == "OpenTelemetry":
        span, said = _span("gen_ai", "claude-x"), {"role": "assistant", "parts": parts}
        span["attributes"] |= {"gen_ai.input.messages": [ASK_JSON, said, later], "gen_ai.output.messages": [said]}
        return [span]
    if name == "OpenInference":
        span = _span("llm", "claude-x")
        span["attributes"] = {key: each for key, each in span["attributes"].items() if "_messages.1" not in key}
        del span["attributes"]["llm.output_messages.0.message.content"]
        span["attributes"]["llm.output_messages.0.message.contents"] = parts
        return [span]
    if name == "Gemini":
        said = {"role": "model", "parts": parts}
        asked = [{"role": role, "parts": [{"text": "Bolts?"}]} for role in ("user", "user")]
        output = {"candidates": [{"content": said, "finishReason": "STOP"}]}
        return [GENERATION | {"input": {"contents": [asked[0], said, asked[1]]}, "output": output}]
    if name == "pi":
        return [*_pi("s")[:2], _pi("s")[2] | {"message": {"role": "assistant", "content": parts}}]
    messages = [{"info": {"role": role}, "parts": [TEXT_BLOCK]} for role in ("user", "assistant")]
    return [{"info": {"id": "s"}, "messages": [messages[0], messages[1] | {"parts": [{"type": "step-start"}, *parts]}]}]


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_an_answer_keep_their_order_in_each_form(name: str) -> None:
    reading = law.read([Record(f"r:{number}", "r", value) for number, value in enumerate(_in_parts(name, law.MIXED))])
    assert not reading.refusal
    (said,) = law.said_in_order(reading)
    marks = ["first", "second", "third", "fourth", "fifth"]
    assert law.order_of_marks([each for each in said if each[1]]) == marks
    assert law.order_of_marks([each for each in said if not each[1]]) in ([], marks)


@pytest.mark.parametrize("name", [name for name in PARTS if "tool_result" in PARTS[name]])
def test_a_result_among_the_parts_of_an_answer_is_that_of_its_call(name: str) -> None:
    reading = law.read([Record("r:1", "r", value) for value in _in_parts(name, law.WITH_RESULT)])
    said = law.said_in_order(reading)[0][-4:]
    assert law.order_of_marks(said) == ["first", "second", "third", "fourth"]
    assert [weight for _, weight in said] == [True, True, False, True]


# A line of lm-eval is a rollout, and what it has beside the known fields is metadata.
@pytest.mark.parametrize("name", sorted(formats_by_name().keys() - {"lm-eval"}))
def test_a_flag_of_turns_is_refused_and_obeyed_or_ignored_as_the_user_says(name: str) -> None:
    for records in files_of(name):
        if (form := law.read(records).form) is None:
            continue
        for rollout in [records] if form.read_file else [[record] for record in records]:
            said = law.said_alone(law.read(rollout, form))
            for flagged, excluded in law.with_flags(rollout) if said else ():
                reading = law.read(flagged, form)
                # A part of Gemini with an unknown field is none that is read.
                if not reading.refusal and not reading.trained:
                    continue
                assert f"mask={law.FLAG} " in reading.refusal
                assert f"ignore={law.FLAG}" in reading.refusal
                assert law.said_alone(law.read_edited(flagged, form, f"ignore={law.FLAG}")) == said
                masked = law.read_edited(flagged, form, f"mask={law.FLAG}")
                if "cannot be told apart" not in masked.refusal:
                    assert law.said_alone(masked) == [key for key in said if key not in excluded]


FLAGS_OF_NO_TURNS: dict[str, list[dict[str, Any]]] = {
    "an argument": [
        {"tool_calls": [{"function": {"name": "look", "arguments": {"deep": flag}}}]} for flag in (True, False)
    ],
    "a flag of a call": [
        {"tool_calls": [{"approved": flag, "function": {"name": "look", "arguments": {"at": f"zq7 {flag}"}}}]}
        for flag in (True, False)
    ],
    "a number of the turn": [{"extra": {"turn_index": place}} for place in (0, 1)],
    "more numbers than 0 and 1": [{"extra": {"bolts": place}} for place in (0, 1, 2)],
    "what is known of the program": [{"is_error": flag} for flag in (True, False)],
    "a flag of both turns": [{"learnable": True}, {"learnable": True}],
}


@pytest.mark.parametrize("turns", FLAGS_OF_NO_TURNS.values(), ids=FLAGS_OF_NO_TURNS)
def test_a_field_that_is_no_flag_of_turns_is_not_refused(turns: list[dict[str, Any]]) -> None:
    messages = [each for k, turn in enumerate(turns) for each in (*ASKED, {**SAID[1], "content": f"Zq7 {k}."} | turn)]
    assert len(law.read([Record("r:1", "r", {"messages": messages})]).trained[0]) == len(turns)


def test_the_result_of_a_rollout_is_no_flag_of_its_turns() -> None:
    (record,) = (each for records in files_of("tau2") for each in records if "simulations" in each.value)
    rollouts = [
        each | {"solved": flag, "reward_info": {"db_match": flag, "asked": each["messages"]}}
        for flag in (True, False)
        for each in record.value["simulations"]
    ]
    assert law.read([replace(record, value=record.value | {"simulations": rollouts})]).trained


def test_a_flag_of_other_speakers_is_not_refused() -> None:
    messages = [{**SAID[0], "liked": True}, SAID[1], {**SAID[0], "liked": False}, SAID[1]]
    assert law.read([Record("r:1", "r", {"messages": messages})]).trained


def test_equal_texts_get_the_flags_of_their_own_turns() -> None:
    steps = [{"learnable": flag} for flag in (True, False, True)]
    messages = [each for step in steps for each in (*ASKED, SAID[1] | step)]
    records = [Record("r:1", "r", {"messages": messages})]
    (item,) = law.read_edited(records, formats_by_name()["chat"], "mask=learnable").items
    assert isinstance(item, Trajectory)
    assert isinstance(item.content, Chat)
    assert item.content.message_weights == [0, 1, 0, 0, 0, 1]


def test_a_null_log_probability_refuses_its_rollout_alone() -> None:
    ids = {"prompt_ids": [5, 6], "response_ids": [7, 8]}
    records = [Record(f"r:{n}", "r", ids | {"logprobs": [-0.1, last]}) for n, last in enumerate((None, -0.2))]
    reading = law.read(records)
    assert reading.notes["bad value of logprobs"] == 1
    assert len(reading.trained) == 1


def test_one_null_log_probability_of_a_batch_refuses_one_rollout() -> None:
    batch: dict[str, Any] = {
        "prompt_token_ids": [[5, 6]] * 2,
        "response_ids": [[7, 8], [7, 9]],
        "loss_masks": [[1, 1]] * 2,
    }
    batch |= {"rewards": [1.0, 0.0], "rollout_logprobs": [[-0.1, None], [-0.1, -0.2]]}
    reading = law.read([Record("r:1", "r", batch)])
    assert not reading.refusal
    assert len(reading.trained) == 1
    assert sum(isinstance(item, Skipped) for item in reading.items) == 1


@pytest.mark.parametrize("arguments", ["stock --all", '{"article": "bo', "7"])
def test_arguments_that_are_no_object_in_json_are_noted(arguments: str) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}]
    reading = law.read([Record("r:1", "r", {"messages": [*ASKED, {"role": "assistant", "tool_calls": calls}]})])
    assert [note for note in reading.notes if note.startswith("arguments of a call are no object in JSON")]


ASK_JSON = {"role": "user", "content": "Bolts as JSON?"}
HEAD = {"role": "assistant", "content": '{"count": '}
REST = {"role": "assistant", "content": "7}"}


def _chat_call(head: dict[str, Any], **request: Any) -> dict[str, Any]:
    choices = [{"message": REST, "finish_reason": "stop"}]
    return {"request": {"model": "m", "messages": [ASK_JSON, head]} | request, "response": {"choices": choices}}


def _span(convention: str, model: str) -> dict[str, Any]:
    if convention == "gen_ai":
        parts = [(each["role"], [{"type": "text", "content": each["content"]}]) for each in (ASK_JSON, HEAD, REST)]
        asked, begun, said = ({"role": role, "parts": part} for role, part in parts)
        attributes: dict[str, Any] = {"gen_ai.request.model": model, "gen_ai.operation.name": "chat"}
        attributes |= {"gen_ai.input.messages": [asked, begun], "gen_ai.output.messages": [said]}
    else:
        attributes = {"openinference.span.kind": "LLM", "llm.model_name": model}
        places = ("llm.input_messages.0", "llm.input_messages.1", "llm.output_messages.0")
        for place, message in zip(places, (ASK_JSON, HEAD, REST), strict=True):
            attributes |= {f"{place}.message.{key}": value for key, value in message.items()}
    ids = {"trace_id": "t", "span_id": "s", "parent_id": None}
    return {"name": "chat", "context": ids, "start_time": "2026-01-01T00:00:00Z", "attributes": attributes}


def _logged(prompt: list[Any], **more: Any) -> dict[str, Any]:
    payload = {"id": "c", "call_type": "acompletion", "status": "success", "messages": prompt, "response_cost": 0}
    return payload | {"response": {"choices": [{"message": REST, "finish_reason": "stop"}]}} | more


CLAUDE = {"model": "claude-x"}
GENERATION = {"id": "o", "traceId": "t", "type": "GENERATION", "output": REST}
ANTHROPIC = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "7}"}],
    "stop_reason": "end_turn",
}
PREFILLED: dict[str, dict[str, Any]] = {
    "Anthropic": {"request": {"model": "m", "messages": [ASK_JSON, HEAD]}, "response": ANTHROPIC},
    "Anthropic's blocks": {
        "request": {"messages": [ASK_JSON, {"role": "assistant", "content": [{"type": "text", "text": '{"count": '}]}]},
        "response": ANTHROPIC,
    },
    "vLLM": _chat_call(HEAD, continue_final_message=True, add_generation_prompt=False),
    "vLLM through a client": _chat_call(HEAD, extra_body={"continue_final_message": True}),
    "an echo of vLLM": _chat_call(HEAD, continue_final_message=True, echo=True),
    "DeepSeek": _chat_call(HEAD | {"prefix": True}),
    "Kimi": _chat_call(HEAD | {"partial": True}),
    "Claude by the API of OpenAI": _chat_call(HEAD, model="anthropic/claude-x"),
    "LiteLLM, Claude": _logged([ASK_JSON, HEAD], **CLAUDE),
    "LiteLLM, a mark": _logged([ASK_JSON, HEAD | {"prefix": True}]),
    "LiteLLM, a parameter": _logged(
        [ASK_JSON, HEAD], model_parameters={"extra_body": {"continue_final_message": True}}
    ),
    "Langfuse, Claude": GENERATION | CLAUDE | {"input": [ASK_JSON, HEAD]},
    "Langfuse, a mark": GENERATION | {"input": {"messages": [ASK_JSON, HEAD | {"partial": True}]}},
    "Langfuse, a request": GENERATION | {"input": {"messages": [ASK_JSON, HEAD], "continue_final_message": True}},
    "OpenTelemetry": _span("gen_ai", "claude-x"),
    "OpenInference": _span("llm", "claude-x"),
    "a record": {"messages": [ASK_JSON, HEAD | {"prefix": True}], "response": "7}"},
    "a record of vLLM": {"messages": [ASK_JSON, HEAD], "response": "7}", "continue_final_message": True},
    "prompt and completion": {"prompt": [ASK_JSON, HEAD | {"prefix": True}], "completion": [REST]},
    "messages alone": {"messages": [ASK_JSON, HEAD | {"prefix": True}, REST]},
}


@pytest.mark.parametrize("name", PREFILLED)
def test_a_prefill_is_the_untrained_head_of_its_turn(name: str) -> None:
    value = json.loads(json.dumps(PREFILLED[name]))
    if "echo" in name:
        value["response"]["choices"][0]["message"]["content"] = '{"count": 7}'
    reading = law.read([Record("r:1", "r", value)])
    assert not reading.refusal
    (item,) = (each for each in reading.items if isinstance(each, Trajectory))
    assert isinstance(item.content, Chat)
    assert [each["content"] for each in item.content.messages] == ["Bolts as JSON?", '{"count": 7}']
    assert item.content.message_bounds == [None, AnswerBounds(prefill=10)]


def test_an_answer_at_the_end_of_a_request_is_no_prefill_without_a_mark() -> None:
    reading = law.read([Record("r:1", "r", _chat_call(HEAD))])
    assert [said[0] for turns in reading.trained for _, said in turns] == ["7}"]
    assert reading.notes[NEW_TURN_NOTE] == 1


def test_a_later_call_continues_a_prefilled_one() -> None:
    whole = {"role": "assistant", "content": '{"count": 7}'}
    later = {"messages": [ASK_JSON, whole, {"role": "user", "content": "Nuts?"}]}
    records = [
        PREFILLED["Anthropic"] | {"session_id": "s"},
        {"request": later, "response": ANTHROPIC, "session_id": "s"},
    ]
    (item,) = law.read([Record(f"r:{n}", "r", value) for n, value in enumerate(records)]).items
    assert isinstance(item, Trajectory)
    assert isinstance(item.content, Chat)
    assert item.content.message_weights == [0, 1, 0, 1]
    assert item.content.message_bounds == [None, AnswerBounds(prefill=10), None, None]


# Fields about the end of an answer, and the stop string: None if the answer ended by its end token.
ENDS: list[tuple[dict[str, Any], str | None]] = [
    ({"finish_reason": "stop", "stop_reason": "Observation:"}, "Observation:"),
    ({"finish_reason": "stop", "stop_reason": "END"}, "END"),
    ({"finish_reason": "tool_calls", "stop_reason": "</tool_call>"}, "</tool_call>"),
    ({"finish_reason": "stop", "matched_stop": "Observation:"}, "Observation:"),
    ({"finish_reason": {"type": "stop", "matched": "\n\n"}}, "\n\n"),
    ({"stop_reason": "stop_sequence", "stop_sequence": "</answer>"}, "</answer>"),
    ({"stop_reason": "stop_sequence"}, ""),
    ({"stop_sequence": "</answer>"}, "</answer>"),
    ({"stop_reason": "</answer>"}, "</answer>"),
    ({"finish_reason": "stop", "stop_reason": None}, None),
    ({"finish_reason": "stop", "stop_reason": 151645}, None),
    ({"finish_reason": "stop", "matched_stop": 151645}, None),
    ({"finish_reason": {"type": "stop", "matched": 151645}}, None),
    ({"finish_reason": "stop", "stop_reason": "end_turn"}, None),
    ({"stop_reason": "end_turn", "stop_sequence": None}, None),
    ({"stop_reason": "end_turn", "stop_sequence": "</answer>"}, None),
    ({"finish_reason": "STOP"}, None),
    ({"stop_reason": "agent_done"}, None),
]
SAYS = {"role": "assistant", "content": "Seven."}
PLACES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a choice": lambda end: _chat_call(ASK_JSON) | {"response": {"choices": [{"message": SAYS} | end]}},
    "LiteLLM": lambda end: _logged([ASK_JSON]) | {"response": {"choices": [{"message": SAYS} | end]}},
    "Langfuse": lambda end: GENERATION | {"input": [ASK_JSON], "output": {"choices": [{"message": SAYS} | end]}},
    "Anthropic": lambda end: {"request": {"messages": [ASK_JSON]}, "response": ANTHROPIC | {"stop_reason": None} | end},
    "a message": lambda end: {"messages": [ASK_JSON, SAYS | end]},
    "beside messages": lambda end: {"messages": [ASK_JSON, SAYS]} | end,
    "a response beside messages": lambda end: {"messages": [ASK_JSON], "response": "Seven."} | end,
    "metadata": lambda end: {"messages": [ASK_JSON, SAYS], "metadata": end},
    "LangChain": lambda end: GENERATION | {"input": [ASK_JSON], "output": SAYS | {"response_metadata": end}},
    "text": lambda end: {"prompt": "Bolts?", "completion": "Seven."} | end,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("end", "stop"), ENDS, ids=[repr(end) for end, _ in ENDS])
def test_an_answer_that_a_stop_string_ended_has_no_end_token(end: dict[str, Any], stop: str | None, place: str) -> None:
    reading = law.read([Record("r:1", "r", PLACES[place](end))])
    (item,) = (each for each in reading.items if isinstance(each, Trajectory))
    assert not item.is_truncated
    if isinstance(item.content, PromptCompletion):
        assert item.content.stop == stop
    else:
        assert isinstance(item.content, Chat)
        last = (item.content.message_bounds or [None])[-1]
        assert (last.stop if last else None) == stop


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("place", ["a record", "a call", "after a prefill", "an earlier turn"])
def test_an_answer_without_text_is_not_trained(place: str, content: Any) -> None:
    empty = {"role": "assistant", "content": content}
    value: dict[str, Any] = {"messages": [ASK_JSON, empty]}
    if place == "a call":
        value = {"request": {"model": "m", "messages": [ASK_JSON]}, "response": {"choices": [{"message": empty}]}}
    elif place == "after a prefill":
        value = {"messages": [ASK_JSON, HEAD | {"prefix": True}, empty]}
    elif place == "an earlier turn":
        value = {"messages": [ASK_JSON, empty, ASK_JSON, SAYS]}
    reading = law.read([Record("r:1", "r", value)])
    assert [said[0] for turns in reading.trained for _, said in turns] == (["Seven."] if "earlier" in place else [])
    assert EMPTY_NOTE in reading.notes or "no call with a response" in reading.notes


RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "output": ({"output": "Zq7."}, "Zq7."),
    "text": ({"content": None, "text": "Zq7."}, "Zq7."),
    "another name": ({"body": "Zq7."}, "refused"),
    "null": ({"content": None}, "noted"),
    "no content": ({}, "noted"),
    "an empty list": ({"content": []}, "noted"),
    "an empty text": ({"content": ""}, "noted"),
    "an image": ({"content": [{"type": "image", "source": {}}]}, "skipped"),
}


@pytest.mark.parametrize(("block", "expected"), RESULTS.values(), ids=RESULTS)
def test_a_result_is_never_empty_in_silence(block: dict[str, Any], expected: str) -> None:
    call = {"type": "tool_use", "id": "c", "name": "stock", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"} | block]}
    messages = [ASK_JSON, {"role": "assistant", "content": [call]}, result, SAYS]
    reading = law.read([Record("r:1", "r", {"messages": messages})])
    if expected == "refused":
        assert "has no content, but body" in reading.refusal
    elif expected == "skipped":
        assert [item.reason for item in reading.items if isinstance(item, Skipped)] == [MEDIA_REASON]
    elif expected == "noted":
        assert reading.notes["message of role 'tool' without text"] == 1
    else:
        assert [text for text, _ in law.said_in_order(reading)[0]][2] == expected


@pytest.mark.parametrize("key", ["response", "result", "output", "content", "none"])
@pytest.mark.parametrize("value", ["Zq7.", "", None, {"text": "Zq7."}])
@pytest.mark.parametrize("name", ["AI SDK", "OpenTelemetry"])
def test_a_result_among_parts_is_never_empty_in_silence(name: str, value: Any, key: str) -> None:
    record = _in_parts(name, law.MIXED)[0]
    record = json.loads(json.dumps(record))
    ids = {"type": "tool-result", "toolCallId": "c"} if name == "AI SDK" else {"type": "tool_call_response", "id": "c"}
    result = {"role": "tool", ("content" if name == "AI SDK" else "parts"): [ids | {key: value}]}
    asked = record["input"]["messages"] if name == "AI SDK" else record["attributes"]["gen_ai.input.messages"]
    asked.insert(2, result)
    reading = law.read([Record("r:1", "r", record)])
    assert not reading.refusal
    is_known = key != "none" and (name, key) != ("AI SDK", "response")
    has_text = any("Zq7." in text for text, _ in law.said_in_order(reading)[0])
    assert has_text == bool(value and is_known)
    assert has_text == (reading.notes["message of role 'tool' without text"] == 0)


def test_a_custom_tool_call_is_a_call_with_its_text() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    value = {"messages": [ASK_JSON, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    reading = law.read([Record("r:1", "r", value)])
    assert [said[2] for turns in reading.trained for _, said in turns] == [[("shell", {"input": "ls"})]]
    assert not reading.notes


@pytest.mark.parametrize("name", [name for name, each in formats_by_name().items() if each.read_file is None])
def test_a_line_alone_is_read_as_among_others(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r.jsonl"
    values = [json.dumps(each.with_lists().value, default=str) for records in files_of(name) for each in records]
    for value in values:
        readings = []
        for lines in ([value], [value, *values[:2]]):
            path.write_text("".join(line + "\n" for line in lines))
            found = law.read_path(path)
            assert not found.refusal
            items = (item for item in found.items if item.source.partition(" ")[0].endswith(":1"))
            readings.append(replace(found, items=tuple(items)))
        assert readings[0].facts == readings[1].facts


# Records that are refused with a remedy: those above, and layouts without a format.
STEP = {"prompt": "Bolts?", "response": "Seven."}
REMEDIES: dict[str, dict[str, Any]] = {
    **{name: value for name, (value, _) in REFUSED.items()},
    "a flag of turns": {"messages": [*ASKED, SAID[1] | {"ok": False}, *ASKED, SAID[1] | {"content": "x", "ok": True}]},
    "a mask of turns": {"messages": [*ASKED, SAID[1] | {"step_loss_mask": True}]},
    "calls in a field of their own": {"messages": [*ASKED, SAID[1] | {"tool_code": "Look."}]},
    "two answers of a question": {"question": "Bolts?", "response": "Seven.", "answer": "Eight."},
    "a prompt beside a trajectory": {"prompt": "Bolts?", "trajectory": SAID},
    "a content under another name": {"messages": [{"role": "user", "utterance": "Bolts?"}, SAID[1]]},
    "names of tools": {"messages": SAID, "tools": "stock, count"},
    "unknown names": {"ask": "Bolts?", "said": "Seven."},
    "unknown roles": {"messages": [{"role": "clerk", "content": "Seven."}, *SAID]},
    "other roles": {"thread": [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]},
    "several rewards": {"messages": SAID, "reward": {"accuracy": 1, "format": 0}},
}


@pytest.mark.parametrize("value", REMEDIES.values(), ids=REMEDIES)
def test_a_remedy_that_is_followed_ends_in_no_other_refusal(tmp_path: Path, value: dict[str, Any]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(value) + "\n")
    refusal = law.read_path(path).refusal
    for line in re.findall(r"--columns '?([^\s;',]\S*[^\s;',])", refusal):
        after = law.read_path(path, line)
        assert not after.refusal or "FIELD" in line, line
    if "rename '" in refusal:
        old, new = re.findall(r"'([^']+)'", refusal)[:2]
        path.write_text(json.dumps({new if key == old else key: each for key, each in value.items()}) + "\n")
        assert not law.read_path(path).refusal


def test_no_name_is_proposed_that_would_not_read_a_line() -> None:
    """The name `sessionId` makes the line one of a session, in which no line is the model's."""
    reading = law.read([Record("r:1", "r", {"type": "canvas_ready", "session_id": "s", "_ts": "t"})])
    assert "has no known format" in reading.refusal
    assert "rename" not in reading.refusal


# A session by its id: each line of the model has an id or a time that a copy keeps.
TIME = "2026-01-01T00:00:00Z"
LINKED: list[dict[str, Any]] = [
    {"uuid": "e1", "parentUuid": None, "type": "user"},
    {"uuid": "e2", "parentUuid": "e1", "type": "assistant"},
]
TEXT_BLOCK = {"type": "text", "text": "Seven."}


def _linked(identity: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    about = {"sessionId": identity, "timestamp": TIME}
    return [about | line | {"message": message} for line, message in zip(LINKED, messages, strict=True)]


def _pi(identity: str) -> list[dict[str, Any]]:
    asked = {"type": "message", "id": "e1", "parentId": None, "message": ASK_JSON}
    answer = {"role": "assistant", "content": [TEXT_BLOCK], "stopReason": "stop"}
    head = {"type": "session", "id": identity, "version": 3, "timestamp": TIME, "cwd": "/w"}
    return [head, asked, {"type": "message", "id": "e2", "parentId": "e1", "message": answer}]


def _codex(identity: str) -> list[dict[str, Any]]:
    meta = {"id": identity} | ({} if identity == "s" else {"forked_from_id": "s"})
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Seven."}]}
    asked = {"type": "message", "role": "user", "content": "Bolts?"}
    items = [{"type": "response_item", "payload": item} for item in (asked, said)]
    return [{"type": "session_meta", "payload": meta}, *items]


def _opencode(identity: str) -> list[dict[str, Any]]:
    about = {"sessionID": identity, "time": {"created": 5}}
    messages = [{"info": about | {"role": role}, "parts": [TEXT_BLOCK]} for role in ("user", "assistant")]
    return [{"info": {"id": identity}, "messages": messages}]


COPIED: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "claude-code": lambda name: _linked(name, ASK_JSON, {"id": "m1", "role": "assistant", "content": [TEXT_BLOCK]}),
    "qwen-code": lambda name: _linked(
        name, {"role": "user", "parts": [{"text": "?"}]}, {"role": "model", "parts": [{"text": "Seven."}]}
    ),
    "gemini-cli": lambda name: [
        {"sessionId": name, "projectHash": "p"},
        {"id": "e1", "type": "user", "content": [{"text": "Bolts?"}]},
        {"id": "e2", "type": "gemini", "content": "Seven."},
    ],
    "pi": _pi,
    "codex": _codex,
    "opencode": _opencode,
    "cline": lambda name: [
        {"version": 1, "sessionId": name, "agent": "lead", "messages": [ASK_JSON | {"ts": 1}, SAYS | {"ts": 2}]}
    ],
}


@pytest.mark.parametrize(("order", "workers"), [("st", 1), ("ts", 2)])
def test_a_copied_session_is_trained_once(tmp_path: Path, order: str, workers: int) -> None:
    inputs = [tmp_path / name / identity for name in COPIED for identity in order]
    for folder in inputs:
        folder.mkdir(parents=True)
        lines = COPIED[folder.parent.name](folder.name)
        # The first user of each program asks something else, so that each has a tree of its own.
        text = "".join(json.dumps(line) + "\n" for line in lines).replace("Seven.", f"Seven of {folder.parent.name}.")
        (folder / f"{folder.name}.jsonl").write_text(text)
    options = BuildOptions(tokenizer=str(SAMPLE_DATA / "tokenizer"), workers=workers)
    trie, log = read_to_trie(inputs, options)
    sources = [Path(source).parts for source in trie.trajectories["source"].to_pylist()]
    assert sorted(next(part for part in source if part in COPIED) for source in sources) == sorted(COPIED)
    assert [item.reason for item in log.skipped] == [COPIED_NOTE] * len(COPIED)
    assert_shares_are_equal(inputs, tmp_path, options)


def assert_shares_are_equal(inputs: list[Path], folder: Path, options: BuildOptions) -> None:
    """Tasks that read a file each build the trie of one process: they know the answers that other files have."""
    build_trie_directory(inputs, folder / "one", options)
    build_trie_on(LocalScheduler(), inputs, folder / "on", options, share_bytes=1)
    manifests = [
        (folder / name / "manifest.json").read_bytes() for name in ("one", "on")
    ]  # with the hashes of all parts
    assert manifests[0] == manifests[1]


def _chatgpt(*letters: str) -> list[dict[str, Any]]:
    """An export with one conversation, whose user and model speak in turns; a letter is a text and the id of a node."""
    nodes: dict[str, Any] = {}
    for parent, name in zip([None, *letters], letters, strict=False):
        role = "user" if name.islower() else "assistant"
        content = {"content_type": "text", "parts": [f"Zq7 {name}."]}
        message = {"id": name, "author": {"role": role}, "content": content, "recipient": "all"}
        nodes[name] = {"id": name, "parent": parent, "children": [], "message": message}
    return [{"title": "t", "conversation_id": "c", "current_node": letters[-1], "mapping": nodes}]


def _checkpoint(*letters: str) -> dict[str, Any]:
    return {
        "clientHistory": [
            {"role": "user" if name.islower() else "model", "parts": [{"text": f"Zq7 {name}."}]} for name in letters
        ],
        "toolCall": {},
    }


def _asked(*letters: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name of each answer among `letters`, and the messages before it and itself."""
    said = [{"role": "user" if name.islower() else "assistant", "content": f"Zq7 {name}."} for name in letters]
    yield from ((name, said[: place + 1]) for place, name in enumerate(letters) if name.isupper())


def _langfuse(*letters: str) -> dict[str, Any]:
    """A page of the observations of a trace."""
    about = {"traceId": "t", "type": "GENERATION"}
    return {
        "data": [
            about | {"id": f"o{name}", "startTime": f"2026-01-01T00:00:0{k}Z", "input": talk[:-1], "output": talk[-1]}
            for k, (name, talk) in enumerate(_asked(*letters))
        ],
        "meta": {"page": len(letters)},
    }


def _langsmith(*letters: str) -> dict[str, Any]:
    about = {"run_type": "llm", "trace_id": "t", "parent_run_id": "p"}
    return {
        "runs": [
            about | {"id": name, "dotted_order": f"1.{k}", "inputs": {"messages": talk[:-1]}, "outputs": talk[-1]}
            for k, (name, talk) in enumerate(_asked(*letters))
        ]
    }


def _spans(*letters: str) -> dict[str, Any]:
    def attribute(name: str, value: Any) -> dict[str, Any]:
        return {"key": f"gen_ai.{name}.messages", "value": {"stringValue": json.dumps(value)}}

    def parts(message: dict[str, Any]) -> dict[str, Any]:
        return {"role": message["role"], "parts": [{"type": "text", "content": message["content"]}]}

    spans = [
        {
            "traceId": "t",
            "spanId": name,
            "startTimeUnixNano": str(k),
            "attributes": [
                attribute("input", [parts(each) for each in talk[:-1]]),
                attribute("output", [parts(talk[-1])]),
            ],
        }
        for k, (name, talk) in enumerate(_asked(*letters))
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def _litellm(*letters: str) -> list[dict[str, Any]]:
    about = {"call_type": "completion", "response_cost": 0, "model_parameters": {}}
    return [
        about | {"id": name, "messages": talk[:-1], "response": {"choices": [{"message": talk[-1]}]}}
        for name, talk in _asked(*letters)
    ]


def _openai_chat(*letters: str) -> list[dict[str, Any]]:
    return [
        {"request": {"messages": talk[:-1]}, "response": {"id": name, "choices": [{"message": talk[-1]}]}}
        for name, talk in _asked(*letters)
    ]


def _anthropic(*letters: str) -> list[dict[str, Any]]:
    return [
        {"request": {"messages": talk[:-1]}, "response": {"id": name, "type": "message", **_blocks(talk[-1], "text")}}
        for name, talk in _asked(*letters)
    ]


def _responses(*letters: str) -> list[dict[str, Any]]:
    return [
        {"id": name, "input": talk[:-1], "output": [{"type": "message", **_blocks(talk[-1], "output_text")}]}
        for name, talk in _asked(*letters)
    ]


def _blocks(message: dict[str, Any], kind: str) -> dict[str, Any]:
    return message | {"content": [{"type": kind, "text": message["content"]}]}


LOGS = [_litellm, _openai_chat, _anthropic, _responses]  # with a record for each answer
EXPORTS = [_chatgpt, _checkpoint, _langfuse, _langsmith, _spans, *LOGS]


@pytest.mark.parametrize("workers", [1, 2])
def test_exports_that_overlap_train_each_answer_once(tmp_path: Path, workers: int) -> None:
    last = [tmp_path / export.__name__ / "3.json" for export in EXPORTS]
    for export, path in zip(EXPORTS, last, strict=True):
        path.parent.mkdir()
        for number, letters in enumerate(("aB", "aBcD", "aBcD", "aBcDeF")):
            text = json.dumps(export(*letters), indent=number).replace("Zq7", f"Zq7 {export.__name__}")
            (path.parent / f"{number}.json").write_text(text)
    inputs = [each for path in last for each in sorted(path.parent.iterdir())]
    options = BuildOptions(tokenizer=str(SAMPLE_DATA / "tokenizer"), workers=workers)
    trie, log = read_to_trie(inputs, options)
    alone = read_to_trie(last, options)[0]
    sources = Counter(Path(source).parts[-2] for source in trie.trajectories["source"].to_pylist())
    assert sources == dict.fromkeys((export.__name__ for export in EXPORTS), 3)
    num_copies = len(EXPORTS) - len(LOGS) + 5 * len(LOGS)
    assert [item.reason for item in log.skipped] == [COPIED_NOTE] * num_copies
    assert num_trained(trie.trajectories) == num_trained(alone.trajectories) > 0
    assert_shares_are_equal(inputs, tmp_path, options)


@pytest.mark.parametrize("export", [_langfuse, _langsmith, _spans])
def test_an_export_that_repeats_a_record_trains_it_once(tmp_path: Path, export: Callable[..., Any]) -> None:
    lines = [json.dumps(export(*letters)) + "\n" for letters in ("aB", "aBcD", "aBcD")]
    options = BuildOptions(tokenizer=str(SAMPLE_DATA / "tokenizer"))
    found = []
    for name, text in (("all", "".join(lines)), ("last", lines[-1])):
        (tmp_path / f"{name}.jsonl").write_text(text)
        found.append(num_trained(read_to_trie([tmp_path / f"{name}.jsonl"], options)[0].trajectories))
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("export", EXPORTS)
def test_an_answer_that_differs_is_no_copy(tmp_path: Path, export: Callable[..., Any]) -> None:
    for number, letters in enumerate(("aB", "aC")):
        text = json.dumps(export(*letters)).replace('"C"', '"B"')  # ChatGPT: another text of the same node
        (tmp_path / f"{number}.json").write_text(text)
    options = BuildOptions(tokenizer=str(SAMPLE_DATA / "tokenizer"))
    trie, log = read_to_trie(sorted(tmp_path.iterdir()), options)
    assert trie.trajectories.num_rows == 2
    assert not log.skipped
