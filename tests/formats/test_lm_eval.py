"""Samples of lm-evaluation-harness: which are rollouts, prompts in two forms, and metrics under several filters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.readings import chat_of, read_as, reasons
from treepack.errors import TreepackError
from treepack.trajectory import Trajectory


def read(*values: dict[str, Any], **options: Any) -> list[Any]:
    return read_as("lm-eval", *values, **options)


def sample(prompt: Any = "2 + 2?", responses: tuple[Any, ...] = (" 4",), **more: Any) -> dict[str, Any]:
    arguments = {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": ["\n"], "temperature": 0.0}}}
    value = {"doc_id": 0, "doc": {"q": "2 + 2?"}, "target": "4", "arguments": arguments, "resps": [list(responses)]}
    return value | {"filtered_resps": ["4"], "filter": "none", "metrics": ["acc"], "acc": 1.0} | more


def test_arguments_in_a_list_are_the_same_as_named_ones() -> None:
    listed = sample(arguments=[["2 + 2?", {"until": ["\n"], "temperature": 0.0}]])
    assert [item.content for item in read(listed)] == [item.content for item in read(sample())]


def test_a_chat_prompt_is_json_text_in_a_list() -> None:
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
    (item,) = read(sample([json.dumps(asked)]))
    assert [*map(dict, chat_of(item).messages)] == [*asked, {"role": "assistant", "content": " 4"}]
    assert chat_of(item).message_weights == [0.0, 0.0, 1.0]
    assert [each.content for each in read(sample(json.dumps([json.dumps(asked)])))] == [item.content]
    begun = [*asked, {"role": "assistant", "content": "It is"}]
    assert reasons(read(sample([json.dumps(begun)]))) == ["response that continues a message of the prompt"]


def test_filters_of_one_sample_are_one_rollout_and_its_metrics_are_chosen_by_name() -> None:
    strict, loose = sample(filter="strict", acc=0.0), sample(filter="loose", acc=1.0, filtered_resps=["[invalid]"])
    items = read(strict, loose, reward_key="acc,loose")
    (item,) = (item for item in items if isinstance(item, Trajectory))
    assert item.reward == 1.0
    assert "metric 'acc,strict' not used" in item.notes
    assert reasons(items) == ["sample under another filter, read with the first one"]
    with pytest.raises(TreepackError, match=r"keys acc,strict, acc,loose; choose one with --reward-key$"):
        read(strict, loose)


def test_metrics_of_several_responses_belong_to_none_of_them() -> None:
    first, second = read(sample(responses=(" 4", " 5")))
    assert (first.trajectory_id, second.trajectory_id) == ("r.jsonl:1/response-1", "r.jsonl:1/response-2")
    assert (first.reward, second.reward) == (None, None)
    assert first.notes == second.notes == ("metrics of several responses together not used",)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (sample(arguments={"gen_args_0": {"arg_0": "4 is", "arg_1": " even"}}, resps=[[["-0.4", "True"]]]),
         "loglikelihood sample, in which the model has written nothing"),
        (sample(arguments=[["A text."]], resps=[["-9.5"]], metrics=["byte_perplexity"], byte_perplexity=[-9.5, 7]),
         "loglikelihood sample, in which the model has written nothing"),
        (sample(responses=("",)), "sample without a response"),
        (sample(resps=[]), "damaged record"),
        (sample(7), "damaged record"),
    ],
)  # fmt: skip
def test_a_sample_without_a_rollout_is_skipped_for_a_true_reason(value: dict[str, Any], reason: str) -> None:
    items = read(value, sample(doc_id=1))
    assert reasons(items) == [reason]
    assert sum(isinstance(item, Trajectory) for item in items) == 1
