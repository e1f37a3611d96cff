"""Data sets of SFT trainers: Alpaca, ShareGPT, ms-swift, OpenAI, LLaMA-Factory; rounds, calls as JSON text, pairs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.readings import chats, read_as, refusal_as, turns
from treepack.errors import TreepackError
from treepack.trajectory import Chat, Skipped, Trajectory

SOURCE = "r.jsonl:1"
CALL = '{"name": "add", "arguments": {"a": 2}}'
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


def read(name: str, value: dict[str, Any]) -> list[tuple[Trajectory, Chat]]:
    return chats(read_as(name, value))


def test_an_instruction_and_its_input_are_one_question_behind_earlier_rounds() -> None:
    value = {
        "instruction": "Add.",
        "input": "2 and 3",
        "output": "5",
        "system": "Be brief.",
        "history": [["Hi", "Yes"]],
    }
    ((trajectory, content),) = read("alpaca", value | {"topic": "sums", "reward": 0.5, "kto_tag": False})
    assert turns(content) == [
        ("system", "Be brief.", 0.0),
        ("user", "Hi", 0.0),
        ("assistant", "Yes", 0.0),  # the label belongs to the last answer
        ("user", "Add.\n2 and 3", 0.0),
        ("assistant", "5", 1.0),
    ]
    assert (trajectory.reward, trajectory.metadata, trajectory.notes) == (0.5, {"topic": "sums"}, ())


def test_an_instruction_without_output_is_skipped() -> None:
    value = {"instruction": "Add.", "output": ""}
    assert read_as("alpaca", value) == [Skipped(SOURCE, "no output")]


@given(TEXT, TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=3))
def test_rounds_of_text_come_back_as_they_were_given(query: str, response: str, history: list[tuple[str, str]]) -> None:
    value = {"query": query, "response": response, "history": [list(pair) for pair in history]}
    ((_, content),) = read("ms-swift", value)
    texts = [text for _, text, _ in turns(content)]
    assert list(zip(texts[0::2], texts[1::2], strict=True)) == [*history, (query, response)]
    assert content.message_weights == [0.0, 1.0] * (len(history) + 1)
    conversation = [{"human": q, "assistant": a} for q, a in [*history, (query, response)]]
    assert turns(read("ms-swift", {"conversation": conversation})[0][1]) == turns(content)


PAIRS: list[tuple[Any, dict[str, Any]]] = [
    ("alpaca", {"id": "p", "instruction": "Q", "chosen": "A", "rejected": "B"}),
    (
        "sharegpt",
        {
            "id": "p",
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
    ),
    (
        "ms-swift",
        {
            "id": "p",
            "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
            "rejected_response": "B",
        },
    ),
    (
        "openai-preference",
        {
            "id": "p",
            "input": {"messages": [{"role": "user", "content": "Q"}]},
            "preferred_output": [{"role": "assistant", "content": "A"}],
            "non_preferred_output": [{"role": "assistant", "content": "B"}],
        },
    ),
    (
        "llama-factory",
        {
            "id": "p",
            "chosen_messages": [
                {"role": "user", "content": [{"type": "text", "value": "Q"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "A"}]},
            ],
            "rejected_messages": [
                {"role": "user", "content": [{"type": "text", "value": "Q"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "B"}]},
            ],
        },
    ),
]


@given(st.lists(st.tuples(st.sampled_from(["human", "gpt", "observation", "system"]), TEXT), min_size=1, max_size=5))
def test_a_conversation_comes_back_from_sharegpt_as_it_was_given(said: list[tuple[str, str]]) -> None:
    ((_, content),) = read("sharegpt", {"conversations": [{"from": who, "value": text} for who, text in said]})
    speakers = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    assert [(speakers[role], text) for role, text, _ in turns(content)] == said
    assert content.message_weights == [float(who == "gpt") for who, _ in said]


@pytest.mark.parametrize(("reader", "value"), PAIRS)
def test_records_with_images_are_skipped(reader: str, value: dict[str, Any]) -> None:
    items = read_as(reader, value | {"images": ["1.jpg"]})
    assert items == [Skipped(SOURCE, "images, audio and video are not read")]
    assert len(read(reader, value | {"images": []})) == 2


def test_a_pair_of_equal_answers_is_skipped() -> None:
    value = {"instruction": "Q", "chosen": "A", "rejected": "A"}
    items = read_as("alpaca", value)
    assert items == [Skipped(SOURCE, "chosen and rejected are the same")]


def test_of_two_conversations_only_what_differs_is_trained() -> None:
    shared = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    question = {"role": "user", "content": "Q"}
    chosen, rejected = ([*shared, question, {"role": "assistant", "content": answer}] for answer in "AB")
    pairs = read("ms-swift", {"messages": chosen, "rejected_messages": rejected})
    assert [content.message_weights for _, content in pairs] == [[0.0, 0.0, 0.0, 1.0]] * 2


def test_a_turn_of_ms_swift_in_parts_of_different_weights_is_skipped() -> None:
    parts = [{"role": "assistant", "content": "Hm.", "loss": False}, {"role": "tool_call", "content": CALL}]
    value = {"messages": [{"role": "user", "content": "Q"}, *parts]}
    items = read_as("ms-swift", value)
    assert items == [Skipped(SOURCE, "turn in parts of different weights")]


def test_what_is_not_of_the_form_is_refused_by_its_place() -> None:
    assert refusal_as("alpaca", {"instruction": "Q", "output": "A", "history": [["Hi"]]}) == (
        'history[0] is ["Hi"]; expected a query and its response'
    )
    said = [{"from": "human", "value": "Hi"}, {"from": "narrator", "value": "He waits."}]
    sentence = "message 2 is from 'narrator'; expected one of system,"
    assert refusal_as("sharegpt", {"conversations": said}).startswith(sentence)
    said[1] = {"from": "function_call", "value": "add(2)"}
    assert refusal_as("sharegpt", {"conversations": said}) == (
        'message 2 has the call "add(2)"; expected JSON with name and arguments'
    )
    question = [{"role": "user", "content": "Hi"}]
    assert refusal_as("ms-swift", {"messages": question, "rejected_response": "No"}) == (
        "has a rejected_response but no chosen one; end messages with a message of the assistant"
    )


TURNS = [{"from": who, "value": "x"} for who in ("human", "gpt", "human", "gpt")]
MESSAGES = [{"role": who, "content": "x"} for who in ("user", "assistant", "user", "assistant")]


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        ("sharegpt", {"conversations": TURNS}),
        ("ms-swift", {"messages": MESSAGES}),
        ("alpaca", {"instruction": "x", "output": "x", "history": [["x", "x"]]}),
    ],
)
@pytest.mark.parametrize("mark", [{"label": False}, {"kto_tag": True}, {"kto_tag": 0}, {"label": "true"}, {"label": 1}])
def test_a_label_belongs_to_the_last_answer(reader: str, value: dict[str, Any], mark: dict[str, Any]) -> None:
    ((trajectory, content),) = read(reader, value | mark)
    assert content.message_weights == [0.0, 0.0, 0.0, 1.0]
    assert trajectory.reward == (0.0 if mark in ({"label": False}, {"kto_tag": 0}) else 1.0)
    with pytest.raises(TreepackError, match="'label', which can contain a mask or a label and is not read"):
        read(reader, value | {"label": "math"})


def test_a_labelled_conversation_has_the_system_prompt_beside_it() -> None:
    ((_, content),) = read("ms-swift", {"messages": MESSAGES, "label": True, "system": "Be brief."})
    assert [role for role, *_ in turns(content)] == ["system", "user", "assistant", "user", "assistant"]


def test_an_answer_beside_labelled_messages_is_refused() -> None:
    sentence = refusal_as("ms-swift", {"messages": MESSAGES[:3], "label": True, "response": "y"})
    assert "has the field 'response', which can contain an answer" in sentence


def test_fields_of_turns_of_sharegpt_are_marks_or_counted() -> None:
    said = [
        {"from": "human", "value": "Q", "train": False},
        {"from": "gpt", "value": "A", "train": False},
        {"from": "gpt", "value": "B", "train": 1, "markdown": None, "emotion": "calm"},
    ]
    ((trajectory, content),) = read("sharegpt", {"conversations": said})
    assert content.message_weights == [0.0, 0.0, 1.0]
    assert trajectory.notes == ("message field 'emotion' not used",)
