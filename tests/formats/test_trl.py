"""TRL: preference pairs, labels, packed rows, and the samples that its GRPO trainers keep."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import chats, read_whole, reasons, refusal_as, trajectories
from treepack.errors import TreepackError
from treepack.formats.trainers.trl_labels import STEPS_NOTE
from treepack.trajectory import PromptCompletion, Skipped, Trajectory

USER = {"role": "user", "content": "2+2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}


def sides(name: str, value: dict[str, Any]) -> list[Trajectory]:
    items = read_whole(name, value)
    assert len(reasons(items)) == 0
    return trajectories(items)


def messages_of(items: list[Trajectory]) -> list[tuple[Any, Any]]:
    return [(content.messages, content.message_weights) for _, content in chats(items)]


def test_a_pair_is_two_trajectories_of_a_group_of_its_own() -> None:
    pair = {"id": "p", "prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "prompt_id": "shared"}
    items = sides("trl-preference", pair)
    assert [item.trajectory_id for item in items] == ["p/chosen", "p/rejected"]
    assert [item.reward for item in items] == [1.0, 0.0]
    assert {item.group_id for item in items} == {"r.jsonl:1"}
    assert messages_of(items) == [([USER, GOOD], [0.0, 1.0]), ([USER, BAD], [0.0, 1.0])]


def test_the_implied_prompt_of_texts_ends_before_a_space() -> None:
    items = sides("trl-preference", {"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert [item.content for item in items] == [
        PromptCompletion("The sky is", " blue."),
        PromptCompletion("The sky is", " green."),
    ]


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("\n\nHuman: Bolts?\n\nAssistant:", " I see seven.", " It has six."),
        ("\n\nHuman: Bolts?\n\nAssistant:", " Seven.", " Seven. And nuts."),
        ("<|im_start|>user\nBolts?<|im_end|>\n<|im_start|>assistant\n", "Seven", "Seventy"),
        ("The sky is", " blue", " black"),
        ("2+2?", "4", "5"),
    ],
)
def test_the_implied_prompt_of_texts_ends_where_the_answer_begins(prompt: str, chosen: str, rejected: str) -> None:
    items = sides("trl-preference", {"chosen": prompt + chosen, "rejected": prompt + rejected})
    assert [item.content for item in items] == [PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected)]


def test_a_pair_of_the_same_completion_twice_is_skipped() -> None:
    pair = {"prompt": "p", "chosen": "c", "rejected": "c"}
    assert read_whole("trl-preference", pair) == [Skipped("r.jsonl:1", "chosen and rejected are the same")]


def test_a_pair_with_images_is_skipped_once() -> None:
    pair = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "images": ["a.png"]}
    assert read_whole("trl-preference", pair) == [Skipped("r.jsonl:1", "images, audio and video are not read")]


def test_a_pair_of_mixed_forms_is_refused() -> None:
    said = refusal_as("trl-preference", {"prompt": [USER], "chosen": "4", "rejected": "5"})
    assert said == "prompt is messages, but the completions are text; give both in one form"
    with pytest.raises(TreepackError, match=r"; expected text \(format trl-preference\)$"):
        read_whole("trl-preference", {"prompt": "p", "chosen": "4", "rejected": [BAD]})


def test_labelled_steps_are_one_completion_that_is_right_if_all_of_them_are() -> None:
    record = {"prompt": "p", "completions": ["one", "two"]}
    for labels in ([True, True], [True, False]):
        (trajectory,) = sides("trl-labels", record | {"labels": labels})
        assert trajectory.content == PromptCompletion("p", "one\ntwo")
        assert (trajectory.reward, trajectory.notes) == (float(all(labels)), (STEPS_NOTE,))
    assert refusal_as("trl-labels", record | {"labels": [True]}).endswith("expected true or false for each of 2 steps")


def test_lengths_of_another_row_are_refused() -> None:
    said = refusal_as("trl-packed", {"input_ids": [1, 2, 3], "seq_lengths": [2], "labels": [1, 2, 3]})
    assert said == "seq_lengths sums to 2; expected 3, the row's tokens"


def test_a_skipped_sequence_does_not_hide_the_others() -> None:
    row = {"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2], "completion_mask": [0, 0, 0, 1]}
    skipped, kept = read_whole("trl-packed", row)
    assert skipped == Skipped("r.jsonl:1", "no trained token")
    assert isinstance(kept, Trajectory)
    assert (kept.trajectory_id, kept.source) == ("r.jsonl:1/sequence-2", "r.jsonl:1")
