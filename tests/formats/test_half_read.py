"""Records that are nearly known: they are read as a whole, or refused, and never trained in part."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import law
from treepack.files.input_files.records import Record
from treepack.trajectory import Chat, Skipped, Trajectory

ASKED = [{"role": "user", "content": "Bolts?"}]
EARLIER = [*ASKED, {"role": "assistant", "content": "Of another call."}, {"role": "user", "content": "And nuts?"}]
SAID = [*ASKED, {"role": "assistant", "content": "Seven."}]
CALL = {"id": "c", "function": {"name": "count", "arguments": "{}"}}
CHOICES = [{"message": {"role": "assistant", "content": "Four."}, "finish_reason": "stop"}]
ITEMS = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Four."}]}]


def read(value: dict[str, Any]) -> law.Reading:
    return law.read([Record("r:1", "r", value)])


def chats(value: dict[str, Any]) -> list[Chat]:
    reading = read(value)
    assert not reading.refusal, reading.refusal
    found = [item.content for item in reading.items if isinstance(item, Trajectory)]
    return [content for content in found if isinstance(content, Chat)]


def trained(value: dict[str, Any]) -> list[str]:
    reading = read(value)
    assert not reading.refusal, reading.refusal
    return [said if isinstance(said, str) else said[0] for turns in reading.trained for _, said in turns]


@pytest.mark.parametrize(
    "answer",
    [
        {"response": {"choices": CHOICES}},
        {"response": {"object": "response", "output": ITEMS}},
        {"output": ITEMS},
        {"output": {"text": "Four."}},
        {"response": [{"type": "text", "text": "Four."}]},
        {"raw_response": '{"choices": [{"message": {"role": "assistant", "content": "Four."}}]}'},
        {"completion": '[{"role": "assistant", "content": "Four."}]'},
    ],
)
def test_an_answer_in_the_form_of_an_api_is_trained_alone(answer: dict[str, Any]) -> None:
    assert trained({"messages": EARLIER} | answer) == ["Four."]


@pytest.mark.parametrize(
    "beside",
    [
        {"llm_response": "Four."},
        {"finalAnswer": "Four."},
        {"response_message": {"role": "assistant", "content": "Four."}},
        {"output_texts": ["Four."]},
        {"metadata": {"completion": "Four."}},
        {"tool_calls": [CALL]},
    ],
)
def test_a_name_that_may_be_an_answer_refuses_messages_that_wait_for_one(beside: dict[str, Any]) -> None:
    assert "may be the answer" in read({"messages": EARLIER} | beside).refusal
    assert trained({"messages": SAID} | beside) == ["Seven."]


@pytest.mark.parametrize("beside", [{"expected_answer": "4"}, {"judge_response": "Good."}, {"answer_type": "number"}])
def test_a_reference_or_a_judgement_is_no_answer(beside: dict[str, Any]) -> None:
    assert trained({"messages": EARLIER} | beside) == ["Of another call."]


def test_calls_beside_a_text_are_a_part_of_the_answer() -> None:
    (content,) = chats({"messages": ASKED, "response": "Let me look.", "tool_calls": [CALL]})
    assert [call["function"]["name"] for call in content.messages[-1]["tool_calls"]] == ["count"]


@pytest.mark.parametrize("name", ["question", "query", "input", "problem"])
def test_the_question_beside_a_pair_is_its_prompt(name: str) -> None:
    both = chats({name: "Name a bolt.", "chosen": "An M6 bolt.", "rejected": "A nut.", "system": "Be brief."})
    asked = [[message["content"] for message in content.messages[:-1]] for content in both]
    assert asked == [["Be brief.", "Name a bolt."]] * 2


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message"])
@pytest.mark.parametrize("talk", [{"messages": SAID}, {"prompt": "Bolts?", "completion": "Seven."}])
def test_a_system_prompt_beside_a_conversation_is_its_first_message(talk: dict[str, Any], name: str) -> None:
    (content,) = chats(talk | {name: "Be brief."})
    assert [message["content"] for message in content.messages] == ["Be brief.", "Bolts?", "Seven."]


@pytest.mark.parametrize("name", ["context", "reasoning", "instructions"])
def test_text_beside_question_and_answer_is_named(name: str) -> None:
    reading = read({"question": "Bolts?", "answer": "Seven.", name: "Some text."})
    assert f"field '{name}' is metadata, not trained" in reading.notes


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"instruction": "Add.", "output": "5"}, "input_text"),
        ({"instruction": "Add.", "output": "5"}, "System"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, "system_text"),
        ({"query": "3 + 3?", "response": "6"}, "my_system"),
        ({"chosen": "Assistant: 5", "rejected": "Assistant: 6"}, "prompt_text"),
    ],
)
def test_text_under_nearly_the_name_of_a_prompt_is_named(record: dict[str, Any], name: str) -> None:
    note = f"field '{name}' is metadata, not trained"
    assert note in read(record | {name: "Some text."}).notes
    assert note not in read(record | {name: "17"}).notes


def test_messages_under_a_plural_name_are_answers_of_their_own() -> None:
    answers = [{"role": "assistant", "content": text} for text in ("Seven.", "Eight.")]
    reading = read({"prompt": "Bolts?", "responses": answers, "rewards": [1, 0]})
    assert [item.reward for item in reading.items if isinstance(item, Trajectory)] == [1.0, 0.0]


@pytest.mark.parametrize("field", [{"text": "Eight."}, {"output": "Eight."}, {"skip": True}])
@pytest.mark.parametrize("content", ["", "Seven."])
def test_a_turn_with_another_text_call_or_mark_is_refused(content: str, field: dict[str, Any]) -> None:
    assert read({"messages": [*ASKED, {"role": "assistant", "content": content} | field]}).refusal


@pytest.mark.parametrize(
    "mark", [{"is_masked": True}, {"train_on_input": True}, {"roles_to_train": ["gpt"]}, {"sample_weight": 0.5}]
)
def test_a_mark_of_what_is_trained_refuses_the_record(mark: dict[str, Any]) -> None:
    assert "which can contain a mask or a label" in read({"messages": SAID} | mark).refusal


def test_reasoning_that_is_encrypted_is_none_and_reasoning_in_the_content_is_not_doubled() -> None:
    hidden = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}
    (content,) = chats({"messages": [*ASKED, SAID[1] | hidden]})
    assert "reasoning_content" not in content.messages[-1]
    (content,) = chats(
        {"messages": [*ASKED, {"role": "assistant", "content": "<think>Count.</think>7", "reasoning": "Count."}]}
    )
    assert "reasoning_content" not in content.messages[-1]


def test_a_refusal_part_is_text() -> None:
    part = {"type": "refusal", "refusal": "I cannot count."}
    assert trained({"messages": [*ASKED, {"role": "assistant", "content": [part]}]}) == ["I cannot count."]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "f", "parameters": '{"type": "object", "properties": {"n": {"type": "integer"}}}'},
        {"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]},
        {"toolSpec": {"name": "f", "inputSchema": {"json": SCHEMA}}},
    ],
)
def test_schemas_of_other_apis_have_the_usual_form(tool: dict[str, Any]) -> None:
    (content,) = chats({"messages": SAID, "tools": [tool]})
    assert content.tools == [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def test_ends_of_several_answers_belong_to_one_each() -> None:
    reading = read({"prompt": "Bolts?", "responses": ["Sev", "Eight."], "finish_reasons": ["length", "stop"]})
    assert [item.is_truncated for item in reading.items if isinstance(item, Trajectory)] == [True, False]
    pair = read({"prompt": "Bolts?", "chosen": "Sev", "rejected": "A nut.", "chosen_finish_reason": "length"})
    assert [item.is_truncated for item in pair.items if isinstance(item, Trajectory)] == [True, False]


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({"messages": None}, {"messages": SAID}),
        ({"error": "timeout"}, {"messages": SAID}),
        ({"prompt": "Bolts?", "response": None}, {"prompt": "Bolts?", "response": "Seven."}),
        ({"instruction": "Count.", "output": None}, {"instruction": "Count.", "output": "Seven."}),
    ],
)
def test_a_record_without_an_answer_is_skipped_and_not_the_file(value: dict[str, Any], good: dict[str, Any]) -> None:
    reading = law.read([Record("r:1", "r", good), Record("r:2", "r", value)])
    assert [type(item) for item in reading.items] == [Trajectory, Skipped]


@pytest.mark.parametrize("bad", [["nan"], ["accuracy", 1.0], [None], ["N/A"], [{"name": "accuracy", "score": "x"}]])
def test_a_list_with_a_reward_that_is_missing_skips_the_rollout(bad: list[Any]) -> None:
    (item,) = read({"messages": SAID, "rewards": bad}).items
    assert isinstance(item, Skipped)


STOCK = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object", "properties": {}}}}
TOOL_PLACES: dict[str, dict[str, Any]] = {
    "the system message": {"messages": [{"role": "system", "content": "Help.", "tools": [STOCK]}, *SAID]},
    "its JSON text": {"messages": [{"role": "system", "content": "Help.", "functions": json.dumps([STOCK])}, *SAID]},
    "metadata": {"messages": SAID, "metadata": {"tools": [STOCK], "shelf": "A"}},
    "metadata beside prompt and answer": {"prompt": ASKED, "response": "Seven.", "metadata": {"tools": [STOCK]}},
    "extra_info as text": {"messages": SAID, "extra_info": {"tools": json.dumps([STOCK])}},
    "ShareGPT": {
        "conversations": [
            {"from": "system", "value": "Help.", "tools": [STOCK]},
            {"from": "human", "value": "Bolts?"},
            {"from": "gpt", "value": "Seven."},
        ]
    },
}


@pytest.mark.parametrize("value", TOOL_PLACES.values(), ids=TOOL_PLACES)
def test_schemas_in_the_system_message_or_metadata_are_those_of_the_conversation(value: dict[str, Any]) -> None:
    (chat,) = chats(value)
    assert [tool["function"]["name"] for tool in chat.tools or []] == ["stock"]
    (given,) = chats(value | {"tools": [STOCK | {"function": {"name": "count"}}]})
    assert [tool["function"]["name"] for tool in given.tools or []] == ["count"]


@pytest.mark.parametrize("tools", [["stock"], [{"name": "stock", "calls": 3}], "stock", 3])
def test_names_and_counts_of_tools_in_metadata_are_no_schemas(tools: Any) -> None:
    (chat,) = chats({"messages": SAID, "metadata": {"tools": tools}})
    assert chat.tools is None


@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
def test_data_for_tuning_gemini_are_conversations(name: str) -> None:
    contents = [
        {"role": "user", "parts": [{"text": "Bolts?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "stock", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "stock", "response": {"output": "7"}}}]},
        {"role": "model", "parts": [{"text": "Seven."}]},
    ]
    value = {name: {"parts": [{"text": "Help."}]}, "contents": contents}
    (chat,) = chats(value)
    assert [each["role"] for each in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.message_weights == [0, 0, 1, 0, 1]
    assert not read(value).notes
